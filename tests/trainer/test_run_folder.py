"""The config of a run survives as JSON, and a folder belongs to one run and one program."""

import errno
import fcntl
import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

import trainer.run.folder as run_folder
from configs.gpt import gpt_tiny
from trainer.config import (
    CheckpointConfig,
    MeshConfig,
)
from trainer.gpt.config import (
    DataConfig,
    GPTTrainConfig,
    RopeConfig,
)
from trainer.run.folder import (
    load_config,
    open_run,
    require_writable,
    save_config,
)

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path):
    return replace(gpt_tiny(), run_dir=tmp_path / "run")


def with_optimizer(config, **changes):
    return replace(config, optimizer=replace(config.optimizer, **changes))


def with_data(config, **changes):
    return replace(config, data=replace(config.data, **changes))


def test_config_survives(config, tmp_path):
    others = replace(
        config,
        model=replace(
            config.model,
            rope=RopeConfig(scaling="yarn", factor=4.0, original_length=64),
            dtype="bfloat16",
        ),
        data=DataConfig(path=Path("some/ä.jsonl"), end_of_document=7, mask_documents=False),
        mesh=MeshConfig(data=2, team=1),
        zero=3,
        zero_axes=("ring", "team"),
        profile=(10, 12),
        tile=512,
    )
    path = tmp_path / "config.json"
    for saved in (config, others):
        save_config(saved, path)
        assert load_config(GPTTrainConfig, path) == saved
    assert [x.name for x in tmp_path.iterdir()] == ["config.json"]


def change(path, *keys, value):
    """Sets what lies under `keys` in a file of JSON, or removes it."""
    content = json.loads(path.read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("optimizer", "learning_rat"), 1.0, r"got optimizer.learning_rat. Use optimizer.learning"),
        (("sede",), 1, r"GPTTrainConfig's; got sede. Use seed, or leave it out"),
        (("steps",), "many", r"steps must be int; got 'many'"),
        (("steps",), True, r"steps must be int; got True"),
        (("steps",), 1.5, r"steps must be int; got 1.5"),
        (("model", "rope", "base"), "x", r"model.rope.base must be float; got 'x'"),
        (("model", "dtype"), "float8", r"model.dtype must be .*'bfloat16'.*; got 'float8'"),
        (("zero_axes",), ["ring", "wing"], r"zero_axes\[1\] must be .*; got 'wing'"),
        (("profile",), [1, 2, 3], r"profile must be tuple\[int, int\]; got \[1, 2, 3\]"),
        (("mesh",), 8, r"mesh must be MeshConfig; got 8"),
        (("run_dir",), 8, r"run_dir must be Path; got 8"),
        (("steps",), None, r"without a default must be there; got none for steps"),
        (("optimizer", "learning_rate"), None, r"got none for optimizer.learning_rate. Add it"),
        (("steps",), 0, r"steps must be at least 1"),
    ],
)
def test_wrong_config_file_names_the_setting(config, tmp_path, keys, value, message):
    path = tmp_path / "config.json"
    save_config(config, path)
    change(path, *keys, value=value)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(GPTTrainConfig, path)
    assert str(caught.value).startswith(f"{path} must hold the config of a run. ")


def test_file_that_is_not_json_or_no_object_raises(tmp_path):
    path = tmp_path / "config.json"
    for text in ('{"steps": 1', "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"must hold the config of a run\."):
            load_config(GPTTrainConfig, path)


def test_settings_of_an_older_file_take_their_defaults(config, tmp_path):
    path = tmp_path / "config.json"
    save_config(config, path)
    change(path, "zero_axes", value=None)
    change(path, "optimizer", "beta2", value=None)
    assert load_config(GPTTrainConfig, path) == config


def test_config_of_what_json_cannot_hold_raises(tmp_path):
    @dataclass
    class Odd:
        what: object = field(default_factory=object)

    with pytest.raises(TypeError):
        save_config(Odd(), tmp_path / "config.json")
    assert not (tmp_path / "config.json").exists()


def test_literals_are_not_taken_for_numbers_of_another_type(tmp_path):
    @dataclass
    class Small:
        level: Literal[0, 1] = 0

    path = tmp_path / "config.json"
    path.write_text('{"level": true}')
    with pytest.raises(ValueError, match=r"level must be .*; got True"):
        load_config(Small, path)


def begin(config):
    """A run that has saved something, as `train.py` leaves it."""
    with open_run(config) as folder:
        save_config(config, folder / "config.json")
        (folder / "checkpoints" / "3").mkdir(parents=True, exist_ok=True)
    return folder


def test_run_goes_on_with_other_devices_and_reports(config):
    assert begin(config) == config.run_dir
    changed = replace(
        config,
        **{"devices": 4, "mesh": MeshConfig(team=1), "zero": 1, "remat": "full", "log_every": 7},
        checkpoint=CheckpointConfig(every=3, keep=9),
    )
    with open_run(changed) as folder:
        assert folder == config.run_dir


def test_run_that_never_saved_anything_binds_nothing(config):
    with open_run(config) as folder:
        save_config(config, folder / "config.json")
        (folder / "checkpoints").mkdir()
    with open_run(replace(config, seed=3)):
        pass


def test_run_of_other_results_is_refused_and_left_alone(config):
    folder = begin(config)
    changed = with_optimizer(replace(config, seed=3), learning_rate=1e-3)
    changed = with_data(changed, path=Path("corpus"), mask_documents=False)
    with pytest.raises(ValueError, match="must keep the settings") as caught, open_run(changed):
        raise AssertionError("not reached")
    assert str(caught.value) == (
        "A run that goes on must keep the settings that its result depends on; got "
        f"{folder}, a run with others:\n"
        "  --optimizer.learning-rate 0.004 there, 0.001 now\n"
        "  --data.path None there, corpus now\n"
        "  --data.mask-documents there, False now\n"
        "  --seed 0 there, 3 now\n"
        "Use another --run-dir for a new run, or --optimizer.learning-rate 0.004 --data.path None "
        "--data.mask-documents --seed 0 to go on with this one. With --allow-changes it goes on as "
        "given now."
    )
    assert load_config(GPTTrainConfig, folder / "config.json") == config


def test_changes_are_allowed_on_request_but_for_the_model(config):
    begin(config)
    rope = replace(config.model.rope, scaling="yarn", factor=4.0, original_length=64)
    changed = replace(
        with_optimizer(config, beta1=0.5),
        **{"steps": 5, "allow_changes": True, "model": replace(config.model, rope=rope)},
    )
    begin(changed)
    with open_run(replace(changed, allow_changes=False)):
        pass
    other = replace(changed, seed=9, model=replace(config.model, layers=5, rope=rope))
    with (
        pytest.raises(ValueError, match=r"--model.layers 4 --seed 0 to go on with this one\.$"),
        open_run(other),
    ):
        raise AssertionError("not reached")


def test_flags_of_the_message_are_those_of_the_program(config):
    """Those that the message advises give the saved run again."""
    import tyro

    changed_data = with_data(config, mask_documents=False)
    settings = run_folder.settings_of(changed_data, but=run_folder.FREE_SETTINGS)
    flags = " ".join(run_folder.flag_text(name, value) for name, value in settings.items())
    changed = with_optimizer(replace(config, seed=3), learning_rate=1e-3)
    again = tyro.cli(GPTTrainConfig, default=changed, args=flags.split())
    assert again == with_data(config, mask_documents=False)


def test_every_setting_of_a_run_must_stay_or_is_listed_as_free(config):
    """A misspelt one would be refused for ever."""
    assert set(run_folder.FREE_SETTINGS) < set(vars(config))


def test_process_that_does_not_write_compares(config):
    with open_run(config, writes=False) as folder:
        assert list(folder.iterdir()) == []
    begin(config)
    with open_run(config), open_run(config, writes=False):
        pass
    other = replace(config, seed=5)
    with pytest.raises(ValueError, match="--seed 0 there, 5 now"), open_run(other, writes=False):
        raise AssertionError("not reached")


def test_second_program_is_kept_out_until_the_first_ends(config):
    script = f"""
import sys
from pathlib import Path
from dataclasses import replace
from configs.gpt import gpt_tiny
from trainer.run.folder import open_run
assert "jax" not in sys.modules
with open_run(replace(gpt_tiny(), run_dir=Path({str(config.run_dir)!r}))):
    print("open", flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == "open\n"
    message = rf"got .*run, where process {process.pid} does. Wait for it"
    with pytest.raises(RuntimeError, match=message), open_run(config):
        raise AssertionError("not reached")
    process.kill()
    process.communicate()
    with open_run(config):
        pass


def test_file_system_without_locks_warns(config, monkeypatch):
    def flock(file, operation):
        raise OSError(error, "no")

    monkeypatch.setattr(fcntl, "flock", flock)
    error = errno.ENOLCK
    with pytest.warns(UserWarning, match="has no locks"), open_run(config):
        pass
    error = errno.EIO
    with pytest.raises(OSError, match="no"), open_run(config):
        raise AssertionError("not reached")


def test_folder_that_cannot_be_written_raises(config, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with (
            pytest.raises(OSError, match=rf"can be written; got {folder}: .*another --run-dir"),
            open_run(replace(config, run_dir=folder)),
        ):
            raise AssertionError("not reached")
    require_writable(tmp_path / "new" / "below")
    assert list((tmp_path / "new" / "below").iterdir()) == []

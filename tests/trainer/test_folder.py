"""The folder of a run belongs to one run and, at a time, to one program."""

import errno
import fcntl
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from configs.dit import dit_digits
from configs.gpt import gpt_tiny
from programs import REPOSITORY
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import CheckpointConfig, MeshConfig
from trainer.errors import RunError, StorageError
from trainer.gpt.config import GPTTrainConfig
from trainer.run.folder import open_run, require_writable
from trainer.run.settings import FREE_SETTINGS, flag_text, load_config, save_config, settings_of

pytestmark = pytest.mark.quick


@pytest.fixture
def config(tmp_path):
    return replace(gpt_tiny(), run_dir=tmp_path / "run")


def with_optimizer(config, **changes):
    return replace(config, optimizer=replace(config.optimizer, **changes))


def with_data(config, **changes):
    return replace(config, data=replace(config.data, **changes))


def begin(config):
    """Makes a run with a checkpoint, as `train.py` leaves it."""
    with open_run(config) as folder:
        save_config(config, folder / "config.json")
        (folder / "checkpoints" / "3").mkdir(parents=True, exist_ok=True)
    return folder


def not_opened(config, *words, error=InputError, **options):
    with refused(error, *words) as caught, open_run(config, **options):
        raise AssertionError("not reached")
    return caught.value


def test_run_goes_on_with_other_devices_and_reports(config):
    assert begin(config) == config.run_dir
    changed = replace(
        config,
        **{"devices": 4, "mesh": MeshConfig(c=1), "zero": 1, "remat": "full", "log_every": 7},
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


def test_run_of_another_kind_is_refused(config):
    folder = begin(config)
    path = folder / "config.json"
    with_kind = json.loads(path.read_text())
    assert with_kind.pop("kind") == "gpt"
    path.write_text(json.dumps(with_kind))  # As files were before there were several kinds.
    with open_run(config):
        pass
    path.write_text(json.dumps({"kind": "dit", "what": "another task knows"}))
    words = f"keep its kind of model; got {folder}, which", "'dit', and a config of kind 'gpt'."
    not_opened(config, *words)


def test_run_of_other_results_is_refused_and_left_alone(config):
    folder = begin(config)
    changed = with_optimizer(replace(config, seed=3), learning_rate=1e-3)
    changed = with_data(changed, path=(Path("corpus"),), mask_documents=False)
    assert str(not_opened(changed, "A run that goes on must")) == (
        "A run that goes on must keep the settings that its result depends on; got "
        f"{folder}, a run with others:\n"
        "  --optimizer.learning-rate 0.004 there, 0.001 now\n"
        "  --data.path none there, corpus now\n"
        "  --data.mask-documents there, False now\n"
        "  --seed 0 there, 3 now\n"
        "Use another --run-dir for a new run, or --optimizer.learning-rate 0.004 --data.path "
        "--data.mask-documents --seed 0 to go on with this one. With --allow-changes it goes on as "
        "given now."
    )
    assert load_config(GPTTrainConfig, folder / "config.json") == config
    not_opened(changed, "--seed", writes=False)


def test_changes_are_allowed_on_request_but_for_the_model_and_the_kind_of_optimizer(config):
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
    not_opened(other, "--model.layers")
    for allow_changes in (False, True):
        muon = replace(with_optimizer(changed, kind="muon"), allow_changes=allow_changes)
        not_opened(muon, "--optimizer.kind")


def test_flags_of_the_message_are_those_of_the_program(config):
    """The flags that the message advises give the config of the saved run."""
    changed_data = with_data(config, mask_documents=False)
    settings = settings_of(changed_data, but=FREE_SETTINGS)
    flags = " ".join(flag_text(name, value) for name, value in settings.items())
    changed = with_optimizer(replace(config, seed=3), learning_rate=1e-3)
    again = tyro.cli(GPTTrainConfig, default=changed, args=flags.split())
    assert again == with_data(config, mask_documents=False)


def test_every_setting_of_a_run_must_stay_or_is_listed_as_free(config):
    """A misspelt name in the list would free no setting."""
    names = {name for default in (config, dit_digits()) for name in settings_of(default)}
    assert set(FREE_SETTINGS) < {*vars(config), *names}


def test_process_that_does_not_write_compares(config):
    with open_run(config, writes=False) as folder:
        assert list(folder.iterdir()) == []
    begin(config)
    with open_run(config), open_run(config, writes=False):
        pass


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
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    process = subprocess.Popen(command, cwd=REPOSITORY, text=True, stdin=pipe, stdout=pipe)
    assert process.stdout.readline() == "open\n"
    words = f"run, where process {process.pid} does. Wait for it"
    not_opened(config, words, error=RunError)
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
        words = f"can be written; got {folder}: ", "another --run-dir"
        not_opened(replace(config, run_dir=folder), *words, error=StorageError)
    require_writable(tmp_path / "new" / "below")
    assert list((tmp_path / "new" / "below").iterdir()) == []

"""Metrics for Weights & Biases: one run for a folder, and none that stops training."""

import importlib.util
import json
import sys
from contextlib import suppress
from functools import partial
from unittest.mock import MagicMock

import jax
import pytest

from programs import logged_steps, make_config
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import WandbConfig
from trainer.errors import MissingPackageError, RunError
from trainer.run.metrics import Reporter
from trainer.run.settings import result_flags
from trainer.run.weights_and_biases import open_wandb, require_wandb


@pytest.fixture
def package(monkeypatch):
    """In place of W&B's."""
    package = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def of_folder(folder, **changes):
    folder.mkdir(exist_ok=True)
    return make_config(wandb=WandbConfig(project="p", **changes), run_dir=folder)


def report(config, steps, first=0, total=4):
    with Reporter(steps=total, tokens_per_step=8) as reporter:
        opening = partial(open_wandb, config)
        reporter.open(config.run_dir, first_step=first, tensorboard=False, wandb=opening)
        for step in steps:
            values = {"train_loss": 1 / step, "gradient_norm": float("nan")}
            reporter.advance(step, values)


def records_of(path):
    """The records of a file that W&B writes offline: none of them crosses a block of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, found = path.read_bytes()[7:], []
    while len(data) > 7:
        size = int.from_bytes(data[4:6], "little")
        assert data[6] == 1, "a record in one piece"
        found.append(Record.FromString(data[7 : 7 + size]))
        data = data[7 + size :]
    return found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_gets_one_run_of_a_folder(tmp_path, capsys):
    import wandb

    folder = tmp_path / "mine"
    config = of_folder(folder, mode="offline")
    report(config, [1, 2, 3])  # Killed after the save of step 2.
    report(config, [3, 4], first=2)
    assert "WARNING" not in capsys.readouterr().out
    wandb.teardown()  # Its other process writes the end of a file after `finish`, too.
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    ids, history, settings = set(), [], {}
    for path in files:
        for record in records_of(path):
            if record.HasField("run"):
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
            for update in (*record.config.update, *record.run.config.update):
                settings[update.key or update.nested_key[0]] = update.value_json
            if record.HasField("history"):
                items = record.history.item
                row = {x.key or x.nested_key[0]: json.loads(x.value_json) for x in items}
                assert "gradient_norm" not in row
                history.append((row["step"], row["train_loss"]))
    assert len(files) == 2
    assert ids == {(json.loads((folder / "wandb.json").read_text())["id"], "p", "mine")}
    assert history == [(step, 1 / step) for step in (1, 2, 3, 3, 4)]
    assert json.loads(settings["optimizer.learning_rate"]) == "0.001"
    assert not [name for name in settings if name.startswith("wandb.")]


def test_run_goes_on_in_a_moved_folder_and_not_without_its_note(package, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    report(of_folder(before), [1])
    before.rename(after)
    report(of_folder(after), [1])
    (after / "wandb.json").write_text("{")
    report(of_folder(after), [1])
    given = [call.kwargs for call in package.init.call_args_list]
    assert [x["name"] for x in given] == ["before", "after", "after"]
    assert given[0]["id"] == given[1]["id"] != given[2]["id"]
    assert {x["resume"] for x in given} == {"allow"}


def test_secrets_get_neither_into_files_nor_into_errors(package, tmp_path):
    package.init.side_effect = ConnectionError("http://me:secret@127.0.0.1:9: no answer")
    with refused(RunError, "--wandb.project p must name a place", "no answer") as caught:
        report(of_folder(tmp_path), [1])
    assert "secret" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if "secret" in path.read_text()]


def test_failure_stops_no_training_and_is_named_once(package, tmp_path, capsys):
    def log(values):
        raise ConnectionError(f"http://me:secret@host/api: no answer at step {values['step']}")

    package.init.return_value.log.side_effect = log
    report(of_folder(tmp_path), [1, 2, 3])
    shown = capsys.readouterr().out
    warning = "WARNING: Weights & Biases gets no more metrics: ConnectionError: http://***@host/api"
    assert shown.count(warning) == 1
    assert "no answer at step 1" in shown
    assert logged_steps(tmp_path) == [1, 2, 3]
    package.init.return_value.finish.assert_not_called()


@pytest.mark.parametrize(("failure", "code"), [(None, 0), (KeyboardInterrupt, 0), (OSError, 1)])
def test_run_there_fails_with_the_run(failure, code, package, tmp_path):
    config = of_folder(tmp_path)
    with suppress(KeyboardInterrupt, OSError), Reporter(steps=4, tokens_per_step=8) as reporter:
        reporter.open(tmp_path, tensorboard=False, wandb=partial(open_wandb, config))
        if failure:
            raise failure
    package.init.return_value.finish.assert_called_once_with(exit_code=code)


def test_package_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = of_folder(tmp_path)
    with refused(MissingPackageError, "--wandb.project p", "[wandb]"):
        require_wandb(config)
    # A folder without code, such as what W&B leaves beside a run, is no package.
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: MagicMock(origin=None))
    with refused(MissingPackageError, "--wandb.project p", "[wandb]"):
        require_wandb(config)
    require_wandb(make_config())
    with refused(MissingPackageError, "--wandb.project p", "[wandb]"):
        open_wandb(config)


def test_options_have_an_effect_but_on_results(package, tmp_path, monkeypatch):
    with refused(InputError, "wandb.project", mode="offline"):
        WandbConfig(mode="offline")
    config = of_folder(tmp_path)
    assert result_flags(config) == result_flags(make_config(run_dir=tmp_path))
    assert open_wandb(make_config(run_dir=tmp_path)) is None
    # Only the first process opens the run there.
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    report(config, [1])
    package.init.assert_not_called()

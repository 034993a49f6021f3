"""Metrics for Weights & Biases and MLflow: one run for a folder, and none that stops training."""

import importlib.util
import json
import sys
from contextlib import suppress
from types import SimpleNamespace

import jax
import pytest

from programs import logged_steps, make_config
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import MlflowConfig, WandbConfig
from trainer.errors import MissingPackageError, RunError
from trainer.run.metrics import Reporter
from trainer.run.settings import result_flags
from trainer.run.trackers import open_trackers, require_packages

needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
    for name in ("wandb", "mlflow")
}


def report(folder, steps, config, first=0, total=4):
    with Reporter(steps=total, tokens_per_step=8) as reporter:
        trackers = open_trackers(config, folder)
        reporter.open(folder, first_step=first, tensorboard=False, trackers=trackers)
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
@needs["wandb"]
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_gets_one_run_of_a_folder(tmp_path, capsys):
    import wandb

    folder = tmp_path / "mine"
    folder.mkdir()
    config = make_config(wandb=WandbConfig(project="p", mode="offline"), run_dir=folder)
    report(folder, [1, 2, 3], config)  # Killed after the save of step 2.
    report(folder, [3, 4], config, first=2)
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


@pytest.mark.slow
@needs["mlflow"]
@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_one_run_of_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = tmp_path / "mine"
    folder.mkdir()
    config = make_config(mlflow=MlflowConfig(experiment="e"), run_dir=folder)
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlruns").as_uri())

    def found():
        (experiment,) = (x for x in client.search_experiments() if x.name == "e")
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "train_loss")
        return run, sorted((x.step, x.value) for x in history)

    report(folder, [1, 2, 3], config)
    run, _ = found()
    assert run.info.status == "KILLED"
    report(folder, [3, 4], config, first=2)
    assert "WARNING" not in capsys.readouterr().out
    run, history = found()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert history == [(step, 1 / step) for step in (1, 2, 3, 3, 4)]
    assert run.data.params["optimizer.learning_rate"] == "0.001"
    assert "gradient_norm" not in run.data.metrics


@pytest.mark.slow
@needs["mlflow"]
@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_a_run_in_a_moved_folder_and_in_no_other_experiment(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before, after, ids = tmp_path / "before", tmp_path / "after", []
    before.mkdir()
    for folder, experiment in ((before, "e"), (after, "e"), (after, "other")):
        report(folder, [1], make_config(mlflow=MlflowConfig(experiment=experiment)))
        ids.append(json.loads((folder / "mlflow.json").read_text())["id"])
        if folder == before:
            before.rename(after)
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.slow
@needs["mlflow"]
@pytest.mark.filterwarnings("ignore")
def test_secrets_get_neither_into_files_nor_into_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    with refused(RunError, "--mlflow.experiment e") as caught:
        report(tmp_path, [1], make_config(mlflow=MlflowConfig(experiment="e")))
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "mlflow.json").exists()


def test_tracker_that_fails_stops_no_training_and_is_named_once(tmp_path, capsys):
    def log(step, metrics):
        raise ConnectionError(f"http://me:secret@host/api: no answer at step {step}")

    failing = SimpleNamespace(name="Failing", log=log)
    with Reporter(steps=4, tokens_per_step=8) as reporter:
        reporter.open(tmp_path, tensorboard=False, trackers=[failing])
        for step in (1, 2, 3):
            reporter.advance(step, {"train_loss": 1.0})
    shown = capsys.readouterr().out
    warning = "WARNING: Failing gets no more metrics: ConnectionError: http://***@host/api: "
    assert shown.count(warning) == 1
    assert "no answer at step 1" in shown
    assert logged_steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    ("failure", "ends"), [(None, "interrupted"), (ZeroDivisionError, "failed")]
)
def test_tracker_hears_how_a_run_ends(failure, ends, tmp_path):
    heard = []
    tracker = SimpleNamespace(name="Fake", log=lambda *_: None, finish=heard.append)
    with suppress(ZeroDivisionError), Reporter(steps=4, tokens_per_step=8) as reporter:
        reporter.open(tmp_path, tensorboard=False, trackers=[tracker])
        if failure:
            raise failure
    assert heard == [ends]


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_package_that_is_missing_is_named(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    configs = {"wandb": WandbConfig(project="p"), "mlflow": MlflowConfig(experiment="e")}
    config = make_config(**{package: configs[package]})
    with refused(MissingPackageError, f"--{package}.", f"[{package}]"):
        require_packages(config)
    # A folder without code, such as what W&B leaves beside a run, is no package.
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace(origin=None))
    with refused(MissingPackageError, f"--{package}.", f"[{package}]"):
        require_packages(config)
    require_packages(make_config())
    with refused(MissingPackageError, f"--{package}.", f"[{package}]"):
        list(open_trackers(config, tmp_path))


@pytest.mark.parametrize("experiment", ["e", None])
@pytest.mark.parametrize("password", ["secret", "se/secret", "se@secret", "123/secret"])
def test_password_in_the_address_of_mlflow_is_refused_and_not_shown(experiment, password):
    with refused(InputError, "MLFLOW_TRACKING_PASSWORD") as caught:
        MlflowConfig(experiment=experiment, uri=f"http://me:{password}@host:5000/x")
    assert "secret" not in str(caught.value)
    MlflowConfig(experiment="e", uri="http://host/@team")


def test_options_of_trackers_have_an_effect_but_on_results(tmp_path, monkeypatch):
    with refused(InputError, mode="offline"):
        WandbConfig(mode="offline")
    with refused(InputError, "mlflow.experiment"):
        MlflowConfig(uri="file:///x")
    config = make_config(wandb=WandbConfig(project="p"))
    assert result_flags(config) == result_flags(make_config())
    # Only the first process opens trackers.
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    report(tmp_path, [1], config)

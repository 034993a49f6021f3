"""Metrics for Weights & Biases and MLflow: one run for a folder, and none that stops training."""

import importlib.util
import json
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import jax
import pytest

from programs import make_config
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import MlflowConfig, WandbConfig
from trainer.errors import MissingPackageError
from trainer.run import trackers
from trainer.run.metrics import Reporter
from trainer.run.settings import result_flags
from trainer.run.trackers import Tracking, trackings_of

needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
    for name in ("wandb", "mlflow")
}


def report(folder, steps, trackings, first=0, total=4):
    with Reporter(steps=total, tokens_per_step=8, trackings=trackings) as reporter:
        reporter.open(folder, first_step=first, tensorboard=False)
        for step in steps:
            values = {"train_loss": 1 / step, "gradient_norm": float("nan")}
            reporter.advance(step, values)


def steps_in(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


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


class FakeMlflow:
    """A stand-in for the packages `mlflow` and `mlflow.entities`, with one server."""

    def __init__(self, monkeypatch):
        self.uris, self.runs, self.params = [], [], {}
        for name in ("mlflow", "mlflow.entities"):
            monkeypatch.setitem(sys.modules, name, self)
        monkeypatch.setattr(trackers, "_require_package", lambda *_: None)
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # Is set for the process otherwise.

    def MlflowClient(self, tracking_uri):
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, _):
        return None

    def create_experiment(self, _):
        return "0"

    def create_run(self, *_, **__):
        self.runs.append(f"run{len(self.runs)}")
        return SimpleNamespace(info=SimpleNamespace(run_id=self.runs[-1]))

    def Param(self, name, value):
        self.params[name] = value

    def Metric(self, *_):
        pass

    def update_run(self, run_id, status):
        assert (run_id, status) == (self.runs[-1], "RUNNING")

    def log_batch(self, *_, metrics=(), params=()):
        if metrics:
            raise ConnectionError("http://me:secret@host/api: no answer")

    def set_terminated(self, *_):
        pass


@pytest.mark.slow
@needs["wandb"]
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_gets_one_run_of_a_folder(tmp_path, capsys):
    import wandb

    folder = tmp_path / "mine"
    folder.mkdir()
    config = make_config(wandb=WandbConfig(project="p", mode="offline"), run_dir=folder)
    report(folder, [1, 2, 3], trackings_of(config))  # Killed after the save of step 2.
    report(folder, [3, 4], trackings_of(config), first=2)
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
@needs["wandb"]
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_without_a_key_says_so_and_asks_nobody(tmp_path, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    config = make_config(wandb=WandbConfig(project="p"), run_dir=tmp_path)
    report(tmp_path, [1, 2], trackings_of(config))
    shown = capsys.readouterr().out
    assert "WARNING: Weights & Biases gets no more metrics: RunError: " in shown
    assert "Run wandb login, set WANDB_API_KEY, or use --wandb.mode offline" in shown
    assert steps_in(tmp_path) == [1, 2]


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

    report(folder, [1, 2, 3], trackings_of(config))
    run, _ = found()
    assert run.info.status == "KILLED"
    report(folder, [3, 4], trackings_of(config), first=2)
    assert "WARNING" not in capsys.readouterr().out
    run, history = found()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert history == [(step, 1 / step) for step in (1, 2, 3, 3, 4)]
    assert run.data.params["optimizer.learning_rate"] == "0.001"
    assert "gradient_norm" not in run.data.metrics


def test_mlflow_in_a_moved_run_folder_is_the_same_run(tmp_path, monkeypatch, capsys):
    server = FakeMlflow(monkeypatch)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    config = make_config(mlflow=MlflowConfig(experiment="e"))
    report(before, [1], trackings_of(config))
    before.rename(after)
    report(after, [2], trackings_of(config))
    assert server.uris == [(folder / "mlruns").as_uri() for folder in (before, after)]
    assert server.runs == ["run0"]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("/shared/my runs", "file:///shared/my%20runs"),
        ("mlruns", "file://{cwd}/mlruns"),
        *((x, x) for x in ("http://host:5000", "file:/x", "sqlite:///x.db", "databricks")),
    ],
)
@pytest.mark.parametrize("by_flag", [True, False])
def test_mlflow_takes_a_folder_by_its_path(given, used, by_flag, tmp_path, monkeypatch):
    server = FakeMlflow(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other" if by_flag else given)
    trackers.open_mlflow(MlflowConfig(experiment="e", uri=given if by_flag else None), tmp_path, {})
    assert server.uris == [used.format(cwd=tmp_path)]


@pytest.mark.quick
def test_tracker_that_fails_stops_no_training_and_is_named_once(tmp_path, capsys):
    class Failing:
        def log(self, step, seconds, metrics):
            raise SystemExit(f"no space at step {step}")

    reached = threading.Event()

    def opened(folder, settings):
        reached.set()
        return Failing()

    failing = Tracking("Failing", opened, {})
    report(tmp_path, [1, 2, 3], [failing])
    assert reached.is_set()
    shown = capsys.readouterr().out
    assert (
        shown.count("WARNING: Failing gets no more metrics: SystemExit: no space at step 1. ") == 1
    )
    assert steps_in(tmp_path) == [1, 2, 3]


def test_tracker_that_hangs_is_not_waited_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "MOST_WAITING", 2)
    forever = threading.Event()
    report(tmp_path, [1, 2, 3], [Tracking("Slow", lambda *_: forever.wait(), {})])
    forever.set()
    assert "WARNING: Slow gets no more metrics: 2 reports wait for it" in capsys.readouterr().out
    assert steps_in(tmp_path) == [1, 2, 3]
    forever = threading.Event()
    report(tmp_path, [1], [Tracking("Slow", lambda *_: forever.wait(), {})])
    forever.set()
    assert "it has not ended within 0 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("failed", "limit"), [(False, "CLOSE_SECONDS"), (True, "CLOSE_SECONDS_AFTER_FAILURE")]
)
def test_trackers_are_waited_for_together_and_shortly_after_a_failure(
    failed, limit, tmp_path, capsys, monkeypatch
):
    forever, waited, join = threading.Event(), [], Tracking.join

    def join_by_the_clock(self, seconds, limit):
        waited.append(seconds)
        join(self, 0.0, limit)

    monkeypatch.setattr(trackers, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    monkeypatch.setattr(Tracking, "join", join_by_the_clock)
    slow = [Tracking(name, lambda *_: forever.wait(), {}) for name in ("A", "B", "C")]
    with (
        suppress(ZeroDivisionError),
        Reporter(steps=4, tokens_per_step=8, trackings=slow) as reporter,
    ):
        reporter.open(tmp_path, tensorboard=False)
        if failed:
            raise ZeroDivisionError
    forever.set()
    assert waited == [getattr(trackers, limit), 0.0, 0.0]
    shown = capsys.readouterr().out
    assert [f"{name} gets no more metrics: it has not ended" in shown for name in "ABC"] == [
        True
    ] * 3


def test_only_the_first_process_writes(monkeypatch):
    config = make_config(wandb=WandbConfig(project="p"), mlflow=MlflowConfig(experiment="e"))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert trackings_of(config) == ()


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_package_that_is_missing_is_named(package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda x: None if x == package else find(x))
    configs = {"wandb": WandbConfig(project="p"), "mlflow": MlflowConfig(experiment="e")}
    with pytest.raises(
        MissingPackageError, match=rf"the package {package}; got none.*\[{package}\]"
    ):
        trackings_of(make_config(**{package: configs[package]}))


def test_options_without_effect_raise():
    with refused(InputError, mode="offline"):
        WandbConfig(mode="offline")
    with refused(InputError, "mlflow.experiment"):
        MlflowConfig(uri="file:///x")


@pytest.mark.parametrize("experiment", ["e", None])
@pytest.mark.parametrize("password", ["secret", "se/secret", "se@secret", "123/secret"])
def test_password_in_the_address_of_mlflow_is_refused_and_not_shown(experiment, password):
    with refused(InputError, "MLFLOW_TRACKING_PASSWORD") as caught:
        MlflowConfig(experiment=experiment, uri=f"http://me:{password}@host:5000/x")
    assert "secret" not in str(caught.value)
    MlflowConfig(experiment="e", uri="http://host/@team")


@pytest.mark.parametrize("password", ["secret", "se/secret", "se@secret", "se/@x?secret"])
def test_secrets_get_neither_into_files_nor_into_logs(tmp_path, monkeypatch, capsys, password):
    server = FakeMlflow(monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{password}@host")
    config = make_config(mlflow=MlflowConfig(experiment="e"), run_dir=tmp_path)
    report(tmp_path, [1], trackings_of(config))
    shown = capsys.readouterr().out
    assert "ConnectionError: http://***@host/api: no answer" in shown
    assert "secret" not in shown + (tmp_path / "mlflow.json").read_text()
    assert "seed" in server.params
    assert not any(name.startswith(("mlflow", "wandb")) for name in server.params)
    # Another password is the same run.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:other@host")
    report(tmp_path, [2], trackings_of(config))
    assert server.runs == ["run0"]


def test_results_do_not_depend_on_trackers_and_another_project_is_another_run(tmp_path):
    config = make_config(wandb=WandbConfig(project="p"))
    assert result_flags(config) == result_flags(make_config())
    path = tmp_path / trackers.WANDB_FILE
    ids = iter("0123")
    for project, expected in (("p", ("0", True)), ("p", ("0", False)), ("q", ("1", True))):
        assert trackers.run_at(path, {"project": project}, lambda: next(ids)) == expected
    path.write_text("no JSON")
    assert trackers.run_at(path, {"project": "q"}, lambda: next(ids)) == ("2", True)

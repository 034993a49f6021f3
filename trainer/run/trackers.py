"""Metrics for programs that collect those of many runs: Weights & Biases and MLflow.

Each has a thread of its own, because it talks to a server: one that is slow, unreachable or broken
delays no step and ends no run. What goes wrong is a warning in the log, once.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from trainer.config import MlflowConfig, TrainConfig, WandbConfig
from trainer.durable import replace_text
from trainer.errors import MissingPackageError, RunError
from trainer.places import without_secret
from trainer.run.settings import settings_of

End = Literal["finished", "interrupted", "failed"]
# A report is small, and there are few: more are waiting only if the program hangs.
MOST_WAITING = 10_000
CLOSE_SECONDS = 60.0
# Other processes hear of a failure, and end, only after this.
CLOSE_SECONDS_AFTER_FAILURE = 5.0
WANDB_FILE = "wandb.json"
# Less than the program waits for: W&B says by itself that it could not finish.
FINISH_SECONDS = CLOSE_SECONDS - 15
MLFLOW_FILE = "mlflow.json"
MLFLOW_FOLDER = "mlruns"
# What MLflow takes for a server, though it looks like a folder.
DATABRICKS = ("databricks", "databricks-uc")
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
# Bounds of MLflow for one request and one value.
PARAMS_OF_REQUEST = 100
LONGEST_PARAM = 500


def trackings_of(config: TrainConfig) -> tuple[Tracking, ...]:
    """The trackers that a run asks for, in the first process; none in the others.

    Raises:
        ImportError: if a package is missing.
    """
    import jax  # Not above: a mirror that is fetched needs the names of the files alone.

    if jax.process_index():
        return ()
    # What says where metrics go is no setting of the model: others see these in the tracker.
    shown = settings_of(config, but=("wandb", "mlflow"))
    settings = {name: str(value) for name, value in shown.items()}
    found = []
    if config.wandb.project is not None:
        _require_package("wandb", f"--wandb.project {config.wandb.project}")
        wandb = config.wandb
        found.append(Tracking("Weights & Biases", lambda *run: open_wandb(wandb, *run), settings))
    if config.mlflow.experiment is not None:
        _require_package("mlflow", f"--mlflow.experiment {config.mlflow.experiment}")
        mlflow = config.mlflow
        found.append(Tracking("MLflow", lambda *run: open_mlflow(mlflow, *run), settings))
    return tuple(found)


def _require_package(package: str, flag: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(
            f"{flag} must have the package {package}; got none. Install the extra: "
            f"pip install -e '.[{package}]'. Or leave the flag out."
        )


class Tracker(Protocol):
    """A run in a program that collects metrics."""

    def log(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step, which were measured at a time since 1970."""
        ...

    def finish(self, end: End) -> None:
        """Ends the run, or the part of it that this program did."""
        ...


OpenTracker = Callable[[Path, Mapping[str, str]], Tracker]
"""(folder of the run, its settings) -> a new run, or the one that the folder began"""


class Tracking:
    """A tracker in a thread of its own."""

    def __init__(self, name: str, open_tracker: OpenTracker, settings: Mapping[str, str]) -> None:
        """Prepares the thread, which `start` starts.

        Args:
            name: what the tracker is called in warnings.
            open_tracker: begins or continues its run.
            settings: the settings of the run by name.
        """
        self.name = name
        self._open = open_tracker
        self._settings = settings
        self._waiting: queue.Queue[Any] = queue.Queue(MOST_WAITING)
        self._failure: str | None = None
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def start(self, folder: Path) -> None:
        """Begins or continues the run of a folder, without waiting for it."""
        self._thread = threading.Thread(target=self._work, args=(folder,), daemon=True)
        self._thread.start()

    def log(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Has the metrics of a step written, without waiting for it."""
        if self._has_failed:
            return
        try:
            self._waiting.put_nowait((step, seconds, metrics))
        except queue.Full:
            self._fail(f"{MOST_WAITING:,} reports wait for it")

    def take_failure(self) -> str | None:
        """Why nothing more is written, the first time that it is asked after that."""
        failure, self._failure = self._failure, None
        return failure

    def end(self, end: End) -> None:
        """Has the run ended after all that waits to be written, without waiting for it."""
        # A thread that hangs has a full queue, and leaves no room for the end.
        with suppress(queue.Full):
            self._waiting.put_nowait(end)

    def join(self, seconds: float, limit: float) -> None:
        """Waits for the end, but only for some seconds, the last of `limit` in all."""
        if self._thread is None:
            return
        if not self._has_failed:
            self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(f"it has not ended within {limit:.0f} s")

    def _work(self, folder: Path) -> None:
        try:
            tracker = self._open(folder, self._settings)
            while isinstance(item := self._waiting.get(), tuple):
                tracker.log(*item)
            tracker.finish(item)
        # Whatever it is, even an exit of the package: training goes on.
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            # Packages quote the address of their server, which may hold a password.
            self._failure, self._has_failed = without_secret(why), True


def close_all(trackings: Sequence[Tracking], end: End) -> None:
    """Waits until all is written, of all trackers at once, but not for ever."""
    limit = CLOSE_SECONDS_AFTER_FAILURE if end == "failed" else CLOSE_SECONDS
    deadline = time.monotonic() + limit
    for tracking in trackings:
        tracking.end(end)
    for tracking in trackings:
        tracking.join(max(deadline - time.monotonic(), 0.0), limit)


def run_at(
    path: Path, place: Mapping[str, str | None], begin: Callable[[], str]
) -> tuple[str, bool]:
    """The id of the run that a folder began at a place, and whether it begins now.

    Args:
        path: where the id is noted, so that the program which goes on with the folder continues it.
        place: where runs are collected: a project, say.
        begin: gives the id of a new run.
    """
    try:
        saved = json.loads(path.read_text())
        if saved["place"] == dict(place):
            return saved["id"], False
    except (OSError, ValueError, KeyError, TypeError):
        pass
    run_id = begin()
    replace_text(path, json.dumps({"place": dict(place), "id": run_id}))
    return run_id, True


class WandbRun:
    """A run in Weights & Biases: a `Tracker`."""

    def __init__(self, run: Any) -> None:
        self._run = run
        # W&B's own counter refuses a step that is done again after a kill or a loss spike.
        run.define_metric("*", step_metric="step")

    def log(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def finish(self, end: End) -> None:
        self._run.finish(exit_code=int(end == "failed"))


def open_wandb(config: WandbConfig, folder: Path, settings: Mapping[str, str]) -> WandbRun:
    """Begins a run, or continues the one that the folder began.

    Args:
        config: the project.
        folder: folder of the run. Its `wandb` holds the files of runs.
        settings: the settings of the run by name.

    Raises:
        Exception: whatever the package raises.
    """
    # A checker of types must not miss it where it is not installed.
    wandb: Any = importlib.import_module("wandb")
    mode = config.mode or os.environ.get("WANDB_MODE", "online")
    # With a terminal, it would ask for a key there, while the run trains.
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise RunError(
            "Weights & Biases needs an API key; got none. Run wandb login, set WANDB_API_KEY, "
            "or use --wandb.mode offline."
        )
    place = {"project": config.project, "entity": config.entity}
    run_id, _ = run_at(folder / WANDB_FILE, place, lambda: secrets.token_hex(4))
    run: Any = wandb.init(
        project=config.project,
        entity=config.entity,
        id=run_id,
        name=folder.resolve().name,
        resume="allow",
        dir=folder,
        mode=mode,
        settings=wandb.Settings(console="off", silent=True, finish_timeout=FINISH_SECONDS),
    )
    run.config.update(dict(settings), allow_val_change=True)
    return WandbRun(run)


class MlflowRun:
    """A run in MLflow: a `Tracker`."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def log(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        entities = importlib.import_module("mlflow.entities")
        milliseconds = round(seconds * 1000)
        values = [
            entities.Metric(name, value, milliseconds, step) for name, value in metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=values)

    def finish(self, end: End) -> None:
        self._client.set_terminated(self._run_id, STATUS[end])


def open_mlflow(config: MlflowConfig, folder: Path, settings: Mapping[str, str]) -> MlflowRun:
    """Begins a run, or continues the one that the folder began.

    Args:
        config: the experiment.
        folder: folder of the run.
        settings: the settings of the run by name.

    Raises:
        Exception: whatever the package raises.
    """
    uri, is_own = _uri(config, folder)
    if uri.startswith("file:"):
        # MLflow refuses folders unless they are asked for, and here they are.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    # A checker of types must not miss them where they are not installed.
    mlflow, entities = map(importlib.import_module, ("mlflow", "mlflow.entities"))
    experiment: Any = config.experiment
    client: Any = mlflow.MlflowClient(tracking_uri=uri)

    def begin() -> str:
        found = client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else client.create_experiment(experiment)
        return client.create_run(number, run_name=folder.resolve().name).info.run_id

    place = _place(None if is_own else uri, experiment)
    run_id, is_new = run_at(folder / MLFLOW_FILE, place, begin)
    if not is_new:
        client.update_run(run_id, status="RUNNING")
        return MlflowRun(client, run_id)
    params = [entities.Param(name, value[:LONGEST_PARAM]) for name, value in settings.items()]
    for first in range(0, len(params), PARAMS_OF_REQUEST):
        client.log_batch(run_id, params=params[first : first + PARAMS_OF_REQUEST])
    return MlflowRun(client, run_id)


def _uri(config: MlflowConfig, folder: Path) -> tuple[str, bool]:
    """Where metrics go, and whether that is in the folder of the run."""
    uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return (folder.resolve() / MLFLOW_FOLDER).as_uri(), True
    if not urlsplit(uri).scheme and uri not in DATABRICKS:
        uri = Path(uri).resolve().as_uri()  # A folder, as MLflow accepts it too.
    return uri, False


def _place(uri: str | None, experiment: str) -> dict[str, str | None]:
    """Where a run is, without secrets. The folder of the run is None, so that it may be moved.

    A URI may hold a password before its host, and others elsewhere: it is hashed. The user and the
    password do not count, as those of a server may change while the run stays there.
    """
    if uri is None:
        return {"uri": None, "experiment": experiment}
    plain = re.sub(r"//([^/@:]+:\S*|[^/@]*)@", "//", uri)  # A password may hold a / or an @.
    hashed = hashlib.sha256(plain.encode()).hexdigest()
    return {"uri": hashed, "experiment": experiment}

"""A run in MLflow."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.config import MlflowConfig
from trainer.run.trackers.tracking import End, keep_run, known_run

RUN_FILE = "mlflow.json"
FOLDER = "mlruns"
# What MLflow takes for a server, though it looks like a folder.
DATABRICKS = ("databricks", "databricks-uc")
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
# Bounds of MLflow for one request and one value.
PARAMS_OF_REQUEST = 100
LONGEST_PARAM = 500


class MlflowRun:
    """A `trainer.run.trackers.tracking.Tracker`."""

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
    assert config.experiment is not None, "the caller asks for it"
    client: Any = mlflow.MlflowClient(tracking_uri=uri)
    place = _place(None if is_own else uri, config.experiment)
    run_id = known_run(folder / RUN_FILE, place)
    if run_id is None:
        # Earlier versions wrote the URI as it is, with its password.
        run_id = known_run(folder / RUN_FILE, {"uri": uri, "experiment": config.experiment})
        if run_id is not None:
            keep_run(folder / RUN_FILE, place, run_id)
    if run_id is not None:
        client.update_run(run_id, status="RUNNING")
        return MlflowRun(client, run_id)
    experiment = client.get_experiment_by_name(config.experiment)
    number = experiment.experiment_id if experiment else client.create_experiment(config.experiment)
    run_id = client.create_run(number, run_name=folder.resolve().name).info.run_id
    keep_run(folder / RUN_FILE, place, run_id)
    params = [entities.Param(name, value[:LONGEST_PARAM]) for name, value in settings.items()]
    for first in range(0, len(params), PARAMS_OF_REQUEST):
        client.log_batch(run_id, params=params[first : first + PARAMS_OF_REQUEST])
    return MlflowRun(client, run_id)


def _uri(config: MlflowConfig, folder: Path) -> tuple[str, bool]:
    """Where metrics go, and whether that is in the folder of the run."""
    uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return (folder.resolve() / FOLDER).as_uri(), True
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

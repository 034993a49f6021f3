"""Metrics for programs that collect those of many runs: Weights & Biases and MLflow."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from trainer.config import TrainConfig
from trainer.durable import replace_text
from trainer.errors import MissingPackageError, RunError
from trainer.places import short
from trainer.run.settings import settings_of

End = Literal["finished", "interrupted", "failed"]
WANDB_FILE = "wandb.json"
MLFLOW_FILE = "mlflow.json"
MLFLOW_FOLDER = "mlruns"
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
# Bounds of MLflow for one request and one value.
PARAMS_OF_REQUEST = 100
LONGEST_PARAM = 500


@runtime_checkable
class Tracker(Protocol):
    """A run in a program that collects metrics."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step, without waiting for a server."""
        ...

    def finish(self, end: End) -> None:
        """Ends the run, or the part of it that this program did."""
        ...


def open_trackers(config: TrainConfig, folder: Path) -> Iterator[Tracker]:
    """The runs that a config asks for: new ones, or those that the folder began."""
    # Metrics may be public: where they go, which may hold names of hosts, is no setting to show.
    shown = settings_of(config, but=("wandb", "mlflow"))
    settings = {name: str(value) for name, value in shown.items()}
    kinds: dict[str, Any] = {"wandb": WandbRun, "mlflow": MlflowRun}
    for package, flag, value in _wanted(config):
        try:
            yield kinds[package](config, folder, settings)
        except ImportError as error:
            raise _missing(package, flag, value, f"none ({error})") from error
        except Exception as error:
            raise RunError(
                f"--{flag} {value} must name a place that takes metrics; got {short(error)}. Mend "
                "that, or leave the flag out."
            ) from error


def require_packages(config: TrainConfig) -> None:
    """Raises unless the packages are installed of the programs that a config asks for."""
    for package, flag, value in _wanted(config):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # None: a folder without code.
            raise _missing(package, flag, value, f"no package {package}")


def _wanted(config: TrainConfig) -> list[tuple[str, str, str]]:
    """Package, flag and value for each of the programs that a config asks for."""
    flags = {"wandb.project": config.wandb.project, "mlflow.experiment": config.mlflow.experiment}
    return [(x.partition(".")[0], x, value) for x, value in flags.items() if value is not None]


def _missing(package: str, flag: str, value: str, got: str) -> MissingPackageError:
    return MissingPackageError(
        f"--{flag} {value} must have its package; got {got}. Install the extra: "
        f"pip install -e '.[{package}]'. Or leave the flag out."
    )


class WandbRun:
    """A run in Weights & Biases, whose package writes in a process of its own."""

    name = "Weights & Biases"

    def __init__(self, config: TrainConfig, folder: Path, settings: Mapping[str, str]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=config.wandb.project,
            entity=config.wandb.entity,
            id=_run_id(folder / WANDB_FILE) or _note(folder / WANDB_FILE, secrets.token_hex(4)),
            name=folder.resolve().name,
            resume="allow",
            dir=folder,
            mode=config.wandb.mode,
            settings=wandb.Settings(console="off", silent=True, finish_timeout=30),
        )
        self._run.config.update(dict(settings), allow_val_change=True)
        # W&B's own counter refuses a step that is done again after a kill.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def finish(self, end: End) -> None:
        self._run.finish(exit_code=int(end == "failed"))


class MlflowRun:
    """A run in MLflow, whose package writes in a thread of its own."""

    name = "MLflow"

    def __init__(self, config: TrainConfig, folder: Path, settings: Mapping[str, str]) -> None:
        # MLflow refuses folders unless they are asked for, and waits for minutes for a server.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        mlflow, self._entities = map(importlib.import_module, ("mlflow", "mlflow.entities"))
        uri = config.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client: Any = mlflow.MlflowClient(uri or (folder.resolve() / MLFLOW_FOLDER).as_uri())
        self._written: list[Any] = []
        name: Any = config.mlflow.experiment
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        former = _run_id(folder / MLFLOW_FILE)
        if former is not None and self._experiment_of(former) == number:
            self._id = former
            self._client.update_run(self._id, status="RUNNING")
            return
        run = self._client.create_run(number, run_name=folder.resolve().name)
        self._id = _note(folder / MLFLOW_FILE, run.info.run_id)
        params = [
            self._entities.Param(name, value[:LONGEST_PARAM]) for name, value in settings.items()
        ]
        for first in range(0, len(params), PARAMS_OF_REQUEST):
            self._client.log_batch(self._id, params=params[first : first + PARAMS_OF_REQUEST])

    def _experiment_of(self, run_id: str) -> str | None:
        try:
            return self._client.get_run(run_id).info.experiment_id
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None  # It is of another server.

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        values = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._written.append(self._client.log_batch(self._id, metrics=values, synchronous=False))

    def finish(self, end: End) -> None:
        for written in self._written if end != "failed" else ():
            written.wait()
        self._client.set_terminated(self._id, STATUS[end])


def _run_id(path: Path) -> str | None:
    """The id of the run that a folder began; None if it began none, or the note is damaged."""
    try:
        return str(json.loads(path.read_bytes())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note(path: Path, run_id: str) -> str:
    replace_text(path, json.dumps({"id": run_id}))
    return run_id

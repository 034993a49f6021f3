"""The trackers that a run asks for."""

from __future__ import annotations

import importlib.util

import jax

from trainer.config import TrainConfig
from trainer.errors import MissingPackageError
from trainer.run.settings import settings_of
from trainer.run.trackers.mlflow_run import open_mlflow
from trainer.run.trackers.tracking import Tracking
from trainer.run.trackers.wandb_run import open_wandb


def trackings_of(config: TrainConfig) -> tuple[Tracking, ...]:
    """The trackers that a run asks for, in the first process; none in the others.

    Raises:
        ImportError: if a package is missing.
    """
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

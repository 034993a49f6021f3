"""Metrics for Weights & Biases, which collects those of many runs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig
from trainer.durable import replace_text
from trainer.errors import MissingPackageError, RunError
from trainer.places import short
from trainer.run.settings import settings_of

WANDB_FILE = "wandb.json"


class WandbRun:
    """A run in Weights & Biases, whose package writes in a process of its own."""

    def __init__(self, config: TrainConfig) -> None:
        """Begins a run, or goes on with the one that the folder of the run began."""
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=config.wandb.project,
            entity=config.wandb.entity,
            id=_run_id(config.run_dir / WANDB_FILE),
            name=config.run_dir.resolve().name,
            resume="allow",
            dir=config.run_dir,
            mode=config.wandb.mode,
            settings=wandb.Settings(console="off", silent=True, finish_timeout=30),
        )
        # Metrics may be public: where they go, which may hold names of hosts, is no setting to
        # show.
        shown = settings_of(config, but=("wandb",))
        settings = {name: str(value) for name, value in shown.items()}
        self._run.config.update(settings, allow_val_change=True)
        # W&B's own counter refuses a step that is done again after a kill.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step, without waiting for a server."""
        self._run.log({"step": step, **metrics})

    def finish(self, *, failed: bool) -> None:
        """Ends the run, or the part of it that this program did."""
        self._run.finish(exit_code=int(failed))


def open_wandb(config: TrainConfig) -> WandbRun | None:
    """The run in Weights & Biases that a config asks for, if any."""
    if config.wandb.project is None:
        return None
    try:
        return WandbRun(config)
    except ImportError as error:
        raise _missing(config.wandb.project, f"none ({error})") from error
    except Exception as error:
        raise RunError(
            f"--wandb.project {config.wandb.project} must name a place that takes metrics; got "
            f"{short(error)}. Mend that, or leave the flag out."
        ) from error


def require_wandb(config: TrainConfig) -> None:
    """Raises if a config asks for Weights & Biases, and its package is not installed."""
    if config.wandb.project is None:
        return
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # None: a folder without code.
        raise _missing(config.wandb.project, "no package wandb")


def _missing(project: str, got: str) -> MissingPackageError:
    return MissingPackageError(
        f"--wandb.project {project} must have its package; got {got}. Install the extra: "
        "pip install -e '.[wandb]'. Or leave the flag out."
    )


def _run_id(path: Path) -> str:
    """The id of the run that a folder began; a new one if there is no note, or a damaged one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if former := str(json.loads(path.read_bytes())["id"]):
            return former
    run_id = secrets.token_hex(4)
    replace_text(path, json.dumps({"id": run_id}))
    return run_id

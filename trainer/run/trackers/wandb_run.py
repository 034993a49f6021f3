"""A run in Weights & Biases."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import WandbConfig
from trainer.errors import RunError
from trainer.run.trackers.tracking import CLOSE_SECONDS, End, keep_run, known_run

RUN_FILE = "wandb.json"
# Less than the program waits for: W&B says by itself that it could not finish.
FINISH_SECONDS = CLOSE_SECONDS - 15


class WandbRun:
    """A `trainer.run.trackers.tracking.Tracker`."""

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
            "Weights & Biases must know you; got no API key. Run wandb login, set WANDB_API_KEY, "
            "or use --wandb.mode offline."
        )
    place = {"project": config.project, "entity": config.entity}
    run_id = known_run(folder / RUN_FILE, place)
    if run_id is None:
        run_id = secrets.token_hex(4)
        keep_run(folder / RUN_FILE, place, run_id)
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

"""The table of tasks. A new kind of model is a folder with a `Task`, and a line here.

Imports no jax: `--help` must be fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError
from trainer.config import TrainConfig
from trainer.dit.task import DiTTask
from trainer.dit.wan.task import WanTask
from trainer.gpt.task import GPTTask
from trainer.run.settings import load_config, read_kind
from trainer.task import Task

TASKS: dict[str, Task[Any, Any]] = {
    "gpt": GPTTask(),
    "dit": DiTTask(),
    "wan": WanTask(),
}
"""Tasks by the kind of their configs, which config.json holds as "kind"."""


def pretrained(folder: Path) -> TrainConfig:
    """Training that goes on from the model of a folder: see `Task.pretrained`."""
    # A folder without a model of another kind should hold a GPT, whose error says what is missing.
    found = (TASKS[kind].pretrained(folder) for kind in ("wan", "gpt"))
    return next(config for config in found if config is not None)


def load_train_config(path: Path) -> TrainConfig:
    """Reads the config.json of a run of any kind."""
    kind = read_kind(path)
    if kind not in TASKS:
        raise InputError(
            f"{path} must hold the config of a run. kind must be {' or '.join(TASKS)}; got "
            f"{kind!r}. Correct the file."
        )
    return load_config(TASKS[kind].config_class, path)

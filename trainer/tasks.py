"""The table of tasks. A new kind of model is a folder with a `Task`, and a line here.

Imports no jax: `--help` must be fast.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.config import FIRST_KIND, TrainConfig
from trainer.dit.task import DiTTask
from trainer.gpt.task import GPTTask
from trainer.run.folder import load_config
from trainer.task import Task

TASKS: dict[str, Task[Any, Any]] = {
    "gpt": GPTTask(),
    "dit": DiTTask(),
}
"""Tasks by the kind of their configs, which config.json holds as "kind"."""


def task_of(config: TrainConfig) -> Task[Any, Any]:
    """The task of a run."""
    return TASKS[config.kind]


def load_train_config(path: Path) -> TrainConfig:
    """Reads the config.json of a run of any kind.

    Args:
        path: the file. If it names no kind, it is of a GPT: so were all runs when it was written.

    Raises:
        ValueError: if the file is not JSON, or a setting is unknown or of a wrong type.
    """
    try:
        values = json.loads(path.read_text())
        kind = values.get("kind", FIRST_KIND) if isinstance(values, dict) else FIRST_KIND
        if kind not in list(TASKS):
            raise ValueError(f"kind must be {' or '.join(TASKS)}; got {kind!r}. Correct the file.")
    except ValueError as error:
        raise ValueError(f"{path} must hold the config of a run. {error}") from error
    return load_config(TASKS[kind].config_class, path)

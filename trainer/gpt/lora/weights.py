"""All weights of a run of a GPT, of which those that are frozen lie in a folder of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import Array, PyTree, Shaped

from trainer.checkpoints.reading import restore_frozen, restore_weights
from trainer.gpt.config import GPTTrainConfig
from trainer.parallel.partition import join_frozen, split_frozen
from trainer.run.folder import FROZEN_FOLDER
from trainer.run.settings import CHECKPOINTS_FOLDER, model_flags


def restore_model(
    run_dir: Path,
    config: GPTTrainConfig,
    shapes: Any,
    *,
    step: int | None = None,
    only_trained: bool = False,
    note: Callable[[str], object],
) -> tuple[PyTree[Shaped[Array, "..."]], int]:
    """Reads the weights of a run, also while it trains.

    Args:
        run_dir: folder of the run.
        config: its config.
        shapes: shapes, types and shardings of all weights.
        step: the step of the checkpoint; None for the newest that is whole.
        only_trained: whether to leave out those that are frozen.
        note: is told what the user must know.

    Returns:
        A tree like `shapes`; and the step at which it was saved.

    Raises:
        CheckpointError: if there is no whole checkpoint.
        ValueError: if it belongs to another model.
    """
    trained, frozen = split_frozen(shapes)
    weights, found = restore_weights(
        run_dir / CHECKPOINTS_FOLDER, trained, model_flags(config), step=step, note=note
    )
    if only_trained:
        return weights, found
    base = restore_frozen(run_dir / FROZEN_FOLDER, frozen, note=note)
    return join_frozen(weights, base), found

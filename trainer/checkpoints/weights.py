"""The weights of a run, read for samples, also while the run trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, PyTree, Shaped

from trainer.checkpoints.background import listen_to_orbax
from trainer.checkpoints.reading import (
    CheckpointError,
    DamagedError,
    named_leaves,
    newest_first,
    read_checkpoint,
)

# Fields of the state; the names of its arrays begin with them.
WEIGHTS = "weights"
AVERAGE = "average"


def restore_weights(
    folder: Path,
    weights: PyTree[jax.ShapeDtypeStruct],
    settings: Mapping[str, str] | None = None,
    *,
    step: int | None = None,
    kind: str | None = None,
    note: Callable[[str], object] = warnings.warn,
) -> tuple[PyTree[Shaped[Array, "..."]], int]:
    """Reads only the weights of the newest whole checkpoint: their average if the run keeps one.

    It writes nothing and touches no unfinished checkpoint, so the run may still be training.

    Args:
        folder: the folder of the checkpoints.
        weights: shapes, types and shardings to restore to.
        settings: settings that must be those that the checkpoint was saved with, as flags.
        step: the step of the checkpoint; None for the newest that is whole.
        kind: what the names of the arrays begin with; None for the weights or their average.
        note: is told what the user must know, such as that the newest checkpoint is damaged.

    Returns:
        A tree like `weights`; and the step at which it was saved.

    Raises:
        CheckpointError: if there is no whole checkpoint.
        ValueError: if it belongs to another model, or to other settings.
    """
    listen_to_orbax()
    names: list[str] = []

    def choose(saved: Mapping[str, Any]) -> Mapping[str, Any]:
        of_average = any(name.startswith(f"{AVERAGE}/") for name in saved)
        chosen = dict(named_leaves({kind or (AVERAGE if of_average else WEIGHTS): weights}))
        names[:] = chosen
        return chosen

    def usable() -> list[int]:
        return [x for x in newest_first(folder) if x not in damaged and step in (None, x)]

    damaged: dict[int, DamagedError] = {}
    while steps := usable():
        found, path = steps[0], folder.resolve() / str(steps[0])
        try:
            arrays, _ = read_checkpoint(
                path,
                choose,
                owner="the model that config.json beside it says",
                settings=settings or {},
                advice="Give the folder of a run whose files are its own.",
            )
        except DamagedError as error:
            # Otherwise the run has meanwhile saved a newer checkpoint and deleted this one.
            if found in newest_first(folder):
                damaged[found] = error
            continue
        for error in [error for bad, error in damaged.items() if bad > found]:
            note(f"WARNING: {error} The checkpoint of step {found} is used.")
        leaves = [arrays[name] for name in names]
        return jax.tree.unflatten(jax.tree.structure(weights), leaves), found
    if damaged:
        raise CheckpointError(
            f"{' '.join(map(str, damaged.values()))} No whole one is left in {folder}. Wait for "
            "the next one of the run, or give the folder of another."
        )
    if step is not None:
        there = ", ".join(map(str, newest_first(folder))) or "none"
        raise CheckpointError(
            f"There must be a checkpoint of step {step}; got {folder} with {there}. Give another "
            "step, or leave it out for the newest."
        )
    raise CheckpointError(
        f"There must be a checkpoint to read; got none in {folder}. Wait for the first one of "
        "the run, or give the folder of another."
    )

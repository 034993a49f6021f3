"""Weights that no step changes, saved once for all checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from trainer import durable
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.reading import CheckpointError
from trainer.checkpoints.weights import restore_weights

FROZEN = "frozen"


class FrozenWeights:
    """The frozen weights of a run, in a folder of their own. All processes must call the methods.

    They are on the disk, with checksums, before the first step. So every whole checkpoint can be
    used as long as the folder of the run is there, whatever becomes of the model that it began
    with.
    """

    def __init__(self, folder: Path, shapes: Any, *, note: Callable[[str], object]) -> None:
        """Does nothing yet.

        Args:
            folder: the folder.
            shapes: shapes, types and shardings of the weights; None if there are none.
            note: is told what the user must know.
        """
        self._folder = folder
        self._shapes = shapes
        self._note = note

    def save(self, weights: Any) -> None:
        """Saves the weights of a run that begins, and waits until they are on the disk.

        Raises:
            CheckpointError: if the disk has too little space, or the save fails.
        """
        if self._shapes is None:
            return
        # What is there is of a run that was stopped before its first checkpoint.
        if jax.process_index() == 0 and (self._folder / "0").exists():
            durable.remove(self._folder / "0")
        with Checkpoints(
            self._folder, keep=0, in_little_memory=self._shapes, note=self._note
        ) as checkpoints:
            checkpoints.check_space(self._shapes)
            checkpoints.save(0, {FROZEN: weights}, {})
            checkpoints.wait()

    def restore(self) -> Any:
        """Reads the weights; None if there are none.

        Raises:
            CheckpointError: if they are gone or damaged.
            ValueError: if they are of another model.
        """
        if self._shapes is None:
            return None
        if not (self._folder / "0").is_dir():
            raise CheckpointError(
                f"The frozen weights of a run must be in its folder; got none in {self._folder}. "
                "Copy them from where the run was, or begin another one."
            )
        return restore_weights(self._folder, self._shapes, kind=FROZEN, note=self._note)[0]

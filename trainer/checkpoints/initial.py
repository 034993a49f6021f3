"""Weights with which a run begins instead of random ones. Imports no jax."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class InitialWeights(ABC):
    """Weights that are read from elsewhere, such as those of a pretrained model."""

    description: str
    """A line for the log."""

    @abstractmethod
    def read(self, weights: Any) -> Any:
        """Reads the weights; each process reads only what its devices need.

        Args:
            weights: a tree of shapes, types and shardings.
        """

    @abstractmethod
    def keep(self, run_dir: Path) -> None:
        """Copies into the folder of a run what belongs to the weights, such as a tokenizer."""

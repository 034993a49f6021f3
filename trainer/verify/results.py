"""Losses and gradients on the hosts, and how far apart two of them are."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils


class Results(NamedTuple):
    """The loss of a batch, and its gradient of each weight by path, on the host."""

    loss: float
    gradients: dict[str, np.ndarray]


class Apart(NamedTuple):
    """How far apart two `Results` are."""

    loss: float
    """The difference, over the larger of the loss and 1."""
    gradients: dict[str, float]
    """By path: the largest difference, over the largest value."""

    @property
    def worst(self) -> str:
        """The weight whose gradients are furthest apart."""
        return max(self.gradients, key=lambda name: self.gradients[name])

    @property
    def gradient(self) -> float:
        """How far these are apart."""
        return self.gradients[self.worst]

    @classmethod
    def of(cls, got: Results, want: Results) -> Apart:
        """The distance of some results from the right ones."""
        loss = _finite(abs(got.loss - want.loss)) / max(abs(want.loss), 1.0)
        # A gradient that is 0 but for rounding, as that of a bias of keys, has no size of its own.
        largest = max((float(np.abs(x).max(initial=0)) for x in want.gradients.values()), default=0)
        apart = {}
        for name, x in want.gradients.items():
            size = max(float(np.abs(x).max(initial=0)), 1e-4 * largest) or 1.0
            difference = np.abs(np.asarray(got.gradients[name], np.float64) - x)
            apart[name] = _finite(float(difference.max(initial=0))) / size
        return cls(loss, apart)


def _finite(x: float) -> float:
    return x if np.isfinite(x) else np.inf


def on_host(tree: Any) -> Any:
    """Whole arrays on the host of every process. All must ask for those of several."""

    def whole(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(whole, tree)


def put(tree: Any, like: Any) -> Any:
    """Arrays of the host on the devices, with the types and shardings of a tree of shapes."""

    def placed(x: Any, to: Any) -> jax.Array:
        value = np.asarray(x).astype(to.dtype)
        return jax.make_array_from_callback(value.shape, to.sharding, lambda index: value[index])

    return jax.tree.map(placed, tree, like)

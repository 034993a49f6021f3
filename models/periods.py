"""Groups layers of different kinds into a few `scan` loops.

A model of local and global layers repeats a pattern of them. A loop over groups of one period is
compiled once, however deep the model is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from models.rope import Rope
from startrail_jax.planner.layers import loops_of


@dataclass(frozen=True)
class Kind:
    """What a layer has that others may not have. The shapes of their weights are the same."""

    window: int | None
    """Number of keys that a query sees, its own included; None for what the attention shows."""
    rope: Rope | None
    """Rotary positions; None for a layer without."""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring layers that are one loop: groups of layers of these kinds, in this order."""

    first: int
    """Number of the first layer."""
    kinds: tuple[Kind, ...]
    """The kinds of the layers of a group."""
    groups: int
    """Number of groups, which is that of the turns of the loop."""

    def grouped(self, stacked: Any) -> Any:
        """What the loop goes over: [groups, layers of a group, ...], of arrays [layers, ...].

        A group of a single layer has no dimension of its own.
        """
        count = self.groups * len(self.kinds)

        def one(x: Any) -> Any:
            if count != len(x):
                x = x[self.first : self.first + count]
            if len(self.kinds) == 1:
                return x
            return x.reshape(self.groups, len(self.kinds), *x.shape[1:])

        return jax.tree.map(one, stacked)

    def each(self, group: Any) -> Iterator[tuple[Kind, Any]]:
        """Each layer of a group, with its part of the arrays of `grouped` at one turn."""
        if len(self.kinds) == 1:
            yield self.kinds[0], group
            return
        # A split, and no indices: the gradients of its parts are joined by one concatenation. Those
        # of indices would each be filled up with zeros to the size of all, and added.
        leaves, structure = jax.tree.flatten(group)
        parts = [lax.split(jnp.asarray(x), [1] * len(self.kinds)) for x in leaves]
        for i, kind in enumerate(self.kinds):
            own = [lax.squeeze(part[i], [0]) for part in parts]
            yield kind, jax.tree.unflatten(structure, own)


def kinds_of_layers(
    windows: Sequence[int | None], ropes: Sequence[Rope | None], layers: int
) -> tuple[Kind, ...]:
    """The kind of each layer, of patterns that repeat: layer i has entry i modulo their number."""
    return tuple(Kind(windows[i % len(windows)], ropes[i % len(ropes)]) for i in range(layers))


def stretches(kinds: Sequence[Kind]) -> tuple[Stretch, ...]:
    """The fewest layers to compile that make up all layers, in the fewest loops."""
    found, first = [], 0
    for period, turns in loops_of(tuple(kinds)):
        found.append(Stretch(first, tuple(kinds[first : first + period]), turns))
        first += period * turns
    return tuple(found)

"""Groups layers of different kinds into a few `scan` loops.

A model of local and global layers repeats a pattern of them. A loop over groups of one period is
compiled once, however deep the model is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from models.rope import Rope
from startrail_jax.planner.layers import loops_of

ATTENTION, LINEAR = "blocks", "linear_blocks"
"""Parts of a model: the stacked weights of the layers with attention, and with linear attention."""


@dataclass(frozen=True)
class Kind:
    """What a layer has that others may not have."""

    part: str
    """The part of the model with its weights, whose shapes are the same for all layers of it."""
    window: int | None = None
    """Number of keys that a query sees, its own included; None for what the attention shows."""
    rope: Rope | None = None
    """Rotary positions; None for a layer without."""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring layers that are one loop: groups of layers of these kinds, in this order."""

    first: Mapping[str, int]
    """For each part, the number of its layers in earlier stretches."""
    kinds: tuple[Kind, ...]
    """The kinds of the layers of a group."""
    groups: int
    """Number of groups, which is that of the turns of the loop."""

    def grouped(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """What the loop goes over: [groups, layers of a group, ...], of arrays [layers, ...].

        Both are of each part. A group of a single layer has no dimension of its own.
        """

        def one(part: str, own: int) -> Any:
            first, count = self.first[part], self.groups * own

            def cut(x: Any) -> Any:
                if count != len(x):
                    x = x[first : first + count]
                return x if len(self.kinds) == 1 else x.reshape(self.groups, own, *x.shape[1:])

            return jax.tree.map(cut, parts[part])

        return {part: one(part, own) for part, own in self._counts.items()}

    @property
    def _counts(self) -> dict[str, int]:
        """The layers of a group of each part."""
        return Counter(kind.part for kind in self.kinds)

    def each(self, group: Any) -> Iterator[tuple[Kind, Any]]:
        """Each layer of a group, with its part of the arrays of `grouped` at one turn."""
        if len(self.kinds) == 1:
            yield self.kinds[0], group[self.kinds[0].part]
            return
        # A split, and no indices: the gradients of its parts are joined by one concatenation. Those
        # of indices would each be filled up with zeros to the size of all, and added.
        layers = {part: _layers(group[part], own) for part, own in self._counts.items()}
        for kind in self.kinds:
            yield kind, next(layers[kind.part])


def _layers(group: Any, count: int) -> Iterator[Any]:
    """The layers of one part of a group, in their order."""
    leaves, structure = jax.tree.flatten(group)
    parts = [lax.split(jnp.asarray(x), [1] * count) for x in leaves]
    for i in range(count):
        yield jax.tree.unflatten(structure, [lax.squeeze(part[i], [0]) for part in parts])


def kinds_of_layers(
    mixers: Sequence[str],
    windows: Sequence[int | None],
    ropes: Sequence[Rope | None],
    layers: int,
) -> tuple[Kind, ...]:
    """The kind of each layer, of patterns that repeat: layer i has entry i modulo their number."""

    def kind(i: int) -> Kind:
        if mixers[i % len(mixers)] == "linear":
            return Kind(LINEAR)
        return Kind(ATTENTION, windows[i % len(windows)], ropes[i % len(ropes)])

    return tuple(map(kind, range(layers)))


def stretches(kinds: Sequence[Kind]) -> tuple[Stretch, ...]:
    """The fewest layers to compile that make up all layers, in the fewest loops."""
    found, first = [], 0
    for period, turns in loops_of(tuple(kinds)):
        before = Counter(kind.part for kind in kinds[:first])
        found.append(Stretch(before, tuple(kinds[first : first + period]), turns))
        first += period * turns
    return tuple(found)

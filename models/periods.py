"""Groups layers of different kinds into a few `scan` loops.

A model of local and global layers repeats a pattern of them. A loop over groups of one period is
compiled once, however deep the model is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from models.rope import Rope
from startrail_jax.patterns import loops_of

ATTENTION = "blocks"
PARTS = {
    ("attention", "mlp"): ATTENTION,
    ("linear", "mlp"): "linear_blocks",
    ("attention", "experts"): "expert_blocks",
    ("linear", "experts"): "linear_expert_blocks",
}
"""(mixer, feed-forward) of a layer -> the part of a model that holds the stacked weights of such
layers."""
MIXERS = {part: mixer for (mixer, _), part in PARTS.items()}
"""Part -> the mixer of its layers."""


@dataclass(frozen=True)
class Kind:
    """Properties in which layers may differ."""

    part: str
    """The part of the model with its weights: all layers of a part have the same shapes."""
    window: int | None = None
    """Number of keys that a query sees, its own included; None for the mask of the attention."""
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
    """Number of groups: the turns of the loop."""

    def grouped(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays for the loop, [groups, layers of a group, ...], from arrays [layers, ...].

        Arguments and result hold the arrays of each part. A group of a single layer has no
        dimension of its own.
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
        """Each layer of a group, with its part of the arrays of `grouped` at one turn.

        `layer_of` takes the arrays of the layer out of that part.
        """
        if len(self.kinds) == 1:
            yield self.kinds[0], group[self.kinds[0].part]
            return
        layers = {part: itertools.count() for part in self._counts}
        for kind in self.kinds:
            yield kind, LayerOfGroup(group[kind.part], next(layers[kind.part]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerOfGroup:
    """A layer of a group, whose arrays nothing has copied yet."""

    group: Any
    """Arrays [layers of the group, ...]."""
    index: int = field(metadata={"static": True})
    """Number of the layer among them."""


def layer_of(weights: Any) -> Any:
    """The arrays of a layer that `Stretch.each` gave.

    Where a layer is rematerialised, this belongs inside: what it saves for its backward pass are
    then the arrays of the loop, which exist already, and no copies of its layers.
    """
    if not isinstance(weights, LayerOfGroup):
        return weights
    return jax.tree.map(lambda x: x[weights.index], weights.group)


def layers_of(part: str, mixers: Sequence[str], feed_forwards: Sequence[str]) -> list[int]:
    """The numbers of the layers whose weights are in a part, given what all layers are."""
    pairs = zip(mixers, feed_forwards, strict=True)
    return [number for number, pair in enumerate(pairs) if PARTS[pair] == part]


def kinds_of_layers(
    mixers: Sequence[str],
    feed_forwards: Sequence[str],
    windows: Sequence[int | None],
    ropes: Sequence[Rope | None],
    layers: int,
) -> tuple[Kind, ...]:
    """The kind of each layer, of patterns that repeat: layer i has entry i modulo their number."""

    def kind(i: int) -> Kind:
        mixer = mixers[i % len(mixers)]
        part = PARTS[mixer, feed_forwards[i % len(feed_forwards)]]
        if mixer == "linear":
            return Kind(part)
        return Kind(part, windows[i % len(windows)], ropes[i % len(ropes)])

    return tuple(map(kind, range(layers)))


def stretches(kinds: Sequence[Kind]) -> tuple[Stretch, ...]:
    """The fewest layers to compile that make up all layers, in the fewest loops."""
    found, first = [], 0
    for period, turns in loops_of(tuple(kinds)):
        before = Counter(kind.part for kind in kinds[:first])
        found.append(Stretch(before, tuple(kinds[first : first + period]), turns))
        first += period * turns
    return tuple(found)

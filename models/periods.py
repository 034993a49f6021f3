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

from models.parts.attention import ATTENTIONS
from models.parts.gpt import stack_name
from models.patterns import loops_of
from models.rope import Rope

ATTENTION = "blocks"
"""The stack of layers of attention and an MLP, which all models have."""


@dataclass(frozen=True)
class Kind:
    """Properties in which layers may differ."""

    stack: str
    """The part of the model with its weights: all layers of a stack have the same shapes."""
    window: int | None = None
    """Number of keys that a query sees, its own included; None for the mask of the attention."""
    rope: Rope | None = None
    """Rotary positions; None for a layer without."""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring layers that one loop runs: groups of layers of these kinds, in this order."""

    first: Mapping[str, int]
    """For each stack, the number of its layers in earlier stretches."""
    kinds: tuple[Kind, ...]
    """The kinds of the layers of a group."""
    groups: int
    """Number of groups: the turns of the loop."""

    def grouped(self, stacks: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays for the loop, [groups, layers of a group, ...], from arrays [layers, ...].

        Arguments and result hold the arrays of each stack. A group of a single layer has no
        dimension of its own.
        """

        def one(stack: str, per_group: int) -> Any:
            first, count = self.first[stack], self.groups * per_group

            def cut(x: Any) -> Any:
                if count != len(x):
                    x = x[first : first + count]
                return (
                    x if len(self.kinds) == 1 else x.reshape(self.groups, per_group, *x.shape[1:])
                )

            return jax.tree.map(cut, stacks[stack])

        return {stack: one(stack, per_group) for stack, per_group in self._counts.items()}

    @property
    def _counts(self) -> dict[str, int]:
        """The layers of a group of each stack."""
        return Counter(layer_kind.stack for layer_kind in self.kinds)

    def each(self, group: Any) -> Iterator[tuple[Kind, Any]]:
        """Each layer of a group, with its share of the arrays of `grouped` at one turn.

        `layer_of` takes the arrays of the layer out of that share.
        """
        if len(self.kinds) == 1:
            yield self.kinds[0], group[self.kinds[0].stack]
            return
        layers = {stack: itertools.count() for stack in self._counts}
        for layer_kind in self.kinds:
            yield layer_kind, LayerOfGroup(group[layer_kind.stack], next(layers[layer_kind.stack]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerOfGroup:
    """A layer of a group, whose arrays nothing has copied yet."""

    group: Any
    """Arrays [layers of the group, ...]."""
    index: int = field(metadata={"static": True})
    """Number of the layer among them."""


def layer_of(weights: Any) -> Any:
    """Takes the arrays of a layer from a result of `Stretch.each`.

    Call it inside of a rematerialised layer: the layer then saves the arrays of the loop, which
    exist already, for its backward pass, and no copy of its own.
    """
    if not isinstance(weights, LayerOfGroup):
        return weights
    return jax.tree.map(lambda x: x[weights.index], weights.group)


def layers_of(stack: str, mixers: Sequence[str], feed_forwards: Sequence[str]) -> list[int]:
    """The numbers of the layers whose weights are in a stack, from the mixers and feed-forwards of
    all layers."""
    pairs = zip(mixers, feed_forwards, strict=True)
    return [number for number, pair in enumerate(pairs) if stack_name(*pair) == stack]


def kinds_of_layers(
    mixers: Sequence[str],
    feed_forwards: Sequence[str],
    windows: Sequence[int | None],
    ropes: Sequence[Rope | None],
    layers: int,
) -> tuple[Kind, ...]:
    """The kind of each layer, from patterns that repeat: layer i has entry i modulo the length."""

    def kind(i: int) -> Kind:
        mixer = mixers[i % len(mixers)]
        stack = stack_name(mixer, feed_forwards[i % len(feed_forwards)])
        if mixer not in ATTENTIONS:
            return Kind(stack)
        return Kind(stack, windows[i % len(windows)], ropes[i % len(ropes)])

    return tuple(map(kind, range(layers)))


def stretches(kinds: Sequence[Kind]) -> tuple[Stretch, ...]:
    """The fewest layers to compile that make up all layers, in the fewest loops."""
    loops, first = [], 0
    for period, turns in loops_of(tuple(kinds)):
        before = Counter(layer_kind.stack for layer_kind in kinds[:first])
        loops.append(Stretch(before, tuple(kinds[first : first + period]), turns))
        first += period * turns
    return tuple(loops)

"""Examples with shared beginnings, joined into trees: each beginning is read once.

Two examples share their first tokens, up to one that counts in both: the token that reads the last
one of a prompt stands in each branch, as it has another target there. Of shared tokens, at most one
example counts each, which gives its target, weight and numbers. So losses and gradients are those
of the examples by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64

from trainer.gpt.batches import TokenExample

LEAST_SHARED = 16
"""Fewest tokens that examples of different records share to be joined."""

Reads = Callable[[int], tuple[Int32[np.ndarray, " n"], Bool[np.ndarray, " n"]]]
"""The tokens of an example, by its number, and which of them count."""


@dataclass(frozen=True, kw_only=True)
class TreeLimits:
    """How far examples may be joined."""

    tokens: int
    """Most tokens of a tree."""
    levels: int | None
    """Most states that a tree needs at a time (`startrail_jax.branch_levels`); None for any."""
    shared: int = LEAST_SHARED
    """Fewest tokens that an example shares with the one before it."""


@dataclass
class Tree:
    """Examples that share beginnings."""

    members: list[int]
    """Their numbers, in an order in which each shares most with the one before it."""
    shared: list[int]
    """How many of its first tokens each shares with the one before it."""
    lengths: list[int]
    """Tokens of each."""

    @property
    def tokens(self) -> int:
        """Tokens of the tree."""
        return sum(self.lengths) - sum(self.shared)

    @property
    def levels(self) -> int:
        """As `TreeLimits.levels`."""
        return 1 + self._branches()[0].depth

    def add(self, number: int, shared: int, length: int) -> None:
        """Adds an example."""
        self.members.append(number)
        self.shared.append(shared)
        self.lengths.append(length)

    def is_too_deep(self, levels: int | None, shared: int, length: int) -> bool:
        """Whether it would have more levels with one more example."""
        if levels is None:
            return False
        return Tree([], [*self.shared, shared], [*self.lengths, length]).levels > levels

    def _branches(self) -> list[_Branch]:
        """The stretches of the tree, each after what it continues. What is above the first one has
        no tokens."""
        root = _Branch(0, 0, 0)
        path = [root]
        for member, (shared, length) in enumerate(zip(self.shared, self.lengths, strict=True)):
            while path[-1].start >= shared and len(path) > 1:
                path.pop()
            if path[-1].stop > shared:
                path[-1].cut(shared)
            branch = _Branch(member, shared, length)
            path[-1].below.append(branch)
            path.append(branch)
        found = [root]
        for branch in found:
            found += branch.below
        for branch in reversed(found):
            branch.order()
        return found

    def places(self) -> tuple[list[Int64[np.ndarray, " n"]], Int32[np.ndarray, " tokens"]]:
        """The place of each token of each member in the tree, and the place after the last one that
        continues each token of the tree."""
        places = [np.full(length, -1) for length in self.lengths]
        ends, at = np.zeros(self.tokens, np.int32), 0
        stack = [(self._branches()[0], -1)]
        while stack:
            branch, begun = stack.pop()
            size = branch.stop - branch.start
            if begun >= 0:  # All below it is written.
                ends[begun : begun + size] = at
                continue
            places[branch.member][branch.start : branch.stop] = np.arange(at, at + size)
            stack.append((branch, at))
            stack += [(x, -1) for x in reversed(branch.below)]
            at += size
        # What a member shares is where the one before it has it.
        for before, (own, shared) in enumerate(zip(places[1:], self.shared[1:], strict=True)):
            own[:shared] = places[before][:shared]
        return places, ends


@dataclass(eq=False)
class _Branch:
    """A stretch of tokens of one member, and what continues it."""

    member: int
    start: int
    stop: int
    below: list[_Branch] = field(default_factory=list)
    depth: int = 0
    """Slots beside the first that what is below needs: see `startrail_jax.linear.forks`."""

    def cut(self, at: int) -> None:
        """Divides the stretch: what is behind becomes the only one below it."""
        rest = _Branch(self.member, at, self.stop, self.below)
        self.stop, self.below = at, [rest]

    def order(self) -> None:
        """Puts the deepest branch last, where it follows in the slot of its beginning."""
        self.below.sort(key=lambda x: x.depth)
        self.depth = max((x.depth + (x is not self.below[-1]) for x in self.below), default=0)


def joined(count: int, read: Reads, limits: TreeLimits) -> list[Tree]:
    """Examples as trees, in the order of the first example of each.

    Examples with a long beginning in common come next to each other in the order of their tokens,
    so that one pass finds them, wherever they are.
    """

    def compare(i: int, j: int) -> int:
        (x, _), (y, _) = read(i), read(j)
        same = _common(x, y)
        if same == min(len(x), len(y)):
            return len(x) - len(y) or i - j
        return int(x[same]) - int(y[same])

    alike = dict[bytes, list[int]]()
    for number in range(count):
        alike.setdefault(read(number)[0][: limits.shared].tobytes(), []).append(number)
    order = [
        i for those in alike.values() for i in sorted(those, key=functools.cmp_to_key(compare))
    ]
    trees: list[Tree] = []
    tree, size, owner = Tree([], [], []), 0, np.zeros(0, bool)
    for number in order:
        tokens, counted = read(number)
        length, shared = len(tokens), 0
        if tree.members:
            before, _ = read(tree.members[-1])
            shared = _common(tokens, before)
            both = np.flatnonzero(counted[:shared] & owner[:shared])
            shared = int(both[0]) if len(both) else shared
        size += length - shared
        is_near = tree.members and shared >= limits.shared and size <= limits.tokens
        if is_near and not tree.is_too_deep(limits.levels, shared, length):
            owner = np.append(owner[:shared] | counted[:shared], counted[shared:])
        else:
            trees.append(tree := Tree([], [], []))
            size, shared, owner = length, 0, counted
        tree.add(number, shared, length)
    return sorted(trees, key=lambda tree: min(tree.members))


def _common(x: np.ndarray, y: np.ndarray) -> int:
    """Number of first tokens that two examples have in common."""
    least = min(len(x), len(y))
    start, size = 0, 64
    while start < least:
        stop = min(start + size, least)
        if len(other := np.flatnonzero(x[start:stop] != y[start:stop])):
            return start + int(other[0])
        start, size = stop, 4 * size
    return least


def merged(tree: Tree, examples: Sequence[TokenExample]) -> TokenExample:
    """The members of a tree, given in their order, as one example."""
    if len(examples) == 1:
        return examples[0]
    places, ends = tree.places()
    size = len(ends)
    tokens, targets, documents = (np.zeros(size, np.int32) for _ in range(3))
    weights = np.zeros(size, np.float32)
    first = examples[0].numbers
    numbers = first and {name: np.zeros((size, *x.shape[1:]), x.dtype) for name, x in first.items()}
    taken = np.zeros(size, bool)
    order = np.argsort(tree.members)
    begun = np.zeros(len(examples), np.int64)
    begun[order] = np.cumsum([0, *(_documents(examples[i]).max() + 1 for i in order[:-1])])
    for place, example, own in zip(places, examples, begun, strict=True):
        tokens[place] = example.tokens
        counted = (example.weights > 0) | ~taken[place]
        here = place[counted]
        taken[place] = True
        targets[here], weights[here] = example.targets[counted], example.weights[counted]
        documents[here] = own + _documents(example)[counted]
        for name, x in (numbers or {}).items():
            x[here] = (example.numbers or {})[name][counted]
    return TokenExample(tokens, targets, weights, documents, numbers, ends)


def _documents(example: TokenExample) -> Any:
    none = np.zeros(len(example.tokens), np.int32)
    return none if example.documents is None else example.documents


def trees_within(example: TokenExample, limits: TreeLimits) -> list[Tree]:
    """The documents of an example, such as a pair, as trees."""
    parts = _parts(example)
    return joined(len(parts), lambda i: (parts[i].tokens, parts[i].weights > 0), limits)


def as_trees(example: TokenExample, trees: Sequence[Tree]) -> TokenExample:
    """An example of several documents whose trees are `trees_within`."""
    if len(trees) > 1:  # They share nothing.
        return example
    parts = _parts(example)
    return merged(trees[0], [parts[i] for i in trees[0].members])


def _parts(example: TokenExample) -> list[TokenExample]:
    return [_part(example, document) for document in range(int(_documents(example).max()) + 1)]


def _part(example: TokenExample, document: int) -> TokenExample:
    here = np.flatnonzero(_documents(example) == document)
    return TokenExample(
        example.tokens[here],
        example.targets[here],
        example.weights[here],
        None,
        example.numbers and {name: x[here] for name, x in example.numbers.items()},
    )

"""Examples of several sources, mixed by weights.

Row n of a run is drawn from a source that the weights and n alone decide: of any number of first
rows, a source gives its share of them. Each source has an order of its own, which begins again,
shuffled anew, once it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Int64

from startrail_jax.tokens.documents import shuffled
from trainer.data.dataset import Source

HALF = Fraction(1, 2)


def drawn(rows: int, weights: Sequence[Fraction]) -> list[int]:
    """How many of the first `rows` rows each source gives. One more row is of one source.

    With three sources, each count is less than one row from its share; with m, less than m / 2.
    """
    left, counts = sum(weights, Fraction()), []
    for weight in weights:
        others = int(rows * (left - weight) / left + HALF)
        counts.append(rows - others)
        rows, left = others, left - weight
    return counts


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixture:
    """The examples of several sources by their number, those of each source one after another."""

    sources: tuple[Source, ...]
    weights: tuple[Fraction, ...]

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitem__(self, index: int) -> Any:
        source, number = locate(self.ends, index)
        return self.sources[source][number]

    @property
    def ends(self) -> Int64[np.ndarray, " sources"]:
        """Where the numbers of each source end."""
        return np.cumsum([len(x) for x in self.sources])

    def place(self, row: int) -> tuple[int, int]:
        """The source of a row, and how many rows it gave before."""
        ends = zip(drawn(row, self.weights), drawn(row + 1, self.weights), strict=True)
        return next(
            (source, before) for source, (before, after) in enumerate(ends) if before < after
        )

    def spread(self, count: int) -> Int64[np.ndarray, " count"]:
        """The numbers of `count` examples: of each source its share, spread evenly over it."""
        shares, sizes = drawn(count, self.weights), map(len, self.sources)
        parts = [np.arange(n) * size // max(n, 1) for n, size in zip(shares, sizes, strict=True)]
        return np.concatenate([x + y for x, y in zip(parts, (0, *self.ends[:-1]), strict=True)])


def locate(ends: Int64[np.ndarray, " sources"], index: int) -> tuple[int, int]:
    """The source of a number, and the number in it, where the numbers of sources end at `ends`."""
    source = int(np.searchsorted(ends, index, side="right"))
    return source, index - int(ends[source - 1] if source else 0)


def mixed_epochs(
    lengths: Sequence[Int64[np.ndarray, " _"]], weights: Sequence[Fraction], seed: int
) -> Callable[[int], Int64[np.ndarray, " drawn"]]:
    """The numbers of the documents of an epoch, in order; those of each source one after another.

    An epoch draws as many documents as there are. Of their tokens, sources of many documents have
    shares as their weights, since the number that is drawn of each follows from the mean length.
    """
    sizes = [int(np.count_nonzero(x)) for x in lengths]
    totals = [int(x.sum()) for x in lengths]
    of_documents = [w * n / total for w, n, total in zip(weights, sizes, totals, strict=True)]
    starts = np.cumsum([0, *map(len, lengths[:-1])])
    numbers = [start + np.flatnonzero(x) for start, x in zip(starts, lengths, strict=True)]

    def of_source(source: int, first: int, last: int) -> np.ndarray:
        """What a source gives from its draw `first` to before its draw `last`."""
        size = sizes[source]
        rounds = range(first // size, -(-last // size))
        orders = [shuffled(size, seed, source, number) for number in rounds]
        skipped = rounds.start * size
        return numbers[source][np.concatenate(orders)[first - skipped : last - skipped]]

    def epoch(number: int) -> Int64[np.ndarray, " drawn"]:
        ends = [drawn(x * sum(sizes), of_documents) for x in (number, number + 1)]
        pairs = [pair for pair in enumerate(zip(*ends, strict=True)) if pair[1][0] < pair[1][1]]
        found = np.concatenate([of_source(source, *pair) for source, pair in pairs])
        return found[shuffled(len(found), seed, number)]

    return epoch


def fractions_of(weights: Sequence[float], count: int) -> tuple[Fraction, ...]:
    """The weights as the decimal numbers that a user writes; equal ones if there are none."""
    return tuple(Fraction(str(x)) for x in weights) or (Fraction(1),) * count

"""The visible part of two units under a causal mask, as full rectangles and causal squares.

These are the two shapes that flash attention kernels serve. Everything here is static: integers,
and no arrays.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Pieces:
    """The visible part of a query unit and a key unit, both in order of position.

    The rectangles and squares together hold every visible (query, key) pair once. No query is in
    two rectangles or in two squares.
    """

    rectangles: tuple[tuple[int, int, int], ...]
    """(start, stop, keys): queries [start, stop) see keys [0, keys)."""
    squares: tuple[tuple[int, int, int], ...]
    """(query, key, size): query + i sees key + j if j <= i, for i, j < size."""

    @classmethod
    def whole(cls, queries: int, keys: int) -> Pieces:
        """One rectangle: every query sees every key."""
        return cls(rectangles=((0, queries, keys),), squares=())


@functools.lru_cache(maxsize=4096)
def pieces_by_offset(
    query: tuple[int, int, int], key: tuple[int, int, int], offsets: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[Pieces, ...]]:
    """The different `Pieces` of units under a causal mask, and the least offset of each.

    Args:
        query: the one run of the query unit, or its early and its late run, as `Runs.shape` gives
            them.
        key: the runs of the key unit, likewise; half of them are late ones if the query unit has
            two.
        offsets: the possible distances, in tokens, from the start of the first query run to the
            start of the first key run.

    Returns:
        Offsets in increasing order, and the pieces that hold from each of them to the next.
    """
    first, cases = [], []
    for offset in sorted(set(offsets)):
        pieces = _pieces(query, key, offset)
        if not cases or cases[-1] != pieces:
            first.append(offset)
            cases.append(pieces)
    return tuple(first), tuple(cases)


def _pieces(query: tuple[int, int, int], key: tuple[int, int, int], offset: int) -> Pieces:
    """The pieces at one offset. They are found on the coarsest grid that both units share."""
    (sides, query_run, _), (key_runs, key_run, apart) = query, key
    grid = math.gcd(query_run, key_run, apart, offset)
    starts = [(offset + i * apart) // grid for i in range(key_runs // sides)]
    queries = [*range(query_run // grid)]
    keys = [start + j for start in starts for j in range(key_run // grid)]
    if sides == 2:
        # Zigzag units have early and late runs. The late runs mirror the early ones: they are as
        # far apart, the other way round, and come after all early ones.
        end = 2 * max(queries[-1], keys[-1]) + 1
        queries, keys = ([*x, *(end - y for y in reversed(x))] for x in (queries, keys))
    counts, squares = [], []
    for x, position in enumerate(queries):
        if position not in keys:
            counts.append(sum(other < position for other in keys))
            continue
        y = keys.index(position)
        if (
            squares
            and squares[-1][0] + squares[-1][2] == x
            and squares[-1][1] + squares[-1][2] == y
        ):
            squares[-1][2] += 1
        else:
            squares.append([x, y, 1])
        counts.append(squares[-1][1])
    ends = [0, *itertools.accumulate(len(list(rows)) for _, rows in itertools.groupby(counts))]
    return Pieces(
        tuple(
            (start * grid, stop * grid, counts[start] * grid)
            for start, stop in itertools.pairwise(ends)
            if counts[start]
        ),
        tuple((x * grid, y * grid, size * grid) for x, y, size in squares),
    )

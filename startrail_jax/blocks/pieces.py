"""The visible part of two units under some masks, in shapes that flash kernels serve.

Under a causal mask these are full rectangles and causal squares. A causal window adds squares with
a window, and squares at its far end, which are causal in reverse order of tokens. Under a
block-causal mask there are rectangles alone, one for each block of queries. Everything here is
static: integers, and no arrays.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from startrail_jax.masks import BlockCausal, Mask
from startrail_jax.masks.algebra import causal_window


@dataclass(frozen=True)
class Pieces:
    """The visible part of a query unit and a key unit, both in order of position.

    Together they hold every visible (query, key) pair once. Squares are (query, key, size), and
    speak of query + i and key + j for i, j < size.
    """

    rectangles: tuple[tuple[int, int, int, int], ...] = ()
    """(start, stop, first, end): queries [start, stop) see keys [first, end)."""
    squares: tuple[tuple[int, int, int], ...] = ()
    """Causal squares: i sees j if j <= i."""
    windows: tuple[tuple[int, int, int], ...] = ()
    """Squares with a window: i sees j if i - window < j <= i."""
    window: int = 0
    """Keys that a query sees in `windows`; 0 if there are none."""
    edges: tuple[tuple[int, int, int], ...] = ()
    """Squares at the far end of a window: i sees j if j >= i."""
    leading: bool = False
    """Whether documents are one, in the first queries and keys, and padding, as under a full mask;
    else the keys of a document in a rectangle are its last ones, as they come before queries."""

    @classmethod
    def whole(cls, queries: int, keys: int) -> Pieces:
        """One rectangle: every query sees every key."""
        return cls(rectangles=((0, queries, 0, keys),))


@functools.lru_cache(maxsize=4096)
def pieces_by_offset(
    query: tuple[int, int, int], key: tuple[int, int, int], offsets: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[Pieces, ...]]:
    """The offsets at which `Pieces` change under a causal mask, increasing, and those from each on.

    `query` and `key` are the runs of the units, as `Runs.shape` gives them; half of the key runs
    are late ones if the query unit has an early and a late run. `offsets` are the possible
    distances, in tokens, from the start of the first query run to that of the first key run.
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
            (start * grid, stop * grid, 0, counts[start] * grid)
            for start, stop in itertools.pairwise(ends)
            if counts[start]
        ),
        tuple((x * grid, y * grid, size * grid) for x, y, size in squares),
    )


TokenRuns = tuple[tuple[int, int, int], ...]
"""(index of the first token in its unit, position of it, tokens) of each run of neighbours."""


MOST_BLOCKS = 64
"""Length of a query unit under a block-causal mask, at most, in blocks: each is a kernel call."""


def period(mask: Mask, tokens: int) -> int | None:
    """By how many tokens a causal window or a block-causal mask may move and stay what it is; None
    for other masks, and where a query unit of so many tokens has too many blocks."""
    if isinstance(mask, BlockCausal):
        return mask.size if tokens <= MOST_BLOCKS * mask.size else None
    return None if causal_window(mask) is None else 1


def pieces_by_runs(mask: Mask, queries: TokenRuns, keys: TokenRuns) -> Pieces:
    """The pieces of two units, with runs in order of position, under a mask that has a `period`."""
    if isinstance(mask, BlockCausal):
        return pieces_of_blocks(queries, keys, mask.size)
    window = causal_window(mask)
    assert window is not None
    return pieces_of_window(queries, keys, window)


@functools.lru_cache(maxsize=4096)
def pieces_of_blocks(queries: TokenRuns, keys: TokenRuns, size: int) -> Pieces:
    """The pieces of two units under a block-causal mask, with blocks of so many tokens."""
    found = []
    for (i, at, m), (j, key_at, n) in itertools.product(_joined(queries), _joined(keys)):
        start = at
        while start < at + m:
            stop, end = (start // size + 1) * size, at + m
            seen = min(stop - key_at, n)
            # Later blocks see no more.
            stop = end if seen == n else min(stop, end)
            if seen > 0:
                found.append((start - at + i, stop - at + i, j, j + seen))
            start = stop
    return Pieces(rectangles=tuple(found), leading=True)


@functools.lru_cache(maxsize=4096)
def pieces_of_window(queries: TokenRuns, keys: TokenRuns, window: int) -> Pieces:
    """The pieces of two units under a causal window, with runs in order of position. A query sees
    `window` keys, the one at its own position included."""
    found: dict[str, list[Any]] = {}
    for (i, at, m), (j, key_at, n) in itertools.product(_joined(queries), _joined(keys)):
        for kind, start, stop, first, end in _band((at, at + m), (key_at, key_at + n), window):
            query, key = start - at + i, first - key_at + j
            piece = (query, query + stop - start, key, key + end - first)
            found.setdefault(kind, []).append(
                piece if kind == "rectangles" else (query, key, stop - start)
            )
    pieces: dict[str, Any] = {kind: tuple(those) for kind, those in found.items()}
    return Pieces(**pieces, window=window if "windows" in found else 0)


def _joined(runs: TokenRuns) -> list[list[int]]:
    """The same runs, of which those that follow each other are one."""
    joined: list[list[int]] = []
    for index, position, tokens in runs:
        if joined and sum(joined[-1][1:]) == position:
            joined[-1][2] += tokens
        else:
            joined.append([index, position, tokens])
    return joined


def _band(
    queries: tuple[int, int], keys: tuple[int, int], window: int
) -> Iterator[tuple[str, int, int, int, int]]:
    """The pieces of queries and keys at neighbouring positions, [start, stop) of each."""
    start, stop = max(queries[0], keys[0]), min(queries[1], keys[1] + window - 1)
    first, end = max(keys[0], start - window + 1), min(keys[1], stop)
    if start >= stop or first >= end:
        return
    if end - 1 <= start:
        # Only the far end of the window hides keys: from `edge` on, each query sees one key less.
        edge = min(first + window - 1, stop)
        size = stop - edge
        if size <= 1:
            yield "rectangles", start, stop, first, end
            return
        yield "edges", edge, stop, first, first + size
        if first + size < end:
            yield "rectangles", start, stop, first + size, end
        if start < edge:
            yield "rectangles", start, edge, first, first + size
    elif start == first:
        yield "squares" if window >= end - start else "windows", start, end, first, end
        yield from _band((end, stop), (first, end), window)
    else:
        yield from _band((start, stop), (first, start), window)
        yield from _band((start, stop), (start, end), window)

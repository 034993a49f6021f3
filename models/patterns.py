"""Layers that differ: the pattern that repeats, and the loops that they make up."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any


def shortest(entries: Sequence[Any]) -> tuple[Any, ...]:
    """The shortest list that gives all entries when it repeats."""
    sizes = range(1, len(entries) + 1)
    fits = (n for n in sizes if all(x == entries[i % n] for i, x in enumerate(entries)))
    return tuple(entries[: next(fits)])


@lru_cache(maxsize=64)
def loops_of(kinds: tuple[Any, ...]) -> tuple[tuple[int, int], ...]:
    """The loops that all layers make up, in order: (layers of a turn, number of turns) of each.

    They have the fewest layers to compile, in the fewest loops. A pattern that repeats is one loop.
    What is left of a last period that is not whole becomes further loops, and so do layers without
    a period, such as local ones after global ones.
    """
    if len(set(kinds)) == 1:
        return ((1, len(kinds)),)
    # By number of the layer, from the last one back: (layers to compile, loops), and the loops.
    best: dict[int, tuple[tuple[int, int], tuple[tuple[int, int], ...]]] = {
        len(kinds): ((0, 0), ())
    }
    for first in range(len(kinds) - 1, -1, -1):
        found = []
        for period in range(1, len(kinds) - first + 1):
            group, stop = kinds[first : first + period], first + period
            while True:
                (cost, loops), rest = best[stop]
                one = period, (stop - first) // period
                found.append(((cost + period, loops + 1), (one, *rest)))
                if kinds[stop : stop + period] != group:
                    break
                stop += period
        best[first] = min(found, key=lambda x: (x[0], -x[1][0][0] * x[1][0][1]))
    return best[0][1]


def turn_of(loops: Sequence[tuple[int, int]], kinds: Sequence[Any]) -> Counter[Any]:
    """How many layers of each kind a turn has, of the loop whose turns have most layers."""
    starts = [0, *itertools.accumulate(period * turns for period, turns in loops)]
    period, first = max((x[0], start) for x, start in zip(loops, starts, strict=False))
    return Counter(kinds[first : first + period])

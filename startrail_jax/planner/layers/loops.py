"""How layers that differ are few loops, and the turn of which has most layers.

`models.periods.stretches` finds the same loops; the planner has no model at hand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=64)
def loops_of(kinds: tuple[Any, ...]) -> tuple[int, int]:
    """The loops that all layers make up: the fewest layers to compile, in the fewest loops.

    Args:
        kinds: the kind of each layer, such as its window.

    Returns:
        Most layers in a turn of a loop, and the number of loops.
    """
    if len(set(kinds)) == 1:
        return 1, 1
    # By number of the layer, from the last one back: (layers to compile, loops), and the loops as
    # (layers of a turn, turns).
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
    loops = best[0][1]
    return max(period for period, _ in loops), len(loops)

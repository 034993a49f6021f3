"""Which rounds of a ring a sliding window leaves, and how much the busiest device then attends to.

The units are those of `startrail_jax.rings.schedule` in zigzag order, and the rounds those of its
`ring_offsets`; there, one setting is looked at, with any mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from startrail_jax.planner.grid import Call, Settings

_SPREAD = 4
"""Query units whose work is counted, from the first to the last."""
_LAST = 16
"""Query units, at most, whose work is counted among the last ones: in these, both runs of a unit
lie near the middle of the sequence, where the window of one reaches into the other. In 600 random
settings of group (to 128), ring (to 64), team (to 32), tokens (200 to 1M) and window, the busiest
unit of those that are counted was the busiest of all."""


class Visits:
    """The rounds that the ring of each setting makes for layers with a window."""

    def __init__(self, settings: Settings, call: Call, window: int) -> None:
        """The rounds.

        Args:
            settings: the settings.
            call: the tokens of a sequence.
            window: keys that a query sees, its own included.
        """
        shards = settings.sequence // settings.head
        slices = call.padded(settings.sequence) // (2 * shards)
        s = settings
        columns = np.stack([s.group, s.ring, s.team, s.inner, slices])
        unique, kind = np.unique(columns, axis=1, return_inverse=True)
        self._kind = kind.ravel()
        self._rings = [_ring(*map(int, column), window) for column in unique.T]
        self.outer = np.array([len(x.offsets) for x in self._rings])[self._kind]
        """Places of the outer cycle that are visited; those of a single ring are its rounds."""
        self.pairs = np.array([x.pairs for x in self._rings])[self._kind]
        """Pairs of a query and a key of a sequence that the busiest device attends to, in each of
        its heads: under a window, the devices of a team do not have the same work."""

    def leaving(self, inside: np.ndarray, *, home: bool) -> np.ndarray:
        """Of `inside` neighbours in a node, how many send to another node, on average over hops.

        Where the window skips rounds, a hop goes over several places, and more devices than the
        last one of a node send to another.

        Args:
            inside: neighbours along the ring that share a node.
            home: whether these are the hops of gradients, which start in round 1, and whose last
                one takes them home.
        """
        keys = np.stack([self._kind, inside])
        unique, index = np.unique(keys, axis=1, return_inverse=True)
        found = [_leaving(self._rings[kind], n, home) for kind, n in unique.T.tolist()]
        return np.array(found)[index.ravel()]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Ring:
    """The ring of one setting."""

    places: int
    """Places of the outer cycle, or of a single ring."""
    offsets: tuple[int, ...]
    """Those that are visited, 0 first."""
    pairs: float
    """See `Visits.pairs`."""


@lru_cache(maxsize=1 << 14)
def _leaving(ring: _Ring, inside: int, home: bool) -> float:
    """See `Visits.leaving`."""
    if len(ring.offsets) == 1:
        return 1.0
    hops = np.diff(ring.offsets)
    if home:
        hops = np.append(hops[1:], ring.places - ring.offsets[-1])
    return float(np.minimum(inside, np.minimum(hops, ring.places - hops)).mean())


# Plans at other port speeds ask for the same rings.
@lru_cache(maxsize=1 << 14)
def _ring(group: int, ring: int, team: int, inner: int, run: int, window: int) -> _Ring:
    """One ring, on which a shard of the sequence is two runs of `run` tokens."""
    pairs = _busiest(group * ring, team, run, window)
    places, block = ring // inner, group * team * run
    if window >= 2 * ring * block:
        return _Ring(places=places, offsets=tuple(range(places)), pairs=pairs)
    # All members of group and team together meet every pair of two blocks. A block is a run from
    # the beginning of the sequence, and one as far from its end. A query that sees a key sees it at
    # most `reach` whole runs beyond the gap between theirs.
    reach, q = (window - 2) // block, np.arange(ring)
    bounds = (
        (q - 1 - reach, q),  # Both from the beginning.
        (q, q + 1 + reach),  # Both from the end.
        (2 * ring - 2 - q - reach, np.full(ring, ring - 1)),  # Keys from the beginning alone.
    )
    steps = np.zeros(2 * places + 1, np.int64)
    for first, last in bounds:
        first, last = np.maximum(first, 0), np.minimum(last, ring - 1)
        some = first <= last
        # The places of the outer cycle at which these key units lie, as distances.
        first, last = first[some] // inner, last[some] // inner
        more = np.minimum(last - first, places - 1)
        near = (q[some] // inner - last) % places
        np.add.at(steps, near, 1)
        np.add.at(steps, near + more + 1, -1)
    met = np.cumsum(steps[:-1]) > 0
    visited = met[:places] | met[places:]
    visited[0] = True
    return _Ring(places=places, offsets=tuple(np.flatnonzero(visited).tolist()), pairs=pairs)


@lru_cache(maxsize=1 << 14)
def _busiest(number: int, team: int, run: int, window: int) -> float:
    """Pairs of the device that attends to most.

    Args:
        number: number of query units, each of which is `team` runs from the beginning of the
            sequence, and as many from its end.
        team: team degree; a member attends to every team-th run, of those from either end.
        run: tokens of a run.
        window: keys that a query sees.
    """
    length = 2.0 * number * team * run
    spread = np.linspace(0, number - 1, _SPREAD).astype(np.int64)
    units = np.union1d(spread, np.arange(max(number - _LAST, 0), number))[:, None]
    ends = np.arange(2 * number * team + 1) * float(run)
    begin, end = units * float(team * run), (units + 1) * float(team * run)
    before = sum(
        _earlier(b, ends)
        - _earlier(a, ends)
        - _earlier(b - window, ends)
        + _earlier(a - window, ends)
        for a, b in ((begin, end), (length - end, length - begin))
    )
    pairs = np.diff(before)
    pairs = pairs + pairs[:, ::-1]
    return float(pairs[:, : number * team].reshape(len(units), number, team).sum(1).max())


def _earlier(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Pairs of a query and a key before these positions, of which the key is not the later one."""
    both = np.maximum(np.minimum(query, key), 0)
    return both * (both + 1) / 2 + np.maximum(query - key, 0) * key

"""Who attends to whom, on which devices, in which rounds: the static side of the schedule.

Sequence ranks are flat over (group, ring, team, head), slowest first; G, R, A, U are the degrees.
Device (g, p, a) attends the queries of its team, query unit g * R + p, to the key units p' * A + a
of all p' on its ring, one per round. Teams share queries, rings share keys, and every (query, key)
pair is met exactly once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from startrail_jax.collectives import KeyPlacement
from startrail_jax.layout import Layout
from startrail_jax.mask import Mask, runs_meet
from startrail_jax.mesh import Axis


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything static about one attention: the axes it runs on and the choices made."""

    group: Axis
    ring: Axis
    team: Axis
    head: Axis
    layout: Layout
    causal: bool
    window: int | None
    scale: float | None
    backend: str
    backward: str
    placement: str
    combine: str

    @property
    def keys(self) -> KeyPlacement:
        """How key units come to their devices, and their gradients back."""
        degree = self.group.degree * self.ring.degree * self.team.degree
        rank = Axis(self.group.names + self.ring.names + self.team.names, degree)
        return KeyPlacement(self.placement, self.group, self.team, rank, self.causal)

    @property
    def query_ranks(self) -> int:
        """Sequence ranks in a query unit."""
        return self.team.degree * self.head.degree

    @property
    def key_ranks(self) -> int:
        """Sequence ranks in a key unit."""
        return self.group.degree * self.head.degree

    def query_unit(self, g: Any, p: Any, distance: Any = 0) -> Any:
        """The query unit that lives `distance` ahead of ring index p in group g."""
        return g * self.ring.degree + (p + distance) % self.ring.degree

    def key_unit(self, p: Any, a: Any, distance: Any = 0) -> Any:
        """The key unit that lives `distance` behind ring index p, at team index a."""
        return (p - distance) % self.ring.degree * self.team.degree + a

    def mask(
        self,
        seq_len: int,
        device: tuple[Any, Any, Any],
        query_segments: Array | None = None,
        key_segments: Array | None = None,
        *,
        queries_ahead: Any = 0,
        keys_behind: Any = 0,
    ) -> Mask:
        """What the queries at device (g, p, a) see of its keys, one of which has come some way."""
        if not self.causal:
            return Mask(query_segments=query_segments, key_segments=key_segments)
        g, p, a = device
        query, key = self.query_unit(g, p, queries_ahead), self.key_unit(p, a, keys_behind)
        return Mask(
            causal=True,
            window=self.window,
            query_runs=self.layout.unit_positions(seq_len, self.query_ranks, query),
            key_runs=self.layout.unit_positions(seq_len, self.key_ranks, key),
            query_segments=query_segments,
            key_segments=key_segments,
        )

    def sort(self, x: Array, ranks: int, dim: int) -> Array:
        """A gathered unit in order of position, which only positional masks need."""
        return self.layout.sort_unit(x, ranks, dim) if self.causal else x

    def unsort(self, x: Array, ranks: int, dim: int) -> Array:
        """The inverse of `sort`."""
        return self.layout.unsort_unit(x, ranks, dim) if self.causal else x


@functools.lru_cache(maxsize=1024)
def ring_offsets(schedule: Schedule, seq_len: int) -> tuple[int, ...]:
    """Ring distances between queries and keys at which some device has work, 0 first.

    All of them, but for a sliding window: the ring then skips the rounds that nobody needs.
    """
    group, ring, team = (range(x.degree) for x in (schedule.group, schedule.ring, schedule.team))
    if schedule.window is None:
        return tuple(ring)
    unit = functools.partial(schedule.layout.unit_positions, seq_len)
    queries = [[unit(schedule.query_ranks, schedule.query_unit(g, p)) for g in group] for p in ring]
    keys = [[unit(schedule.key_ranks, schedule.key_unit(p, a)) for a in team] for p in ring]
    return tuple(
        offset
        for offset in ring
        if offset == 0
        or any(
            runs_meet(query, key, schedule.window)
            for p in ring
            for query in queries[p]
            for key in keys[p - offset]
        )
    )

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

from startrail_jax.analysis.cost import cheaper_backward
from startrail_jax.blocks.base import Request
from startrail_jax.collectives import KeyPlacement
from startrail_jax.layout import Layout
from startrail_jax.mask import Mask, runs_meet
from startrail_jax.mesh import Axis
from startrail_jax.pieces import Pieces, pieces_by_offset


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
    platform: str | None
    """Of the devices: see `mesh.device_kind`."""
    capability: tuple[int, int] | None

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
            window=self.window_in(seq_len),
            query_runs=self.layout.unit_positions(seq_len, self.query_ranks, query),
            key_runs=self.layout.unit_positions(seq_len, self.key_ranks, key),
            query_segments=query_segments,
            key_segments=key_segments,
            offsets=run_offsets(self, seq_len, queries_ahead + keys_behind),
        )

    def window_in(self, seq_len: int) -> int | None:
        """The window, if it hides anything in a sequence of that length."""
        return None if self.window is None or self.window >= seq_len else self.window

    def request(self, seq_len: int, **arrays: Any) -> Request:
        """What a block will be asked for; `arrays` are the fields that depend on the arrays."""
        return Request(
            platform=self.platform,
            capability=self.capability,
            causal=self.causal,
            window=self.window_in(seq_len),
            num_cases=len(unit_cases(self, seq_len)),
            **arrays,
        )

    def travels(self, **shard: Any) -> str:
        """Which side goes round the ring in the backward pass: "query" or "kv".

        Args:
            shard: sizes of one device's arrays, as `cost.cheaper_backward` takes them.
        """
        if self.backward != "auto":
            return self.backward
        return cheaper_backward(team=self.team.degree, group=self.group.degree, **shard)

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
    window = schedule.window_in(seq_len)
    if window is None:
        return tuple(ring)
    unit = functools.partial(schedule.layout.unit_positions, seq_len)
    queries = [[unit(schedule.query_ranks, schedule.query_unit(g, p)) for g in group] for p in ring]
    keys = [[unit(schedule.key_ranks, schedule.key_unit(p, a)) for a in team] for p in ring]
    return tuple(
        offset
        for offset in ring
        if offset == 0
        or any(
            runs_meet(query, key, window)
            for p in ring
            for query in queries[p]
            for key in keys[p - offset]
        )
    )


def unit_cases(
    schedule: Schedule, seq_len: int, kv_seq_len: int | None = None
) -> tuple[Pieces, ...]:
    """All `Pieces` that units may meet in; none if they do not fall into pieces."""
    query = schedule.layout.unit_positions(seq_len, schedule.query_ranks, 0)
    key = schedule.layout.unit_positions(kv_seq_len or seq_len, schedule.key_ranks, 0)
    if not schedule.causal:
        whole = (0, query.shape[0] * query.shape[1], key.shape[0] * key.shape[1])
        return (Pieces(rectangles=(whole,), squares=()),)
    if not (query.contiguous and key.contiguous):
        return ()
    return pieces_by_offset(query.shape, key.shape, run_offsets(schedule, seq_len, None))[1]


def run_offsets(schedule: Schedule, seq_len: int, distance: Any) -> tuple[int, ...]:
    """Every distance in tokens from the first query run to the first key run of units that meet.

    Of those that meet `distance` apart on the ring; anywhere on it, if that is traced or None.
    """
    return _run_offsets(schedule, seq_len, distance if isinstance(distance, int) else None)


@functools.lru_cache(maxsize=1024)
def _run_offsets(schedule: Schedule, seq_len: int, distance: int | None) -> tuple[int, ...]:
    group, ring, team = (range(x.degree) for x in (schedule.group, schedule.ring, schedule.team))

    def start(ranks: int, unit: int) -> Any:
        return schedule.layout.unit_positions(seq_len, ranks, unit).starts[0]

    distances = ring_offsets(schedule, seq_len) if distance is None else (distance,)
    queries = [
        [start(schedule.query_ranks, schedule.query_unit(g, p)) for g in group] for p in ring
    ]
    keys = [[start(schedule.key_ranks, schedule.key_unit(p, a)) for a in team] for p in ring]
    return tuple(
        sorted(
            {
                key - query
                for p in ring
                for d in distances
                for query in queries[p]
                for key in keys[p - d]
            }
        )
    )

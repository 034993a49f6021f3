"""Which units attend to each other, on which devices, in which rounds: the static schedule.

The *sequence rank* of a device is its flat index over the axes (ring, group, team, head), slowest
first, whose degrees are R, G, A and U. After the head exchange, which trades tokens for heads among
U neighbours, a device is called (p, g, a) by its indices along ring, group and team. The G * A
devices of one p hold a *block* of the sequence.

* A *unit* is what one gather brings together. No device sends anything to another place first.
* A *team* is the A devices (p, g, 0..A-1). They share a query unit, which is neighbouring shards.
* A *group* is the G devices (p, 0..G-1, a). They share a key unit, which is every A-th shard of
  their block.
* A *ring* is the R devices (0..R-1, g, a). Round after round, each of them attends its query unit
  to the key unit of another block.

Device (p, g, a) so meets the keys of all shards with its a, and its team those of all shards. In
the first round, queries and keys are of one block, and a mask is a staircase. In every other round
one block lies before the other, and a causal mask is one rectangle.

A *double ring* (LoongTrain, https://arxiv.org/abs/2406.18485) visits the same units in another
order. With n devices in an inner cycle, ring index p is o * n + i. Key units go round the inner
cycle, which takes n rounds, while a copy of each is under way to the same i of the next o.
*Distance* d on the ring means d // n places in the outer cycle and d % n in the inner cycle; with
n = 1 there is only the outer one, of all R devices.

So every (query, key) pair is met exactly once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.devices.degrees import Axis, Cycle
from startrail_jax.masks import Causal, Full, Mask
from startrail_jax.masks.algebra import causal_window
from startrail_jax.rings.options import Options
from startrail_jax.tokens.layout import Layout, Runs


@dataclass(frozen=True, kw_only=True)
class Rounds(Options):
    """The axes of one attention, and what says which units meet."""

    group: Axis
    ring: Axis
    team: Axis
    head: Axis
    layout: Layout
    mask: Mask
    """Which position sees which; other masks than a full one need units in order of position."""

    @property
    def num_shards(self) -> int:
        """Shards of the sequence after the head exchange: G * R * A."""
        return self.group.degree * self.ring.degree * self.team.degree

    @property
    def query_ranks(self) -> int:
        """Sequence ranks in a query unit."""
        return self.team.degree * self.head.degree

    @property
    def key_ranks(self) -> int:
        """Sequence ranks in a key unit."""
        return self.group.degree * self.head.degree

    @property
    def cycles(self) -> tuple[Cycle, Cycle]:
        """The outer and the inner cycle of the ring."""
        outer = Cycle(self.ring, self.ring.degree // self.inner, stride=self.inner)
        return outer, Cycle(self.ring, self.inner)

    def along_ring(self, p: Any, distance: Any, direction: int) -> Any:
        """The ring index `distance` ahead of p, or behind it if `direction` is -1."""
        outer, inner = self.cycles
        if self.inner > 1:
            p = inner.place(p, direction * (distance % self.inner))
        return outer.place(p, direction * (distance // self.inner))

    def query_runs(self, seq_len: int, p: Any, g: Any) -> Runs:
        """Positions of the query unit at ring index p and group index g, traced or NumPy arrays."""
        unit = p * self.group.degree + g
        return self.layout.unit_positions(seq_len, unit * self.query_ranks, self.query_ranks)

    def key_runs(self, seq_len: int, p: Any, a: Any) -> Runs:
        """Positions of the key unit that ring index p and team index a have in round 0."""
        if self.published:
            return self.query_runs(seq_len, p, a)
        block, head = p * self.group.degree * self.query_ranks, self.head.degree
        return self.layout.unit_positions(
            seq_len, block + a * head, head, self.group.degree, self.query_ranks
        )

    def units_that_meet(self, seq_len: int, distances: Sequence[int]) -> tuple[Runs, Runs]:
        """Positions of each device's query and key units: starts are arrays [distance, p, g, a]."""
        p, g, a = np.indices((self.ring.degree, self.group.degree, self.team.degree))
        behind = np.stack([self.along_ring(p, distance, -1) for distance in distances])
        here = np.broadcast_to(p, behind.shape)
        return self.query_runs(seq_len, here, g), self.key_runs(seq_len, behind, a)


@functools.lru_cache(maxsize=1024)
def ring_offsets(rounds: Rounds, seq_len: int) -> tuple[int, ...]:
    """Ring distances between queries and keys at which some device has work, 0 first. The ring
    skips rounds that the mask hides from all devices; a double ring skips whole inner cycles."""
    ring = range(rounds.ring.degree)
    mask = rounds.mask.within(seq_len)
    if isinstance(mask, (Full, Causal)):
        return tuple(ring)
    if (window := causal_window(mask)) is not None:
        count, zigzag = rounds.ring.degree, rounds.layout.kind == "zigzag"
        needed = _places_of_window(count, rounds.inner, zigzag, seq_len, window)
        return tuple(offset for offset in ring if offset // rounds.inner in needed)
    met = mask.meet(*rounds.units_that_meet(seq_len, ring))
    needed = {offset // rounds.inner for offset in ring if met[offset].any()}
    return tuple(offset for offset in ring if offset // rounds.inner in {0, *needed})


@functools.lru_cache(maxsize=1024)
def _places_of_window(
    ring: int, inner: int, zigzag: bool, seq_len: int, window: int
) -> frozenset[int]:
    """The places of the outer cycle at which a causal window lets some queries see some keys. A
    block is one run of tokens, and under zigzag a second one, as far from the end."""
    count, places = ring * (2 if zigzag else 1), ring // inner
    run, last = seq_len // count, np.arange(count)
    first = np.maximum((last * run - window + 1) // run, 0)
    block = np.minimum(last, 2 * ring - 1 - last)
    steps = np.zeros(2 * places + 1, np.int64)
    early = first, np.minimum(last, ring - 1)
    late = 2 * ring - 1 - last, 2 * ring - 1 - np.maximum(first, ring)
    for low, high in (early, late):
        some = low <= high
        low, high = low[some] // inner, high[some] // inner
        near = (block[some] // inner - high) % places
        np.add.at(steps, near, 1)
        np.add.at(steps, near + np.minimum(high - low, places - 1) + 1, -1)
    met = np.cumsum(steps[:-1]) > 0
    return frozenset({0, *np.flatnonzero(met[:places] | met[places:]).tolist()})

"""Which blocks serve which units, in which rounds: the static schedule of one attention.

`rounds` says which units meet on which devices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from startrail_jax.blocks import Backend
from startrail_jax.blocks.base import Request
from startrail_jax.blocks.pieces import Pieces, period, pieces_by_offset, pieces_by_runs
from startrail_jax.blocks.visibility import Cases, Visibility
from startrail_jax.devices.degrees import PLATFORMS, SEQUENCE_ROLES, Axis, Degrees
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.masks import Causal, Full, Mask
from startrail_jax.masks.algebra import causal_window
from startrail_jax.rings.options import Side
from startrail_jax.rings.rounds import Rounds, ring_offsets
from startrail_jax.rings.sizes import Sizes, traveller
from startrail_jax.tokens.layout import Layout, Runs


@dataclass(frozen=True, kw_only=True)
class Schedule(Rounds):
    """Everything static about one attention: its axes, and the options of `Attention`."""

    scale: float | None = None
    softcap: float | None = None
    backend: Backend = "auto"
    platform: str = "cpu"
    """Platform of the devices, as `device_kind` gives it."""
    capability: tuple[int, int] | None = None
    """Least CUDA compute capability of the devices, as `device_kind` gives it."""
    scores: tuple[str, ...] = ()
    """What calls give for the scores, of `scores.NAMES`. They speak of positions too."""
    trees: bool = False
    """Whether the ids of calls are the ends of stretches: see `Visibility.trees`."""
    near: int | None = None
    """With `trees`, the window, which counts tokens of a branch; ids then have places beside ends:
    int32 [b, t, 2]. The mask has no window."""

    def on(self, platform: str | None, capability: tuple[int, int] | None) -> Schedule:
        """The same schedule on other devices; what is None stays as it is on the mesh."""
        platform = "cuda" if platform == "gpu" else platform
        if platform not in (None, *PLATFORMS):
            raise InputError(
                f"platform must be one of {PLATFORMS}; got {platform!r}. "
                "Leave it out for that of the mesh."
            )
        if platform is None or platform == self.platform:
            platform, capability = self.platform, capability or self.capability
        return replace(self, platform=platform, capability=capability)

    @property
    def alone(self) -> Schedule:
        """The same call with all sequence axes as one ring, and neither team, group nor head."""
        ring, none = Axis.joined(self.ring, self.group, self.team, self.head), Axis((), 1)
        return replace(self, ring=ring, group=none, team=none, head=none, inner=1, published=False)

    @property
    def id_arrays(self) -> int:
        """Numbers of a token that has ids."""
        return 1 if self.near is None else 2

    @property
    def ordered(self) -> bool:
        """Whether the positions of tokens matter, so that units are in order of position."""
        return not isinstance(self.mask, Full) or bool(self.scores)

    def visibility(
        self,
        seq_len: int,
        device: tuple[Any, Any, Any],
        query_segments: Array | None = None,
        key_segments: Array | None = None,
        *,
        kv_seq_len: int | None = None,
        queries_ahead: Any = 0,
        keys_behind: Any = 0,
    ) -> Visibility:
        """What the query unit at a device (p, g, a), traced or not, sees of the key unit there.

        Lengths are those of whole sequences; `kv_seq_len` is None if it is the same. On the ring,
        the units have come from `queries_ahead` places ahead and `keys_behind` places behind.
        """
        mask = self.mask.within(seq_len)
        if isinstance(mask, Full) and not self.scores:
            return Visibility(query_segments=query_segments, key_segments=key_segments)
        query_places = key_places = None
        if self.near is not None and query_segments is not None and key_segments is not None:
            query_segments, query_places = query_segments[..., 0], query_segments[..., 1]
            key_segments, key_places = key_segments[..., 0], key_segments[..., 1]
        p, g, a = device
        distance = queries_ahead + keys_behind
        # A loop, in which the distance is traced, never plays the first round.
        known = distance if isinstance(distance, int) else None
        ahead, behind = self.along_ring(p, queries_ahead, 1), self.along_ring(p, keys_behind, -1)
        queries = self.query_runs(seq_len, ahead, g)
        keys = self.key_runs(kv_seq_len or seq_len, behind, a)
        by_runs = None
        if period(mask, queries.tokens) is not None:
            by_runs = functools.partial(_case_of_runs, self, seq_len, known, queries, keys)
        return Visibility(
            mask,
            query_runs=queries,
            key_runs=keys,
            query_segments=query_segments,
            key_segments=key_segments,
            query_places=query_places,
            key_places=key_places,
            near=self.near,
            trees=self.trees,
            offsets=run_offsets(self, seq_len, known),
            by_runs=by_runs,
        )

    def request(self, share: Sizes, num_cases: int | None = None) -> Request:
        """What a block will be asked for, with arrays of these sizes on each device. `num_cases` is
        that of `Request`; None for that of the units that meet on the rings."""
        seq_len = share.query_tokens * self.num_shards
        if num_cases is None:
            num_cases = len(unit_cases(self, seq_len))
        return Request(
            platform=self.platform,
            capability=self.capability,
            dtype=share.dtype,
            head_dim=share.head_dim,
            value_head_dim=share.value_head_dim,
            mask=self.mask.within(seq_len),
            packed=share.packed,
            num_cases=num_cases,
            softcap=self.softcap,
            scores=self.scores,
            trees=self.trees,
            near=self.near,
        )

    def travels(self, share: Sizes) -> Side:
        """Which side goes round the ring in the backward pass. Queries with a bias stay, as its
        rows would have to travel with them."""
        if "bias" in self.scores and self.ring.degree > 1:
            return "kv"
        return traveller(self, share, team=self.team.degree, group=self.group.degree)

    def sort(self, x: Array, ranks: int, dim: int) -> Array:
        """A gathered unit of `ranks` sequence ranks, in order of position along `dim` where it
        matters."""
        return self.layout.sort_unit(x, ranks, dim) if self.ordered else x

    def unsort(self, x: Array, ranks: int, dim: int) -> Array:
        """The inverse of `sort`."""
        return self.layout.unsort_unit(x, ranks, dim) if self.ordered else x


def check_mask_of_trees(mask: Mask) -> None:
    """Raises a NotImplementedError unless rows of trees may have such a mask."""
    if not isinstance(mask, Causal) and causal_window(mask) is None:
        raise UnsupportedError(
            "visible_until needs a causal attention, which may have a window; got an instance with "
            f"mask={mask}. Build Attention(mesh, causal=True), or Attention(mesh, window=...)."
        )


def for_trees(schedule: Schedule) -> Schedule:
    """The schedule of calls with rows of trees, in which no round is empty for sure."""
    mask = schedule.mask.within(2**31)  # Places are int32.
    near = causal_window(mask)
    return replace(schedule, trees=True, near=near, mask=mask if near is None else Causal())


def schedule_of(degrees: Degrees, mask: Mask, layout: Layout, **options: Any) -> Schedule:
    """A schedule for the axes of `make_mesh`, with the defaults of `Attention` for all else."""
    axes: dict[str, Any] = {role: Axis((role,), getattr(degrees, role)) for role in SEQUENCE_ROLES}
    return Schedule(**axes, layout=layout, mask=mask, **options)


def unit_cases(
    schedule: Schedule, seq_len: int, kv_seq_len: int | None = None
) -> tuple[Pieces, ...]:
    """Every set of pieces that the visible part of two units may fall into, from the lengths of
    whole sequences; `kv_seq_len` is None if it is the same.

    Empty where it does not fall into pieces, as under masks that are not full, causal, block-causal
    or a causal window.
    """
    query, key = schedule.query_runs(seq_len, 0, 0), schedule.key_runs(kv_seq_len or seq_len, 0, 0)
    mask = schedule.mask.within(seq_len)
    if isinstance(mask, Full):
        return (Pieces.whole(query.tokens, key.tokens),)
    if period(mask, query.tokens) is not None:
        found = [run_cases(schedule, seq_len, distance) for distance in (0, None)]
        return tuple(dict.fromkeys(pieces for *_, cases in found for pieces in cases))
    if not isinstance(mask, Causal):
        return ()
    offsets = [run_offsets(schedule, seq_len, distance) for distance in (0, None)]
    return pieces_by_offset(query.shape, key.shape, sum(offsets, ()))[1]


@functools.lru_cache(maxsize=1024)
def run_offsets(schedule: Schedule, seq_len: int, distance: int | None) -> tuple[int, ...]:
    """Every distance, in tokens, from the first query run to the first key run of units that meet
    at a ring distance; None for any distance but 0."""
    distances = ring_offsets(schedule, seq_len)[1:] if distance is None else (distance,)
    if not distances:
        return ()
    query, key = schedule.units_that_meet(seq_len, distances)
    return tuple(np.unique(key.starts[0] - query.starts[0]).tolist())


@functools.lru_cache(maxsize=1024)
def run_cases(
    schedule: Schedule, seq_len: int, distance: int | None
) -> tuple[np.ndarray, np.ndarray, tuple[Pieces, ...]]:
    """Every set of pieces of units of neighbouring tokens, under a mask that has a `period`.

    Returns all ways in which units may lie, int32 [ways, runs]: the starts of the query runs and
    then of the key runs, counted from the period in which the first query lies; the index of the
    set of each way, int32 [ways]; and the sets. `distance` is that of `run_offsets`.
    """
    distances = ring_offsets(schedule, seq_len)[1:] if distance is None else (distance,)
    if not distances:
        return np.zeros((0, 0), np.int32), np.zeros(0, np.int32), ()
    mask, (query, key) = schedule.mask.within(seq_len), schedule.units_that_meet(seq_len, distances)
    starts = np.stack(_from_period(mask, query, key), -1)
    ways = np.unique(starts.reshape(-1, starts.shape[-1]), axis=0)
    found = []
    for way in ways.tolist():
        of_queries, of_keys = way[: len(query.starts)], way[len(query.starts) :]
        runs = [
            tuple((i * unit.length, start, unit.length) for i, start in enumerate(those))
            for unit, those in ((query, of_queries), (key, of_keys))
        ]
        found.append(pieces_by_runs(mask, *runs))
    cases = tuple(dict.fromkeys(found))
    return ways.astype(np.int32), np.array([*map(cases.index, found)], np.int32), cases


def _case_of_runs(
    schedule: Schedule, seq_len: int, distance: int | None, queries: Runs, keys: Runs
) -> Cases:
    """The case of two units that meet, whose starts may be traced: see `run_cases`."""
    ways, index, cases = run_cases(schedule, seq_len, distance)
    if len(cases) == 1:
        return 0, cases
    starts = [*map(jnp.asarray, _from_period(schedule.mask.within(seq_len), queries, keys))]
    way = (ways == jnp.stack(starts)[None]).all(-1).argmax()
    return jnp.asarray(index)[way], cases


def _from_period(mask: Mask, queries: Runs, keys: Runs) -> list[Any]:
    """The starts of all runs, counted from the period in which the first query lies."""
    step = period(mask, queries.tokens)
    assert step is not None
    first = queries.starts[0] // step * step
    return [x - first for x in (*queries.starts, *keys.starts)]

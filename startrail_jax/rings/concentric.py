"""The rings: units of queries and keys, which come from all devices and go round.

Here are steps 1 to 4 of `vjp.py`, forward and backward. `schedule.py` says which units meet where
and when, `ring_loop.py` moves what goes round.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from startrail_jax import blocks
from startrail_jax.blocks import softmax
from startrail_jax.blocks.base import Pair
from startrail_jax.blocks.softmax import Partials, log_sum, merge_precisely, rows
from startrail_jax.rings import collectives, score_units
from startrail_jax.rings.latents import Expanding
from startrail_jax.rings.residuals import CHECKPOINT_NAMES, Rows, row_gradients
from startrail_jax.rings.ring_loop import UNROLLED_ROUNDS, as_float32, circulate
from startrail_jax.rings.schedule import Schedule, ring_offsets
from startrail_jax.rings.score_units import ScoreInputs
from startrail_jax.rings.sizes import Sizes
from startrail_jax.xla.ordering import recompute_in_backward


@dataclass(frozen=True)
class Concentric:
    """How units come together on the rings: a transport of `vjp.py`.

    A device receives A - 1 shares for the queries; 2g(G - 1) for the keys (2g(2C - 1) in the way of
    the paper); 2gG in each of R - 1 hops of the ring; and A - 1 for the combination.

    In the backward pass one side travels round the ring:

    * "query" (the paper): q, dout, lse and delta go round and dq travels to its owner: 4A shares a
      hop for 16-bit inputs, 3A for float32, and lse and delta.
    * "kv": k and v go round and dk and dv travel to their owner: 6gG shares a hop for 16-bit
      inputs, 4gG for float32.

    Gradients are summed in float32, and travel in `schedule.gradient_dtype`: in bfloat16 a gradient
    is half of what these figures count, and each hop rounds the sum so far once.
    """

    schedule: Schedule
    seq_len: int
    """Tokens of the whole sequence."""
    scale: float
    block: blocks.Block | Expanding
    by_query: bool
    """Whether the query side travels in the backward pass."""

    @classmethod
    def of(
        cls, schedule: Schedule, kept: Any, given: ScoreInputs, *, gathered: bool = False
    ) -> Concentric:
        """See `Transport.of`: `kept` are the shards of this device or, if gathered, its units."""
        q, k, v, segments, _ = kept
        share = Sizes.of(
            q,
            k,
            v,
            packed=segments is not None,
            id_arrays=schedule.id_arrays,
            expansion=given.expansion,
        )
        if gathered:
            share = dataclasses.replace(
                share,
                query_tokens=share.query_tokens // schedule.team.degree,
                key_tokens=share.key_tokens // schedule.group.degree,
            )
        block: Any = blocks.select(schedule.backend, schedule.request(share))
        if given.expansion is not None:
            block = Expanding(block, given.expansion)
        return cls(
            schedule=schedule,
            seq_len=share.query_tokens * schedule.num_shards,
            scale=q.shape[-1] ** -0.5 if schedule.scale is None else float(schedule.scale),
            block=block,
            by_query=schedule.travels(share) == "query",
        )

    def gather(self, shards: Any, *, named: bool = False) -> Any:
        """Steps 1 and 2: the units of queries, keys, values and ids, as they are in round 0."""
        units = self._units(shards, queries_first=True)
        if not named:
            return units
        return jax.tree.map(lambda x: checkpoint_name(x, CHECKPOINT_NAMES[3]), units)

    def _units(self, shards: Any, *, queries_first: bool) -> tuple[Any, ...]:
        schedule = self.schedule
        q, k, v, query_ids, key_ids = shards
        q_unit: Any = _query_unit(schedule, q)
        query_ids = _query_unit(schedule, query_ids)
        if queries_first and schedule.team.degree > 1:
            # Queries first: they travel while a layer projects its keys and values. XLA would wait
            # for everything and then gather all of it at once.
            q_unit, k, v = lax.optimization_barrier((q_unit, k, v))
        k_unit, v_unit, key_ids = (_key_unit(schedule, x) for x in (k, v, key_ids))
        return q_unit, k_unit, v_unit, query_ids, key_ids

    def attend(self, gathered: Any, given: ScoreInputs) -> tuple[Any, Any, Any]:
        """Steps 3 and 4."""
        schedule = self.schedule
        q_unit, k_unit, v_unit, query_ids, key_ids = gathered
        device = _device(schedule)

        def attend(keys: Any, distance: Any, so_far: Any) -> tuple[Partials, tuple[()]]:
            k, v, key_ids = keys
            units = q_unit, k, query_ids, key_ids
            visibility, here = score_units.visibility_and_scores(
                schedule, self.seq_len, device, units, given, keys_behind=distance
            )
            return self.block.forward(
                Pair(q_unit, k, v, visibility, self.scale, here), so_far or ()
            ), ()

        partials, _ = circulate(
            schedule.cycles,
            ring_offsets(schedule, self.seq_len),
            direction=1,
            travellers=(k_unit, v_unit, key_ids),
            visit=attend,
            finalise=lambda partials: (merge_precisely(partials),),
            unrolled=_unrolled(schedule),
        )
        out, *stats = merge_precisely(partials)
        out = schedule.unsort(out, schedule.query_ranks, 1)
        lse, low = (schedule.unsort(x, schedule.query_ranks, 2) for x in stats)
        low = low if q_unit.dtype == jnp.float32 else None
        return _combine(schedule, out, lse, low, q_unit.dtype, given.sinks)

    def again(self, kept: Any, dout: Array, lse: Array) -> Any:
        """See `Transport.again`."""
        schedule, (q, k, v, query_ids, key_ids) = self.schedule, kept
        gathers = not schedule.keep_gathered
        keys_travel = schedule.ring.degree > 1 and not self.by_query
        # Or XLA would keep what was expanded of them.
        keys_travel |= isinstance(self.block, Expanding)
        if gathers and schedule.team.degree > 1:
            q, query_ids = recompute_in_backward((q, query_ids), dout, lse)
        if keys_travel or (gathers and schedule.group.degree > 1):
            k, v, key_ids = recompute_in_backward((k, v, key_ids), dout, lse)
        units = q, k, v, query_ids, key_ids
        return self._units(units, queries_first=False) if gathers else units

    def gradients(self, gathered: Any, found: Rows, given: ScoreInputs, key_dtype: Any) -> Any:
        """See `Transport.gradients`."""
        schedule = self.schedule
        q_unit, k_unit, v_unit, query_ids, key_ids = gathered
        keys = k_unit, v_unit, key_ids
        device = _device(schedule)
        lse = found.lse
        dout, delta = row_gradients(found)

        queries = (
            q_unit,
            _query_unit(schedule, dout),
            *(_query_unit(schedule, x, dim=2) for x in (lse, delta)),
            query_ids,
        )

        def gradients(queries: Any, keys: Any, into: Any, **distance: Any) -> tuple[Any, ...]:
            q, dout, lse, delta, query_ids = queries
            k, v, key_ids = keys
            units = q, k, query_ids, key_ids
            visibility, here = score_units.visibility_and_scores(
                schedule, self.seq_len, device, units, given, **distance
            )
            pair = Pair(q, k, v, visibility, self.scale, here)
            return self.block.backward(pair, lse, delta, dout, into)

        # Gradients of scores stay, whatever travels: they are sums over all that a device visits.
        def visit_queries(queries: Any, distance: Any, so_far: Any) -> tuple[Any, Any]:
            into = (None, *(so_far or (None, None)))
            dq, *stay = gradients(queries, keys, into, queries_ahead=distance)
            return tuple(stay), dq

        def visit_keys(keys: Any, distance: Any, so_far: Any) -> tuple[Any, Any]:
            dq, *of_scores = so_far or (None,)
            into = (dq, None, None, *of_scores)
            dq, dk, dv, *of_scores = gradients(queries, keys, into, keys_behind=distance)
            return (dq, *of_scores), (dk, dv)

        stayed, travelled = circulate(
            schedule.cycles,
            ring_offsets(schedule, self.seq_len),
            direction=-1 if self.by_query else 1,
            travellers=queries if self.by_query else keys,
            visit=visit_queries if self.by_query else visit_keys,
            finalise=as_float32,
            unrolled=_unrolled(schedule),
            carried_dtype=schedule.gradient_dtype,
        )
        stayed = as_float32(stayed)
        if self.by_query:
            dq, (dk, dv, *of_scores) = travelled, stayed
        else:
            (dq, *of_scores), (dk, dv) = stayed, travelled
        dq = schedule.unsort(dq, schedule.query_ranks, 1)
        dq = collectives.sum_at_owner(dq, schedule.team, 1, schedule.gradient_dtype)
        dq = dq.astype(q_unit.dtype)
        dk, dv = (_key_gradient(schedule, x, key_dtype) for x in (dk, dv))
        return dq, dk, dv, of_scores, delta


def _combine(
    schedule: Schedule,
    out: Float32[Array, "b t n v"],
    lse: Float32[Array, "b n t"],
    low: Float32[Array, "b n t"] | None,
    dtype: Any,
    sinks: Float32[Array, " n"] | None,
) -> tuple[Float[Array, "b s n v"], Float32[Array, "b n s"], Float32[Array, "b n s"] | None]:
    """Step 4: joins what the members of a team found for its queries; each keeps its own queries.

        L = log sum_a exp(lse_a),    out = sum_a exp(lse_a - L) out_a

    Sinks join in float32, before outputs are rounded: each is one more lse, of an output of 0.
    Outputs are sent and returned in `dtype`; the owner of the queries adds them in float32: A - 1
    shares of out, of lse, and of low if there is one. As published, the network adds them in
    `dtype`, so the rounding error grows with A: A - 1 shares of out and 4(A - 1) of lse.
    """
    team = schedule.team
    stats: Any = (lse,) if low is None else (lse, low)
    if team.degree == 1 or not schedule.published:
        if team.degree > 1:
            outs = collectives.partials(out.astype(dtype), team, 1)
            theirs = (collectives.partials(x, team, 2) for x in stats)
            out, *stats = merge_precisely(list(zip(outs, *theirs, strict=True)))
        if sinks is not None:
            out, *stats = softmax.join_sinks(out, *stats, sinks=sinks)
        return out.astype(dtype), stats[0], None if low is None else stats[1]
    highest = collectives.maximum(lse, team)
    if sinks is not None:
        highest, of_sink = softmax.highest_with(sinks, highest)
    weights = jnp.exp(sum(stats[1:], lse - highest))
    total = collectives.total(weights, team)
    if sinks is not None:
        total += of_sink
    out = collectives.scatter_sum((out * rows(weights / total)).astype(dtype), team, 1)
    size = lse.shape[2] // team.degree
    own = lambda x: lax.dynamic_slice_in_dim(x, collectives.index(team) * size, size, 2)  # noqa: E731
    lse, rest = map(own, log_sum(highest, total))
    return out, lse, None if low is None else rest


def _unrolled(schedule: Schedule) -> tuple[int, int]:
    """See `UNROLLED_ROUNDS`."""
    return UNROLLED_ROUNDS.get(schedule.platform, UNROLLED_ROUNDS["default"])


def _device(schedule: Schedule) -> tuple[Any, Any, Any]:
    """The indices (p, g, a) of this device along ring, group and team."""
    p, g, a = (collectives.index(x) for x in (schedule.ring, schedule.group, schedule.team))
    return p, g, a


def _query_unit(schedule: Schedule, x: Array | None, dim: int = 1) -> Array | None:
    """Step 1: the query unit of the team, or what belongs to it, in order of position."""
    if x is None:
        return None
    x = collectives.gather(x, schedule.team, dim)
    return schedule.sort(x, schedule.query_ranks, dim)


def _key_unit(schedule: Schedule, x: Array | None) -> Array | None:
    """Step 2: the key unit that this device holds in round 0, in order of position."""
    if x is None:
        return None
    if schedule.published:
        x = collectives.gather(x, schedule.team, 1)
        x = collectives.trade_places(x, schedule.group, schedule.team)
    else:
        x = collectives.gather(x, schedule.group, 1)
    return schedule.sort(x, schedule.key_ranks, 1)


def _key_gradient(schedule: Schedule, dx: Array | None, dtype: Any) -> Array | None:
    """The way back of `_key_unit`: sums over the members of a group, each at its owner."""
    if dx is None:
        return None
    dx, sent_in = schedule.unsort(dx, schedule.key_ranks, 1), schedule.gradient_dtype
    axis = schedule.group
    if schedule.published:
        dx = collectives.trade_places(dx.astype(sent_in), axis, schedule.team).astype(jnp.float32)
        axis = schedule.team
    return collectives.sum_at_owner(dx, axis, 1, sent_in).astype(dtype)

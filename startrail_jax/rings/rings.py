"""Concentric rings, forward and backward; they run inside a fully manual `shard_map`.

`schedule.py` says which units meet where and when, and defines units, teams, groups and rings.
Here the units move and are attended. The steps are:

    0  head exchange: an all_to_all trades tokens for heads (Ulysses).
    1  query gather: each team gathers its query unit.
    2  key gather: each group gathers its key unit.
    3  ring: in each round, a device attends its query unit to a key unit, while keys move on.
    4  combination: each team joins the outputs of its members.
    5  output exchange: an all_to_all trades heads for tokens.

G, R and A are the degrees of group, ring and team; g is key heads / query heads. Traffic is given
in *shares*, the bytes of one device's query after step 0 ("units" in `analysis.cost`).

References:
    StarTrail, https://arxiv.org/abs/2407.00611 (algorithm 2 is step 2, algorithm 3 is step 3); Ring
    Attention, https://arxiv.org/abs/2310.01889; Ulysses, https://arxiv.org/abs/2309.14509;
    LoongTrain's 2D-Attention, https://arxiv.org/abs/2406.18485; tiles of queries and keys without
    a ring: Attention2D, https://arxiv.org/abs/2503.15758, and Mesh-Attention,
    https://arxiv.org/abs/2512.20968.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from startrail_jax import blocks
from startrail_jax.blocks import softmax
from startrail_jax.blocks.softmax import Partials, log_sum, merge_precisely, rows
from startrail_jax.rings import collectives, score_units
from startrail_jax.rings.head_chunks import check_head_chunks, in_chunks
from startrail_jax.rings.residuals import CHECKPOINT_NAMES, named, row_gradients
from startrail_jax.rings.ring_loop import UNROLLED_ROUNDS, as_float32, circulate
from startrail_jax.rings.schedule import Schedule, ring_offsets
from startrail_jax.rings.score_units import NOTHING, Given
from startrail_jax.rings.seen import attend_seen
from startrail_jax.rings.sizes import Sizes
from startrail_jax.shapes import (
    KeySegments,
    KeyShard,
    LseShard,
    OutShard,
    QuerySegments,
    QueryShard,
    ValueShard,
)
from startrail_jax.xla.derivatives import without_derivative
from startrail_jax.xla.ordering import recompute_in_backward
from startrail_jax.xla.varying import alike, is_replicated


def sharded_attention(
    schedule: Schedule,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    query_segments: QuerySegments | None = None,
    key_segments: KeySegments | None = None,
    given: Given = NOTHING,
) -> tuple[OutShard, LseShard]:
    """Attention of this device's tokens to the whole sequence: steps 0 to 5, for a chunk at a time.

    Steps 0 and 5 move data only where the head degree is above 1. Where there are fewer key heads
    than that degree, they are copied before step 0. Copies, on one device or on several, are
    float32 arrays until then, so that their gradients are summed before they are rounded.

    Args:
        schedule: what `Attention.schedule` holds.
        q: this device's queries, of all the heads that its tensor rank holds.
        k, v: its keys and values, likewise: in the dtype of q, or copies (`copy_heads`).
        query_segments, key_segments: segment ids of the same tokens; both or neither.
        given: what `score_units.local` gives, whose scores `schedule.scores` names.

    Returns:
        out in the dtype of q and lse in float32, for this device's tokens.
    """
    parts = 1 if schedule.exchange == "seen" else schedule.head.degree
    check_head_chunks(schedule.head_chunks, max(k.shape[2] // parts, 1))
    if is_replicated(k, q) or is_replicated(v, q):
        k, v = as_float32((k, v))
    q, k, v = alike(q, k, v)

    attend_heads = attend_seen if schedule.exchange == "seen" else _attend_heads

    def attend(first: int, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        here = given.of_heads(first, q.shape[2])
        return attend_heads(schedule, q, k, v, query_segments, key_segments, here)

    return in_chunks(attend, schedule.head_chunks, q, k, v)


def _attend_heads(
    schedule: Schedule,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    query_segments: QuerySegments | None,
    key_segments: KeySegments | None,
    given: Given,
) -> tuple[OutShard, LseShard]:
    """Steps 0 to 5 for some heads, or all."""
    head = schedule.head
    if k.shape[2] < head.degree:
        k, v = collectives.repeat_heads(head.degree, k, v)
    q = collectives.exchange(q, head, split=2, concat=1)
    k, v = (collectives.exchange_keys(x, head, q.dtype) for x in (k, v))
    shared = query_segments is key_segments
    if query_segments is not None:
        query_segments = collectives.gather(query_segments, head, 1)
    if key_segments is not None:
        key_segments = query_segments if shared else collectives.gather(key_segments, head, 1)
    given = score_units.place(schedule, given, q)
    ids = query_segments, key_segments
    out, lse, _ = concentric_attention(schedule, q, k, v, *ids, given)
    out = collectives.exchange(out, head, split=1, concat=2)
    lse = collectives.exchange(lse, head, split=2, concat=1)
    if head.degree > 1:
        out = checkpoint_name(out, CHECKPOINT_NAMES[2])
    return out, lse


def _forward(
    schedule: Schedule,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    query_segments: QuerySegments | None,
    key_segments: KeySegments | None,
    given: Given = NOTHING,
) -> tuple[OutShard, LseShard, LseShard | None]:
    """Steps 1 to 4: gather queries, place keys, go round the ring, combine over the team.

    A device receives A - 1 shares for the queries; 2g(G - 1) for the keys (2g(2C - 1) in the way of
    the paper); 2gG in each of R - 1 hops of the ring; and A - 1 for the combination. The backward
    pass is `_backward`.

    Keys and values are used in the dtype of q; their gradients have the dtype that they come in.

    Returns:
        out in the dtype of q and lse in float32, for this device's queries; and what rounding took
        from lse (`softmax.Partials`), which only float32 inputs are exact enough to need.
    """
    k, v = (x.astype(q.dtype) for x in (k, v))
    static = _static(schedule, q, k, v, query_segments)
    units = _units(schedule, q, k, v, query_segments, key_segments)
    return _attend(schedule, static, *units, given=given)


def _units(
    schedule: Schedule,
    q: Any,
    k: Any,
    v: Any,
    query_segments: Any,
    key_segments: Any,
    *,
    queries_first: bool = True,
) -> tuple[Any, ...]:
    """Steps 1 and 2: the units of queries, keys, values and segment ids, as they are in round 0."""
    q_unit: Any = _query_unit(schedule, q)
    query_ids = _query_unit(schedule, query_segments)
    if queries_first and schedule.team.degree > 1:
        # Queries first: they travel while a layer projects its keys and values. XLA would wait for
        # everything and then gather all of it at once.
        q_unit, k, v = lax.optimization_barrier((q_unit, k, v))
    k_unit, v_unit, key_ids = (_key_unit(schedule, x) for x in (k, v, key_segments))
    return q_unit, k_unit, v_unit, query_ids, key_ids


def _attend(
    schedule: Schedule,
    static: tuple[int, float, blocks.Block, bool],
    q_unit: Any,
    k_unit: Any,
    v_unit: Any,
    query_ids: Any,
    key_ids: Any,
    given: Given,
) -> tuple[OutShard, LseShard, LseShard | None]:
    """Steps 3 and 4, from the units that `_units` gives and what `_static` gives."""
    seq_len, scale, block, _ = static
    device = _device(schedule)

    def attend(keys: Any, distance: Any, so_far: Any) -> tuple[Partials, tuple[()]]:
        k, v, key_ids = keys
        units = q_unit, k, query_ids, key_ids
        visibility, here = score_units.met(
            schedule, seq_len, device, units, given, keys_behind=distance
        )
        return block.forward(q_unit, k, v, visibility, scale, so_far or (), here), ()

    partials, _ = circulate(
        schedule.cycles,
        ring_offsets(schedule, seq_len),
        direction=1,
        travellers=(k_unit, v_unit, key_ids),
        visit=attend,
        settle=lambda partials: (merge_precisely(partials),),
        unrolled=_unrolled(schedule),
    )
    out, *stats = merge_precisely(partials)
    out = schedule.unsort(out, schedule.query_ranks, 1)
    lse, low = (schedule.unsort(x, schedule.query_ranks, 2) for x in stats)
    low = low if q_unit.dtype == jnp.float32 else None
    return _combine(schedule, out, lse, low, q_unit.dtype, given.sinks)


def _forward_rule(
    schedule: Schedule,
    q: Any,
    k: Any,
    v: Any,
    query_segments: Any,
    key_segments: Any,
    given: Given = NOTHING,
) -> tuple[Any, Any]:
    segments = query_segments, key_segments
    given_keys = k[:0]
    k, v = (x.astype(q.dtype) for x in (k, v))
    kept = (q, k, v, *segments)
    if schedule.keep_gathered:
        static = _static(schedule, q, k, v, segments[0])
        units = _units(schedule, *kept)
        kept = jax.tree.map(lambda x: checkpoint_name(x, CHECKPOINT_NAMES[3]), units)
        out, *stats = _attend(schedule, static, *kept, given=given)
    else:
        out, *stats = concentric_attention(schedule, *kept, given)
    out, lse, low = named(out, *stats)
    return (out, lse, low), (*kept, given, out, lse, low, given_keys)


def _backward(schedule: Schedule, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    """Gradients of q, k, v and of what is given, as in FlashAttention-2 (arXiv 2307.08691, 3.1.2).

        p = exp(s - lse),  ds = p * (dp - delta),  delta = rowsum(dout * out) - dlse

    lse and delta are those of whole rows, over all keys. One side travels round the ring:

    * "query" (the paper): k, v, dk and dv stay. q, dout, lse and delta go round and dq travels
      home: 4A shares a hop for 16-bit inputs, 3A for float32, and lse and delta.
    * "kv": q and dq stay. k and v go round and dk and dv travel home: 6gG shares a hop for 16-bit
      inputs, 4gG for float32.

    Gradients are summed in float32, and travel in `schedule.gradient_dtype`: in bfloat16 a gradient
    is half of what these figures count, and each hop rounds the sum so far once.
    """
    *kept, given, out, lse, low, given_keys = residuals
    dout, dlse, *_ = cotangents
    seq_len, scale, block, by_query = _static(schedule, *kept[:4], gathered=schedule.keep_gathered)
    units = _backward_units(schedule, kept, by_query, dout, lse)
    q_unit, k_unit, v_unit, query_ids, key_ids = units
    keys = k_unit, v_unit, key_ids
    device = _device(schedule)
    dout, delta = row_gradients(dout, dlse, out, lse, low)

    queries = (
        q_unit,
        _query_unit(schedule, dout),
        *(_query_unit(schedule, x, dim=2) for x in (lse, delta)),
        query_ids,
    )

    def gradients(queries: Any, keys: Any, into: Any, **distance: Any) -> tuple[Array, ...]:
        q, dout, lse, delta, query_ids = queries
        k, v, key_ids = keys
        units = q, k, query_ids, key_ids
        visibility, here = score_units.met(schedule, seq_len, device, units, given, **distance)
        return block.backward(q, k, v, lse, delta, dout, visibility, scale, into, here)

    # The gradients of scores stay, whatever travels: they are sums over all that a device visits.
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
        ring_offsets(schedule, seq_len),
        direction=-1 if by_query else 1,
        travellers=queries if by_query else keys,
        visit=visit_queries if by_query else visit_keys,
        settle=as_float32,
        unrolled=_unrolled(schedule),
        follows_dtype=schedule.gradient_dtype,
    )
    stayed = as_float32(stayed)
    if by_query:
        dq, (dk, dv, *of_scores) = travelled, stayed
    else:
        (dq, *of_scores), (dk, dv) = stayed, travelled
    dq = schedule.unsort(dq, schedule.query_ranks, 1)
    dq = collectives.sum_at_owner(dq, schedule.team, 1, schedule.gradient_dtype)
    dq = dq.astype(q_unit.dtype)
    dk, dv = (_key_gradient(schedule, x, given_keys.dtype) for x in (dk, dv))
    scores, _, sinks = given
    scores = None if scores is None else scores.with_gradients(of_scores)
    sinks = None if sinks is None else softmax.sink_gradient(sinks, lse, delta)
    return dq, dk, dv, None, None, Given(scores, None, sinks)


def _backward_units(
    schedule: Schedule, kept: Any, by_query: bool, dout: Array, lse: Array
) -> tuple[Any, ...]:
    """The units of the forward pass, as they were kept, or gathered again when dout is there.

    What the forward pass has sent too is sent again (`recompute_in_backward`): XLA would send it
    once, and keep what arrived.
    """
    gathers, keys_travel = not schedule.keep_gathered, schedule.ring.degree > 1 and not by_query
    q, k, v, query_ids, key_ids = kept
    if gathers and schedule.team.degree > 1:
        q, query_ids = recompute_in_backward((q, query_ids), dout, lse)
    if keys_travel or (gathers and schedule.group.degree > 1):
        k, v, key_ids = recompute_in_backward((k, v, key_ids), dout, lse)
    units = q, k, v, query_ids, key_ids
    return _units(schedule, *units, queries_first=False) if gathers else units


def _backward_rule(schedule: Schedule, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    residuals, cotangents = without_derivative((residuals, cotangents))
    return _backward(schedule, residuals, cotangents)


# Where there are gradients, jax traces the forward pass twice: as it is, and in its rule. The
# inlined jit remembers the first trace, and leaves nothing of itself in the program.
concentric_attention = jax.custom_vjp(
    jax.jit(_forward, static_argnums=0, inline=True), nondiff_argnums=(0,)
)
concentric_attention.defvjp(_forward_rule, _backward_rule)


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
    Outputs are sent and returned in `dtype`. Under "merge" the members send them to the owner of
    the queries, which adds them in float32: A - 1 shares of out, of lse, and of low if there is
    one. Under "reduce_scatter" (the paper) the network adds them in `dtype`, so that the rounding
    error grows with A: A - 1 shares of out and 4(A - 1) of lse.
    """
    team = schedule.team
    stats: Any = (lse,) if low is None else (lse, low)
    if team.degree == 1 or schedule.combine == "merge":
        if team.degree > 1:
            outs = collectives.partials(out.astype(dtype), team, 1)
            theirs = (collectives.partials(x, team, 2) for x in stats)
            out, *stats = merge_precisely(list(zip(outs, *theirs, strict=True)))
        if sinks is not None:
            out, *stats = softmax.join_sinks(out, *stats, sinks=sinks)
        return out.astype(dtype), stats[0], None if low is None else stats[1]
    highest = collectives.maximum(lse, team, 2)
    if sinks is not None:
        highest, of_sink = softmax.highest_with(sinks, highest)
    weights = jnp.exp(sum(stats[1:], lse - highest))
    total = collectives.total(weights, team, 2)
    if sinks is not None:
        total += of_sink
    out = collectives.scatter_sum((out * rows(weights / total)).astype(dtype), team, 1)
    size = lse.shape[2] // team.degree
    own = lambda x: lax.dynamic_slice_in_dim(x, collectives.index(team) * size, size, 2)  # noqa: E731
    lse, rest = map(own, log_sum(highest, total))
    return out, lse, None if low is None else rest


def _static(
    schedule: Schedule,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    segments: Array | None,
    *,
    gathered: bool = False,
) -> tuple[int, float, blocks.Block, bool]:
    """What is known before anything runs.

    Args:
        schedule, q, k, v, segments: as in `_forward`; the segment ids of queries.
        gathered: whether these are units, and not this device's shards.

    Returns:
        Tokens of the whole sequence, scale of the logits, the block backend, and whether the query
        side travels in the backward pass.
    """
    packed, gradient_dtype = segments is not None, schedule.gradient_dtype
    share = Sizes.of(q, k, v, packed=packed, gradient_dtype=gradient_dtype)
    if gathered:
        share = dataclasses.replace(
            share,
            query_tokens=share.query_tokens // schedule.team.degree,
            key_tokens=share.key_tokens // schedule.group.degree,
        )
    scale = q.shape[-1] ** -0.5 if schedule.scale is None else float(schedule.scale)
    block = blocks.select(schedule.backend, schedule.request(share))
    seq_len = share.query_tokens * schedule.num_shards
    return seq_len, scale, block, schedule.travels(share) == "query"


def _unrolled(schedule: Schedule) -> tuple[int, int]:
    """See `UNROLLED_ROUNDS`."""
    return UNROLLED_ROUNDS.get(schedule.platform or "default", UNROLLED_ROUNDS["default"])


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
    if schedule.as_published:
        x = collectives.gather(x, schedule.team, 1)
        x = collectives.trade_places(x, schedule.group, schedule.team)
    else:
        x = collectives.gather(x, schedule.group, 1)
    return schedule.sort(x, schedule.key_ranks, 1)


def _key_gradient(schedule: Schedule, dx: Array, dtype: Any) -> Array:
    """The way back of `_key_unit`: sums over the members of a group, each at its owner."""
    dx, sent_in = schedule.unsort(dx, schedule.key_ranks, 1), schedule.gradient_dtype
    axis = schedule.group
    if schedule.as_published:
        dx = collectives.trade_places(dx.astype(sent_in), axis, schedule.team).astype(jnp.float32)
        axis = schedule.team
    return collectives.sum_at_owner(dx, axis, 1, sent_in).astype(dtype)

"""Concentric rings, forward and backward. Runs inside a fully manual `shard_map`.

`schedule.py` says which units meet where and when; here they move and are attended. G, R, A are the
degrees of group, ring and team, and g is key heads / query heads.

References:
    StarTrail, https://arxiv.org/abs/2407.00611 (algorithms 1-3); Ring Attention,
    https://arxiv.org/abs/2310.01889; Ulysses, https://arxiv.org/abs/2309.14509; LoongTrain's
    2D-Attention, https://arxiv.org/abs/2406.18485.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from startrail_jax import blocks, collectives
from startrail_jax.mesh import Axis
from startrail_jax.schedule import Schedule, ring_offsets
from startrail_jax.shapes import (
    EMPTY,
    KeySegments,
    KeyShard,
    LseShard,
    OutShard,
    QuerySegments,
    QueryShard,
    ValueShard,
)
from startrail_jax.softmax import Partials, merge_partials, rows
from startrail_jax.varying import alike

# Up to so many rounds are unrolled. A longer ring runs its middle as a loop over as many rounds as
# the second number says, which bounds the time to compile it. XLA copies what a loop carries from
# one turn to the next, hence the longer turns on GPUs, whose kernels compile fast.
UNROLLED_ROUNDS = {"cuda": (16, 8), "default": (4, 1)}

# For `jax.checkpoint_policies.save_only_these_names`: with them, attention is not recomputed. The
# last is the output after the exchange back, where `head` > 1.
CHECKPOINT_NAMES = ("attention_partial", "attention_lse", "attention_out")


def sharded_attention(
    schedule: Schedule,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    query_segments: QuerySegments | None = None,
    key_segments: KeySegments | None = None,
) -> tuple[OutShard, LseShard]:
    """Attention of this device's tokens to the whole sequence: steps 0 to 5 of the schedule.

    With `head` > 1, an all_to_all first trades tokens for heads (Ulysses) and another trades back;
    key heads are replicated where there are fewer than `head`.

    Args:
        q, k, v: this device's shards, of all the heads that its tensor rank holds.
        query_segments, key_segments: segment ids of the same tokens; both or neither.

    Returns:
        out in the dtype of q and lse in float32, of this device's tokens.
    """
    head = schedule.head
    q, k, v = alike(q, k, v)
    if k.shape[2] < head.degree:
        copied = jnp.arange(head.degree) // (head.degree // k.shape[2])
        k, v = (collectives.copy_heads(x, copied, Axis((), 1)) for x in (k, v))
    q, k, v = (collectives.exchange(x, head, split=2, concat=1) for x in (q, k, v))
    shared = query_segments is key_segments
    if query_segments is not None:
        query_segments = collectives.gather(query_segments, head, 1)
    if key_segments is not None:
        key_segments = query_segments if shared else collectives.gather(key_segments, head, 1)
    out, lse = concentric_attention(schedule, q, k, v, query_segments, key_segments)
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
) -> tuple[OutShard, LseShard]:
    """Steps 1 to 4: gather queries, place keys, go round the ring, combine over the team.

    Receives per device, in units of one shard of q (g = key heads / query heads): A - 1 for the
    queries, 2g(G - 1) and at most 2g for the placement (2g(2C - 1) in the paper's order), 2gG in
    each of R - 1 ring hops, and A - 1 for the combination. The backward pass is `_backward`.

    Returns:
        out in the dtype of q and lse in float32, of this device's queries.
    """
    seq_len, scale, block = _static(schedule, q, v, query_segments)
    device = _device(schedule)
    q_unit: Any = _query_unit(schedule, q)
    query_ids = _query_unit(schedule, query_segments)
    if schedule.team.degree > 1:
        # Queries first: they are on their way while a layer projects its keys and values. XLA
        # would gather everything at once, when all are there.
        q_unit, k, v = lax.optimization_barrier((q_unit, k, v))

    def attend(keys: Any, distance: Any, so_far: Any) -> tuple[Partials, tuple[()]]:
        k, v, key_ids = keys
        mask = schedule.mask(seq_len, device, query_ids, key_ids, keys_behind=distance)
        return block.forward(q_unit, k, v, mask, scale, into=so_far or ()), ()

    partials, _ = circulate(
        schedule.ring,
        ring_offsets(schedule, seq_len),
        direction=1,
        travellers=tuple(_key_unit(schedule, x) for x in (k, v, key_segments)),
        visit=attend,
        settle=lambda partials: (merge_partials(partials),),
        unrolled=_unrolled(schedule),
    )
    out, lse = merge_partials(partials)
    out = schedule.unsort(out, schedule.query_ranks, 1)
    lse = schedule.unsort(lse, schedule.query_ranks, 2)
    return _combine(schedule, out, lse, q.dtype)


def _forward_rule(schedule: Schedule, *inputs: Any) -> tuple[Any, Any]:
    out, lse = concentric_attention(schedule, *inputs)
    out = checkpoint_name(out, CHECKPOINT_NAMES[0])
    lse = checkpoint_name(lse, CHECKPOINT_NAMES[1])
    return (out, lse), (*inputs, out, lse)


def _backward(schedule: Schedule, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    """Gradients by blocks: p = exp(s - lse), ds = p * (dp - delta), with the global lse and delta.

    "query" (the paper): keys and their gradients stay; (q, dout, lse, delta) go round the ring and
    dq travels home: 4A units a hop at 16-bit inputs, 3A at float32, and lse and delta.
    "kv": queries and theirs stay; (k, v) go round and dk, dv travel home: 6gG units at 16 bit, 4gG.
    Gradients travel and are summed in float32.
    """
    q, k, v, query_segments, key_segments, out, lse = residuals
    dout, dlse = cotangents
    by_query = _travels(schedule, q, k, v, query_segments) == "query"
    if schedule.team.degree > 1:
        q, query_segments = _not_before(dout, lse, (q, query_segments))
    if schedule.group.degree > 1 or (schedule.ring.degree > 1 and not by_query):
        k, v, key_segments = _not_before(dout, lse, (k, v, key_segments))
    seq_len, scale, block = _static(schedule, q, v, query_segments)
    device = _device(schedule)
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2) - dlse

    queries = (
        *(_query_unit(schedule, x) for x in (q, dout)),
        *(_query_unit(schedule, x, dim=2) for x in (lse, delta)),
        _query_unit(schedule, query_segments),
    )
    keys = tuple(_key_unit(schedule, x) for x in (k, v, key_segments))

    def gradients(queries: Any, keys: Any, into: Any, **distance: Any) -> tuple[Array, ...]:
        q, dout, lse, delta, query_ids = queries
        k, v, key_ids = keys
        mask = schedule.mask(seq_len, device, query_ids, key_ids, **distance)
        return block.backward(q, k, v, lse, delta, dout, mask, scale, into)

    def visit_queries(queries: Any, distance: Any, so_far: Any) -> tuple[Any, Any]:
        into = (None, *(so_far or (None, None)))
        dq, dk, dv = gradients(queries, keys, into, queries_ahead=distance)
        return (dk, dv), dq

    def visit_keys(keys: Any, distance: Any, so_far: Any) -> tuple[Any, Any]:
        dq, dk, dv = gradients(queries, keys, (so_far, None, None), keys_behind=distance)
        return dq, (dk, dv)

    stayed, travelled = circulate(
        schedule.ring,
        ring_offsets(schedule, seq_len),
        direction=-1 if by_query else 1,
        travellers=queries if by_query else keys,
        visit=visit_queries if by_query else visit_keys,
        settle=_float32,
        unrolled=_unrolled(schedule),
    )
    stayed = _float32(stayed)
    dq, (dk, dv) = (travelled, stayed) if by_query else (stayed, travelled)
    dq = schedule.unsort(dq, schedule.query_ranks, 1)
    dq = collectives.scatter_sum(dq, schedule.team, 1).astype(q.dtype)
    dk, dv = (schedule.unsort(x, schedule.key_ranks, 1) for x in (dk, dv))
    dk, dv = (schedule.keys.scatter(x, q.dtype) for x in (dk, dv))
    return dq, dk, dv, None, None


def _not_before(dout: Array, lse: Array, inputs: Any) -> Any:
    """`inputs`, as values that XLA does not know before `dout`.

    Else it finds that the backward pass moves what the forward moved, does so once, and keeps the
    gathered units of every layer alive until then. An optimization_barrier does not prevent that:
    XLA on CPU (jax 0.10.2) drops it before the last common-subexpression elimination.
    """
    never = (lse.ravel()[0] < 2 * EMPTY) & (dout.ravel()[0] > 0)
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), inputs)


concentric_attention = jax.custom_vjp(_forward, nondiff_argnums=(0,))
concentric_attention.defvjp(_forward_rule, _backward)


def circulate(
    ring: Axis,
    offsets: tuple[int, ...],
    *,
    direction: int,
    travellers: Any,
    visit: Callable[[Any, Any, Any], tuple[Any, Any]],
    settle: Callable[[Any], Any],
    unrolled: tuple[int, int],
) -> tuple[Any, Any]:
    """The ring loop, of the forward and of both backward passes.

    In round i every device holds the travellers that live offsets[i] behind it (ahead of it, if
    `direction` is -1) and visits them. What belongs to the device accumulates there; what belongs
    to the travellers follows them. The home round's share stays home, so the others' takes
    len(offsets) - 1 hops: it starts in round 1, moves one round late, together with the next
    travellers, so that every hop but the last runs beside a visit, and is added on arrival.

    Args:
        ring: the axis to go round.
        offsets: distances to visit, 0 first.
        direction: +1 sends to the next ring index, -1 to the one before.
        travellers: pytree of arrays that move.
        visit: (travellers, distance, stays so far) -> (stays, follows), pytrees of arrays. It adds
            to what stays, which is None in round 0; `follows` may be ().
        settle: brings what stays to one form, for a loop to carry.
        unrolled: see `UNROLLED_ROUNDS`.

    Returns:
        What stays, of all rounds, and what follows, in float32, summed and at home.
    """
    steps = [direction * (b - a) for a, b in itertools.pairwise(offsets)]
    last = len(offsets) - 1

    def play(i: int, offset: Any, state: Any) -> Any:
        """One round. In a loop over alike rounds, i is the first of them and `offset` is traced."""
        travellers, stays, follows = state
        arriving = collectives.shift(travellers, ring, steps[i]) if i < last else None
        followed = collectives.shift(follows, ring, steps[i - 1]) if i > 1 else None
        stays, follows = visit(travellers, offset, stays)
        # Without the barrier XLA sends everything first, and nothing runs beside the messages. What
        # is cheap comes after it, or XLA would hide a message behind that alone.
        arriving, stays, follows, followed = lax.optimization_barrier(
            (arriving, stays, follows, followed)
        )
        if i > 1:
            follows = jax.tree.map(jnp.add, _float32(follows), followed)
        elif i == 1:
            follows = _float32(follows)
        return arriving, stays, follows

    def next_door(i: int) -> bool:
        """Whether round i comes from the offset before and goes to the next."""
        return steps[i - 1] == steps[i] == direction

    def loop(first: int, turns: int, state: Any) -> Any:
        """`turns` times `turn` rounds from round `first` on, all of them next door."""

        def play_turn(n: Any, state: Any) -> Any:
            for j in range(turn):
                state = play(first, offsets[first] + n * turn + j, state)
            travellers, stays, follows = state
            return travellers, settle(stays), follows

        travellers, stays, follows = state
        return lax.fori_loop(0, turns, play_turn, (travellers, settle(stays), follows))

    travellers, stays, home = play(0, 0, (travellers, None, None))
    if last == 0:
        return stays, _float32(home)
    state = play(1, offsets[1], (travellers, stays, None))
    most, turn = unrolled
    i = 2
    while i <= last:
        rounds = sum(1 for _ in itertools.takewhile(next_door, range(i, last)))
        turns = rounds // turn if last >= most else 0
        state = loop(i, turns, state) if turns else play(i, offsets[i], state)
        i += turns * turn or 1
    _, stays, follows = state
    follows = collectives.shift(follows, ring, -direction * offsets[last])
    return stays, jax.tree.map(jnp.add, _float32(home), follows)


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _combine(
    schedule: Schedule, out: Float32[Array, "b t n v"], lse: Float32[Array, "b n t"], dtype: Any
) -> tuple[Float[Array, "b s n v"], Float32[Array, "b n s"]]:
    """Joins the members' attentions of the team's queries; each keeps its own queries (step 4).

        L = log sum_a exp(lse_a),    out = sum_a exp(lse_a - L) out_a

    Outputs are sent, and the joined one is returned, in `dtype`. "merge" sends them to their owner,
    who adds them in float32: A - 1 units of out and of lse. "reduce_scatter" (the paper) lets the
    network add them in `dtype`, so that the rounding error grows with A: A - 1 units of out and
    4(A - 1) of lse.
    """
    team = schedule.team
    if team.degree == 1:
        return out.astype(dtype), lse
    if schedule.combine == "merge":
        outs = collectives.partials(out.astype(dtype), team, 1)
        lses = collectives.partials(lse, team, 2)
        out, lse = merge_partials(list(zip(outs, lses, strict=True)))
        return out.astype(dtype), lse
    highest = lax.pmax(lse, team.names)
    weights = jnp.exp(lse - highest)
    total = lax.psum(weights, team.names)
    out = collectives.scatter_sum((out * rows(weights / total)).astype(dtype), team, 1)
    lse = jnp.where(highest <= EMPTY, EMPTY, highest + jnp.log(total))
    own = collectives.index(team) * (lse.shape[2] // team.degree)
    return out, lax.dynamic_slice_in_dim(lse, own, lse.shape[2] // team.degree, 2)


def _static(
    schedule: Schedule, q: QueryShard, v: ValueShard, segments: Array | None
) -> tuple[int, float, blocks.Block]:
    """Length of the whole sequence, scale of the logits, and the block backend."""
    ranks = schedule.group.degree * schedule.ring.degree * schedule.team.degree
    seq_len = q.shape[1] * ranks
    scale = q.shape[-1] ** -0.5 if schedule.scale is None else float(schedule.scale)
    request = schedule.request(
        seq_len,
        dtype=q.dtype.name,
        head_dim=q.shape[-1],
        value_head_dim=v.shape[-1],
        packed=segments is not None,
    )
    return seq_len, scale, blocks.select(schedule.backend, request)


def _unrolled(schedule: Schedule) -> tuple[int, int]:
    """See `UNROLLED_ROUNDS`."""
    return UNROLLED_ROUNDS.get(schedule.platform or "default", UNROLLED_ROUNDS["default"])


def _device(schedule: Schedule) -> tuple[Any, Any, Any]:
    """This device's (g, p, a)."""
    g, p, a = (collectives.index(x) for x in (schedule.group, schedule.ring, schedule.team))
    return g, p, a


def _query_unit(schedule: Schedule, x: Array | None, dim: int = 1) -> Array | None:
    """The team's queries (or what belongs to them), in order of position (step 1)."""
    if x is None:
        return None
    x = collectives.gather(x, schedule.team, dim)
    return schedule.sort(x, schedule.query_ranks, dim)


def _key_unit(schedule: Schedule, x: Array | None) -> Array | None:
    """The key unit that this device holds in round 0, in order of position (step 2)."""
    return None if x is None else schedule.sort(schedule.keys.place(x), schedule.key_ranks, 1)


def _travels(
    schedule: Schedule, q: QueryShard, k: KeyShard, v: ValueShard, segments: Array | None
) -> str:
    """Which side goes round the ring in the backward pass: "query" or "kv"."""
    return schedule.travels(
        query_tokens=q.shape[1],
        key_tokens=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_head_dim=v.shape[3],
        width=q.dtype.itemsize,
        packed=segments is not None,
    )

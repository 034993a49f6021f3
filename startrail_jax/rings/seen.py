"""Attention that sends only the keys that a mask shows; it runs inside a fully manual `shard_map`.

`exchange.py` says which keys a device needs and in which moves they come. A device attends its own
queries, of all heads of its tensor rank,

    1  to its own keys, while the pieces of others are under way, and then
    2  to each piece that has arrived, whose output is merged with what there is.

In the backward pass the pieces are sent again, or kept (`keep_gathered`). Their gradients go home
by the inverse moves, in `gradient_dtype`, and are added in float32 to those of the owner.

A device receives, of K and V together, the keys of each move once in the forward pass and once in
the backward pass, and sends as many gradients. No query moves, and no output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from startrail_jax import blocks
from startrail_jax.blocks import softmax
from startrail_jax.blocks.base import Request
from startrail_jax.blocks.pieces import Pieces, pieces_of_window
from startrail_jax.blocks.scores import PLAIN, Scores
from startrail_jax.blocks.softmax import Partials, merge_precisely
from startrail_jax.blocks.visibility import Cases, Visibility, causal_window
from startrail_jax.masks import Causal, Full, Pattern
from startrail_jax.rings import collectives
from startrail_jax.rings.exchange import Exchange, KeyMove, KeyRun, Slices, exchange_of
from startrail_jax.rings.residuals import CHECKPOINT_NAMES, named, row_gradients
from startrail_jax.rings.ring_loop import as_float32
from startrail_jax.rings.schedule import Schedule
from startrail_jax.rings.score_units import NOTHING, Given
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
from startrail_jax.tokens.layout import Layout, Runs, Span
from startrail_jax.xla.derivatives import without_derivative
from startrail_jax.xla.ordering import recompute_in_backward
from startrail_jax.xla.varying import alike


def why_not_seen(pattern: Pattern, layout: Layout, seq_len: int) -> str | None:
    """Why only the keys that are seen cannot or need not be sent; None if they can.

    Args:
        pattern: the mask.
        layout: the layout of queries and keys.
        seq_len: tokens of the whole sequence.
    """
    within = pattern.within(seq_len)
    if layout.degree == 1:
        return "one device holds all keys"
    if isinstance(within, (Full, Causal)):
        return f"the mask {within} shows the keys of nearly all devices"
    if within.per_row:
        return f"the mask {within} leaves lengths open until a call gives them"
    if seen_exchange(pattern, layout, seq_len) is None:
        return f"the mask {within} shows each device keys of nearly all others"
    return None


@functools.lru_cache(maxsize=1024)
def seen_exchange(pattern: Pattern, layout: Layout, seq_len: int) -> Exchange | None:
    """The exchange for a mask of static positions and a contiguous or zigzag layout.

    Returns:
        The exchange; None if it is not worth looking for (`exchange.exchange_of`).
    """
    pattern = pattern.within(seq_len)

    def shows(ranks: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        found = pattern.shows(layout.unit_positions(seq_len, ranks, 1), Span(first, last))
        return np.broadcast_to(found, np.broadcast_shapes(ranks.shape, first.shape))

    slices = Slices(layout.degree, layout.multiple // layout.degree, seq_len // layout.multiple)
    return exchange_of(slices, shows)


def attend_seen(
    schedule: Schedule,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    query_segments: QuerySegments | None,
    key_segments: KeySegments | None,
    given: Given,
) -> tuple[OutShard, LseShard]:
    """Attention of this device's tokens to the whole sequence, for some heads, or all.

    Args:
        schedule: what `Attention.schedule` holds, of a mask and layout for which there is an
            exchange.
        q, k, v, query_segments, key_segments, given: as in `rings.sharded_attention`.

    Returns:
        out in the dtype of q and lse in float32, for this device's tokens.
    """
    scores, prefix, sinks = given
    sinks = None if sinks is None else alike(sinks, q)[0]
    if scores is not None and scores.slopes is not None:
        scores = replace(scores, slopes=alike(scores.slopes, q)[0])
    given = Given(scores, prefix, sinks)
    out, lse, _ = seen_attention(schedule.alone, q, k, v, query_segments, key_segments, given)
    return out, lse


@functools.lru_cache(maxsize=1024)
def seen_cases(pattern: Pattern, layout: Layout, seq_len: int) -> tuple[tuple[Pieces, ...], ...]:
    """The pieces of what each rank sees of its own keys and then of each run of keys that arrives.

    Args:
        pattern, layout, seq_len: as in `seen_exchange`, of which there is one.

    Returns:
        For own keys and for each run, the pieces of each rank; none if the mask is no causal
        window.
    """
    window, exchange = (
        causal_window(pattern.within(seq_len)),
        seen_exchange(pattern, layout, seq_len),
    )
    if window is None or exchange is None:
        return ()
    units = [layout.unit_positions(seq_len, rank, 1) for rank in range(layout.degree)]
    own = [
        tuple((i * unit.length, start, unit.length) for i, start in enumerate(unit.starts))
        for unit in units
    ]
    arrived = (
        [
            ((first - start, first, last - first + 1),) if first <= last else ()
            for start, (first, last) in zip(run.positions, run.needed, strict=True)
        ]
        for move in exchange.moves
        for run in move.runs
    )
    return tuple(
        tuple(pieces_of_window(*both, window) for both in zip(own, keys, strict=True))
        for keys in (own, *arrived)
    )


def seen_request(schedule: Schedule, share: Sizes) -> Request:
    """`Schedule.request` where only the keys that the mask shows are sent."""
    seq_len = share.query_tokens * schedule.num_shards
    by_rank = seen_cases(schedule.pattern, schedule.layout, seq_len)
    return schedule.request(share, max((len(set(those)) for those in by_rank), default=0))


@dataclass(frozen=True)
class _Piece(Pattern):
    """What a mask shows of the keys of one piece that count; it exists while tracing."""

    pattern: Pattern
    first: Any
    last: Any

    @property
    def reach(self) -> int | None:
        """See `Pattern.reach`."""
        return self.pattern.reach

    def visible(self, query: Any, key: Any) -> Any:
        """See `Pattern.visible`."""
        return self.pattern.visible(query, key) & (key >= self.first) & (key <= self.last)

    def some(self, query: Span, key: Span) -> Any:
        """See `Pattern.some`."""
        return self.pattern.some(query, key) & (key.last >= self.first) & (key.first <= self.last)

    def every(self, query: Span, key: Span) -> Any:
        """See `Pattern.every`."""
        return self.pattern.every(query, key) & self._counts(key)

    def triangle(self, query: Span, key: Span) -> Any:
        """See `Pattern.triangle`."""
        return self.pattern.triangle(query, key) & self._counts(key)

    def edge(self, query: Span, key: Span) -> Any:
        """See `Pattern.edge`."""
        return self.pattern.edge(query, key) & self._counts(key)

    def _counts(self, key: Span) -> Any:
        return (key.first >= self.first) & (key.last <= self.last)


@dataclass(frozen=True)
class _Static:
    """What is known before anything runs, and which device this is."""

    schedule: Schedule
    exchange: Exchange
    seq_len: int
    scale: float
    block: blocks.Block
    rank: Any

    @classmethod
    def of(cls, schedule: Schedule, q: Any, k: Any, v: Any, segments: Any) -> _Static:
        share = Sizes.of(q, k, v, packed=segments is not None)
        seq_len = share.query_tokens * schedule.num_shards
        exchange = seen_exchange(schedule.pattern, schedule.layout, seq_len)
        assert exchange is not None
        return cls(
            schedule=schedule,
            exchange=exchange,
            seq_len=seq_len,
            scale=q.shape[-1] ** -0.5 if schedule.scale is None else float(schedule.scale),
            block=blocks.select(schedule.backend, seen_request(schedule, share)),
            rank=collectives.index(schedule.ring),
        )

    def here(self, values: Sequence[Any]) -> Any:
        """The entry of this rank in a table with one for each."""
        return values[0] if len(set(values)) == 1 else jnp.asarray(values, jnp.int32)[self.rank]

    def scores(self, given: Given) -> Scores:
        return replace(given.scores or PLAIN, softcap=self.schedule.softcap)

    def own(self, query_ids: Any, key_ids: Any) -> Visibility:
        """What the queries of this device see of its own keys."""
        mine = self.schedule.visibility(self.seq_len, (self.rank, 0, 0), query_ids, key_ids)
        return replace(mine, of_window=self._of_window(0))

    def of_run(self, number: int, run: KeyRun, query_ids: Any, key_ids: Any) -> Visibility:
        """What the queries of this device see of the keys of run `number`, which have arrived."""
        first, last = (self.here([ends[i] for ends in run.needed]) for i in (0, 1))
        own, start = self.own(query_ids, key_ids), self.here(run.positions)
        return replace(
            own,
            pattern=_Piece(own.pattern, first, last),
            key_runs=Runs((start,), run.length),
            offsets=(),
            of_window=self._of_window(1 + number),
        )

    def _of_window(self, index: int) -> Callable[[], Cases] | None:
        """`Visibility.of_window` of one entry of `seen_cases`."""
        found = seen_cases(self.schedule.pattern, self.schedule.layout, self.seq_len)
        if not found:
            return None
        cases = tuple(dict.fromkeys(found[index]))
        return lambda: (self.here([*map(cases.index, found[index])]), cases)


def _send(static: _Static, move: KeyMove, x: Array | None) -> Array | None:
    """The keys of a move, or what belongs to them, from their owners: [b, keys, ...]."""
    if x is None:
        return None
    cut = [lax.dynamic_slice_in_dim(x, static.here(p.starts), p.length, 1) for p in move.runs]
    axis = static.schedule.ring
    if not move.shared:
        return collectives.permute(jnp.concatenate(cut, 1), axis, list(move.pairs))
    cut = [
        jnp.where(static.rank == run.owner, piece, jnp.zeros_like(piece))
        for run, piece in zip(move.runs, cut, strict=True)
    ]
    return alike(collectives.total(jnp.concatenate(cut, 1), axis), x)[0]


def _return(static: _Static, move: KeyMove, dx: Array, home: Array) -> Array:
    """Adds the gradients of the keys of a move to those of their owners, in float32."""
    sent_in, axis = static.schedule.gradient_dtype, static.schedule.ring
    if move.shared:
        # A sum on the network: it is rounded to float32 only.
        dx = alike(collectives.total(dx.astype(jnp.float32), axis), home)[0]
    else:
        dx = collectives.permute(dx.astype(sent_in), axis, list(move.returning))
        dx = dx.astype(jnp.float32)
    for run, piece in zip(move.runs, _split(move, dx), strict=True):
        if move.shared:
            piece = jnp.where(static.rank == run.owner, piece, 0.0)
        start = static.here(run.starts)
        so_far = lax.dynamic_slice_in_dim(home, start, run.length, 1)
        home = lax.dynamic_update_slice_in_dim(home, so_far + piece, start, 1)
    return home


def _received(static: _Static, k: Array, v: Array, ids: Array | None) -> list[Any]:
    """Keys, values and segment ids of all moves."""
    joined = jnp.concatenate([k, v], -1)
    return [
        (_send(static, move, joined), _send(static, move, ids)) for move in static.exchange.moves
    ]


def _arrived(
    static: _Static, received: list[Any], head_dim: int
) -> list[tuple[KeyRun, Array, Array, Array | None]]:
    """Each run of each move: keys, values and segment ids."""
    runs = []
    for move, (keys, ids) in zip(static.exchange.moves, received, strict=True):
        ids = [None] * len(move.runs) if ids is None else _split(move, ids)
        for run, kv, here in zip(move.runs, _split(move, keys), ids, strict=True):
            runs.append((run, *jnp.split(kv, [head_dim], -1), here))
    return runs


def _split(move: KeyMove, x: Array) -> list[Array]:
    """What lies one after another in a message."""
    return jnp.split(x, np.cumsum([run.length for run in move.runs])[:-1], 1)


def _forward(
    schedule: Schedule,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    query_segments: QuerySegments | None,
    key_segments: KeySegments | None,
    given: Given = NOTHING,
) -> tuple[OutShard, LseShard, LseShard | None]:
    """Steps 1 and 2; returns what `rings._forward` does."""
    k, v = (x.astype(q.dtype) for x in (k, v))
    static = _Static.of(schedule, q, k, v, query_segments)
    received = _received(static, k, v, key_segments)
    return _attend(static, q, k, v, query_segments, key_segments, received, given)


def _attend(
    static: _Static,
    q: Any,
    k: Any,
    v: Any,
    query_ids: Any,
    key_ids: Any,
    received: list[Any],
    given: Given,
) -> tuple[Any, Any, Any]:
    block, scale, scores = static.block, static.scale, static.scores(given)
    partials: Partials = block.forward(q, k, v, static.own(query_ids, key_ids), scale, (), scores)
    # As in a ring: XLA would send everything first, with nothing to run beside it.
    received, partials = lax.optimization_barrier((received, partials))
    for number, (run, k, v, ids) in enumerate(_arrived(static, received, q.shape[-1])):
        visibility = static.of_run(number, run, query_ids, ids)
        partials = block.forward(q, k, v, visibility, scale, partials, scores)
    out, lse, low = merge_precisely(partials)
    if given.sinks is not None:
        out, lse, low = softmax.join_sinks(out, lse, low, sinks=given.sinks)
    return out.astype(q.dtype), lse, low if q.dtype == jnp.float32 else None


def _forward_rule(
    schedule: Schedule, q: Any, k: Any, v: Any, query_ids: Any, key_ids: Any, given: Given = NOTHING
) -> tuple[Any, Any]:
    like = k[:0]
    k, v = (x.astype(q.dtype) for x in (k, v))
    kept, received = (q, k, v, query_ids, key_ids), None
    if schedule.keep_gathered:
        static = _Static.of(schedule, q, k, v, query_ids)
        received = _received(static, k, v, key_ids)
        received = jax.tree.map(lambda x: checkpoint_name(x, CHECKPOINT_NAMES[3]), received)
        out, *stats = _attend(static, *kept, received=received, given=given)
    else:
        out, *stats = seen_attention(schedule, *kept, given)
    out, lse, low = named(out, *stats)
    return (out, lse, low), (kept, received, given, out, lse, low, like)


def _backward_rule(schedule: Schedule, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    residuals, cotangents = without_derivative((residuals, cotangents))
    (q, k, v, query_ids, key_ids), received, given, out, lse, low, like = residuals
    dout, dlse, *_ = cotangents
    static = _Static.of(schedule, q, k, v, query_ids)
    if received is None:
        again = recompute_in_backward((k, v, key_ids), dout, lse)
        received = _received(static, *again)
    dout, delta = row_gradients(dout, dlse, out, lse, low)
    block, scale, scores = static.block, static.scale, static.scores(given)

    def gradients(k: Any, v: Any, visibility: Visibility, into: Any) -> Any:
        return block.backward(q, k, v, lse, delta, dout, visibility, scale, into, scores)

    own = static.own(query_ids, key_ids)
    dq, dk, dv, *of_scores = gradients(k, v, own, (None, None, None))
    received, dq, dk, dv, of_scores = lax.optimization_barrier((received, dq, dk, dv, of_scores))
    travelling = []
    for number, (run, k_run, v_run, ids) in enumerate(_arrived(static, received, q.shape[-1])):
        visibility = static.of_run(number, run, query_ids, ids)
        into = (as_float32(dq), None, None, *as_float32(of_scores))
        dq, dk_run, dv_run, *of_scores = gradients(k_run, v_run, visibility, into)
        travelling.append(jnp.concatenate(as_float32([dk_run, dv_run]), -1))
    home = jnp.concatenate(as_float32([dk, dv]), -1)
    for move in static.exchange.moves:
        pieces, travelling = travelling[: len(move.runs)], travelling[len(move.runs) :]
        home = _return(static, move, jnp.concatenate(pieces, 1), home)
    dk, dv = jnp.split(home, [q.shape[-1]], -1)
    learnt = given.scores and given.scores.with_gradients(as_float32(of_scores))
    sinks = None if given.sinks is None else softmax.sink_gradient(given.sinks, lse, delta)
    dq, dk, dv = dq.astype(q.dtype), dk.astype(like.dtype), dv.astype(like.dtype)
    return dq, dk, dv, None, None, Given(learnt, None, sinks)


# See `rings.concentric_attention`.
seen_attention = jax.custom_vjp(
    jax.jit(_forward, static_argnums=0, inline=True), nondiff_argnums=(0,)
)
seen_attention.defvjp(_forward_rule, _backward_rule)

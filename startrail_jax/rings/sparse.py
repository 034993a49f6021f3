"""Attention that sends only the keys that a mask shows; it runs inside a fully manual `shard_map`.

`sparse_plan.py` says which keys a device needs and in which moves they come. A device attends its
own queries, of all heads of its tensor rank, to its own keys while the pieces of others are under
way, and then to each piece that has arrived, whose output is merged with what there is.

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
from startrail_jax.blocks.base import Pair, Request
from startrail_jax.blocks.pieces import Pieces, period, pieces_by_runs
from startrail_jax.blocks.scores import PLAIN, Scores
from startrail_jax.blocks.softmax import Partials, merge_precisely
from startrail_jax.blocks.visibility import Cases, Visibility
from startrail_jax.masks import Mask
from startrail_jax.rings import collectives
from startrail_jax.rings.residuals import CHECKPOINT_NAMES, Rows, row_gradients
from startrail_jax.rings.ring_loop import as_float32
from startrail_jax.rings.schedule import Schedule
from startrail_jax.rings.score_units import ScoreInputs
from startrail_jax.rings.sizes import Sizes
from startrail_jax.rings.sparse_plan import KeyMove, KeyRun, SparsePlan, plan_sparse
from startrail_jax.tokens.layout import Layout, Runs, Span
from startrail_jax.xla.ordering import recompute_in_backward
from startrail_jax.xla.varying import alike


@functools.lru_cache(maxsize=1024)
def sparse_cases(mask: Mask, layout: Layout, seq_len: int) -> tuple[tuple[Pieces, ...], ...]:
    """For own keys and then for each run of keys that arrives, the pieces that each rank sees; none
    if the mask has no `period`."""
    shown, plan = mask.within(seq_len), plan_sparse(mask, layout, seq_len)
    if period(shown, seq_len // layout.degree) is None or plan is None:
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
        for move in plan.moves
        for run in move.runs
    )
    return tuple(
        tuple(pieces_by_runs(shown, *both) for both in zip(own, keys, strict=True))
        for keys in (own, *arrived)
    )


def sparse_request(schedule: Schedule, share: Sizes) -> Request:
    """`Schedule.request` where only the keys that the mask shows are sent."""
    seq_len = share.query_tokens * schedule.num_shards
    by_rank = sparse_cases(schedule.mask, schedule.layout, seq_len)
    return schedule.request(share, max((len(set(those)) for those in by_rank), default=0))


@dataclass(frozen=True)
class _Piece(Mask):
    """What a mask shows of the keys of one piece that count; it exists while tracing."""

    mask: Mask
    first: Any
    last: Any

    @property
    def reach(self) -> int | None:
        """See `Mask.reach`."""
        return self.mask.reach

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        return self.mask.visible(query, key) & (key >= self.first) & (key <= self.last)

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        return self.mask.some(query, key) & (key.last >= self.first) & (key.first <= self.last)

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        return self.mask.every(query, key) & self._counts(key)

    def triangle(self, query: Span, key: Span) -> Any:
        """See `Mask.triangle`."""
        return self.mask.triangle(query, key) & self._counts(key)

    def edge(self, query: Span, key: Span) -> Any:
        """See `Mask.edge`."""
        return self.mask.edge(query, key) & self._counts(key)

    def _counts(self, key: Span) -> Any:
        return (key.first >= self.first) & (key.last <= self.last)


@dataclass(frozen=True)
class Sparse:
    """How only the keys come that a mask shows: a transport of `vjp.py`."""

    schedule: Schedule
    plan: SparsePlan
    seq_len: int
    scale: float
    block: blocks.Block
    rank: Any

    @classmethod
    def of(
        cls, schedule: Schedule, kept: Any, given: ScoreInputs, *, gathered: bool = False
    ) -> Sparse:
        """See `Transport.of`."""
        q, k, v, segments, _ = kept[0] if gathered else kept
        share = Sizes.of(q, k, v, packed=segments is not None)
        seq_len = share.query_tokens * schedule.num_shards
        plan = plan_sparse(schedule.mask, schedule.layout, seq_len)
        assert plan is not None
        return cls(
            schedule=schedule,
            plan=plan,
            seq_len=seq_len,
            scale=q.shape[-1] ** -0.5 if schedule.scale is None else float(schedule.scale),
            block=blocks.select(schedule.backend, sparse_request(schedule, share)),
            rank=collectives.index(schedule.ring),
        )

    def gather(self, shards: Any, *, named: bool = False) -> Any:
        """The shards, and what is received: keys, values and segment ids of all moves."""
        _, k, v, _, ids = shards
        joined = jnp.concatenate([k, v], -1)
        received = [(_send(self, move, joined), _send(self, move, ids)) for move in self.plan.moves]
        if named:
            received = jax.tree.map(lambda x: checkpoint_name(x, CHECKPOINT_NAMES[3]), received)
        return shards, received

    def attend(self, gathered: Any, given: ScoreInputs) -> tuple[Any, Any, Any]:
        """See `Transport.attend`."""
        (q, k, v, query_ids, key_ids), received = gathered
        block, scale, scores = self.block, self.scale, self.scores(given)
        own = Pair(q, k, v, self.own(query_ids, key_ids), scale, scores)
        partials: Partials = block.forward(own)
        # As in a ring: XLA would send everything first, with nothing to run beside it.
        received, partials = lax.optimization_barrier((received, partials))
        for number, (run, k, v, ids) in enumerate(_arrived(self, received, q.shape[-1])):
            visibility = self.of_run(number, run, query_ids, ids)
            partials = block.forward(Pair(q, k, v, visibility, scale, scores), partials)
        out, lse, low = merge_precisely(partials)
        if given.sinks is not None:
            out, lse, low = softmax.join_sinks(out, lse, low, sinks=given.sinks)
        return out.astype(q.dtype), lse, low if q.dtype == jnp.float32 else None

    def again(self, kept: Any, dout: Array, lse: Array) -> Any:
        """See `Transport.again`."""
        if self.schedule.keep_gathered:
            return kept
        q, k, v, query_ids, key_ids = kept
        k_again, v_again, ids_again = recompute_in_backward((k, v, key_ids), dout, lse)
        _, received = self.gather((q, k_again, v_again, query_ids, ids_again))
        return kept, received

    def gradients(self, gathered: Any, found: Rows, given: ScoreInputs, key_dtype: Any) -> Any:
        """See `Transport.gradients`."""
        (q, k, v, query_ids, key_ids), received = gathered
        dout, delta = row_gradients(found)
        scale, scores = self.scale, self.scores(given)

        def gradients(k: Any, v: Any, visibility: Visibility, into: Any) -> Any:
            pair = Pair(q, k, v, visibility, scale, scores)
            return self.block.backward(pair, found.lse, delta, dout, into)

        own = self.own(query_ids, key_ids)
        dq, dk, dv, *of_scores = gradients(k, v, own, (None, None, None))
        received, dq, dk, dv, of_scores = lax.optimization_barrier(
            (received, dq, dk, dv, of_scores)
        )
        travelling = []
        for number, (run, k_run, v_run, ids) in enumerate(_arrived(self, received, q.shape[-1])):
            visibility = self.of_run(number, run, query_ids, ids)
            into = (as_float32(dq), None, None, *as_float32(of_scores))
            dq, dk_run, dv_run, *of_scores = gradients(k_run, v_run, visibility, into)
            travelling.append(jnp.concatenate(as_float32([dk_run, dv_run]), -1))
        owned = jnp.concatenate(as_float32([dk, dv]), -1)
        for move in self.plan.moves:
            pieces, travelling = travelling[: len(move.runs)], travelling[len(move.runs) :]
            owned = _return(self, move, jnp.concatenate(pieces, 1), owned)
        dk, dv = jnp.split(owned, [q.shape[-1]], -1)
        dq, dk, dv = dq.astype(q.dtype), dk.astype(key_dtype), dv.astype(key_dtype)
        return dq, dk, dv, as_float32(of_scores), delta

    def here(self, values: Sequence[Any]) -> Any:
        """The entry of this rank in a table with one for each."""
        return values[0] if len(set(values)) == 1 else jnp.asarray(values, jnp.int32)[self.rank]

    def scores(self, given: ScoreInputs) -> Scores:
        return replace(given.scores or PLAIN, softcap=self.schedule.softcap)

    def own(self, query_ids: Any, key_ids: Any) -> Visibility:
        """What the queries of this device see of its own keys."""
        mine = self.schedule.visibility(self.seq_len, (self.rank, 0, 0), query_ids, key_ids)
        return replace(mine, by_runs=self._by_runs(0))

    def of_run(self, number: int, run: KeyRun, query_ids: Any, key_ids: Any) -> Visibility:
        """What the queries of this device see of the keys of run `number`, which have arrived."""
        first, last = (self.here([ends[i] for ends in run.needed]) for i in (0, 1))
        own, start = self.own(query_ids, key_ids), self.here(run.positions)
        return replace(
            own,
            mask=_Piece(own.mask, first, last),
            key_runs=Runs((start,), run.length),
            offsets=(),
            by_runs=self._by_runs(1 + number),
        )

    def _by_runs(self, index: int) -> Callable[[], Cases] | None:
        """`Visibility.by_runs` of one entry of `sparse_cases`."""
        found = sparse_cases(self.schedule.mask, self.schedule.layout, self.seq_len)
        if not found:
            return None
        cases = tuple(dict.fromkeys(found[index]))
        return lambda: (self.here([*map(cases.index, found[index])]), cases)


def _send(sparse: Sparse, move: KeyMove, x: Array | None) -> Array | None:
    """The keys of a move, or what belongs to them, from their owners: [b, keys, ...]."""
    if x is None:
        return None
    cut = [lax.dynamic_slice_in_dim(x, sparse.here(p.starts), p.length, 1) for p in move.runs]
    axis = sparse.schedule.ring
    if not move.shared:
        return collectives.permute(jnp.concatenate(cut, 1), axis, list(move.pairs))
    cut = [
        jnp.where(sparse.rank == run.owner, piece, jnp.zeros_like(piece))
        for run, piece in zip(move.runs, cut, strict=True)
    ]
    return alike(collectives.total(jnp.concatenate(cut, 1), axis), x)[0]


def _return(sparse: Sparse, move: KeyMove, dx: Array, owned: Array) -> Array:
    """Adds the gradients of the keys of a move to those of their owners, in float32."""
    sent_in, axis = sparse.schedule.gradient_dtype, sparse.schedule.ring
    if move.shared:
        # A sum on the network: it is rounded to float32 only.
        dx = alike(collectives.total(dx.astype(jnp.float32), axis), owned)[0]
    else:
        dx = collectives.permute(dx.astype(sent_in), axis, list(move.returning))
        dx = dx.astype(jnp.float32)
    for run, piece in zip(move.runs, _split(move, dx), strict=True):
        if move.shared:
            piece = jnp.where(sparse.rank == run.owner, piece, 0.0)
        start = sparse.here(run.starts)
        so_far = lax.dynamic_slice_in_dim(owned, start, run.length, 1)
        owned = lax.dynamic_update_slice_in_dim(owned, so_far + piece, start, 1)
    return owned


def _arrived(
    sparse: Sparse, received: list[Any], head_dim: int
) -> list[tuple[KeyRun, Array, Array, Array | None]]:
    """Each run of each move: keys, values and segment ids."""
    runs = []
    for move, (keys, ids) in zip(sparse.plan.moves, received, strict=True):
        ids = [None] * len(move.runs) if ids is None else _split(move, ids)
        for run, kv, here in zip(move.runs, _split(move, keys), ids, strict=True):
            runs.append((run, *jnp.split(kv, [head_dim], -1), here))
    return runs


def _split(move: KeyMove, x: Array) -> list[Array]:
    """What lies one after another in a message."""
    return jnp.split(x, np.cumsum([run.length for run in move.runs])[:-1], 1)

"""The attention of all schemes as one `custom_vjp`; it runs inside a fully manual `shard_map`.

`schedule.py` says which units meet where and when, and defines units, teams, groups and rings.
Here the units move and are attended. The steps are:

    0  head exchange: an all_to_all trades tokens for heads (Ulysses).
    1  query gather: each team gathers its query unit.
    2  key gather: each group gathers its key unit.
    3  ring: in each round, a device attends its query unit to a key unit, while keys move on.
    4  combination: each team joins the outputs of its members.
    5  output exchange: an all_to_all trades heads for tokens.

G, R and A are the degrees of group, ring and team; g is key heads / query heads. Traffic is given
in *shares*, the bytes of one device's query after step 0 ("units" in `traffic.cost`).

References:
    StarTrail, https://arxiv.org/abs/2407.00611 (algorithm 2 is step 2, algorithm 3 is step 3); Ring
    Attention, https://arxiv.org/abs/2310.01889; Ulysses, https://arxiv.org/abs/2309.14509;
    LoongTrain's 2D-Attention, https://arxiv.org/abs/2406.18485; tiles of queries and keys without
    a ring: Attention2D, https://arxiv.org/abs/2503.15758, and Mesh-Attention,
    https://arxiv.org/abs/2512.20968.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from startrail_jax.blocks import softmax
from startrail_jax.blocks.shapes import (
    KeyOrLatentShard,
    KeySegments,
    LseShard,
    OutShard,
    QuerySegments,
    QueryShard,
    ValueShard,
)
from startrail_jax.rings import collectives, score_units
from startrail_jax.rings.concentric import Concentric
from startrail_jax.rings.derivatives import without_derivative
from startrail_jax.rings.head_chunks import check_head_chunks, in_chunks
from startrail_jax.rings.latents import Expansion
from startrail_jax.rings.residuals import EXCHANGED_OUT, Rows, named
from startrail_jax.rings.ring_loop import as_float32
from startrail_jax.rings.schedule import Schedule
from startrail_jax.rings.score_units import NO_SCORES, ScoreInputs
from startrail_jax.rings.sparse import Sparse
from startrail_jax.xla.varying import alike, is_replicated


def sharded_attention(
    schedule: Schedule,
    q: QueryShard,
    k: KeyOrLatentShard,
    v: ValueShard | None,
    query_segments: QuerySegments | None = None,
    key_segments: KeySegments | None = None,
    given: ScoreInputs = NO_SCORES,
) -> tuple[OutShard, LseShard]:
    """Attention of this device's tokens to the whole sequence: steps 0 to 5, for a chunk at a time.

    k and v are in the dtype of q, as out is, or copies (`copy_heads`); segment ids are both given
    or neither. Fewer key heads than the head degree are copied before step 0. All copies are
    float32 until then, so that their gradients are summed before they are rounded.
    """
    if schedule.exchange == "sparse":
        schedule = schedule.alone
    check_head_chunks(schedule.head_chunks, max(k.shape[2] // schedule.head.degree, 1))
    if any(x is not None and is_replicated(x, q) for x in (k, v)):
        k, v = as_float32((k, v))
    q, k, v = alike(q, k, v)

    def attend(first: int, q: Array, k: Array, v: Array | None) -> tuple[Array, Array]:
        here = given.of_heads(first, q.shape[2])
        return _attend_heads(schedule, q, k, v, query_segments, key_segments, here)

    return in_chunks(attend, schedule.head_chunks, q, k, v)


def _attend_heads(
    schedule: Schedule,
    q: QueryShard,
    k: KeyOrLatentShard,
    v: ValueShard | None,
    query_segments: QuerySegments | None,
    key_segments: KeySegments | None,
    given: ScoreInputs,
) -> tuple[OutShard, LseShard]:
    """Steps 0 to 5 for some heads, or all."""
    head = schedule.head
    dtype = q.dtype
    if k.shape[2] < head.degree:
        k, v = jax.tree.map(lambda x: collectives.repeat_heads(head.degree, x), (k, v))
    q = collectives.exchange(q, head, split=2, concat=1)
    k, v = jax.tree.map(lambda x: collectives.exchange_keys(x, head, dtype), (k, v))
    shared = query_segments is key_segments
    if query_segments is not None:
        query_segments = collectives.gather(query_segments, head, 1)
    if key_segments is not None:
        key_segments = query_segments if shared else collectives.gather(key_segments, head, 1)
    given = score_units.of_units(schedule, given, q)
    ids = query_segments, key_segments
    out, lse, _ = concentric_attention(schedule, q, k, v, *ids, given)
    out = collectives.exchange(out, head, split=1, concat=2)
    lse = collectives.exchange(lse, head, split=2, concat=1)
    if head.degree > 1:
        out = checkpoint_name(out, EXCHANGED_OUT)
    return out, lse


@runtime_checkable
class Transport(Protocol):
    """How the keys come to the queries of a device, and gradients to where they belong. Shards are
    q, k, v and the segment ids of queries and of keys, with k and v in the dtype of q."""

    @classmethod
    def of(
        cls, schedule: Schedule, kept: Any, given: ScoreInputs, *, gathered: bool = False
    ) -> Transport:
        """The transport of one call, from the shards of a device or from the result of `gather`,
        and from what else is given."""
        ...

    def gather(self, shards: Any, *, named: bool = False) -> Any:
        """Sends what comes before attention; what is kept for the backward pass is `named`."""
        ...

    def attend(self, gathered: Any, given: ScoreInputs) -> tuple[Any, Any, Any]:
        """Attends the queries of this device to all keys that they see.

        Returns out in the dtype of q and lse in float32, with sinks; and the rounding error of lse
        (`softmax.Partials`), which only float32 inputs are exact enough to need.
        """
        ...

    def again(self, kept: Any, dout: Any, lse: Any) -> Any:
        """Gathers again in the backward pass, except for what was kept. Waits for `dout`
        (`recompute_in_backward`), or XLA would reuse the forward gather and keep its result."""
        ...

    def gradients(self, gathered: Any, found: Rows, given: ScoreInputs, key_dtype: Any) -> Any:
        """Gradients of q, k, v (k and v in `key_dtype`) and of the scores, and delta."""
        ...


def _transport(schedule: Schedule) -> type[Transport]:
    return Sparse if schedule.exchange == "sparse" else Concentric


def _forward(
    schedule: Schedule,
    q: QueryShard,
    k: KeyOrLatentShard,
    v: ValueShard | None,
    query_segments: QuerySegments | None,
    key_segments: KeySegments | None,
    given: ScoreInputs = NO_SCORES,
) -> tuple[OutShard, LseShard, LseShard | None]:
    """Steps 1 to 4; returns what `Transport.attend` does. Keys and values are used in the dtype of
    q; their gradients have the dtype that they come in."""
    k, v = jax.tree.map(lambda x: x.astype(q.dtype), (k, v))
    shards = q, k, v, query_segments, key_segments
    transport = _transport(schedule).of(schedule, shards, given)
    return transport.attend(transport.gather(shards), given)


def _forward_rule(
    schedule: Schedule,
    q: Any,
    k: Any,
    v: Any,
    query_segments: Any,
    key_segments: Any,
    given: ScoreInputs = NO_SCORES,
) -> tuple[Any, Any]:
    like = k[:0]
    k, v = jax.tree.map(lambda x: x.astype(q.dtype), (k, v))
    kept: Any = q, k, v, query_segments, key_segments
    if schedule.keep_gathered:
        transport = _transport(schedule).of(schedule, kept, given)
        kept = transport.gather(kept, named=True)
        found = transport.attend(kept, given)
    else:
        found = concentric_attention(schedule, *kept, given)
    found = named(*found)
    return found, (kept, given, *found, like)


def _backward_rule(schedule: Schedule, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    """Gradients of q, k, v and of what is given, as in FlashAttention-2 (arXiv 2307.08691, 3.1.2).

        p = exp(s - lse),  ds = p * (dp - delta),  delta = rowsum(dout * out) - dlse

    lse and delta are those of whole rows, over all keys.
    """
    residuals, cotangents = without_derivative((residuals, cotangents))
    kept, given, out, lse, low, like = residuals
    dout, dlse, *_ = cotangents
    gathered = schedule.keep_gathered
    transport = _transport(schedule).of(schedule, kept, given, gathered=gathered)
    gathered = transport.again(kept, dout, lse)
    found = Rows(dout, dlse, out, lse, low)
    *gradients, of_scores, delta = transport.gradients(gathered, found, given, like.dtype)
    scores, _, sinks, expansion = given
    if expansion is not None:
        expansion, of_scores = Expansion(*of_scores), ()
    scores = None if scores is None else scores.with_gradients(of_scores)
    sinks = None if sinks is None else softmax.sink_gradient(sinks, lse, delta)
    return *gradients, None, None, ScoreInputs(scores, None, sinks, expansion)


# Where there are gradients, jax traces the forward pass twice: as it is, and in its rule. The
# inlined jit remembers the first trace, and leaves nothing of itself in the program.
concentric_attention = jax.custom_vjp(
    jax.jit(_forward, static_argnums=0, inline=True), nondiff_argnums=(0,)
)
concentric_attention.defvjp(_forward_rule, _backward_rule)

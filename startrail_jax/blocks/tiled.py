"""Block attention on NVIDIA GPUs under any mask: cuDNN on the tiles that it serves, XLA on others.

The masks of cuDNN are few: top-left causal, padding, and a left window. No other kernel serves
packed documents and windows between any two units: the Pallas kernels of JAX on Triton are
deprecated, Pallas on Mosaic GPU does not support the A100 and promises no stable interface, and
tokamax needs some 85 packages and, for its backward pass, an H100.

But most of what such masks show is tiles that are visible as a whole, or that are causal triangles,
and cuDNN serves these at full speed. The end of a window is a causal triangle in reverse order. So
pairs of `COARSE` tiles are sorted by `tile_kinds`. Mixed pairs are cut into `FINE` tiles and sorted
again. Pairs that are mixed even then are dense: all their logits are computed in memory. So are all
pairs of dtypes and head_dims that cuDNN does not serve, and of scores beyond the scaled products.
Pairs in which nothing is visible are not visited.

Only the device knows which pairs are of which kind, so each kind is a loop over a list of pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from startrail_jax.blocks import cudnn
from startrail_jax.blocks.base import Pair, Request
from startrail_jax.blocks.scores import Scores, ScoreTile
from startrail_jax.blocks.shapes import EMPTY, KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.blocks.softmax import Partials, log_sum, merge_precisely
from startrail_jax.blocks.tiles import (
    Tiling,
    mask_logits,
    split_tiles,
    tile_kinds,
    visible_in_tiles,
    visible_tiles,
)
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.masks import Full
from startrail_jax.xla.ordering import zeros_after

# Tokens of a coarse tile, of queries and of keys. At this size the work of the kernel, which grows
# with the square of the tokens, outweighs reading, merging and writing back, which grow with the
# tokens.
COARSE = 4096
# Tokens of a fine tile, and bytes that the float32 logits of a pair may take, over all heads. With
# many heads the tiles are smaller.
FINE, LOGITS_BYTES = 1024, 2**28

# What the kernel call for a tile asks of cuDNN.
_KERNEL_CALL = Request(
    platform="cuda", capability=None, dtype="bfloat16", head_dim=64, value_head_dim=64,
    mask=Full(), packed=False, num_cases=1,
)  # fmt: skip


def refusal(request: Request) -> str | None:
    """See `base.Block.refusal`. Every request is served on devices that can run cuDNN's kernels."""
    return cudnn.refusal(
        replace(_KERNEL_CALL, platform=request.platform, capability=request.capability)
    )


def no_kernels(
    dtype: str,
    head_dim: int,
    value_head_dim: int,
    softcap: float | None,
    scores: tuple[str, ...] = (),
) -> str | None:
    """Why cuDNN serves no tile, so that all are dense; None if it does serve tiles."""
    asked = dict(head_dim=head_dim, value_head_dim=value_head_dim, scores=scores)
    return cudnn.refusal(replace(_KERNEL_CALL, dtype=dtype, softcap=softcap, **asked))


def forward(pair: Pair, into: Partials = ()) -> Partials:
    """See `base.Block.forward`. Returns one triple (out, lse, low), in float32."""
    q, k, v, visibility, scale, scores = pair
    lists = _tile_lists(visibility, q, k, v, scores)

    def visit(pair: _TilePair, so_far: tuple[Array, ...]) -> tuple[Array, ...]:
        q_i, k_j, v_j = pair.queries(q), pair.keys(k), pair.keys(v)
        if pair.kind == "mixed":
            at = pair.scores(scores, visibility, q, k)
            here = _attend(q_i, k_j, v_j, scale, pair.visible(visibility), at)
        else:
            q_i, k_j, v_j = map(pair.turn, (q_i, k_j, v_j))
            out, lse = cudnn.attend(q_i, k_j, v_j, scale, pair.kind != "full")
            here = pair.turn(out), pair.turn(lse, 2)
        # Tokens are the second dimension of out, and the third of lse and low.
        merged = merge_precisely([tuple(map(pair.queries, so_far, (1, 2, 2))), here])
        return tuple(map(pair.put_queries, so_far, merged, (1, 2, 2)))

    if into:
        so_far = merge_precisely(into)
    else:
        zeros = zeros_after(q, v.shape[-1], _opaque_false(lists))
        low = zeros[..., 0].swapaxes(1, 2)
        so_far = zeros, low + EMPTY, low
    for pairs in lists:
        so_far = pairs.fold(visit, so_far)
    return (so_far,)


def backward(
    pair: Pair,
    lse: LseShard,
    delta: LseShard,
    dout: OutShard,
    into: tuple[Array | None, ...] = (None, None, None),
) -> tuple[Float32[Array, "..."], ...]:
    """See `base.Block.backward`."""
    q, k, v, visibility, scale, scores = pair
    lists = _tile_lists(visibility, q, k, v, scores)
    # So that exp(logits - lse) is 0 in rows that see no key.
    lse = jnp.where(lse <= EMPTY, -EMPTY, lse)
    dout = dout.astype(q.dtype)
    kernel_out, kernel_dout = cudnn.output_for(delta, dout)

    def visit(pair: _TilePair, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        dq, dk, dv, *learnt = sums
        q_i, k_j, v_j, lse_i = pair.queries(q), pair.keys(k), pair.keys(v), pair.queries(lse, 2)
        if pair.kind == "mixed":
            delta_i, dout_i = pair.queries(delta, 2), pair.queries(dout)
            visible, at = pair.visible(visibility), pair.scores(scores, visibility, q, k)
            *parts, learnt = _gradients(
                q_i, k_j, v_j, lse_i, delta_i, dout_i, scale, visible, at, tuple(learnt)
            )
        else:
            out_i, dout_i = pair.queries(kernel_out), pair.queries(kernel_dout)
            causal, lse_i = pair.kind != "full", pair.turn(lse_i, 2)
            q_i, k_j, v_j, out_i, dout_i = map(pair.turn, (q_i, k_j, v_j, out_i, dout_i))
            parts = cudnn.gradients(q_i, k_j, v_j, lse_i, out_i, dout_i, scale, causal)
            parts = tuple(map(pair.turn, parts))
        return (
            pair.put_queries(dq, pair.queries(dq) + parts[0].astype(jnp.float32)),
            pair.put_keys(dk, pair.keys(dk) + parts[1].astype(jnp.float32)),
            pair.put_keys(dv, pair.keys(dv) + parts[2].astype(jnp.float32)),
            *learnt,
        )

    sums = tuple(
        zeros_after(like, x.shape[-1], _opaque_false(lists)) if dx is None else dx
        for like, x, dx in zip((dout, k, v), (q, k, v), into[:3], strict=True)
    )
    sums += scores.sums(into[3:], _opaque_false(lists))
    for pairs in lists:
        sums = pairs.fold(visit, sums)
    return sums


@dataclass(frozen=True)
class _TileList:
    """Pairs of tiles of one kind, to be visited one after another."""

    kind: str
    """A kind of `tiles.tile_kinds`."""
    query: Tiling
    key: Tiling
    order: Int32[Array, " pairs"]
    """(Index of the query tile) * (number of key tiles) + (index of the key tile), then padding."""
    count: Int32[Array, ""]

    @classmethod
    def of(cls, kind: str, query: Tiling, key: Tiling, pairs: Bool[Array, "i j"]) -> _TileList:
        (order,) = jnp.nonzero(pairs.reshape(-1), size=pairs.size, fill_value=0)
        if kind == "strict edge":
            # Without its last query and its first key, it is a plain causal triangle, turned.
            query = Tiling(query.starts, query.fresh, query.size - 1)
            key = Tiling(key.starts + 1, key.fresh + 1, key.size - 1)
        return cls(kind, query, key, order.astype(jnp.int32), pairs.sum(dtype=jnp.int32))

    def fold(self, body: Callable[[_TilePair, Any], Any], carry: Any) -> Any:
        """Folds `body(pair of tiles, carry)` over the pairs."""

        def visit(n: Array, carry: Any) -> Any:
            i, j = jnp.divmod(self.order[n], len(self.key.starts))
            return body(_TilePair(self, i, j), carry)

        return lax.fori_loop(0, self.count, visit, carry)


@dataclass(frozen=True)
class _TilePair:
    """One pair of tiles: reads and writes its parts of arrays of queries and of keys."""

    pairs: _TileList
    i: Int32[Array, ""]
    j: Int32[Array, ""]

    @property
    def kind(self) -> str:
        return self.pairs.kind

    def turn(self, x: Array, axis: int = 1) -> Array:
        """Tokens in reverse order in a tile at the end of a window, which is causal that way."""
        return jnp.flip(x, axis) if self.kind in ("edge", "strict edge") else x

    def queries(self, x: Array, axis: int = 1) -> Array:
        return _cut(x, self.pairs.query, self.i, axis)

    def put_queries(self, x: Array, tile: Array, axis: int = 1) -> Array:
        return _paste(x, tile, self.pairs.query, self.i, axis)

    def keys(self, x: Array) -> Array:
        return _cut(x, self.pairs.key, self.j, 1)

    def put_keys(self, x: Array, tile: Array) -> Array:
        return _paste(x, tile, self.pairs.key, self.j, 1)

    def scores(
        self, scores: Scores, visibility: Visibility, q: QueryShard, k: KeyShard
    ) -> ScoreTile:
        where = visibility, self.pairs.query, self.pairs.key, self.i, self.j
        return ScoreTile(scores, *where, k.shape[2], q.shape[2] // k.shape[2])

    def visible(self, visibility: Visibility) -> Bool[Array, "#b #t #s"] | None:
        return visible_in_tiles(visibility, self.pairs.query, self.pairs.key, self.i, self.j)


def _cut(x: Array, tiling: Tiling, i: Array, axis: int) -> Array:
    """Tile i of an array whose tokens lie along `axis`. The dimensions after it are cut as one:
    otherwise XLA would transpose the whole array for the products of a dense tile, and back."""
    tile = tiling.cut(x.reshape(*x.shape[: axis + 1], -1), i, axis)
    return tile.reshape(*tile.shape[: axis + 1], *x.shape[axis + 1 :])


def _paste(x: Array, tile: Array, tiling: Tiling, i: Array, axis: int) -> Array:
    """The inverse of `_cut`."""
    flat = tiling.paste(
        x.reshape(*x.shape[: axis + 1], -1), tile.reshape(*tile.shape[: axis + 1], -1), i, axis
    )
    return flat.reshape(x.shape)


def _tile_lists(
    visibility: Visibility, q: QueryShard, k: KeyShard, v: ValueShard, scores: Scores
) -> list[_TileList]:
    dims = q.shape[-1], v.shape[-1]
    dense = no_kernels(q.dtype.name, *dims, scores.softcap, scores.given) is not None
    return pair_lists(visibility, q.shape[1], k.shape[1], q.shape[0] * q.shape[2], dense=dense)


def pair_lists(
    visibility: Visibility, query_len: int, key_len: int, rows: int, *, dense: bool
) -> list[_TileList]:
    """All pairs of tiles that may hold something visible, each once, in a list for each kind.
    `rows` are rows of the batch times query heads; `dense` if cuDNN serves no tile."""
    coarse = tilings(visibility, query_len, key_len)
    side = math.isqrt(LOGITS_BYTES // (4 * rows))
    size = min(FINE, 2 ** (max(side, 1).bit_length() - 1))
    (fine_query, query_parent), (fine_key, key_parent) = (split_tiles(x, size) for x in coarse)
    fine = fine_query, fine_key
    if dense:
        return [_TileList.of("mixed", *fine, visible_tiles(visibility, *fine))]
    kinds = tile_kinds(visibility, *coarse)
    mixed = kinds.pop("mixed", None)
    lists = [_TileList.of(kind, *coarse, pairs) for kind, pairs in kinds.items()]
    if mixed is None:
        return lists
    if all(a.size == b.size for a, b in zip(coarse, fine, strict=True)):
        return [*lists, _TileList.of("mixed", *coarse, mixed)]
    mixed = mixed[query_parent[:, None], key_parent]
    kinds = tile_kinds(visibility, *fine)
    return lists + [_TileList.of(kind, *fine, mixed & pairs) for kind, pairs in kinds.items()]


def tilings(visibility: Visibility, query_len: int, key_len: int) -> tuple[Tiling, Tiling]:
    """The coarse tiles of a pair of units, of the same size if their lengths allow it."""
    query_runs, key_runs = visibility.num_query_runs, visibility.num_key_runs
    size = Tiling.of(min(query_len // query_runs, key_len // key_runs), 1, COARSE).size
    return Tiling.of(query_len, query_runs, size), Tiling.of(key_len, key_runs, size)


def _opaque_false(lists: list[_TileList]) -> Bool[Array, ""]:
    """A false predicate that XLA cannot constant-fold."""
    return functools.reduce(jnp.logical_or, (pairs.count < 0 for pairs in lists))


def _attend(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    scale: float,
    visible: Bool[Array, "#b #t #s"] | None,
    at: ScoreTile,
) -> tuple[Float32[Array, "b t n v"], LseShard, LseShard]:
    """What `cudnn.attend` computes and low, but under any mask and with out in float32."""
    heads, dot = k.shape[2], _dot(q.dtype)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    logits, _ = at.logits(dot("bkrh,bksh->bkrs", _rows(q, heads), k) * scale)
    logits = mask_logits(logits, visible, heads=heads, queries=q.shape[1])
    # Weights are at most this, a power of 2, so that sums of values near the greatest float32 do
    # not overflow. In float16 small weights would vanish, and no value is that great.
    unit = 1.0 if v.dtype == jnp.float16 else 0.5 ** k.shape[2].bit_length()
    # In a row that sees no key, p is 0 and the total is set to a unit, the least in other rows.
    highest = jnp.maximum(logits.max(-1), EMPTY)
    p = jnp.exp(logits - highest[..., None]) * unit
    total = jnp.maximum(p.sum(-1), unit)
    out = dot("bkrs,bksv->bkrv", at.drop(p).astype(v.dtype), v) / total[..., None]
    stats = log_sum(highest, total / unit)
    lse, low = (rearrange(x, "b k (g t) -> b (k g) t", t=q.shape[1]) for x in stats)
    return rearrange(out, "b k (g t) v -> b t (k g) v", t=q.shape[1]), lse, low


def _gradients(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: LseShard,
    delta: LseShard,
    dout: OutShard,
    scale: float,
    visible: Bool[Array, "#b #t #s"] | None,
    at: ScoreTile,
    learnt: tuple[Array, ...],
) -> tuple[Array, Array, Array, tuple[Array, ...]]:
    """What `cudnn.gradients` computes, but under any mask, for a given delta and in float32. Last
    come the sums `learnt` of gradients of the scores, with those of this pair added."""
    heads, dot = k.shape[2], _dot(q.dtype)
    rows, dout, k, v = _rows(q, heads), _rows(dout, heads), k.swapaxes(1, 2), v.swapaxes(1, 2)
    lse, delta = (rearrange(x, "b (k g) t -> b k (g t) 1", k=heads) for x in (lse, delta))
    logits, slope = at.logits(dot("bkrh,bksh->bkrs", rows, k) * scale)
    logits = mask_logits(logits, visible, heads=heads, queries=q.shape[1])
    p = jnp.exp(logits - lse)
    ds = p * (at.drop(dot("bkrv,bksv->bkrs", dout, v)) - delta)
    learnt = at.add_gradients(ds, learnt)
    ds = ds * scale
    ds = (ds if slope is None else ds * slope).astype(q.dtype)
    dq = rearrange(dot("bkrs,bksh->bkrh", ds, k), "b k (g t) h -> b t (k g) h", t=q.shape[1])
    dk = dot("bkrs,bkrh->bksh", ds, rows)
    dv = dot("bkrs,bkrv->bksv", at.drop(p).astype(v.dtype), dout)
    return dq, dk.swapaxes(1, 2), dv.swapaxes(1, 2), learnt


def _rows(x: Float[Array, "b t n h"], heads: int) -> Float[Array, "b k r h"]:
    """Queries grouped by key head, so that all that share a key head are rows of one product."""
    return rearrange(x, "b t (k g) h -> b k (g t) h", k=heads)


def _dot(dtype: jnp.dtype) -> Callable[..., Float32[Array, "..."]]:
    """einsum with float32 sums; 16-bit operands stay 16-bit, so that tensor cores multiply them."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

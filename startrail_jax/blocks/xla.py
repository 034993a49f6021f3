"""Block attention in plain XLA: a loop over the visible (query tile, key tile) pairs.

It serves every mask on every platform. Tiles in which nothing is visible are never visited, and one
tile of logits exists at a time; the list of visible tiles takes 5 bytes for each tile. Sums and the
softmax are in float32. Products are in float32 too, except those of 16-bit inputs on accelerators.

Query heads that share a key head are rows of the same product, so keys and values are not repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from startrail_jax.blocks.base import Pair, Request
from startrail_jax.blocks.scores import Scores, ScoreTile
from startrail_jax.blocks.shapes import EMPTY, KeyShard, LseShard, OutShard, QueryShard
from startrail_jax.blocks.softmax import Partials, log_sum, merge_precisely
from startrail_jax.blocks.tiles import Tiling, mask_logits, visible_in_tiles, visible_tiles
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.xla.ordering import zeros_after

# Rows (queries times heads that share a key head) and columns (keys) of one tile of logits.
TILE_ROWS = 256
TILE_COLUMNS = 256


def refusal(request: Request) -> None:
    """Returns None: this backend serves everything."""


def forward(pair: Pair, into: Partials = ()) -> Partials:
    """See `base.Block.forward`. Returns one triple (out, lse, low), in float32."""
    q, k, v, visibility, scale, scores = pair
    tiles = _Tiles.of(visibility, q, k)
    visits = _VisibleTiles.of(visible_tiles(visibility, tiles.query, tiles.key))
    dot = _dot(q.dtype)
    if into:
        so_far = merge_precisely(into)
    else:
        out = zeros_after(q, v.shape[-1], visits.opaque_false)
        low = zeros_after(q, q.shape[-1], visits.opaque_false)[..., 0].swapaxes(1, 2)
        so_far = out, low + EMPTY, low
    # Weights are at most this, a power of 2, so that sums of values near the greatest float32 do
    # not overflow.
    unit = 0.5 ** k.shape[1].bit_length()

    def query_tile(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        q_i = tiles.rows(q, i)

        def key_tile(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            out, total, highest = carry
            logits = dot("zrh,zsh->zrs", q_i, tiles.columns(k, j)) * scale
            at = tiles.scores(scores, i, j)
            logits = tiles.masked(at.logits(logits)[0], i, j)
            new = jnp.maximum(highest, logits.max(-1))
            p, decay = jnp.exp(logits - new[..., None]) * unit, jnp.exp(highest - new)
            out = out * decay[..., None] + dot("zrs,zsv->zrv", at.drop(p), tiles.columns(v, j))
            return out, total * decay + p.sum(-1), new

        # Keys attended earlier count as one key, whose logit is lse + low and whose value is out.
        out, lse, low = tiles.rows(carry[0], i), *(tiles.stats(x, i) for x in carry[1:])
        total = jnp.exp(low) * unit
        first = out * total[..., None], total, lse
        out, total, highest = visits.fold(i, key_tile, first)
        # In a row that has seen no key yet, highest is EMPTY, out is 0 and total is a unit.
        stats = log_sum(highest, total / unit)
        out = tiles.put_rows(carry[0], out / total[..., None], i)
        return out, *(tiles.put_stats(x, y, i) for x, y in zip(carry[1:], stats, strict=True))

    return (lax.fori_loop(0, len(tiles.query.starts), query_tile, so_far),)


def backward(
    pair: Pair,
    lse: LseShard,
    delta: LseShard,
    dout: OutShard,
    into: tuple[Array | None, ...] = (None, None, None),
) -> tuple[Float32[Array, "..."], ...]:
    """See `base.Block.backward`."""
    q, k, v, visibility, scale, scores = pair
    tiles = _Tiles.of(visibility, q, k)
    visits = _VisibleTiles.of(visible_tiles(visibility, tiles.query, tiles.key).T)
    dot = _dot(q.dtype)

    def key_tile(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        k_j, v_j = tiles.columns(k, j), tiles.columns(v, j)

        def query_tile(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            dq, dk_j, dv_j, *learnt = carry
            at = tiles.scores(scores, i, j, keys_first=True)
            q_i, dout_i = tiles.rows(q, i), tiles.rows(dout, i)
            lse_i, delta_i = tiles.stats(lse, i), tiles.stats(delta, i)
            # Keys by queries: with this order, only one of the five products has to transpose.
            logits, slope = at.logits(dot("zsh,zrh->zsr", k_j, q_i) * scale)
            logits = tiles.masked(logits, i, j, keys_first=True)
            p = jnp.exp(logits - lse_i[:, None])
            ds = p * (at.drop(dot("zsv,zrv->zsr", v_j, dout_i)) - delta_i[:, None])
            learnt = at.add_gradients(ds, tuple(learnt))
            ds = ds * scale
            ds = ds if slope is None else ds * slope
            dq = tiles.put_rows(dq, tiles.rows(dq, i) + dot("zsr,zsh->zrh", ds, k_j), i)
            dk_j = dk_j + dot("zsr,zrh->zsh", ds, q_i)
            dv_j = dv_j + dot("zsr,zrv->zsv", at.drop(p), dout_i)
            return dq, dk_j, dv_j, *learnt

        dq, dk, dv, *learnt = carry
        dk_j, dv_j = tiles.columns(dk, j), tiles.columns(dv, j)
        sums = dq, dk_j, dv_j, *learnt
        dq, dk_j, dv_j, *learnt = visits.fold(j, query_tile, sums)
        return dq, tiles.put_columns(dk, dk_j, j), tiles.put_columns(dv, dv_j, j), *learnt

    sums = tuple(
        zeros_after(like, x.shape[-1], visits.opaque_false) if dx is None else dx
        for like, x, dx in zip((dout, k, v), (q, k, v), into[:3], strict=True)
    )
    sums += scores.sums(into[3:], visits.opaque_false)
    return lax.fori_loop(0, len(tiles.key.starts), key_tile, sums)


def tilings(
    visibility: Visibility, query_len: int, key_len: int, group: int
) -> tuple[Tiling, Tiling]:
    """Tiles of the queries and keys of a pair of units; `group` query heads share a key head."""
    rows = max(1, TILE_ROWS // group)
    return (
        Tiling.of(query_len, visibility.num_query_runs, rows),
        Tiling.of(key_len, visibility.num_key_runs, TILE_COLUMNS),
    )


@dataclass(frozen=True)
class _VisibleTiles:
    """For each outer tile, the inner tiles that may hold something visible."""

    order: Int32[Array, " visits"]
    """The inner tiles of outer tile 0, then those of outer tile 1, ..., then padding."""
    ends: Int32[Array, " outer"]
    """Where the part of each outer tile in `order` ends."""

    @classmethod
    def of(cls, visible: Bool[Array, "outer inner"]) -> _VisibleTiles:
        (flat,) = jnp.nonzero(visible.reshape(-1), size=visible.size, fill_value=0)
        order = flat.astype(jnp.int32) % visible.shape[1]
        ends = visible.sum(1, dtype=jnp.int32).cumsum()
        return cls(order, ends)

    @property
    def opaque_false(self) -> Bool[Array, ""]:
        """A false predicate that XLA cannot constant-fold."""
        return self.ends[-1] < 0

    def fold(self, outer: Array, body: Callable[[Array, Any], Any], carry: Any) -> Any:
        """Folds `body(inner tile, carry)` over the inner tiles of one outer tile."""
        begin = jnp.where(outer > 0, self.ends[outer - 1], 0)
        visit = lambda n, carry: body(self.order[n], carry)  # noqa: E731
        return lax.fori_loop(begin, self.ends[outer], visit, carry)


@dataclass(frozen=True)
class _Tiles:
    """Reads and writes tiles of a pair of units, as the rows and columns of matrix products.

    In shapes, z is (batch, key head), r is (query head of that key head, query), and c is key.
    """

    visibility: Visibility
    heads: int
    """Number of key heads."""
    group: int
    """Number of query heads that share a key head."""
    query: Tiling
    key: Tiling

    @classmethod
    def of(cls, visibility: Visibility, q: QueryShard, k: KeyShard) -> _Tiles:
        group = q.shape[2] // k.shape[2]
        return cls(
            visibility, k.shape[2], group, *tilings(visibility, q.shape[1], k.shape[1], group)
        )

    def rows(self, x: Float[Array, "b t n h"], i: Array) -> Float32[Array, "z r h"]:
        """Query tile i, in float32."""
        tile = self.query.cut(x, i, 1).astype(jnp.float32)
        return rearrange(tile, "b q (k g) h -> (b k) (g q) h", k=self.heads)

    def put_rows(
        self, x: Float32[Array, "b t n h"], tile: Float32[Array, "z r h"], i: Array
    ) -> Float32[Array, "b t n h"]:
        """The inverse of `rows`."""
        tile = rearrange(tile, "(b k) (g q) h -> b q (k g) h", k=self.heads, q=self.query.size)
        return self.query.paste(x, tile, i, 1)

    def stats(self, x: LseShard, i: Array) -> Float32[Array, "z r"]:
        """A number for each row of query tile i, such as its lse."""
        return rearrange(self.query.cut(x, i, 2), "b (k g) q -> (b k) (g q)", k=self.heads)

    def put_stats(self, x: LseShard, tile: Float32[Array, "z r"], i: Array) -> LseShard:
        """The inverse of `stats`."""
        tile = rearrange(tile, "(b k) (g q) -> b (k g) q", k=self.heads, q=self.query.size)
        return self.query.paste(x, tile, i, 2)

    def columns(self, x: Float[Array, "b s k h"], j: Array) -> Float32[Array, "z c h"]:
        """Key tile j, in float32."""
        return rearrange(self.key.cut(x, j, 1).astype(jnp.float32), "b c k h -> (b k) c h")

    def put_columns(
        self, x: Float32[Array, "b s k h"], tile: Float32[Array, "z c h"], j: Array
    ) -> Float32[Array, "b s k h"]:
        """The inverse of `columns`."""
        tile = rearrange(tile, "(b k) c h -> b c k h", k=self.heads)
        return self.key.paste(x, tile, j, 1)

    def scores(self, scores: Scores, i: Array, j: Array, *, keys_first: bool = False) -> ScoreTile:
        """The scores of the pair (i, j) of tiles."""
        where = self.visibility, self.query, self.key, i, j
        return ScoreTile(scores, *where, self.heads, self.group, keys_first)

    def masked(
        self, logits: Float32[Array, "z _ _"], i: Array, j: Array, *, keys_first: bool = False
    ) -> Float32[Array, "z _ _"]:
        """Logits [z, rows, columns] of the pair (i, j) of tiles, -inf where the query does not see
        the key; [z, columns, rows] if `keys_first`."""
        visible = visible_in_tiles(self.visibility, self.query, self.key, i, j)
        return mask_logits(
            logits, visible, heads=self.heads, queries=self.query.size, keys_first=keys_first
        )


def _dot(dtype: jnp.dtype) -> Callable[..., Array]:
    """einsum of float32 tiles that come from inputs of this dtype.

    Only float32 inputs need full precision: a TF32 product on a GPU represents bfloat16 and float16
    inputs exactly, and is several times faster.
    """
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return functools.partial(jnp.einsum, precision=precision)

"""Block attention in plain XLA: a loop over the visible (query tile, key tile) pairs.

Serves every mask on every platform. Tiles that are wholly masked are never visited, and no more
than one tile of logits exists at a time. Everything is computed in float32.

Inside, query heads that share a key head are rows of the same product: z = (batch, key head),
g = query heads per key head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from startrail_jax.mask import Mask, Tiling, visible_tiles
from startrail_jax.shapes import EMPTY, KeyShard, LseShard, OutShard, QueryShard, ValueShard

# Rows (queries times heads that share a key head) and columns (keys) of one tile of logits.
TILE_ROWS = 512
TILE_COLUMNS = 256


def forward(
    q: QueryShard, k: KeyShard, v: ValueShard, mask: Mask, scale: float
) -> tuple[Float32[Array, "b t n v"], LseShard]:
    """See `base.Block.forward`; out is float32."""
    grid = _Grid.of(mask, q, k)
    dot = _dot(q.dtype)
    q, k, v = _rows(q, k.shape[2]), _columns(k), _columns(v)

    def one_tile(i: Array, j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        out, total, highest = (grid.query_tile(x, i) for x in carry)
        logits = dot("zrh,zsh->zrs", grid.query_tile(q, i), grid.key_tile(k, j)) * scale
        logits = grid.masked(logits, i, j)
        new = jnp.maximum(highest, logits.max(-1))
        p, decay = jnp.exp(logits - new[..., None]), jnp.exp(highest - new)
        out = out * decay[..., None] + dot("zrs,zsv->zrv", p, grid.key_tile(v, j))
        new_carry = (out, total * decay + p.sum(-1), new)
        return tuple(grid.put_query_tile(x, tile, i) for x, tile in zip(carry, new_carry))

    zeros = functools.partial(_full_like_inputs, inputs=(q, k, v, grid.num_pairs))
    carry = (zeros((*q.shape[:3], v.shape[-1])), zeros(q.shape[:3]), zeros(q.shape[:3], EMPTY))
    out, total, highest = grid.visit(one_tile, carry)
    total = jnp.where(highest <= EMPTY, 1.0, total)
    lse = jnp.where(highest <= EMPTY, EMPTY, highest + jnp.log(total))
    return _unfold(out / total[..., None], grid.batch), rearrange(
        lse, "(b k) g t -> b (k g) t", b=grid.batch
    )


def backward(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: LseShard,
    delta: LseShard,
    dout: OutShard,
    mask: Mask,
    scale: float,
) -> tuple[Float32[Array, "b t n h"], Float32[Array, "b s k h"], Float32[Array, "b s k v"]]:
    """See `base.Block.backward`."""
    grid = _Grid.of(mask, q, k)
    dot = _dot(q.dtype)
    heads = k.shape[2]
    q, dout, k, v = _rows(q, heads), _rows(dout, heads), _columns(k), _columns(v)
    lse, delta = (rearrange(x, "b (k g) t -> (b k) g t", k=heads) for x in (lse, delta))

    def one_tile(i: Array, j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        q_i, dout_i, lse_i, delta_i = (grid.query_tile(x, i) for x in (q, dout, lse, delta))
        k_j, v_j = grid.key_tile(k, j), grid.key_tile(v, j)
        logits = grid.masked(dot("zrh,zsh->zrs", q_i, k_j) * scale, i, j)
        p = jnp.exp(logits - lse_i[..., None])
        ds = p * (dot("zrv,zsv->zrs", dout_i, v_j) - delta_i[..., None]) * scale
        dq, dk, dv = carry
        dq = grid.put_query_tile(dq, grid.query_tile(dq, i) + dot("zrs,zsh->zrh", ds, k_j), i)
        dk = grid.put_key_tile(dk, grid.key_tile(dk, j) + dot("zrs,zrh->zsh", ds, q_i), j)
        dv = grid.put_key_tile(dv, grid.key_tile(dv, j) + dot("zrs,zrv->zsv", p, dout_i), j)
        return dq, dk, dv

    inputs = (q, k, v, dout, grid.num_pairs)
    carry = tuple(_full_like_inputs(x.shape, inputs=inputs) for x in (q, k, v))
    dq, dk, dv = grid.visit(one_tile, carry)
    columns = "(b k) s h -> b s k h"
    return (
        _unfold(dq, grid.batch),
        rearrange(dk, columns, b=grid.batch),
        rearrange(dv, columns, b=grid.batch),
    )


def tilings(mask: Mask, query_len: int, key_len: int, group: int) -> tuple[Tiling, Tiling]:
    """How the queries and the keys of a unit pair are tiled; `group` query heads share a key head."""
    query_runs = len(mask.query_runs.starts) if mask.query_runs else 1
    key_runs = len(mask.key_runs.starts) if mask.key_runs else 1
    rows = max(1, TILE_ROWS // group)
    return Tiling.of(query_len, query_runs, rows), Tiling.of(key_len, key_runs, TILE_COLUMNS)


@dataclass(frozen=True)
class _Grid:
    """The tiles of one (query unit, key unit) pair, and the list of those worth visiting."""

    mask: Mask
    batch: int
    group: int
    """Query heads per key head."""
    query: Tiling
    key: Tiling
    pairs: Int32[Array, " pairs"]
    """Flat indices (query tile * key tiles + key tile) of the visible tiles, then padding."""
    num_pairs: Int32[Array, ""]

    @classmethod
    def of(cls, mask: Mask, q: QueryShard, k: KeyShard) -> _Grid:
        group = q.shape[2] // k.shape[2]
        query, key = tilings(mask, q.shape[1], k.shape[1], group)
        visible = visible_tiles(mask, query, key).reshape(-1)
        (pairs,) = jnp.nonzero(visible, size=visible.size, fill_value=0)
        num_pairs = visible.sum(dtype=jnp.int32)
        return cls(mask, q.shape[0], group, query, key, pairs.astype(jnp.int32), num_pairs)

    def visit(self, body: Callable[[Array, Array, Any], Any], carry: Any) -> Any:
        """Folds `body(query tile, key tile, carry)` over the visible pairs, row after row."""

        def one_pair(n: Array, carry: Any) -> Any:
            i, j = jnp.divmod(self.pairs[n], len(self.key.starts))
            return body(i, j, carry)

        return lax.fori_loop(0, self.num_pairs, one_pair, carry)

    def query_tile(self, x: Float[Array, "z g t *h"], i: Array) -> Float32[Array, "z r *h"]:
        """Rows of query tile i: every head of the group, in float32."""
        tile = _slice(x, self.query, i, 2)
        return tile.reshape(tile.shape[0], -1, *tile.shape[3:]).astype(jnp.float32)

    def put_query_tile(
        self, x: Float32[Array, "z g t *h"], tile: Float32[Array, "z r *h"], i: Array
    ) -> Float32[Array, "z g t *h"]:
        tile = tile.reshape(tile.shape[0], self.group, -1, *tile.shape[2:])
        return lax.dynamic_update_slice_in_dim(x, tile, _start(self.query, i), 2)

    def key_tile(self, x: Float[Array, "z s h"], j: Array) -> Float32[Array, "z c h"]:
        """Columns of key tile j, in float32."""
        return _slice(x, self.key, j, 1).astype(jnp.float32)

    def put_key_tile(
        self, x: Float32[Array, "z s h"], tile: Float32[Array, "z c h"], j: Array
    ) -> Float32[Array, "z s h"]:
        return lax.dynamic_update_slice_in_dim(x, tile, _start(self.key, j), 1)

    def masked(self, logits: Float32[Array, "z r c"], i: Array, j: Array) -> Array:
        """`logits` of tile (i, j), -inf where the key is not visible to the query."""
        allowed = self.allowed(i, j)
        if allowed is None:
            return logits
        split = rearrange(logits, "(b k) (g q) c -> b k g q c", b=self.batch, g=self.group)
        return jnp.where(allowed[:, None, None], split, -jnp.inf).reshape(logits.shape)

    def allowed(self, i: Array, j: Array) -> Bool[Array, "#b q c"] | None:
        """Visibility inside tile (i, j); None if nothing in any tile is masked."""
        tests, mask = [], self.mask
        if mask.causal:
            query = _slice(mask.query_positions, self.query, i, 0)[None, :, None]
            key = _slice(mask.key_positions, self.key, j, 0)[None, None, :]
            tests.append(key <= query)
            if mask.window is not None:
                tests.append(key > query - mask.window)
        if mask.query_segments is not None and mask.key_segments is not None:
            query = _slice(mask.query_segments, self.query, i, 1)[:, :, None]
            key = _slice(mask.key_segments, self.key, j, 1)[:, None, :]
            tests += [query == key, query >= 0]
        for tiling, at, shape in ((self.query, i, (1, -1, 1)), (self.key, j, (1, 1, -1))):
            if tiling.overlaps:
                token = _start(tiling, at) + np.arange(tiling.size)
                tests.append((token >= jnp.asarray(tiling.fresh)[at]).reshape(shape))
        return functools.reduce(jnp.logical_and, tests) if tests else None


def _start(tiling: Tiling, i: Array) -> Array:
    return jnp.asarray(tiling.starts)[i]


def _slice(x: Array, tiling: Tiling, i: Array, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, _start(tiling, i), tiling.size, axis)


def _rows(x: Float[Array, "b t n h"], heads: int) -> Float[Array, "z g t h"]:
    return rearrange(x, "b t (k g) h -> (b k) g t h", k=heads)


def _columns(x: Float[Array, "b s k h"]) -> Float[Array, "z s h"]:
    return rearrange(x, "b s k h -> (b k) s h")


def _unfold(x: Float[Array, "z g t h"], batch: int) -> Float[Array, "b t n h"]:
    return rearrange(x, "(b k) g t h -> b t (k g) h", b=batch)


def _dot(dtype: jnp.dtype) -> Callable[..., Array]:
    """einsum of float32 tiles. Full precision for float32 inputs only: a GPU's TF32 product holds
    bfloat16 and float16 inputs exactly, and is several times faster."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return functools.partial(jnp.einsum, precision=precision)


def _full_like_inputs(
    shape: tuple[int, ...], value: float = 0.0, *, inputs: tuple[Array, ...]
) -> Float32[Array, "..."]:
    """A constant to start a loop with: inside shard_map it must vary over the axes the loop's
    results vary over, those of its inputs."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))
    full = jnp.full(shape, value, jnp.float32)
    return lax.pcast(full, tuple(sorted(axes)), to="varying") if axes else full

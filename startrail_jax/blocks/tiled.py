"""Block attention on NVIDIA GPUs under any mask: cuDNN on the tiles that it serves, XLA on others.

cuDNN's own masks are few: top-left causal, padding, a left window. No other kernel serves packed
documents, stripes and windows between any two units: jax's Pallas kernels on Triton are deprecated,
Pallas on Mosaic GPU leaves out the A100 and promises no interface, and tokamax is some 85 packages
whose backward pass needs an H100.

But most of what such masks show is whole tiles of which all is visible, or a causal triangle, and
these are cuDNN calls at full speed. So pairs of `COARSE` tiles are sorted by `tile_kinds`; the
mixed ones are cut into `FINE` tiles and sorted again; what is mixed even then is computed from one
tile of logits in memory, as are all tiles of the dtypes and head_dims that cuDNN does not serve.
Tiles of which nothing is visible are not visited.

Which tiles are of which kind is known on the device only: each kind is a loop over a list of pairs.
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
from startrail_jax.blocks.base import Request
from startrail_jax.mask import Mask
from startrail_jax.shapes import EMPTY, KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.softmax import Partials, merge_partials
from startrail_jax.tiles import (
    Tiling,
    split_tiles,
    tile_kinds,
    visible_in_tiles,
    visible_tiles,
)

# Tokens of a tile, on both sides. In a coarse pair the kernel's work, which grows with the square,
# outweighs what grows with the tokens: to read, merge and write back what belongs to them.
COARSE = 4096
# So many queries by keys, of every head, may have their logits in memory; fewer where there are so
# many heads that these would take more bytes.
FINE, LOGITS_BYTES = 1024, 2**28

# What the kernel call of a tile asks of cuDNN.
_KERNEL_CALL = Request(
    platform="cuda", capability=None, dtype="bfloat16", head_dim=64, value_head_dim=64,
    causal=False, window=None, packed=False, num_cases=1,
)  # fmt: skip


def refusal(request: Request) -> str | None:
    """See `base.Block.refusal`: every request is served, on devices that have cuDNN's kernels."""
    return cudnn.refusal(
        replace(_KERNEL_CALL, platform=request.platform, capability=request.capability)
    )


def no_kernels(dtype: str, head_dim: int, value_head_dim: int) -> str | None:
    """Why no tile is a call of cuDNN's, so that all are dense; None if whole ones are."""
    head_dims = dict(head_dim=head_dim, value_head_dim=value_head_dim)
    return cudnn.refusal(replace(_KERNEL_CALL, dtype=dtype, **head_dims))


def forward(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    mask: Mask,
    scale: float,
    into: Partials = (),
) -> Partials:
    """See `base.Block.forward`. Everything is merged as it comes, in float32."""
    visits = _visits(mask, q, k, v)

    def visit(pair: _Pair, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        q_i, k_j, v_j = pair.queries(q), pair.keys(k), pair.keys(v)
        if pair.kind == "mixed":
            here = _attend(q_i, k_j, v_j, scale, pair.visible(mask))
        else:
            here = cudnn.attend(q_i, k_j, v_j, scale, pair.kind != "full")
        out, lse = so_far
        out_i, lse_i = merge_partials(((pair.queries(out), pair.queries(lse, 2)), here))
        return pair.put_queries(out, out_i), pair.put_queries(lse, lse_i, 2)

    if into:
        so_far = merge_partials(into)
    else:
        zeros = _zeros(q, v.shape[-1], visits)
        so_far = zeros, zeros[..., 0].swapaxes(1, 2) + EMPTY
    for some in visits:
        so_far = some.fold(visit, so_far)
    return (so_far,)


def backward(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: LseShard,
    delta: LseShard,
    dout: OutShard,
    mask: Mask,
    scale: float,
    into: tuple[Array | None, Array | None, Array | None] = (None, None, None),
) -> tuple[Float32[Array, "b t n h"], Float32[Array, "b s k h"], Float32[Array, "b s k v"]]:
    """See `base.Block.backward`."""
    visits = _visits(mask, q, k, v)
    # Rows that see no key: exp(logits - lse) is to be 0 there.
    lse = jnp.where(lse <= EMPTY, -EMPTY, lse)
    dout = dout.astype(q.dtype)
    kernel_out, kernel_dout = cudnn.output_for(delta, dout)

    def visit(pair: _Pair, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        q_i, k_j, v_j, lse_i = pair.queries(q), pair.keys(k), pair.keys(v), pair.queries(lse, 2)
        if pair.kind == "mixed":
            delta_i, dout_i = pair.queries(delta, 2), pair.queries(dout)
            visible = pair.visible(mask)
            parts = _gradients(q_i, k_j, v_j, lse_i, delta_i, dout_i, scale, visible)
        else:
            out_i, dout_i = pair.queries(kernel_out), pair.queries(kernel_dout)
            causal = pair.kind != "full"
            parts = cudnn.gradients(q_i, k_j, v_j, lse_i, out_i, dout_i, scale, causal)
        dq, dk, dv = sums
        return (
            pair.put_queries(dq, pair.queries(dq) + parts[0].astype(jnp.float32)),
            pair.put_keys(dk, pair.keys(dk) + parts[1].astype(jnp.float32)),
            pair.put_keys(dv, pair.keys(dv) + parts[2].astype(jnp.float32)),
        )

    sums = tuple(
        _zeros(like, x.shape[-1], visits) if dx is None else dx
        for like, x, dx in zip((dout, k, v), (q, k, v), into, strict=True)
    )
    for some in visits:
        sums = some.fold(visit, sums)
    dq, dk, dv = sums
    return dq, dk, dv


@dataclass(frozen=True)
class _Visits:
    """Pairs of tiles of one kind, to be visited one after another."""

    kind: str
    """One of those of `tiles.tile_kinds`."""
    query: Tiling
    key: Tiling
    order: Int32[Array, " pairs"]
    """Query tile times the number of key tiles, plus key tile; then padding."""
    count: Int32[Array, ""]

    @classmethod
    def of(cls, kind: str, query: Tiling, key: Tiling, pairs: Bool[Array, "i j"]) -> _Visits:
        (order,) = jnp.nonzero(pairs.reshape(-1), size=pairs.size, fill_value=0)
        if kind == "strict":
            # Without its first query and its last key, a plain causal triangle.
            query = Tiling(query.starts + 1, query.fresh + 1, query.size - 1)
            key = Tiling(key.starts, key.fresh, key.size - 1)
        return cls(kind, query, key, order.astype(jnp.int32), pairs.sum(dtype=jnp.int32))

    def fold(self, body: Callable[[_Pair, Any], Any], carry: Any) -> Any:
        """Folds `body(pair of tiles, carry)` over the pairs."""

        def visit(n: Array, carry: Any) -> Any:
            i, j = jnp.divmod(self.order[n], len(self.key.starts))
            return body(_Pair(self, i, j), carry)

        return lax.fori_loop(0, self.count, visit, carry)


@dataclass(frozen=True)
class _Pair:
    """One pair of tiles: reads and writes its part of arrays of queries and of keys."""

    visits: _Visits
    i: Int32[Array, ""]
    j: Int32[Array, ""]

    @property
    def kind(self) -> str:
        return self.visits.kind

    def queries(self, x: Array, axis: int = 1) -> Array:
        return _cut(x, self.visits.query, self.i, axis)

    def put_queries(self, x: Array, tile: Array, axis: int = 1) -> Array:
        return _paste(x, tile, self.visits.query, self.i, axis)

    def keys(self, x: Array) -> Array:
        return _cut(x, self.visits.key, self.j, 1)

    def put_keys(self, x: Array, tile: Array) -> Array:
        return _paste(x, tile, self.visits.key, self.j, 1)

    def visible(self, mask: Mask) -> Bool[Array, "#b #t #s"] | None:
        return visible_in_tiles(mask, self.visits.query, self.visits.key, self.i, self.j)


def _cut(x: Array, tiling: Tiling, i: Array, axis: int) -> Array:
    """A tile of an array of tokens along `axis`.

    The dimensions behind it are cut and pasted as one. XLA then cannot keep the array in the order
    that suits the products of a dense tile, for which it would transpose all of it, there and back.
    """
    tile = tiling.cut(x.reshape(*x.shape[: axis + 1], -1), i, axis)
    return tile.reshape(*tile.shape[: axis + 1], *x.shape[axis + 1 :])


def _paste(x: Array, tile: Array, tiling: Tiling, i: Array, axis: int) -> Array:
    """The inverse of `_cut`."""
    flat = tiling.paste(
        x.reshape(*x.shape[: axis + 1], -1), tile.reshape(*tile.shape[: axis + 1], -1), i, axis
    )
    return flat.reshape(x.shape)


def _visits(mask: Mask, q: QueryShard, k: KeyShard, v: ValueShard) -> list[_Visits]:
    """All visible pairs of tiles, each once, by kind."""
    coarse = tilings(mask, q.shape[1], k.shape[1])
    side = math.isqrt(LOGITS_BYTES // (4 * q.shape[0] * q.shape[2]))
    size = min(FINE, 2 ** (max(side, 1).bit_length() - 1))
    (fine_query, query_parent), (fine_key, key_parent) = (split_tiles(x, size) for x in coarse)
    fine = fine_query, fine_key
    if no_kernels(q.dtype.name, q.shape[-1], v.shape[-1]):
        return [_Visits.of("mixed", *fine, visible_tiles(mask, *fine))]
    kinds = tile_kinds(mask, *coarse)
    mixed = kinds.pop("mixed", None)
    visits = [_Visits.of(kind, *coarse, pairs) for kind, pairs in kinds.items()]
    if mixed is None:
        return visits
    if all(a.size == b.size for a, b in zip(coarse, fine, strict=True)):
        return [*visits, _Visits.of("mixed", *coarse, mixed)]
    mixed = mixed[query_parent[:, None], key_parent]
    kinds = tile_kinds(mask, *fine)
    return visits + [_Visits.of(kind, *fine, mixed & pairs) for kind, pairs in kinds.items()]


def tilings(mask: Mask, query_len: int, key_len: int) -> tuple[Tiling, Tiling]:
    """The coarse tiles of a pair of units, of one size where their lengths allow it."""
    query_runs = len(mask.query_runs.starts) if mask.query_runs else 1
    key_runs = len(mask.key_runs.starts) if mask.key_runs else 1
    size = Tiling.of(min(query_len // query_runs, key_len // key_runs), 1, COARSE).size
    return Tiling.of(query_len, query_runs, size), Tiling.of(key_len, key_runs, size)


def _zeros(
    like: Float[Array, "b t n h"], dim: int, visits: list[_Visits]
) -> Float32[Array, "b t n v"]:
    """Zeros to sum into, that vary over the manual mesh axes that the sums vary over.

    Computed from `like`, so that no scheduler sets them up, and holds their memory, before.
    """
    never = functools.reduce(jnp.logical_or, (x.count < 0 for x in visits))
    zeros = jnp.where(never, like[..., :1].astype(jnp.float32), 0.0)
    return jnp.broadcast_to(zeros, (*like.shape[:-1], dim))


def _attend(
    q: QueryShard, k: KeyShard, v: ValueShard, scale: float, visible: Bool[Array, "#b #t #s"] | None
) -> tuple[Float32[Array, "b t n v"], LseShard]:
    """`cudnn.attend` under any mask, the logits in memory; out in float32."""
    heads, dot = k.shape[2], _dot(q.dtype)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    logits = _masked(dot("bkrh,bksh->bkrs", _rows(q, heads), k) * scale, visible)
    # Where nothing is visible p is 0, and the total is set to 1; elsewhere it is at least 1.
    highest = jnp.maximum(logits.max(-1), EMPTY)
    p = jnp.exp(logits - highest[..., None])
    total = jnp.maximum(p.sum(-1), 1.0)
    out = dot("bkrs,bksv->bkrv", p.astype(v.dtype), v) / total[..., None]
    lse = rearrange(highest + jnp.log(total), "b k (g t) -> b (k g) t", t=q.shape[1])
    return rearrange(out, "b k (g t) v -> b t (k g) v", t=q.shape[1]), lse


def _gradients(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: LseShard,
    delta: LseShard,
    dout: OutShard,
    scale: float,
    visible: Bool[Array, "#b #t #s"] | None,
) -> tuple[Float32[Array, "b t n h"], Float32[Array, "b s k h"], Float32[Array, "b s k v"]]:
    """`cudnn.gradients` under any mask, the logits in memory; in float32, and for a given delta."""
    heads, dot = k.shape[2], _dot(q.dtype)
    rows, dout, k, v = _rows(q, heads), _rows(dout, heads), k.swapaxes(1, 2), v.swapaxes(1, 2)
    lse, delta = (rearrange(x, "b (k g) t -> b k (g t) 1", k=heads) for x in (lse, delta))
    logits = _masked(dot("bkrh,bksh->bkrs", rows, k) * scale, visible)
    p = jnp.exp(logits - lse)
    ds = (p * (dot("bkrv,bksv->bkrs", dout, v) - delta) * scale).astype(q.dtype)
    dq = rearrange(dot("bkrs,bksh->bkrh", ds, k), "b k (g t) h -> b t (k g) h", t=q.shape[1])
    dk, dv = dot("bkrs,bkrh->bksh", ds, rows), dot("bkrs,bkrv->bksv", p.astype(v.dtype), dout)
    return dq, dk.swapaxes(1, 2), dv.swapaxes(1, 2)


def _rows(x: Float[Array, "b t n h"], heads: int) -> Float[Array, "b k r h"]:
    """Queries by the key head that they share: they are rows of the same product."""
    return rearrange(x, "b t (k g) h -> b k (g t) h", k=heads)


def _masked(
    logits: Float32[Array, "b k r s"], visible: Bool[Array, "#b #t #s"] | None
) -> Float32[Array, "b k r s"]:
    """`logits`, -inf where the query does not see the key."""
    if visible is None:
        return logits
    split = rearrange(logits, "b k (g t) s -> b k g t s", t=visible.shape[1])
    return jnp.where(visible[:, None, None], split, -jnp.inf).reshape(logits.shape)


def _dot(dtype: jnp.dtype) -> Callable[..., Float32[Array, "..."]]:
    """einsum with sums in float32, and 16-bit operands as they are: a tensor core's product."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

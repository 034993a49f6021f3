"""Attention of a few new tokens to a cache whose slots are sharded over the sequence axes.

A cache holds the keys, or the values, of a sequence of S slots in the order of the layout, one slot
for each position: what sequence-parallel attention gets as key and value are the shards of a cache.
Where a slot lies follows from ranks and is never sent, and what is not visible from a position is
never read from its slot: slots above it need not be filled yet.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from startrail_jax import collectives
from startrail_jax.layout import Layout
from startrail_jax.mesh import Axis
from startrail_jax.shapes import EMPTY, KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.softmax import rows
from startrail_jax.varying import alike


def sharded_decode(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    positions: Int32[Array, "b t"],
    *,
    layout: Layout,
    ranks: Axis,
    window: int | None,
    scale: float | None,
) -> OutShard:
    """Attention of the same new tokens on all `ranks` to the slots of all of them.

    Each device attends to its own slots, in float32, and they merge what they found:

        L = log sum_r exp(lse_r),    out = sum_r exp(lse_r - L) out_r

    in two all_reduces, of one and of v + 1 float32 numbers for each query of each head. A device
    receives 2 (P - 1) / P * 4 * b * t * n * (v + 2) bytes, whatever the length of the cache.

    Args:
        q: the new tokens, replicated over `ranks`.
        k, v: this device's slots.
        positions: of the new tokens. Each sees the slots of its own position and below, the last
            `window` of them; one of negative position sees none.
        layout: of the cache.
        ranks: the flat sequence axis, over (group, ring, team, head).
        window: as of `Attention`.
        scale: of the logits; None for head_dim ** -0.5.

    Returns:
        out in the dtype of q, replicated over `ranks`; 0 where no slot is visible.
    """
    out, lse = _attend_slots(
        q, k, v, positions, _slot_positions(layout, ranks, k.shape[1]), window, scale
    )
    highest = collectives.maximum(lse, ranks)
    # Where all are EMPTY the weights are 1, and the outputs 0.
    weights = rows(jnp.exp(lse - highest))
    both = collectives.total(jnp.concatenate([out * weights, weights], axis=-1), ranks)
    return (both[..., :-1] / both[..., -1:]).astype(q.dtype)


def _attend_slots(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    positions: Int32[Array, "b t"],
    slots: Int32[Array, " s"],
    window: int | None,
    scale: float | None,
) -> tuple[Float32[Array, "b t n v"], LseShard]:
    """Dense attention to the visible ones of this device's slots; all in float32."""
    batch, length, heads, head_dim = q.shape
    groups = q.reshape(batch, length, k.shape[2], -1, head_dim).astype(jnp.float32)
    factor = head_dim**-0.5 if scale is None else scale
    distance = positions[:, :, None] - slots[None, None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    visible = visible[:, None, None]
    logits = _dot("btkgh,bskh->bkgts", groups, k) * factor
    logits = jnp.where(visible, logits, EMPTY)
    highest = logits.max(-1, keepdims=True)
    # An unfilled slot may hold anything finite. In a row that sees none, the weights must be 0.
    weights = jnp.where(visible, jnp.exp(logits - highest), 0.0)
    total = weights.sum(-1, keepdims=True)
    # The total of a row that sees a slot is at least 1.
    out = _dot("bkgts,bskv->btkgv", weights / jnp.maximum(total, 1.0), v)
    lse = jnp.where(total > 0, highest + jnp.log(jnp.maximum(total, 1.0)), EMPTY)
    out = out.reshape(batch, length, heads, v.shape[-1])
    return out, lse.reshape(batch, heads, length)


def _dot(formula: str, x: Float32[Array, "..."], y: Float[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.einsum(formula, x, y.astype(jnp.float32), precision="highest")


def write_slots(
    cache: Float[Array, "..."],
    new: Float[Array, "b t k h"],
    positions: Int32[Array, "b t"],
    *,
    layout: Layout,
    ranks: Axis,
    layer: Int32[Array, ""] | int | None = None,
) -> Float[Array, "..."]:
    """The cache with the slots of `positions` replaced, where this device has them.

    Nothing is sent, and XLA writes in place where the cache is donated or carried by a loop; on
    CPUs, which have no 16-bit floats, only one of float32.

    Args:
        cache: this device's slots [b s k h], or those of all layers, [layers b s k h].
        new: keys or values of the new tokens, replicated over `ranks`.
        positions: of the new tokens, distinct in each row; those that the cache does not have, as
            negative ones, are not written.
        layout: of the cache.
        ranks: the flat sequence axis, over (group, ring, team, head).
        layer: which of the layers, if the cache has those of all.
    """
    length = cache.shape[-3]
    runs = layout.unit_positions(length * layout.degree, 1, collectives.index(ranks))
    # One past the end: not written.
    slots = jnp.full_like(positions, length)
    for i, start in enumerate(runs.starts):
        turn, rest = jnp.divmod(positions - start, runs.stride)
        slot = turn * runs.block + rest
        inside = (positions >= start) & (rest < runs.block) & (slot < runs.length)
        slots = jnp.where(inside, i * runs.length + slot, slots)
    batch = jnp.arange(cache.shape[-4])[:, None]
    cache, new, slots = alike(cache, new.astype(cache.dtype), slots)
    index = (batch, slots) if layer is None else (layer, batch, slots)
    return cache.at[index].set(new, mode="drop")


def _slot_positions(layout: Layout, ranks: Axis, slots: int) -> Int32[Array, " s"]:
    """Position of each of this device's slots, in order."""
    rank = collectives.index(ranks)
    return layout.unit_positions(slots * layout.degree, 1, rank).vector()


def check_decode(
    query: Any,
    key: Any,
    value: Any,
    positions: Any,
    *,
    causal: bool,
    layout: Layout,
    slots: int,
) -> None:
    """Raises unless new tokens and a cache fit each other.

    Args:
        slots: of the whole cache, over all devices.

    Raises:
        ValueError: if shapes or dtypes do not fit, or the attention is not causal.
    """
    if not causal:
        raise ValueError(
            "decode needs a causal attention, as slots that are not filled yet must not be seen; "
            "got an instance with causal=False. Build Attention(mesh, causal=True)."
        )
    shapes = f"query {query.shape}, key_cache {key.shape}, value_cache {value.shape}"
    fits = (
        query.ndim == key.ndim == value.ndim == 4
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and key.shape[:3] == value.shape[:3]
        and 0 not in query.shape + key.shape + value.shape
        and query.shape[2] % key.shape[2] == 0
    )
    if not fits:
        raise ValueError(
            "query must be [batch, new, heads, head_dim], key_cache [batch, slots, kv_heads, "
            "head_dim] and value_cache [batch, slots, kv_heads, value_head_dim], and kv_heads "
            f"divide heads; got {shapes}. Correct the odd one out."
        )
    dtypes = [str(x.dtype) for x in (query, key, value)]
    if len(set(dtypes)) > 1:
        raise ValueError(
            "query, key_cache and value_cache must have one dtype; got "
            f"{', '.join(dtypes)}. Cast the query."
        )
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(
            f"query, key_cache and value_cache must be of a float dtype; got {dtypes[0]}. Cast "
            "them, to bfloat16 or float32."
        )
    _check_positions(positions, query.shape[:2])
    layout.check_length(slots, "slots")


def check_update(
    cache: Any, new: Any, positions: Any, *, layout: Layout, slots: int, layers: bool = False
) -> None:
    """Raises unless new keys or values fit a cache.

    Args:
        slots: of the whole cache, over all devices.
        layers: whether the cache is that of all layers.

    Raises:
        ValueError: if shapes do not fit, or positions are not int32.
    """
    shape = cache.shape[layers:]
    if not (
        len(shape) == new.ndim == 4 and (shape[0], *shape[2:]) == (new.shape[0], *new.shape[2:])
    ):
        raise ValueError(
            f"cache must be [{'layers, ' if layers else ''}batch, slots, kv_heads, head_dim] and "
            "new [batch, new, kv_heads, head_dim], alike but for the second; got cache "
            f"{cache.shape}, new {new.shape}. Correct the odd one out."
        )
    _check_positions(positions, new.shape[:2])
    layout.check_length(slots, "slots")


def _check_positions(positions: Any, shape: tuple[int, ...]) -> None:
    if positions.shape != shape or positions.dtype != jnp.int32:
        raise ValueError(
            f"positions must be int32 [batch, new] = {list(shape)}; got {positions.dtype} "
            f"{list(positions.shape)}. Give one for each new token of each row."
        )

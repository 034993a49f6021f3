"""Decoding: attention of a few new tokens to a KV cache that is sharded over the sequence axes.

A cache holds the keys, or the values, of a sequence in *slots*, one for each position, in the order
of the layout. So the key and value arrays of `Attention` can be used as a cache. Devices compute
where a slot lies, so positions are never sent. A query never reads slots after its own position, so
empty slots may hold any finite numbers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Int32

from startrail_jax.blocks.softmax import cap_logits, rows
from startrail_jax.calls.arguments import Arguments
from startrail_jax.calls.score_checks import check_per_head
from startrail_jax.calls.validation import check_decode, check_shardings, check_update, check_whole
from startrail_jax.devices.axes import flat_axis
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.rings import collectives
from startrail_jax.rings.sizes import check_heads
from startrail_jax.shapes import EMPTY, KeyShard, LseShard, QueryShard, ValueShard
from startrail_jax.tokens.layout import Runs
from startrail_jax.xla.varying import alike


@dataclass(frozen=True)
class Decoding(Arguments):
    """The methods of `Attention` that read and write a cache."""

    def decode(
        self,
        query: ArrayLike,
        key_cache: ArrayLike,
        value_cache: ArrayLike,
        positions: ArrayLike,
        *,
        slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
    ) -> Array:
        """Computes the attention of new tokens to a cache that is sharded over the sequence axes.

        The result is that of a call with the whole sequence: each token attends to itself and to
        all tokens before it. Each of the P sequence devices r attends to its own slots, in float32,
        and the results are merged:

            L = log sum_r exp(lse_r),    out = sum_r exp(lse_r - L) out_r

        This takes two all_reduces, of one and of v + 1 float32 numbers for each query of each head.
        A device receives 2 (P - 1) / P * 4 * b * t * n * (v + 2) bytes, whatever the length of the
        cache.

        Args:
            query: [batch, new, heads, head_dim] sharded as `decode_spec(heads)`, replicated over
                the sequence axes. `new` should be small, as all logits exist at once.
            key_cache: [batch, slots, kv_heads, head_dim] sharded as `key_spec(kv_heads)`, in the
                order of `layout`. It already holds the keys of `query`: see `update_cache`. Slots
                of padding in front of a prompt would be seen: leave padding out of the cache.
            value_cache: [batch, slots, kv_heads, value_head_dim], sharded like key_cache.
            positions: int32 [batch, new], the position of each query. A query sees the slots up to
                its own position that the mask shows. A query at a negative position sees no slot.
                Positions may lie beyond the last slot.
            slopes, sinks: as in a call.

        Returns:
            out [batch, new, heads, value_head_dim] in the dtype of query and sharded like it; 0
            where no slot is visible.

        Raises:
            ValueError: if this attention is not causal, or if shapes, dtypes or shardings do not
                fit.
        """
        check_whole(self.mesh)
        query, key, value = (jnp.asarray(x) for x in (query, key_cache, value_cache))
        arrays = (query, key, value, jnp.asarray(positions))
        check_decode(*arrays, mask=self.resolved_mask, layout=self.layout, slots=key.shape[1])
        check_heads(self.degrees, query.shape[2], key.shape[2])
        query_spec, key_spec = self.decode_spec(query.shape[2]), self.key_spec(key.shape[2])
        specs = (query_spec, key_spec, key_spec, PartitionSpec(query_spec[0]))
        names = ("query", "key_cache", "value_cache", "positions")
        check_shardings(names, arrays, specs, self.mesh)
        per_head = {
            name: check_per_head(name, values, query.shape[2])
            for name, values in (("slopes", slopes), ("sinks", sinks))
            if values is not None
        }
        return _decode(self, specs, per_head, *arrays)

    def decode_local(
        self,
        query: Array,
        key_cache: Array,
        value_cache: Array,
        positions: Array,
        sinks: Array | None = None,
        slopes: Array | None = None,
    ) -> Array:
        """Computes one device's part of `decode`, inside a fully manual `shard_map` of the caller.

        Args:
            query: the new tokens [b, t, n, h] of this device's rows and heads.
            key_cache, value_cache: this device's slots [b, s, k, h] and [b, s, k, v], with the key
                heads that its query heads need; neighbouring query heads share a key head.
            positions: int32 [b, t], the positions of the new tokens.
            sinks, slopes: floats [n] of this device's heads, as in a call.

        Returns:
            out [b, t, n, v] of this device's queries, in the dtype of query.

        Raises:
            ValueError: if this attention is not causal, or if shapes or dtypes do not fit.
        """
        check_decode(
            query,
            key_cache,
            value_cache,
            positions,
            mask=self.resolved_mask,
            layout=self.layout,
            slots=key_cache.shape[1] * self.degrees.sequence,
        )
        out, lse = self._attend_slots(query, key_cache, value_cache, positions, slopes)
        ranks = flat_axis(self.axes, SEQUENCE_ROLES)
        # Any number would do in its place, so that it needs no gradient.
        highest = collectives.maximum(jax.lax.stop_gradient(lse), ranks)
        # In a row that is EMPTY everywhere, all weights are 1 and scale outputs of 0.
        weights = rows(jnp.exp(lse - highest))
        both = collectives.total(jnp.concatenate([out * weights, weights], axis=-1), ranks)
        total = both[..., -1:]
        if sinks is not None:
            total += rows(jnp.exp(sinks.astype(jnp.float32)[None, :, None] - highest))
        return (both[..., :-1] / total).astype(query.dtype)

    def _attend_slots(
        self,
        q: QueryShard,
        k: KeyShard,
        v: ValueShard,
        positions: Int32[Array, "b t"],
        slopes: Float[Array, " n"] | None,
    ) -> tuple[Float32[Array, "b t n v"], LseShard]:
        """Dense attention to those of this device's slots that are visible, all in float32."""
        batch, length, heads, head_dim = q.shape
        slots = self._positions_of_slots(k.shape[1]).vector()
        # Positions are int32, also those beyond the slots.
        mask = self.resolved_mask.within(2**31)
        groups = q.reshape(batch, length, k.shape[2], -1, head_dim).astype(jnp.float32)
        factor = head_dim**-0.5 if self.scale is None else self.scale
        visible = mask.visible(positions[:, :, None], slots[None, None, :])[:, None, None]
        logits, _ = cap_logits(_dot("btkgh,bskh->bkgts", groups, k) * factor, self.softcap)
        if slopes is not None:
            far = jnp.abs(positions[:, :, None] - slots[None, None]).astype(jnp.float32)
            far = far[:, None, None]
            logits -= slopes.astype(jnp.float32).reshape(1, k.shape[2], -1, 1, 1) * far
        logits = jnp.where(visible, logits, EMPTY)
        highest = logits.max(-1, keepdims=True)
        # In a row that sees no slot, every logit is EMPTY, and its weights must be 0 all the same.
        weights = jnp.where(visible, jnp.exp(logits - highest), 0.0)
        total = weights.sum(-1, keepdims=True)
        # Slots that no query sees may hold anything, and a weight of 0 times NaN is NaN.
        v = jnp.where(visible.any((1, 2, 3))[..., None, None], v, 0)
        # The total of a row that sees a slot is at least 1.
        out = _dot("bkgts,bskv->btkgv", weights / jnp.maximum(total, 1.0), v)
        lse = jnp.where(total > 0, highest + jnp.log(jnp.maximum(total, 1.0)), EMPTY)
        out = out.reshape(batch, length, heads, v.shape[-1])
        return out, lse.reshape(batch, heads, length)

    def _positions_of_slots(self, slots: int) -> Runs:
        """The positions of this device's slots."""
        rank = collectives.index(flat_axis(self.axes, SEQUENCE_ROLES))
        return self.layout.unit_positions(slots * self.layout.degree, rank, 1)

    def _decode_on_device(
        self,
        per_head: dict[str, Array],
        query: Array,
        key: Array,
        value: Array,
        positions: Array,
        *,
        kv_heads: int,
    ) -> Array:
        """`decode_local`, after a choice of heads where all `kv_heads` lie on every device."""
        if kv_heads % self.degrees.tensor:
            tensor = self.axes["tensor"]
            needed = collectives.needed_heads(kv_heads, self.degrees.head, tensor)
            needed = needed[:: self.key_copies(kv_heads)]
            key, value = (
                collectives.copy_heads(x, needed, tensor).astype(x.dtype) for x in (key, value)
            )
        heads = query.shape[2]
        first = collectives.index(self.axes["tensor"]) * heads
        own = {
            name: jax.lax.dynamic_slice_in_dim(values, first, heads)
            for name, values in per_head.items()
        }
        return self.decode_local(query, key, value, positions, **own)

    def update_cache(self, cache: ArrayLike, new: ArrayLike, positions: ArrayLike) -> Array:
        """Writes the keys, or the values, of new tokens into their slots; nothing is sent.

        Args:
            cache: [batch, slots, kv_heads, head_dim] sharded as `key_spec(kv_heads)`. It is written
                in place in a `jit` to which it is donated (`donate_argnums`), and in a loop that
                carries it; on CPUs, which have no 16-bit floats, only if it is float32.
            new: [batch, new, kv_heads, head_dim], sharded like the cache, but replicated over the
                sequence axes.
            positions: int32 [batch, new], distinct in each row. Positions outside the cache are not
                written: give padding in front of a prompt negative ones, and count from 0 after it.

        Returns:
            The cache, with its sharding and dtype unchanged.

        Raises:
            ValueError: if shapes or shardings do not fit, or if positions are not int32.
        """
        check_whole(self.mesh)
        cache, new, positions = (jnp.asarray(x) for x in (cache, new, positions))
        check_update(cache, new, positions, layout=self.layout, slots=cache.shape[1])
        spec = self.key_spec(cache.shape[2])
        specs = (spec, PartitionSpec(spec[0], None, *spec[2:]), PartitionSpec(spec[0]))
        check_shardings(("cache", "new", "positions"), (cache, new, positions), specs, self.mesh)
        return _update(self, specs, cache, new, positions)

    def update_cache_local(
        self, cache: Array, new: Array, positions: Array, *, layer: Array | int | None = None
    ) -> Array:
        """Does one device's part of `update_cache`, inside a `shard_map` of the caller.

        Args:
            cache: this device's slots [b, s, k, h]; with a `layer`, those of all layers, [layers,
                b, s, k, h].
            new: keys or values of the new tokens [b, t, k, h], of this device's rows and key heads.
                They are cast to the dtype of the cache.
            positions: int32 [b, t], the positions of the new tokens.
            layer: the layer whose slots are written, if the cache has those of all layers.

        Returns:
            The cache.

        Raises:
            ValueError: if shapes do not fit, or if positions are not int32.
        """
        check_update(
            cache,
            new,
            positions,
            layout=self.layout,
            slots=cache.shape[-3] * self.degrees.sequence,
            layers=layer is not None,
        )
        length = cache.shape[-3]
        runs = self._positions_of_slots(length)
        # An index past the end is not written.
        slots = jnp.full_like(positions, length)
        for i, start in enumerate(runs.starts):
            slot = positions - start
            inside = (slot >= 0) & (slot < runs.length)
            slots = jnp.where(inside, i * runs.length + slot, slots)
        batch = jnp.arange(cache.shape[-4])[:, None]
        cache, new, slots = alike(cache, new.astype(cache.dtype), slots)
        index = (batch, slots) if layer is None else (layer, batch, slots)
        return cache.at[index].set(new, mode="drop")

    def decode_spec(self, heads: int) -> PartitionSpec:
        """PartitionSpec of the queries and outputs of `decode`: [batch, new, heads, head_dim].

        Raises:
            ValueError: if the heads cannot be split over `head` and `tensor`.
        """
        batch, _, split, _ = self.query_spec(heads)
        return PartitionSpec(batch, None, split, None)

    def key_copies(self, kv_heads: int) -> int:
        """How many neighbouring key heads in the input of `local` are copies of one head.

        There are copies only if `tensor` does not divide `kv_heads` and `head` is above 1. A cache
        needs only one copy of each head, `key[:, :, ::copies]`.
        """
        parts = self.degrees.head * self.degrees.tensor
        if kv_heads % self.degrees.tensor == 0:
            return 1
        return math.gcd(self.degrees.head, parts // kv_heads)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(
    attention: Decoding,
    specs: tuple[PartitionSpec, ...],
    per_head: dict[str, Array],
    *arrays: Array,
) -> Array:
    """`decode` of arrays that have been checked."""
    return jax.shard_map(
        functools.partial(attention._decode_on_device, kv_heads=arrays[1].shape[2]),
        mesh=attention.mesh,
        in_specs=(PartitionSpec(), *specs),
        out_specs=specs[0],
    )(per_head, *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _update(attention: Decoding, specs: tuple[PartitionSpec, ...], *arrays: Array) -> Array:
    """`update_cache` of arrays that have been checked."""
    return jax.shard_map(
        attention.update_cache_local, mesh=attention.mesh, in_specs=specs, out_specs=specs[0]
    )(*arrays)


def _dot(formula: str, x: Float32[Array, "..."], y: Float[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.einsum(formula, x, y.astype(jnp.float32), precision="highest")

"""Decoding: attention of a few new tokens to a KV cache that is sharded over the sequence axes.

A cache holds the keys, or the values, of a sequence in *slots*, one for each position, in the order
of the layout. So the key and value arrays of `Attention` can be used as a cache. Devices compute
where a slot lies, so positions are never sent. A query never reads slots after its own position, so
empty slots may hold any finite numbers.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from startrail_jax.blocks.shapes import EMPTY, KeyShard, LseShard, QueryShard, ValueShard
from startrail_jax.blocks.softmax import cap_logits, rows
from startrail_jax.calls.score_checks import check_per_head
from startrail_jax.calls.sharding import Sharded
from startrail_jax.calls.trees import check_trees, ends_of_slots
from startrail_jax.calls.validation import check_decode, check_shardings, check_update, check_whole
from startrail_jax.devices.axes import flat_axis
from startrail_jax.devices.degrees import SEQUENCE_ROLES, Degrees
from startrail_jax.rings import collectives
from startrail_jax.rings.branches import hidden_between
from startrail_jax.rings.schedule import Schedule, for_trees
from startrail_jax.rings.sizes import check_heads
from startrail_jax.tokens.layout import Runs
from startrail_jax.xla.varying import alike


def decode_spec(attention: Sharded, heads: int) -> PartitionSpec:
    """`Attention.decode_spec`."""
    batch, _, split, _ = attention.query_spec(heads)
    return PartitionSpec(batch, None, split, None)


def key_copies(degrees: Degrees, kv_heads: int) -> int:
    """`Attention.key_copies`."""
    parts = degrees.head * degrees.tensor
    if kv_heads % degrees.tensor == 0:
        return 1
    return math.gcd(degrees.head, parts // kv_heads)


def decode(
    attention: Sharded,
    schedule: Schedule,
    *given: ArrayLike,
    visible_until: ArrayLike | None,
    **per_head: ArrayLike | None,
) -> Array:
    """`Attention.decode`: `given` are query, key_cache, value_cache and positions."""
    check_whole(attention.mesh)
    if visible_until is not None:
        check_trees(schedule.mask, segment_ids=None, slopes=per_head.get("slopes"))
    arrays = tuple(jnp.asarray(x) for x in given)
    query, key = arrays[:2]
    check_decode(*arrays, mask=schedule.mask, layout=attention.layout, slots=key.shape[1])
    heads, kv_heads = query.shape[2], key.shape[2]
    check_heads(attention.degrees, heads, kv_heads)
    query_spec, key_spec = decode_spec(attention, heads), attention.key_spec(kv_heads)
    specs = (query_spec, key_spec, key_spec, PartitionSpec(query_spec[0]))
    names = ("query", "key_cache", "value_cache", "positions", "visible_until")
    if visible_until is not None:
        arrays += (ends_of_slots(visible_until, key.shape[:2]),)
        specs += (attention.sequence_spec,)
    check_shardings(names, arrays, specs, attention.mesh)
    found = {
        name: check_per_head(name, values, heads)
        for name, values in per_head.items()
        if values is not None
    }
    return _decode(attention, schedule, specs, found, *arrays)


def decode_shards(
    attention: Sharded,
    schedule: Schedule,
    query: Array,
    key_cache: Array,
    value_cache: Array,
    positions: Array,
    sinks: Array | None = None,
    slopes: Array | None = None,
    visible_until: Array | None = None,
) -> Array:
    """`Attention.decode_local`."""
    ends = None
    if visible_until is not None:
        check_trees(schedule.mask, segment_ids=None, slopes=slopes)
        ends = ends_of_slots(visible_until, key_cache.shape[:2])
        schedule = for_trees(schedule)
    check_decode(
        query,
        key_cache,
        value_cache,
        positions,
        mask=schedule.mask,
        layout=attention.layout,
        slots=key_cache.shape[1] * attention.degrees.sequence,
    )
    arrays = query, key_cache, value_cache, positions
    found = attend_slots(attention, schedule, *arrays, slopes, ends)
    return merge_slots(attention, *found, sinks).astype(query.dtype)


def merge_slots(
    attention: Sharded,
    out: Float32[Array, "b t n v"],
    lse: LseShard,
    sinks: Float[Array, " n"] | None = None,
) -> Float32[Array, "b t n v"]:
    """The attention to the slots of all devices, from what each found in its own."""
    ranks = flat_axis(attention.axes, SEQUENCE_ROLES)
    # Any number would do in its place, so that it needs no gradient.
    highest = collectives.maximum(jax.lax.stop_gradient(lse), ranks)
    # In a row that is EMPTY everywhere, all weights are 1 and scale outputs of 0.
    weights = rows(jnp.exp(lse - highest))
    both = collectives.total(jnp.concatenate([out * weights, weights], axis=-1), ranks)
    total = both[..., -1:]
    if sinks is not None:
        total += rows(jnp.exp(sinks.astype(jnp.float32)[None, :, None] - highest))
    return both[..., :-1] / total


def update(attention: Sharded, cache: ArrayLike, new: ArrayLike, positions: ArrayLike) -> Array:
    """`Attention.update_cache`."""
    check_whole(attention.mesh)
    cache, new, positions = (jnp.asarray(x) for x in (cache, new, positions))
    check_update(cache, new, positions, layout=attention.layout, slots=cache.shape[1])
    spec = attention.key_spec(cache.shape[2])
    specs = (spec, PartitionSpec(spec[0], None, *spec[2:]), PartitionSpec(spec[0]))
    names = ("cache", "new", "positions")
    check_shardings(names, (cache, new, positions), specs, attention.mesh)
    return _update(attention, specs, cache, new, positions)


def update_shards(
    attention: Sharded,
    cache: Array,
    new: Array,
    positions: Array,
    layer: Array | int | None = None,
) -> Array:
    """`Attention.update_cache_local`."""
    check_update(
        cache,
        new,
        positions,
        layout=attention.layout,
        slots=cache.shape[-3] * attention.degrees.sequence,
        layers=layer is not None,
    )
    length = cache.shape[-3]
    runs = _positions_of_slots(attention, length)
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


def attend_slots(
    attention: Sharded,
    schedule: Schedule,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    positions: Int32[Array, "b t"],
    slopes: Float[Array, " n"] | None,
    ends: Int32[Array, "b s"] | None,
) -> tuple[Float32[Array, "b t n v"], LseShard]:
    """Dense attention to those of this device's slots that are visible, all in float32."""
    batch, length, heads, head_dim = q.shape
    slots = _positions_of_slots(attention, k.shape[1]).vector()
    groups = q.reshape(batch, length, k.shape[2], -1, head_dim).astype(jnp.float32)
    factor = head_dim**-0.5 if schedule.scale is None else schedule.scale
    visible = _visible(attention, schedule, positions, slots, ends)[:, None, None]
    logits, _ = cap_logits(float32_dot("btkgh,bskh->bkgts", groups, k) * factor, schedule.softcap)
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
    out = float32_dot("bkgts,bskv->btkgv", weights / jnp.maximum(total, 1.0), v)
    lse = jnp.where(total > 0, highest + jnp.log(jnp.maximum(total, 1.0)), EMPTY)
    out = out.reshape(batch, length, heads, v.shape[-1])
    return out, lse.reshape(batch, heads, length)


def _visible(
    attention: Sharded,
    schedule: Schedule,
    positions: Int32[Array, "b t"],
    slots: Int32[Array, " s"],
    ends: Int32[Array, "b s"] | None,
) -> Bool[Array, "b t s"]:
    """Whether each new token sees each of this device's slots."""
    new, old = positions[:, :, None], slots[None, None, :]
    # Positions are int32, also those beyond the slots.
    seen = schedule.mask.within(2**31).visible(new, old)
    if ends is None:
        return seen
    seen &= new < ends[:, None, :]
    if schedule.near is not None:
        ranks = flat_axis(attention.axes, SEQUENCE_ROLES)
        hidden = hidden_between(ends, positions, attention.layout, ranks)
        seen &= new - old - hidden < schedule.near
    return seen


def _positions_of_slots(attention: Sharded, slots: int) -> Runs:
    """The positions of this device's slots."""
    rank = collectives.index(flat_axis(attention.axes, SEQUENCE_ROLES))
    return attention.layout.unit_positions(slots * attention.layout.degree, rank, 1)


def _decode_on_device(
    attention: Sharded,
    schedule: Schedule,
    kv_heads: int,
    per_head: dict[str, Array],
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    visible_until: Array | None = None,
) -> Array:
    """`decode_shards`, after a choice of heads where all `kv_heads` lie on every device."""
    degrees, tensor = attention.degrees, attention.axes["tensor"]
    if kv_heads % degrees.tensor:
        needed = collectives.needed_heads(kv_heads, degrees.head, tensor)
        needed = needed[:: key_copies(degrees, kv_heads)]
        key, value = (
            collectives.copy_heads(x, needed, tensor).astype(x.dtype) for x in (key, value)
        )
    heads = query.shape[2]
    first = collectives.index(tensor) * heads
    own = {
        name: jax.lax.dynamic_slice_in_dim(values, first, heads)
        for name, values in per_head.items()
    }
    arrays = query, key, value, positions
    return decode_shards(attention, schedule, *arrays, **own, visible_until=visible_until)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(
    attention: Sharded,
    schedule: Schedule,
    specs: tuple[PartitionSpec, ...],
    per_head: dict[str, Array],
    *arrays: Array,
) -> Array:
    """`decode` of arrays that have been checked."""
    return jax.shard_map(
        functools.partial(_decode_on_device, attention, schedule, arrays[1].shape[2]),
        mesh=attention.mesh,
        in_specs=(PartitionSpec(), *specs),
        out_specs=specs[0],
    )(per_head, *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _update(attention: Sharded, specs: tuple[PartitionSpec, ...], *arrays: Array) -> Array:
    """`update` of arrays that have been checked."""
    return jax.shard_map(
        functools.partial(update_shards, attention),
        mesh=attention.mesh,
        in_specs=specs,
        out_specs=specs[0],
    )(*arrays)


def float32_dot(
    formula: str, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float32[Array, "..."]:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(formula, x, y, precision="highest")

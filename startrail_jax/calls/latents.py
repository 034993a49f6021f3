"""Calls with latents in place of keys and values: see `startrail_jax.rings.latents`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from startrail_jax.blocks.shapes import LatentShard, OutShard, QueryShard
from startrail_jax.calls.cache import attend_slots, decode_spec, float32_dot, merge_slots
from startrail_jax.calls.sharding import Sharded
from startrail_jax.calls.trees import check_trees, ends_of_slots
from startrail_jax.calls.validation import (
    DTYPES,
    check_causal_decode,
    check_positions,
    check_segments,
    check_shardings,
    check_whole,
    segment_arrays,
)
from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError
from startrail_jax.masks import Mask
from startrail_jax.rings.latents import Expansion
from startrail_jax.rings.schedule import Schedule, for_trees
from startrail_jax.rings.score_units import ScoreInputs
from startrail_jax.rings.sizes import Sizes
from startrail_jax.tokens.layout import Layout

_NAMES = ("query", "latent", "rotated_key", "key_kernel", "value_kernel")


def latent_call(
    attention: Sharded, mask: Mask, arrays: tuple[Any, ...], segment_ids: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...], ScoreInputs, ScoreInputs]:
    """The inputs of a call with latents, checked, in the form of one with keys and values; the
    specs of these; the matrices; and their specs. `arrays` are those of `_NAMES`."""
    given: list[Any] = [None if x is None else jnp.asarray(x) for x in arrays]
    query, latent, rotated, *kernels = given
    check_latents(*given, degrees=attention.degrees, layout=attention.layout, mask=mask)
    ids = segment_arrays(attention, (query, latent), attention.mark_padding(segment_ids))
    check_segments(query, latent, ids)
    query_spec, tokens = attention.query_spec(query.shape[2]), attention.sequence_spec
    of_heads = PartitionSpec(None, query_spec[2], None)
    specs = query_spec, tokens, tokens, of_heads, of_heads
    shown = [x for x in zip(_NAMES, given, specs, strict=True) if x[1] is not None]
    shown += [("segment_ids", x, tokens) for x in ids]
    names, shown_arrays, shown_specs = zip(*shown, strict=True)
    check_shardings(names, shown_arrays, shown_specs, attention.mesh)
    key_spec = attention.key_spec(1)
    inputs = query, attention.placed(joined(latent, rotated), key_spec), None, *ids
    expansion = Expansion.of(*kernels)
    of_inputs = query_spec, key_spec, None, *(tokens for _ in ids)
    specs_of_kernels: Any = (of_heads, of_heads)
    of_expansion = Expansion(*specs_of_kernels)
    given_specs = ScoreInputs(expansion=of_expansion)
    return inputs, of_inputs, ScoreInputs(expansion=expansion), given_specs


def joined(latent: Float[Array, "b s r"], rotated: Float[Array, "b s e"] | None) -> LatentShard:
    """Latents and the rotated parts of their keys, as one key head."""
    parts = [latent] if rotated is None else [latent, rotated]
    return jnp.concatenate(parts, -1)[:, :, None]


def check_latents(
    query: Any,
    latent: Any,
    rotated: Any,
    key_kernel: Any,
    value_kernel: Any,
    *,
    degrees: Degrees,
    layout: Layout,
    mask: Mask,
    shards: bool = False,
) -> None:
    """Raises a ValueError unless the arrays of a call fit each other, the layout and the mesh. If
    `shards`, they are those of one device."""
    arrays = query, latent, rotated, key_kernel, value_kernel
    if not _fit(*arrays):
        shapes = ", ".join(
            f"{name} {None if x is None else [*x.shape]}"
            for name, x in zip(_NAMES, arrays, strict=True)
        )
        raise InputError(
            "query must be [batch, seq, heads, head_dim], latent [batch, kv_seq, rank], key_kernel "
            "[rank, heads, channels], value_kernel [rank, heads, value_head_dim], and rotated_key "
            "[batch, kv_seq, head_dim - channels], or None if that is 0; got "
            f"{shapes}. Correct the odd one out."
        )
    dtypes = [str(x.dtype) for x in arrays[:3] if x is not None]
    of_kernels = [x.dtype for x in arrays[3:]]
    floats = all(jnp.issubdtype(x, jnp.floating) for x in of_kernels)
    if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES or not floats:
        raise InputError(
            f"query, latent and rotated_key must have one dtype of {DTYPES}, and the kernels be "
            f"floats; got {', '.join(map(str, (*dtypes, *of_kernels)))}. Cast them."
        )
    times = (degrees.data, degrees.sequence, degrees.tensor) if shards else (1, 1, 1)
    Sizes(
        batch=query.shape[0] * times[0],
        query_tokens=query.shape[1] * times[1],
        key_tokens=latent.shape[1] * times[1],
        heads=query.shape[2] * times[2],
        kv_heads=1,
        head_dim=query.shape[3],
        value_head_dim=value_kernel.shape[2],
        dtype=dtypes[0],
        packed=False,
    ).check(degrees, mask=mask, layout=layout)


def _fit(query: Any, latent: Any, rotated: Any, key_kernel: Any, value_kernel: Any) -> bool:
    if (query.ndim, latent.ndim, key_kernel.ndim, value_kernel.ndim) != (4, 3, 3, 3):
        return False
    left = query.shape[3] - key_kernel.shape[2]
    wanted = (*latent.shape[:2], left) if left else None
    return (
        query.shape[0] == latent.shape[0]
        and (None if rotated is None else rotated.shape) == wanted
        and key_kernel.shape[:2] == value_kernel.shape[:2] == (latent.shape[2], query.shape[2])
        and 0 not in (*query.shape, *latent.shape, *key_kernel.shape, *value_kernel.shape)
    )


def decode_latents(
    attention: Sharded, schedule: Schedule, *given: ArrayLike, visible_until: ArrayLike | None
) -> Array:
    """`Attention.latent_decode`: `given` are query, cache, positions, key_kernel, value_kernel."""
    check_whole(attention.mesh)
    arrays = tuple(jnp.asarray(x) for x in given)
    query, cache, *_ = arrays
    _check_cache(*arrays, mask=schedule.mask)
    attention.layout.check_length(cache.shape[1], "slots")
    query_spec = decode_spec(attention, query.shape[2])
    of_heads = PartitionSpec(None, query_spec[2], None)
    of_rows = PartitionSpec(query_spec[0])
    specs = (query_spec, attention.key_spec(1), of_rows, of_heads, of_heads)
    names = ("query", "cache", "positions", "key_kernel", "value_kernel", "visible_until")
    if visible_until is not None:
        check_trees(schedule.mask, segment_ids=None, slopes=None)
        arrays += (ends_of_slots(visible_until, cache.shape[:2]),)
        specs += (attention.sequence_spec,)
    check_shardings(names, arrays, specs, attention.mesh)
    return _decode(attention, schedule, specs, *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(
    attention: Sharded, schedule: Schedule, specs: tuple[PartitionSpec, ...], *arrays: Array
) -> Array:
    """`decode_latents` of arrays that have been checked."""
    return jax.shard_map(
        functools.partial(decode_latent_shards, attention, schedule),
        mesh=attention.mesh,
        in_specs=specs,
        out_specs=specs[0],
    )(*arrays)


def decode_latent_shards(
    attention: Sharded,
    schedule: Schedule,
    query: QueryShard,
    cache: LatentShard,
    positions: Int32[Array, "b t"],
    key_kernel: Float[Array, "r n d"],
    value_kernel: Float[Array, "r n v"],
    visible_until: Int32[Array, "b s"] | None = None,
) -> OutShard:
    """`Attention.latent_decode_local`. Queries are brought to the latents, which stay as they are,
    and what is found is brought to values before it is sent."""
    _check_cache(query, cache, positions, key_kernel, value_kernel, mask=schedule.mask)
    attention.layout.check_length(cache.shape[1] * attention.degrees.sequence, "slots")
    if schedule.scale is None:
        schedule = dataclasses.replace(schedule, scale=query.shape[3] ** -0.5)
    ends = None
    if visible_until is not None:
        check_trees(schedule.mask, segment_ids=None, slopes=None)
        ends, schedule = ends_of_slots(visible_until, cache.shape[:2]), for_trees(schedule)
    rank, _, channels = key_kernel.shape
    absorbed = float32_dot("btnd,rnd->btnr", query[..., :channels], key_kernel)
    rows = jnp.concatenate([absorbed, query[..., channels:].astype(jnp.float32)], -1)
    values = cache[..., :rank]
    out, lse = attend_slots(attention, schedule, rows, cache, values, positions, None, ends)
    out = float32_dot("btnr,rnv->btnv", out, value_kernel)
    return merge_slots(attention, out, lse).astype(query.dtype)


def _check_cache(
    query: Any, cache: Any, positions: Any, key_kernel: Any, value_kernel: Any, *, mask: Mask
) -> None:
    check_causal_decode(mask)
    latent = rotated = None
    if cache.ndim == 4 and cache.shape[2] == 1 and key_kernel.ndim == 3:
        rank = key_kernel.shape[0]
        latent, rotated = cache[:, :, 0, :rank], cache[:, :, 0, rank:]
        rotated = rotated if rotated.shape[2] else None
    if latent is None or not _fit(query, latent, rotated, key_kernel, value_kernel):
        shapes = ", ".join(str([*x.shape]) for x in (query, cache, key_kernel, value_kernel))
        raise InputError(
            "query must be [batch, new, heads, head_dim], cache [batch, slots, 1, rank + rotary], "
            "key_kernel [rank, heads, head_dim - rotary] and value_kernel [rank, heads, "
            f"value_head_dim]; got {shapes}. Correct the odd one out."
        )
    dtypes = [str(x.dtype) for x in (query, cache)]
    if len(set(dtypes)) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise InputError(
            f"query and cache must have one dtype of floats; got {', '.join(dtypes)}. Cast the "
            "query."
        )
    check_positions(positions, query.shape[:2])

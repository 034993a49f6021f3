"""The short causal convolution in front of linear attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32, Int32, Shaped

from startrail_jax.calls.sharding import Sharded
from startrail_jax.devices.axes import flat_axis
from startrail_jax.devices.degrees import SEQUENCE_ROLES, Axis
from startrail_jax.errors import InputError
from startrail_jax.linear.forks import Forks, forks_of
from startrail_jax.linear.halo import (
    begins,
    kept,
    numbers_of_slices,
    of_all_slices,
    slices_and_before,
)
from startrail_jax.linear.on_devices import heads_spec
from startrail_jax.rings import collectives
from startrail_jax.xla.varying import alike


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_conv(
    attention: Sharded, returns_last: bool, levels: int, *arrays: Any
) -> tuple[Array, Any]:
    """The convolution of whole arrays on the devices of the mesh, after all checks: the outputs,
    and the last inputs or None. The arrays are x, kernel, what stands before x, and segment ids, or
    `visible_until` with levels."""
    x = arrays[0]
    data, seq, *rest = heads_spec(attention, x.shape[2], x.ndim)
    spec, beside = PartitionSpec(data, seq, *rest), PartitionSpec(data, None, *rest)
    return jax.shard_map(
        functools.partial(conv_of_shards, attention, returns_last, levels),
        mesh=attention.mesh,
        in_specs=(spec, PartitionSpec(None, *rest), beside, attention.sequence_spec),
        out_specs=(spec, beside if returns_last else None),
    )(*arrays)


def conv_of_shards(
    attention: Sharded,
    returns_last: bool,
    levels: int,
    x: Array,
    kernel: Array,
    first: Array,
    ids: Array | None,
) -> tuple[Array, Any]:
    """What one device computes of a convolution."""
    zigzag, axis = attention.layout.kind == "zigzag", flat_axis(attention.axes, SEQUENCE_ROLES)
    # In float32, for the sum of its gradient over devices.
    x, kernel, first, ids = alike(x, kernel.astype(jnp.float32), first, ids)
    here = x.shape[1] // (2 if zigzag else 1)
    if here < first.shape[1] and not levels:
        raise InputError(
            "Each slice of a device must have at least width - 1 tokens; got "
            f"{here}, width={len(kernel)}. Use fewer devices."
        )
    x = x if ids is None else kept(ids >= 0, x)
    if levels and ids is not None:
        forks = forks_of(ids, attention.layout, axis, levels)
        out = conv_of_forks(axis, x, kernel, forks)
    else:
        out = conv_on_device(zigzag, axis, x, kernel, ids, first)
    out = out if ids is None else kept(ids >= 0, out)
    if not returns_last:
        return out, None
    ids = jnp.zeros_like(x, jnp.int32, shape=x.shape[:2]) if ids is None else ids
    return out, last_inputs(attention, axis, x, ids, first)


def conv_on_device(
    zigzag: bool,
    axis: Axis,
    x: Shaped[Array, "b t *m"],
    kernel: Shaped[Array, "w *m"],
    ids: Int32[Array, "b t"] | None,
    first: Shaped[Array, "b e *m"],
) -> Shaped[Array, "b t *m"]:
    """out_t = sum_i kernel_i x_{t - w + 1 + i}, in float32, where `first` stands before x_0. Inputs
    of other documents count as zeros; those of padding are zeros."""
    extra = first.shape[1]
    number = None
    if ids is not None:
        own, before = slices_and_before(ids, _no_ids(ids, extra), axis, zigzag=zigzag)
        number = _documents(jnp.concatenate([before, own], 2))
    # In float32, in which gradients are summed; messages have the type of x.
    own, before = slices_and_before(x, first, axis, zigzag=zigzag, dtype=jnp.float32)

    def filled(y: Array, front: int, back: int) -> Array:
        return jnp.pad(y, [(0, 0)] * 2 + [(front, back)] + [(0, 0)] * (y.ndim - 3))

    # Each token's gradient is then one sum, which XLA rounds as it is made: of an array with all
    # inputs, it would keep the float32 gradient for both of its parts.
    out = _summed(filled(own, extra, 0), kernel, number)
    at_edge = None if number is None else number[..., : 2 * extra]
    edge = _summed(filled(before, 0, extra), kernel, at_edge)
    out = out + filled(edge, 0, out.shape[2] - extra)
    return out.astype(x.dtype).reshape(x.shape)


def conv_of_forks(
    axis: Axis,
    x: Shaped[Array, "b t *m"],
    kernel: Shaped[Array, "w *m"],
    forks: Forks,
) -> Shaped[Array, "b t *m"]:
    """The same in trees: the tokens before one are those that it continues.

    All devices gather the last tokens of each slot at the end of every slice.
    """
    (b, t), width = x.shape[:2], len(kernel)
    levels, slices, extra = forks.open_ends.shape[2], forks.open_ends.shape[1], width - 1
    flat = x.reshape(b, slices, t // slices, -1)
    places, ends, slots, fresh = (
        y.reshape(b, slices, -1) for y in (forks.places, forks.ends, forks.slots, forks.fresh)
    )
    before = flat[:, :, :0]
    if extra:
        before = _tails_before(axis, flat, places, ends, forks, extra)
    # Where the token before each one is: first the tails of all slots, then the tokens, then none.
    size, first = places.shape[2], levels * extra
    none = first + size
    real, index = ends > places, jnp.arange(size, dtype=jnp.int32)[None, None]
    latest = jnp.full_like(slots, none)
    for level in range(levels):
        here = lax.cummax(jnp.where(real & (slots == level), index, -1), axis=2)
        here = jnp.concatenate([jnp.full_like(here[..., :1], -1), here[..., :-1]], 2)
        here = jnp.where(here < 0, level * extra if extra else none, first + here)
        latest = jnp.where(slots - fresh == level, here, latest)
    number = np.arange(first)
    tails = np.where((number + 1) % max(extra, 1) == 0, none, number + 1).astype(np.int32)
    tails = jnp.broadcast_to(jnp.asarray(tails)[None, None], (b, slices, first))
    end = jnp.full_like(latest[..., :1], none)
    earlier = jnp.concatenate([*alike(tails, latest)[:1], latest, end], 2)
    inputs = jnp.concatenate([before, flat, jnp.zeros_like(flat[:, :, :1])], 2)
    weights = kernel.astype(jnp.float32).reshape(width, 1, 1, 1, -1)
    where = jnp.broadcast_to(first + index, slots.shape)
    out = jnp.zeros(flat.shape, jnp.float32)
    for weight in weights[::-1]:
        term = jnp.take_along_axis(inputs, where[..., None], 2)
        out = out + weight * term.astype(jnp.float32)
        where = jnp.take_along_axis(earlier, where, 2)
    out = out + forks.nan
    return out.astype(x.dtype).reshape(x.shape)


def _tails_before(
    axis: Axis,
    x: Shaped[Array, "b s t c"],
    places: Int32[Array, "b s t"],
    ends: Int32[Array, "b s t"],
    forks: Forks,
    extra: int,
) -> Shaped[Array, "b s de c"]:
    """The last tokens of each slot before each slice, the last one first, and zeros for none."""
    open_ends, own, spine = forks.open_ends, forks.left_open, forks.left_open_by_all
    b, slices, levels = open_ends.shape
    # Of each slice, the last tokens of the branch to each node that is still seen.
    on = (ends[:, :, None] >= own[..., None]) & (own[..., None] >= 0)
    found = _last_of(x[:, :, None], places[:, :, None], on, extra)
    tails, at = (of_all_slices(y, axis) for y in found)
    # Of each slot and each slice before, the branch to the innermost node that holds the slot.
    earlier = jnp.arange(len(spine))[None] < numbers_of_slices(axis, slices)[:, None]
    seen = spine[:, :, None, None] >= jnp.where(open_ends < 0, _MOST, open_ends)[None, ..., None]
    innermost = seen & ~jnp.pad(seen[..., 1:], [(0, 0)] * 4 + [(0, 1)])
    innermost &= earlier.T[:, None, :, None, None]  # [all slices, b, s, d, levels]
    there = innermost[..., None] & (at[:, :, None, None] >= 0)
    order = jnp.broadcast_to(at[:, :, None, None], there.shape)
    rows = (jnp.moveaxis(y, 0, 3).reshape(b, slices, levels, -1) for y in (there, order))
    inputs = jnp.moveaxis(tails, 0, 1).reshape(b, 1, 1, -1, tails.shape[-1])
    there, order = rows
    found, _ = _last_of(inputs, order, there, extra)
    return found.reshape(b, slices, levels * extra, -1)


_MOST = np.iinfo(np.int32).max


def _last_of(
    x: Shaped[Array, "b #s #d t c"], order: Int32[Array, "b s #d t"], mask: Array, count: int
) -> tuple[Array, Array]:
    """The tokens where a mask [b, s, d, t] holds that come last in order, the last one first:
    [b, s, d, count, c]; and their order, -1 for one that is not there."""
    found, at, order = [], [], jnp.where(mask, order, -1)
    row = jnp.arange(len(mask)).reshape(-1, 1, 1)
    s = jnp.arange(x.shape[1]).reshape(1, -1, 1)
    d = jnp.arange(x.shape[2]).reshape(1, 1, -1)
    for _ in range(count):
        best = order.argmax(-1)
        last = order.max(-1)
        found.append(kept(last >= 0, x[row, s, d, best]))
        at.append(last)
        order = jnp.where(order == last[..., None], -1, order)
    return jnp.stack(found, 3), jnp.stack(at, 3)


def conv_of_all(
    x: Shaped[Array, "b t *m"], kernel: Shaped[Array, "w *m"], first: Shaped[Array, "b e *m"]
) -> tuple[Shaped[Array, "b t *m"], Shaped[Array, "b e *m"]]:
    """The convolution of tokens that are all here, and the last inputs."""
    inputs = jnp.concatenate([first, x], 1)
    out = _summed(inputs[:, None].astype(jnp.float32), kernel, None)
    out = out.astype(x.dtype).reshape(x.shape)
    return out, inputs[:, inputs.shape[1] - first.shape[1] :]


def _summed(
    inputs: Float32[Array, "b s et *m"],
    kernel: Shaped[Array, "w *m"],
    number: Int32[Array, "_ _ et"] | None,
) -> Float32[Array, "b s t *m"]:
    extra, kernel = kernel.shape[0] - 1, kernel.astype(jnp.float32)
    t = inputs.shape[2] - extra
    out = jnp.zeros((*inputs.shape[:2], t, *inputs.shape[3:]), jnp.float32)
    for i in range(extra + 1):
        weight = kernel[i].reshape(1, 1, 1, *kernel.shape[1:])
        term = inputs[:, :, i : i + t]
        if number is not None:
            term = kept(number[..., i : i + t] == number[..., extra:], term)
        out = out + weight * term
    return out


def last_inputs(
    attention: Sharded,
    axis: Axis,
    x: Shaped[Array, "b t *m"],
    ids: Int32[Array, "b t"],
    first: Shaped[Array, "b e *m"],
) -> Shaped[Array, "b e *m"]:
    """The inputs up to the last token that is no padding, of its document; zeros before."""
    t, extra = ids.shape[1], first.shape[1]
    rank = collectives.index(axis)
    layout = attention.layout
    places = layout.unit_positions(t * layout.degree, rank, 1).vector()
    end = collectives.maximum(jnp.where(ids >= 0, places[None], -1).max(1), axis)
    wanted = end[:, None] + jnp.arange(1 - extra, 1, dtype=jnp.int32)[None]
    here = wanted[:, :, None] == places[None, None]

    def found(y: Array, before: Array) -> Array:
        own = kept(here, y[:, None]).sum(2, dtype=y.dtype)
        place = (wanted + extra).clip(0, extra - 1)
        before = jax.vmap(lambda x, i: x[i])(before, place)
        before = kept((wanted < 0) & (rank == 0), before)
        return collectives.total(own + before, axis)

    number = _documents(found(ids, _no_ids(ids, extra)))
    last = found(x, first)
    return kept(number == number[:, -1:], last)


def _documents(ids: Array) -> Array:
    """Numbers of the documents of neighbouring tokens, among which padding begins none."""
    return jnp.cumsum(begins(ids, jnp.full_like(ids[..., 0], -1)), -1, dtype=jnp.int32)


def _no_ids(ids: Array, extra: int) -> Array:
    """Those of what stands before the first token, which has its document."""
    return jnp.full_like(ids, -1, shape=(len(ids), extra))

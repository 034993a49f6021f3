"""A call of linear attention on the devices of a mesh: from whole arrays to those of a device."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from startrail_jax.calls.sharding import Sharded
from startrail_jax.devices.degrees import Axis
from startrail_jax.linear.block import LinearCall
from startrail_jax.linear.checks import check_served
from startrail_jax.linear.forks import forks_of
from startrail_jax.linear.halo import begins, ids_before, kept
from startrail_jax.linear.vjp import decode, linear_attention
from startrail_jax.rings import collectives
from startrail_jax.xla.varying import vary


def heads_spec(attention: Sharded, heads: int, ndim: int) -> PartitionSpec:
    """`LinearAttention.heads_spec`."""
    return PartitionSpec(*attention.key_spec(heads)[:3], *[None] * (ndim - 3))


def state_spec(attention: Sharded) -> PartitionSpec:
    """`LinearAttention.state_spec`."""
    data, tensor, _ = attention.lse_spec
    return PartitionSpec(data, tensor, None, None)


# Jitted, because outside a jit shard_map runs its body one operation at a time.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def run(
    attention: Sharded, call: LinearCall, specs: Any, returns_state: bool, *arrays: Any
) -> tuple[Array, Any]:
    """Linear attention of whole arrays, after all checks: the outputs, and the last state or None.

    They are query, key, value, decay, beta, the initial state and segment ids, or None, and have
    the `specs`.
    """
    counts = tuple(0 if x is None else x.shape[2] for x in arrays[:5])
    return jax.shard_map(
        functools.partial(on_device, attention, call, counts, returns_state),
        mesh=attention.mesh,
        in_specs=specs,
        out_specs=(
            heads_spec(attention, call.heads * attention.degrees.tensor, 4),
            state_spec(attention) if returns_state else None,
        ),
    )(*arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_decode(attention: Sharded, call: LinearCall, *arrays: Any) -> tuple[Array, Array]:
    """New tokens of whole arrays, on the devices of the mesh."""
    *given, _ = arrays
    counts = tuple(0 if x is None else x.shape[2] for x in given)
    data = attention.sequence_spec[0]

    def spec(heads: int, ndim: int) -> PartitionSpec:
        return PartitionSpec(data, None, *heads_spec(attention, heads, ndim)[2:])

    return jax.shard_map(
        functools.partial(decode_on_device, attention, call, counts),
        mesh=attention.mesh,
        in_specs=(
            *(None if x is None else spec(x.shape[2], x.ndim) for x in given),
            state_spec(attention),
        ),
        out_specs=(spec(call.heads * attention.degrees.tensor, 4), state_spec(attention)),
    )(*arrays)


def on_device(
    attention: Sharded,
    call: LinearCall,
    counts: tuple[int, ...],
    returns_state: bool,
    *arrays: Any,
) -> tuple[Array, Any]:
    """What one device computes, from its parts of the arrays; `counts` are the heads of the first
    five, over all devices. With levels, ids are `visible_until`."""
    *given, state, ids = arrays
    tokens = _tokens(attention, call, counts, *given)
    b, t = tokens[0].shape[:2]
    check_served(attention, call, tokens[2], tokens[0].shape[3])
    line, fresh = call.line, jnp.zeros((b, t), bool)
    forks = None
    if ids is not None:
        tokens = [kept(ids >= 0, x) for x in tokens]
    if ids is not None and call.levels:
        forks = forks_of(ids, attention.layout, line.axis, call.levels)
        fresh = forks.of_tokens
    elif ids is not None:
        before = ids_before(ids, line.axis, zigzag=line.zigzag)
        fresh = begins(ids.reshape(*before.shape, -1), before).reshape(b, t)
    if state is None:
        slots = (call.levels,) if call.levels else ()
        dims = (x.shape[3] for x in tokens[::2][:2])
        state = jnp.zeros((b, call.heads, *slots, *dims), jnp.float32)
    out, last = linear_attention(call, vary(state, *line.axis.names), fresh, *tokens)
    if forks is not None:
        out = out + forks.nan.astype(out.dtype)
    if ids is not None:  # For the gradients: what comes from padding goes nowhere.
        out = kept(ids >= 0, out)
    return out, collectives.total(last, line.axis) if returns_state else None


def decode_on_device(
    attention: Sharded, call: LinearCall, counts: tuple[int, ...], *arrays: Any
) -> tuple[Array, Array]:
    """What one device computes of `LinearAttention.decode`."""
    *given, state = arrays
    return decode(call, state, *_tokens(attention, call, counts, *given))


def _tokens(
    attention: Sharded, call: LinearCall, counts: tuple[int, ...], *given: Any
) -> list[Array]:
    """Query, key, value, decay [b, t, _, 1 or k] and beta, with the heads of this device."""
    tensor = attention.axes["tensor"]
    own: list[Any] = [
        x if x is None else _own_heads(x, count, call.heads, tensor)
        for x, count in zip(given, counts, strict=True)
    ]
    query, key, value, decay, beta = own
    shape = (*query.shape[:2], call.heads)
    if decay is None:
        decay = jnp.zeros(shape, jnp.float32)
    if beta is None:
        beta = jnp.ones(shape, jnp.float32)
    return [query, key, value, decay if decay.ndim == 4 else decay[..., None], beta]


def _own_heads(x: Array, count: int, here: int, tensor: Axis) -> Array:
    """The heads of this device's states, `here`, of an array with `count` heads over all
    devices."""
    if count % tensor.degree == 0:
        return x
    of_head = here * tensor.degree // count
    neighbours = math.gcd(here, of_head)
    states = collectives.index(tensor) * here + jnp.arange(0, here, neighbours)
    return collectives.copy_heads(x, states // of_head, tensor).astype(x.dtype)

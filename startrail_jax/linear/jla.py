"""The backend of the package `jax-linear-attention`: kernels for Hopper, all groups at once.

A kernel takes the state before a group, and gives the outputs and the state after it. The map of a
group is what it makes of its values from nothing, and of zero values from the unit matrix. Sums
are in float32, products in the dtype of the inputs. On an H100, both passes of 16,384 tokens of 32
heads of 128 take 3.6 ms, and 42 ms in plain XLA, with the same errors.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from startrail_jax.linear.block import LinearCall, LinearRequest
from startrail_jax.linear.rules import Map
from startrail_jax.xla.varying import like, unmarked

RULES = ("gated_delta",)
DTYPES = ("bfloat16", "float16")
DIMS = (64, 128)
"""What key_dim and value_dim may be."""
LEAST = -100.0
"""Smaller logarithms of a decay count as this one, whose exponential is 0 in float32. The kernels
subtract sums of them, to whose size the error is proportional."""


def refusal(request: LinearRequest) -> str | None:
    """See `block.LinearBlock`."""
    if request.platform != "cuda" or request.capability not in (None, (9, 0)):
        given = request.platform if request.platform != "cuda" else request.capability
        return f"its kernels are for Hopper GPUs, of compute capability (9, 0); got {given}"
    if request.trees:
        return "its kernels serve no trees; got visible_until"
    if request.rule not in RULES:
        return f"only rule='gated_delta' has run on a GPU; got rule={request.rule!r}"
    if request.dtype not in DTYPES:
        return f"its dtypes are {' and '.join(DTYPES)}; got {request.dtype}"
    if not {request.key_dim, request.value_dim} <= {*DIMS}:
        return (
            f"key_dim and value_dim must be among {DIMS}; got {request.key_dim} and "
            f"{request.value_dim}"
        )
    if importlib.util.find_spec("jla") is None:
        return (
            "it needs the package jax-linear-attention: pip install '.[jla]', on Python 3.12 or "
            "later"
        )
    return None


def maps(call: LinearCall, blocks: Any) -> Map:
    """See `block.LinearBlock`."""
    query, key, value, *rest = blocks
    dims = key.shape[-1], value.shape[-1]
    groups = (*key.shape[:3], call.heads)
    added, _ = outputs(call, blocks, like(jnp.zeros((*groups, *dims), jnp.float32), key))
    unit = jnp.broadcast_to(jnp.eye(dims[0], dtype=jnp.float32), (*groups, dims[0], dims[0]))
    nothing = like(jnp.zeros((*value.shape[:-1], dims[0]), value.dtype), key)
    return outputs(call, (query, key, nothing, *rest), like(unit, key))[0], added


def outputs(call: LinearCall, blocks: Any, states: Array) -> tuple[Array, Array]:
    """See `block.LinearBlock`."""
    return _unmarked(lambda *arrays: _run(call, *arrays), states, *blocks)


def wanted(call: LinearCall, blocks: Any, states: Array, dout: Array) -> Array:
    """See `block.LinearBlock`."""

    def back(dout: Array, states: Array, *blocks: Array) -> Array:
        _, pull = jax.vjp(lambda states: _run(call, states, *blocks), states)
        return pull((jnp.zeros_like(states), dout))[0]

    return _unmarked(back, dout, states, *blocks)


def gradients(call: LinearCall, blocks: Any, states: Array, dout: Array, after: Array) -> Any:
    """See `block.LinearBlock`."""

    def back(after: Array, dout: Array, states: Array, *blocks: Array) -> Any:
        *floats, document = blocks
        _, pull = jax.vjp(lambda *floats: _run(call, states, *floats, document), *floats)
        return [*pull((after, dout))]

    return _unmarked(back, after, dout, states, *blocks)


def _unmarked(function: Callable[..., Any], *arrays: Array) -> Any:
    """What a function computes that knows of no manual axes, marked as varying like the arrays."""
    return jax.tree.map(lambda x: like(x, arrays[0]), function(*map(unmarked, arrays)))


def _run(call: LinearCall, states: Array, *blocks: Array) -> tuple[Array, Array]:
    """The states after groups and the outputs, as `outputs` gives them."""
    from jla.ops.mosaic_gpu.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        gated_delta_rule,
    )

    query, key, value, decay, beta, document = blocks
    groups, tokens = document.shape[:3], document.shape[3:]
    rows, length = math.prod(groups), math.prod(tokens)
    keys = math.lcm(query.shape[5], key.shape[5])

    def by_head(x: Array, heads: int, dtype: Any) -> Array:
        # The gradients of a head are summed over its copies, in float32.
        x = x.reshape(rows, length, *x.shape[5:]).astype(jnp.float32)
        return jnp.repeat(x, heads // x.shape[2], axis=2).astype(dtype)

    state, ids = states.reshape(rows, *states.shape[3:]), None
    if call.packed:
        fresh = jnp.diff(document, axis=4, prepend=0).reshape(rows, length)
        ids = fresh.cumsum(1)
        # The kernel knows of no document that begins at the first token.
        state = jnp.where(fresh[:, 0, None, None, None] > 0, 0, state)
    out, after = gated_delta_rule(
        by_head(query, keys, query.dtype),
        by_head(key, keys, key.dtype),
        by_head(value, call.heads, value.dtype),
        jnp.maximum(by_head(decay, call.heads, jnp.float32)[..., 0], LEAST),
        by_head(beta, call.heads, jnp.float32),
        scale=call.scale,
        initial_state=state,
        output_final_state=True,
        segment_ids=ids,
    )
    return after.reshape(states.shape), out.reshape(*groups, *tokens, *out.shape[2:])

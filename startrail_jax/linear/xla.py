"""The backend of plain XLA: chunk by chunk, all groups at once. It serves everything.

See `block.LinearBlock` for what the functions compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from startrail_jax.linear.block import LinearCall, LinearRequest
from startrail_jax.linear.rules import LEAST, Chunk, Map
from startrail_jax.xla.varying import like


def refusal(request: LinearRequest) -> str | None:
    """See `block.LinearBlock`."""
    return None


def _in_one_dimension(function: Callable[..., Any]) -> Callable[..., Any]:
    """Rows, slices and groups as one dimension, where states are slots. On CPUs, XLA of jax 0.10
    writes beyond the results of sums of products of some shapes of seven dimensions."""

    @functools.wraps(function)
    def run(call: LinearCall, blocks: Any, *arrays: Array) -> Any:
        if not call.levels:
            return function(call, blocks, *arrays)
        lead = blocks[0].shape[:3]
        flat = jax.tree.map(lambda x: x.reshape(-1, 1, 1, *x.shape[3:]), (blocks, *arrays))
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[3:]), function(call, *flat))

    return run


@_in_one_dimension
def maps(call: LinearCall, blocks: Any) -> Map:
    """See `block.LinearBlock`."""
    _, key, value, *_ = blocks
    shape = (*key.shape[:3], call.heads, key.shape[-1], value.shape[-1])
    unit = call.rule.unit(jnp.zeros(shape, jnp.float32))

    def add(map_: Any, c: Array) -> tuple[Any, None]:
        return call.rule.extend(map_, _terms(call, _chunk(blocks, c))), None

    unit = jax.tree.map(lambda x: like(x, key), unit)
    return call.rule.parts(lax.scan(add, unit, jnp.arange(key.shape[3]))[0])


@_in_one_dimension
def outputs(call: LinearCall, blocks: Any, states: Array) -> tuple[Array, Array]:
    """See `block.LinearBlock`."""
    value = blocks[2]
    shape = (*value.shape[:-2], call.heads, value.shape[-1])

    def add(carry: tuple[Array, Array], c: Array) -> tuple[tuple[Array, Array], None]:
        state, outs = carry
        terms = _terms(call, _chunk(blocks, c))
        out = jnp.moveaxis(call.rule.out(terms, state), 3, 4).astype(value.dtype)
        outs = lax.dynamic_update_index_in_dim(outs, out, c, 3)
        return (call.rule.step(terms, state), outs), None

    begun = states, like(jnp.zeros(shape, value.dtype), value)
    return lax.scan(add, begun, jnp.arange(value.shape[3]))[0]


@_in_one_dimension
def wanted(call: LinearCall, blocks: Any, states: Array, dout: Array) -> Array:
    """See `block.LinearBlock`."""

    def back(dstate: Array, c: Array) -> tuple[Array, None]:
        terms = _terms(call, _chunk(blocks, c))
        _, pull = jax.vjp(lambda state: _both(call, terms, state), jnp.zeros_like(dstate))
        return pull((dstate, _of_chunk(dout, c)))[0], None

    steps = jnp.arange(dout.shape[3])
    return lax.scan(back, like(jnp.zeros_like(states), states), steps, reverse=True)[0]


@_in_one_dimension
def gradients(call: LinearCall, blocks: Any, states: Array, dout: Array, after: Array) -> Any:
    """See `block.LinearBlock`."""
    steps = jnp.arange(dout.shape[3])

    def forward(state: Array, c: Array) -> tuple[Array, Array]:
        return call.rule.step(_terms(call, _chunk(blocks, c)), state), state

    def back(dstate: Array, x: tuple[Array, Array]) -> tuple[Array, Any]:
        (state, c), (*given, document) = x, _chunk(blocks, x[1])
        _, pull = jax.vjp(
            lambda state, *given: _both(call, _terms(call, (*given, document)), state),
            state,
            *given,
        )
        dstate, *dgiven = pull((dstate, _of_chunk(dout, c)))
        return dstate, dgiven

    _, before = lax.scan(forward, states, steps)
    _, grads = lax.scan(back, after, (before, steps), reverse=True)
    return [jnp.moveaxis(x, 0, 3) for x in grads]


def _both(call: LinearCall, terms: Any, state: Array) -> tuple[Array, Array]:
    return call.rule.step(terms, state), call.rule.out(terms, state)


def _chunk(blocks: Any, c: Array) -> tuple[Array, ...]:
    """Chunk c of all groups, [b, s, g, tokens, ...]."""
    return tuple(lax.dynamic_index_in_dim(x, c, 3, keepdims=False) for x in blocks)


def _of_chunk(dout: Array, c: Array) -> Array:
    (found,) = _chunk((dout,), c)
    return jnp.moveaxis(found, 4, 3).astype(jnp.float32)


def _terms(call: LinearCall, chunk: tuple[Array, ...]) -> Any:
    """What chunks do, [b, s, g, h, ...]; the heads of query and key are repeated as needed."""
    query, key, value, decay, beta, document = chunk

    def by_head(x: Array) -> Array:
        # The gradients of a head are summed over its states, in float32.
        x = jnp.moveaxis(x, 4, 3).astype(jnp.float32)
        return jnp.repeat(x, call.heads // x.shape[3], axis=3)

    return call.rule.terms(
        Chunk(
            query=by_head(query) * call.scale,
            key=by_head(key),
            value=by_head(value),
            decay=jnp.maximum(by_head(decay), LEAST),
            beta=by_head(beta),
            document=document[:, :, :, None],
            dtype=key.dtype,
        )
    )

"""The backend of plain XLA: chunk by chunk, all groups at once. It serves everything.

See `block.LinearBlock` for what the functions compute. In a call with `by_token`, a chunk is
computed token by token, by the definition of the rule. That is slow, and what a document holds
stays there, whatever it is: in the products of a chunk, 0 times NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from startrail_jax.linear.block import LinearCall, LinearRequest
from startrail_jax.linear.rules import LEAST, Chunk, Map, dot
from startrail_jax.xla.varying import like


def refusal(request: LinearRequest) -> str | None:
    """See `block.LinearBlock`."""
    return None


def maps(call: LinearCall, blocks: Any) -> Map:
    """See `block.LinearBlock`."""
    _, key, value, *_ = blocks
    shape = (*key.shape[:3], call.heads, key.shape[-1], value.shape[-1])
    unit = call.rule.unit(jnp.zeros(shape, jnp.float32))
    if call.by_token:
        return _maps_by_token(call, blocks, call.rule.parts(unit))

    def add(map_: Any, c: Array) -> tuple[Any, None]:
        return call.rule.extend(map_, call.rule.terms(_by_head(call, _chunk(blocks, c)))), None

    unit = jax.tree.map(lambda x: like(x, key), unit)
    return call.rule.parts(lax.scan(add, unit, jnp.arange(key.shape[3]))[0])


def outputs(call: LinearCall, blocks: Any, states: Array) -> tuple[Array, Array]:
    """See `block.LinearBlock`."""
    value = blocks[2]
    shape = (*value.shape[:-2], call.heads, value.shape[-1])

    def add(carry: tuple[Array, Array], c: Array) -> tuple[tuple[Array, Array], None]:
        state, outs = carry
        state, out = _both(call, _chunk(blocks, c), state)
        out = jnp.moveaxis(out, 3, 4).astype(value.dtype)
        return (state, lax.dynamic_update_index_in_dim(outs, out, c, 3)), None

    begun = states, like(jnp.zeros(shape, value.dtype), value)
    return lax.scan(add, begun, jnp.arange(value.shape[3]))[0]


def wanted(call: LinearCall, blocks: Any, states: Array, dout: Array) -> Array:
    """See `block.LinearBlock`."""

    def back(dstate: Array, c: Array) -> tuple[Array, None]:
        chunk = _chunk(blocks, c)
        _, pull = jax.vjp(lambda state: _both(call, chunk, state), jnp.zeros_like(dstate))
        return pull((dstate, _of_chunk(dout, c)))[0], None

    steps = jnp.arange(dout.shape[3])
    return lax.scan(back, like(jnp.zeros_like(states), states), steps, reverse=True)[0]


def gradients(call: LinearCall, blocks: Any, states: Array, dout: Array, after: Array) -> Any:
    """See `block.LinearBlock`."""
    steps, arrays = jnp.arange(dout.shape[3]), (blocks, states, dout, after)
    if call.by_token and dout.shape[2] > 1:  # One group at a time, which keeps states of tokens.
        groups = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, :, None], 2, 0), arrays)
        grads = lax.map(lambda group: gradients(call, *group), groups)
        return [jnp.moveaxis(x, 0, 2)[:, :, :, 0] for x in grads]

    def forward(state: Array, c: Array) -> tuple[Array, Array]:
        return _both(call, _chunk(blocks, c), state)[0], state

    def back(dstate: Array, x: tuple[Array, Array]) -> tuple[Array, Any]:
        (state, c), (*given, document) = x, _chunk(blocks, x[1])
        _, pull = jax.vjp(
            lambda state, *given: _both(call, (*given, document), state),
            state,
            *given,
        )
        dstate, *dgiven = pull((dstate, _of_chunk(dout, c)))
        return dstate, dgiven

    _, before = lax.scan(forward, states, steps)
    _, grads = lax.scan(back, after, (before, steps), reverse=True)
    return [jnp.moveaxis(x, 0, 3) for x in grads]


def _both(call: LinearCall, chunk: tuple[Array, ...], state: Array) -> tuple[Array, Array]:
    """The state after a chunk, and its outputs."""
    if call.by_token:
        return _token_by_token(call, _by_head(call, chunk), state)
    terms = call.rule.terms(_by_head(call, chunk))
    return call.rule.step(terms, state), call.rule.out(terms, state)


def _token_by_token(call: LinearCall, chunk: Chunk, state: Array) -> tuple[Array, Array]:
    """The state after a chunk, and its outputs, in runs of about the root of its tokens: the
    backward pass keeps the states before them, and those of one run."""
    begins = jnp.diff(chunk.document, axis=-1, prepend=0) > 0
    run = 1 << begins.shape[-1].bit_length() // 2

    def add(state: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, value, decay, beta, begins = x
        state = jnp.where(begins[..., None, None], 0, state)
        state = call.rule.token(state, key, value, decay, beta)
        return state, dot("...k,...kv->...v", query, state)

    def of_run(state: Array, tokens: Any) -> tuple[Array, Array]:
        return lax.scan(add, state, tokens)

    tokens = (
        *(jnp.moveaxis(x, -2, 0) for x in chunk[:4]),
        *(jnp.moveaxis(x, -1, 0) for x in (chunk.beta, begins)),
    )
    runs = jax.tree.map(lambda x: x.reshape(-1, run, *x.shape[1:]), tokens)
    state, out = lax.scan(jax.checkpoint(of_run, prevent_cse=False), state, runs)
    return state, jnp.moveaxis(out.reshape(-1, *out.shape[2:]), 0, -2)


def _maps_by_token(call: LinearCall, blocks: Any, unit: Map) -> Map:
    """M is what is left of a unit, to which nothing is written, and N what is written to zeros."""
    (m, n), document = unit, blocks[-1]
    columns = m.shape[-1]

    def add(state: Array, c: Array) -> tuple[Array, None]:
        chunk = _by_head(call, _chunk(blocks, c))
        value = jnp.pad(chunk.value, [*[(0, 0)] * (n.ndim - 1), (columns, 0)])
        return _token_by_token(call, chunk._replace(value=value), state)[0], None

    state = jnp.concatenate([jnp.broadcast_to(m, (*n.shape[:-1], columns)), n], -1)
    state, _ = lax.scan(add, like(state, document), jnp.arange(document.shape[3]))
    has_border = (document > 0).any((-2, -1))[..., None, None, None]
    return jnp.where(has_border, 0, state[..., : m.shape[-2], :columns]), state[..., columns:]


def _chunk(blocks: Any, c: Array) -> tuple[Array, ...]:
    """Chunk c of all groups, [b, s, g, tokens, ...]."""
    return tuple(lax.dynamic_index_in_dim(x, c, 3, keepdims=False) for x in blocks)


def _of_chunk(dout: Array, c: Array) -> Array:
    (found,) = _chunk((dout,), c)
    return jnp.moveaxis(found, 4, 3).astype(jnp.float32)


def _by_head(call: LinearCall, chunk: tuple[Array, ...]) -> Chunk:
    """Chunks [b, s, g, h, c, ...]; the heads of arrays with fewer are repeated."""
    query, key, value, decay, beta, document = chunk

    def by_head(x: Array) -> Array:
        # The gradients of a head are summed over its states, in float32.
        x = jnp.moveaxis(x, 4, 3).astype(jnp.float32)
        return jnp.repeat(x, call.heads // x.shape[3], axis=3)

    return Chunk(
        query=by_head(query) * call.scale,
        key=by_head(key),
        value=by_head(value),
        decay=jnp.maximum(by_head(decay), LEAST),
        beta=by_head(beta),
        document=document[:, :, :, None],
        dtype=key.dtype,
    )

"""Linear attention of one device as one `custom_vjp`; it runs inside a fully manual `shard_map`.

The tokens of a device are cut into slices, groups and chunks. In the forward pass,

    1  the map of each group follows from its keys and values (all groups at once, chunk by chunk),
    2  the scan of `scan.py` gives the state before each group,
    3  the outputs follow (all groups at once, chunk by chunk).

The backward pass knows the states before the groups, so that it needs no gradient of maps:

    1  what the outputs of a group want of the state before it (M^T of the group is known),
    2  the scan, from the end to the beginning, gives the gradient of the state after each group,
    3  the gradients of all inputs, some groups at a time: only these keep a state for each chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from startrail_jax.linear.rules import LEAST, Chunk, ChunkTerms, Map, StateRule
from startrail_jax.linear.scan import Line
from startrail_jax.linear.sizes import CHUNK, Cut
from startrail_jax.xla.varying import alike, vary, varying_axes

CHECKPOINT_NAMES = ("linear_states", "linear_out")
"""The states before groups and the factors of their maps, and the output. With them,
`jax.checkpoint` computes no part of linear attention again but what its backward pass does
anyway."""


@dataclass(frozen=True)
class LinearCall:
    """What is static in a call."""

    line: Line
    heads: int
    """States of a row of this device."""
    scale: float

    @property
    def rule(self) -> StateRule:
        return self.line.rule


def cut_up(cut: Cut, x: Array, slices: int) -> Array:
    """[b, t, ...] -> [b, slices, groups, chunks, tokens of a chunk, ...]."""
    rest = x.shape[2:]
    x = x.reshape(x.shape[0], slices, -1, *rest)
    fill = cut.size - x.shape[2]
    if fill:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, fill), *[(0, 0)] * len(rest)])
    return x.reshape(*x.shape[:2], cut.groups, cut.chunks, cut.tokens, *rest)


def joined(cut: Cut, x: Array, slices: int, tokens: int) -> Array:
    """The inverse of `cut_up`, for `tokens` in all slices."""
    rest = x.shape[5:]
    x = x.reshape(*x.shape[:2], cut.size, *rest)[:, :, : tokens // slices]
    return x.reshape(x.shape[0], tokens, *rest)


def linear_attention(call: LinearCall, first: Array, begins: Array, *floats: Array) -> Any:
    """Linear attention of the tokens of a device.

    Args:
        call: what is static.
        first: the state before the first token of each row, [b, h, k, v] in float32.
        begins: whether a document begins, [b, t].
        *floats: query, key, value [b, t, _, channels], decay [b, t, _, 1 or k] and beta [b, t, _],
            which are 0 at padding.

    Returns:
        out [b, t, h, v] in the dtype of value; and the last state, on the device of the last token,
        zeros on the others.
    """
    first, begins, *blocks = alike(first, begins, *floats)
    length, slices = begins.shape[1], call.line.slices
    cut = Cut.of(length // slices)
    document = jnp.cumsum(cut_up(cut, begins, slices).astype(jnp.int32), -1)
    out, last = _linear(call, first, (*(cut_up(cut, x, slices) for x in blocks), document))
    out = checkpoint_name(joined(cut, out, slices, length), CHECKPOINT_NAMES[1])
    return out, last


def decode(call: LinearCall, state: Array, *floats: Array) -> tuple[Array, Array]:
    """Outputs [b, t, h, v] of a few tokens, all on this device, and the state after them."""
    tokens = floats[0].shape[1]
    size = min(CHUNK, 1 << (tokens - 1).bit_length())
    cut = Cut(1, -(-tokens // size), size)
    fresh = jnp.zeros((floats[0].shape[0], tokens), jnp.int32)
    state, fresh, *blocks = alike(state, fresh, *floats)
    blocks = (*(cut_up(cut, x, 1) for x in blocks), cut_up(cut, fresh, 1))
    after, out = _outputs(call, blocks, state[:, None, None])
    return joined(cut, out, 1, tokens), after[:, 0, 0]


def _forward(call: LinearCall, first: Array, blocks: Any) -> Any:
    maps = _maps(call, first, blocks)
    states, last = call.line.enter(maps, first)
    states, factors = (checkpoint_name(x, CHECKPOINT_NAMES[0]) for x in (states, maps[0]))
    return (_outputs(call, blocks, states)[1], last), (blocks, states, factors)


def _backward(call: LinearCall, residuals: Any, cotangents: Any) -> Any:
    (blocks, states, factors), (dout, dlast) = residuals, cotangents
    maps = call.rule.transposed(factors), _wanted(call, blocks, states, dout)
    after, dfirst = call.line.enter(maps, dlast, reverse=True)
    return dfirst, (*_gradients(call, blocks, states, dout, after), None)


_linear = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(0,))
_linear.defvjp(_forward, _backward)


def _maps(call: LinearCall, first: Array, blocks: Any) -> Map:
    """The maps of all groups, [b, s, g, h, ...]."""
    rows, chunks = blocks[0].shape[:3], blocks[0].shape[3]
    unit = call.rule.unit(jnp.zeros((*rows, *first.shape[1:]), jnp.float32))

    def add(map_: Any, c: Array) -> tuple[Any, None]:
        return call.rule.extend(map_, _terms(call, _chunk(blocks, c))), None

    unit = jax.tree.map(lambda x: _like(x, first), unit)
    return call.rule.parts(lax.scan(add, unit, jnp.arange(chunks))[0])


def _outputs(call: LinearCall, blocks: Any, states: Array) -> tuple[Array, Array]:
    """The states after groups, and the outputs of all chunks, [b, s, g, n, c, h, v]."""
    value = blocks[2]
    shape = (*value.shape[:-2], call.heads, value.shape[-1])

    def add(carry: tuple[Array, Array], c: Array) -> tuple[tuple[Array, Array], None]:
        state, outs = carry
        terms = _terms(call, _chunk(blocks, c))
        out = jnp.moveaxis(call.rule.out(terms, state), 3, 4).astype(value.dtype)
        outs = lax.dynamic_update_index_in_dim(outs, out, c, 3)
        return (call.rule.step(terms, state), outs), None

    begun = states, _like(jnp.zeros(shape, value.dtype), value)
    return lax.scan(add, begun, jnp.arange(value.shape[3]))[0]


def _wanted(call: LinearCall, blocks: Any, states: Array, dout: Array) -> Array:
    """The gradients of the states before groups, as far as it comes from their own outputs."""

    def back(dstate: Array, c: Array) -> tuple[Array, None]:
        terms = _terms(call, _chunk(blocks, c))
        _, pull = jax.vjp(lambda state: _both(call, terms, state), jnp.zeros_like(dstate))
        return pull((dstate, _of_chunk(dout, c)))[0], None

    steps = jnp.arange(dout.shape[3])
    return lax.scan(back, _like(jnp.zeros_like(states), states), steps, reverse=True)[0]


def _gradients(call: LinearCall, blocks: Any, states: Array, dout: Array, after: Array) -> Any:
    """The gradients of all floats, from those of the states after groups, in the form of blocks."""
    *floats, document = blocks
    cut = Cut(*document.shape[2:])
    groups, steps = cut.groups, jnp.arange(cut.chunks)
    width = cut.at_once(states.shape[0] * states.shape[1] * call.heads)

    def of_groups(found: Any, first: Array) -> tuple[Any, None]:
        *here, state, dstate, cotangent = (
            lax.dynamic_slice_in_dim(x, first, width, 2)
            for x in (*floats, document, states, after, dout)
        )

        def forward(state: Array, c: Array) -> tuple[Array, Array]:
            return call.rule.step(_terms(call, _chunk(here, c)), state), state

        def back(dstate: Array, x: tuple[Array, Array]) -> tuple[Array, Any]:
            (state, c), (*given, document) = x, _chunk(here, x[1])
            _, pull = jax.vjp(
                lambda state, *given: _both(call, _terms(call, (*given, document)), state),
                state,
                *given,
            )
            dstate, *dgiven = pull((dstate, _of_chunk(cotangent, c)))
            return dstate, dgiven

        _, before = lax.scan(forward, state, steps)
        _, grads = lax.scan(back, dstate, (before, steps), reverse=True)
        grads = (jnp.moveaxis(x, 0, 3) for x in grads)
        return [
            lax.dynamic_update_slice_in_dim(x, y, first, 2)
            for x, y in zip(found, grads, strict=True)
        ], None

    # The last groups may be among those before: they are computed again, to the same numbers.
    firsts = jnp.minimum(jnp.arange(-(-groups // width)) * width, groups - width)
    return lax.scan(of_groups, [_like(jnp.zeros_like(x), x) for x in floats], firsts)[0]


def _both(call: LinearCall, terms: ChunkTerms, state: Array) -> tuple[Array, Array]:
    return call.rule.step(terms, state), call.rule.out(terms, state)


def _chunk(blocks: Any, c: Array) -> tuple[Array, ...]:
    """Chunk c of all groups, [b, s, g, tokens, ...]."""
    return tuple(lax.dynamic_index_in_dim(x, c, 3, keepdims=False) for x in blocks)


def _of_chunk(dout: Array, c: Array) -> Array:
    (found,) = _chunk((dout,), c)
    return jnp.moveaxis(found, 4, 3).astype(jnp.float32)


def _terms(call: LinearCall, chunk: tuple[Array, ...]) -> ChunkTerms:
    """What chunks do, [b, s, g, h, ...]; the heads of query and key are repeated as needed."""
    query, key, value, decay, beta, document = chunk

    def by_head(x: Array) -> Array:
        x = jnp.moveaxis(x, 4, 3)
        return jnp.repeat(x, call.heads // x.shape[3], axis=3)

    return call.rule.terms(
        Chunk(
            query=(by_head(query) * call.scale).astype(query.dtype),
            key=by_head(key),
            value=by_head(value),
            decay=jnp.maximum(by_head(decay).astype(jnp.float32), LEAST),
            beta=by_head(beta).astype(jnp.float32),
            document=document[:, :, :, None],
        )
    )


def _like(x: Array, other: Array) -> Array:
    return vary(x, *varying_axes(other))

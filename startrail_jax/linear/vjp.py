"""Linear attention of one device as one `custom_vjp`; it runs inside a fully manual `shard_map`.

The tokens of a device are cut into slices, groups and chunks. In the forward pass,

    1  the map of each group follows from its keys and values (all groups at once),
    2  the scan of `scan.py` gives the state before each group,
    3  the outputs follow (all groups at once).

The backward pass knows the states before the groups, so that it needs no gradient of maps:

    1  what the outputs of a group want of the state before it (M^T of the group is known),
    2  the scan, from the end to the beginning, gives the gradient of the state after each group,
    3  the gradients of all inputs, some groups at a time: only these keep a state for each chunk.

A backend (`block.py`) computes what groups do; the rest is the same for all of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from startrail_jax.linear import jla, xla
from startrail_jax.linear.block import LinearBlock, LinearCall
from startrail_jax.linear.sizes import CHUNK, Cut
from startrail_jax.xla.varying import alike, like

CHECKPOINT_NAMES = ("linear_states", "linear_out")
"""The states before groups and the factors of their maps, and the output. With them,
`jax.checkpoint` recomputes nothing that the backward pass does not recompute anyway."""

BLOCKS: dict[str, LinearBlock] = {"xla": xla, "jla": jla}
"""The backends by name."""


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

    Given are the state before the first token of each row, float32 [b, h, k, v]; whether a document
    begins, [b, t], or `Forks.of_tokens`; and query, key, value [b, t, _, channels], decay
    [b, t, _, 1 or k] and beta [b, t, _], which are 0 at padding. Returns out [b, t, h, v] in the
    dtype of value, and the last state, on the device of the last token, zeros on the others. With
    forks, states are slots [b, h, levels, k, v].
    """
    first, begins, *blocks = alike(first, begins, *floats)
    length, slices = begins.shape[1], call.line.slices
    cut = Cut.of(length // slices, call.chunk)
    document = cut_up(cut, begins, slices)
    if not call.levels:
        document = jnp.cumsum(document.astype(jnp.int32), -1)
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
    after, out = xla.outputs(call, blocks, state[:, None, None])
    return joined(cut, out, 1, tokens), after[:, 0, 0]


def _forward(call: LinearCall, first: Array, blocks: Any) -> Any:
    block = BLOCKS[call.backend]
    maps = block.maps(call, blocks)
    states, last = call.line.enter(maps, first)
    states, factors = jax.tree.map(
        lambda x: checkpoint_name(x, CHECKPOINT_NAMES[0]), (states, maps[0])
    )
    return (block.outputs(call, blocks, states)[1], last), (blocks, states, factors)


def _backward(call: LinearCall, residuals: Any, cotangents: Any) -> Any:
    (blocks, states, factors), (dout, dlast) = residuals, cotangents
    maps = call.rule.transposed(factors), BLOCKS[call.backend].wanted(call, blocks, states, dout)
    after, dfirst = call.line.enter(maps, dlast, reverse=True)
    return dfirst, (*_gradients(call, blocks, states, dout, after), None)


_linear = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(0,))
_linear.defvjp(_forward, _backward)


def _gradients(call: LinearCall, blocks: Any, states: Array, dout: Array, after: Array) -> Any:
    """The gradients of all floats, from those of the states after groups, in the form of blocks."""
    *floats, document = blocks
    cut = Cut(*document.shape[2:5])
    groups = cut.groups
    width = cut.at_once(states.shape[0] * states.shape[1] * call.heads * max(call.levels, 1))

    def of_groups(found: Any, first: Array) -> tuple[Any, None]:
        *here, state, cotangent, dstate = (
            lax.dynamic_slice_in_dim(x, first, width, 2) for x in (*blocks, states, dout, after)
        )
        grads = BLOCKS[call.backend].gradients(call, here, state, cotangent, dstate)
        return [
            lax.dynamic_update_slice_in_dim(x, y, first, 2)
            for x, y in zip(found, grads, strict=True)
        ], None

    # The last groups may be among those before: they are computed again, to the same numbers.
    firsts = jnp.minimum(jnp.arange(-(-groups // width)) * width, groups - width)
    return lax.scan(of_groups, [like(jnp.zeros_like(x), x) for x in floats], firsts)[0]

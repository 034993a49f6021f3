"""Tiling: MLP and loss, computed for some of a device's tokens at a time to save memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from startrail_jax.xla.varying import vary


def in_tiles(function: Callable[..., Array], tile: int | None, dtype: Any) -> Callable[..., Array]:
    """A function of tokens that is computed for `tile` of them at a time (None for all at once).

    `function` takes arrays [B T ...] to an array [B T ...], each token by itself; outputs of added
    tokens of zeros are dropped. A tile saves its input, and its backward pass computes the rest
    again. Integers have no gradient. The loops have the matrices that `function` refers to in
    `dtype`, so that each is cast once; gradients are added up in the type of the matrix.
    """

    def tiled(*arrays: Array) -> Array:
        batch, length = arrays[0].shape[:2]
        if tile is None or tile >= batch * length:
            return function(*arrays)
        tiles = tuple(_cut(x, tile) for x in arrays)
        pure, weights = jax.closure_convert(function, *(x[0] for x in tiles))
        out: Any = _map_tiles(pure, dtype, weights, tiles)
        return _joined(out, (batch, length, *out.shape[3:]))

    return tiled


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map_tiles(function: Callable[..., Array], dtype: Any, weights: Any, tiles: Any) -> Array:
    """`function(*tile, *weights)` for each tile."""
    wide = _widened(weights, dtype)
    return lax.map(lambda xs: function(*xs, *wide()), tiles)


def _map_forward(function: Any, dtype: Any, weights: Any, tiles: Any) -> tuple[Array, Any]:
    return _map_tiles(function, dtype, weights, tiles), (weights, tiles)


def _map_backward(function: Any, dtype: Any, residuals: Any, dout: Array) -> tuple[Any, Any]:
    weights, tiles = residuals

    def step(weights: Any, of_tile: Array, *xs: Array) -> tuple[Any, Any]:
        def of_reals(weights: Any, reals: Any) -> Array:
            return function(
                *(x if r is None else r for x, r in zip(xs, reals, strict=True)), *weights
            )

        reals = tuple(x if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in xs)
        again = jax.checkpoint(of_reals, prevent_cse=False)
        return jax.vjp(again, weights, reals)[1](of_tile)

    return _added_up(step, weights, (dout, *tiles), dtype, reverse=True)


_map_tiles.defvjp(_map_forward, _map_backward)


def _added_up(
    step: Callable[..., Any], weights: Any, cut: Any, dtype: Any, *, reverse: bool = False
) -> Any:
    """The sum over tiles of the first result of `step(weights, *tile)`, and all second ones."""
    first = jax.eval_shape(lambda *xs: step(weights, *xs)[0], *(x[0] for x in cut))
    wide = _widened(weights, dtype)

    def add(so_far: Any, xs: Any) -> tuple[Any, Any]:
        new, out = step(wide(), *xs)
        return jax.tree.map(jnp.add, so_far, new), out

    return lax.scan(add, jax.tree.map(_zeros, first), cut, reverse=reverse)


def _widened(weights: Any, dtype: Any) -> Callable[[], Any]:
    """Gives the weights to each tile of a loop, which has matrices in another type: cast once."""
    narrow = jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, weights)
    return lambda: jax.tree.map(lambda x, w: x.astype(w.dtype), narrow, weights)


def _zeros(shape: Any) -> Array:
    # Outside of a shard_map, shapes have no axes along which they vary.
    axes = getattr(shape.manual_axis_type, "varying", ())
    return vary(jnp.zeros(shape.shape, shape.dtype), *axes)


def summed_in_tiles(
    function: Callable[..., Float32[Array, ""]],
    tile: int | None,
    dtype: Any,
    *,
    differentiated: bool = True,
) -> Callable[..., Float32[Array, ""]]:
    """The sum over all tokens of a function, computed for `tile` tokens at a time (None for all).

    `function` takes (weights, x [B T ...], more [B T ...], ...), and is differentiable by x and by
    the float32 weights, whose values `dtype` must hold exactly. For tokens that are zeros in all
    arrays, it must be 0. Each tile gives its value and its gradients in one pass, so that nothing
    is saved or recomputed.

    If the sum is not `differentiated`, say so: jax would keep its rule for that, and with it all
    that `function` refers to, until the program ends.
    """

    def tiles(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        batch, length = arrays[0].shape[:2]
        return tuple(_cut(x, tile or batch * length) for x in arrays)

    def value(weights: Any, *arrays: Array) -> Array:
        return _added_up(lambda *xs: (function(*xs), None), weights, tiles(arrays), dtype)[0]

    if not differentiated:
        return value
    total = jax.custom_vjp(value)

    def forward(weights: Any, *arrays: Array) -> tuple[Array, Any]:
        def step(*xs: Any) -> tuple[Any, Array]:
            loss, (dweights, dx) = jax.value_and_grad(function, argnums=(0, 1))(*xs)
            return (loss, dweights), dx

        (loss, dweights), dx = _added_up(step, weights, tiles(arrays), dtype)
        return loss, (dweights, _joined(dx, arrays[0].shape), len(arrays))

    def backward(residuals: Any, dloss: Array) -> tuple[Any, ...]:
        dweights, dx, count = residuals
        dweights = jax.tree.map(lambda dw: dw * dloss, dweights)
        return (dweights, dx * dloss.astype(dx.dtype), *[None] * (count - 1))

    total.defvjp(forward, backward)
    return total


def _cut(x: Array, tile: int) -> Array:
    """Tokens [B T ...] as tiles [n 1 size ...] of the same size, the last one ending with zeros.
    They are as small as their number allows, so fewer than n zeros are computed for nothing."""
    tokens = x.shape[0] * x.shape[1]
    count = -(-tokens // tile)
    size = -(-tokens // count)
    x = x.reshape(tokens, *x.shape[2:])
    if missing := count * size - tokens:
        x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(count, 1, size, *x.shape[1:])


def _joined(tiles: Array, shape: tuple[int, ...]) -> Array:
    """What `_cut` has cut: an array of this shape."""
    tokens = shape[0] * shape[1]
    return tiles.reshape(-1, *shape[2:])[:tokens].reshape(shape)

"""Tiling: MLP and loss, computed for some of a device's tokens at a time to save memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from startrail_jax.errors import InputError
from startrail_jax.varying import vary


def in_tiles(function: Callable[..., Array], tile: int | None) -> Callable[..., Array]:
    """A function of tokens that is computed for `tile` of them at a time, forward and backward.

    Args:
        function: a function of arrays [B T ...] to an array [B T ...] that treats each token by
            itself.
        tile: tokens at a time; if it does not divide B * T, the largest smaller number that does.
            None for all at once.
    """

    def tiled(*arrays: Array) -> Array:
        batch, length = arrays[0].shape[:2]
        if tile is None or tile >= batch * length:
            return function(*arrays)
        size = largest_tile(tile, batch * length)
        tiles = tuple(x.reshape(-1, 1, size, *x.shape[2:]) for x in arrays)
        out = lax.map(jax.checkpoint(lambda xs: function(*xs), prevent_cse=False), tiles)
        return out.reshape(batch, length, *out.shape[3:])

    return tiled


def summed_in_tiles(
    function: Callable[..., Float32[Array, ""]],
    tile: int | None,
    dtype: Any,
    *,
    differentiated: bool = True,
) -> Callable[..., Float32[Array, ""]]:
    """The sum over all tokens of a function that is computed for one tile at a time.

    Where the sum is differentiated, each tile gives its value and its gradients in one pass. So
    what `function` computes is neither saved nor recomputed, and no second pass over the tiles
    needs the weights.

    Args:
        function: a function (weights, x [B T ...], more [B T ...], ...) -> the sum over its tokens.
            It is differentiable by the weights, which are float32, and by x.
        tile: tokens of a tile, a divisor of B * T; None for all tokens.
        dtype: a type that holds the values of the weights exactly; the loop over tiles keeps them
            in it.
        differentiated: whether the sum may be differentiated. If it is not, jax would keep its rule
            for that, and with it all that `function` refers to, until the program ends.
    """

    def tiles(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        batch, length = arrays[0].shape[:2]
        size = min(tile or batch * length, batch * length)
        return tuple(x.reshape(-1, 1, size, *x.shape[2:]) for x in arrays)

    def zeros(shape: Any) -> Array:
        return vary(jnp.zeros(shape.shape, shape.dtype), *shape.manual_axis_type.varying)

    def add_up(step: Callable[..., Any], weights: Any, cut: Any) -> Any:
        first = jax.eval_shape(lambda *xs: step(weights, *xs)[0], *(x[0] for x in cut))
        narrow = jax.tree.map(lambda w: w.astype(dtype), weights)

        def add(so_far: Any, xs: Any) -> tuple[Any, Any]:
            new, out = step(jax.tree.map(lambda w: w.astype(jnp.float32), narrow), *xs)
            return jax.tree.map(jnp.add, so_far, new), out

        return lax.scan(add, jax.tree.map(zeros, first), cut)

    def value(weights: Any, *arrays: Array) -> Array:
        return add_up(lambda *xs: (function(*xs), None), weights, tiles(arrays))[0]

    if not differentiated:
        return value
    total = jax.custom_vjp(value)

    def forward(weights: Any, *arrays: Array) -> tuple[Array, Any]:
        def step(*xs: Any) -> tuple[Any, Array]:
            loss, (dweights, dx) = jax.value_and_grad(function, argnums=(0, 1))(*xs)
            return (loss, dweights), dx

        (loss, dweights), dx = add_up(step, weights, tiles(arrays))
        return loss, (dweights, dx.reshape(arrays[0].shape), len(arrays))

    def backward(residuals: Any, dloss: Array) -> tuple[Any, ...]:
        dweights, dx, count = residuals
        dweights = jax.tree.map(lambda dw: dw * dloss, dweights)
        return (dweights, dx * dloss.astype(dx.dtype), *[None] * (count - 1))

    total.defvjp(forward, backward)
    return total


def largest_tile(tile: int, tokens: int) -> int:
    """The largest number up to `tile` that divides the number of tokens."""
    return next(n for n in range(min(tile, tokens), 0, -1) if tokens % n == 0)


def check_tile(tile: int | None, tokens: int) -> None:
    """Checks that `tile` divides the number of tokens that a device treats at a time.

    Raises:
        ValueError: if it does not.
    """
    if tile is not None and tile < tokens and tokens % tile:
        best = largest_tile(tile, tokens)
        raise InputError(
            "tile must divide the number of tokens that a device treats at a time, which is that "
            "of a batch / (accumulation * devices that share the batch); got "
            f"tile={tile} for {tokens} tokens. Use --tile {best}."
        )

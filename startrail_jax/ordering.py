"""What is computed first, where XLA could choose."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


@jax.custom_vjp
def first(y: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both, unchanged; what is made of x waits for y, in the forward pass.

    So messages of the attention that carry y can be on their way meanwhile: queries are gathered
    beneath the projections of keys and values (https://arxiv.org/abs/2407.00611).
    """
    y, x = lax.optimization_barrier((y, x))
    return y, x


first.defvjp(lambda y, x: (first(y, x), None), lambda _, cotangents: cotangents)


@jax.custom_vjp
def returned_after(x: Any, y: Any) -> tuple[Any, Any]:
    """Both, unchanged; the backward pass goes on from x when the gradient of y is there."""
    return x, y


def _returned_after_backward(_: None, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    dx, dy = gradients
    return lax.optimization_barrier((dx, dy))[0], dy


returned_after.defvjp(lambda x, y: ((x, y), None), _returned_after_backward)

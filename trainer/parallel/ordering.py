"""When gradients are complete, where XLA would choose it for itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from startrail_jax.xla.varying import varying_axes


@jax.custom_vjp
def gradient_first(first: Any, then: Array) -> tuple[Any, Array]:
    """Makes the gradient of `then` wait for the gradient of `first`; the values are unchanged.

    So the gradient of `first` is complete, and can be sent, before the backward pass goes on
    through `then`. XLA is free to put it off, and to keep its whole buffer alive, until something
    else is sent.
    """
    return first, then


def _gradient_first_backward(_: None, gradients: tuple[Any, Array]) -> tuple[Any, Array]:
    d_first, d_then = gradients
    done = jax.tree.leaves(d_first)
    # A barrier makes all of its arrays vary over the mesh axes over which one of them does.
    if further := tuple(frozenset().union(*map(varying_axes, done)) - varying_axes(d_then)):
        done = [lax.psum(jnp.stack([x.ravel()[0] for x in done]), further)]
    return d_first, lax.optimization_barrier((d_then, done))[0]


gradient_first.defvjp(lambda first, then: ((first, then), None), _gradient_first_backward)

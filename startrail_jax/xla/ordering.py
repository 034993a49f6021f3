"""Tricks that fix an order of computation which XLA would otherwise choose for itself. Each returns
values unchanged and adds a dependency between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

_BELOW_ALL = -1e38  # Below every lse, also of a row that sees no key.


@jax.custom_vjp
def compute_first(first: jax.Array, then: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Makes everything that is computed from `then` wait for `first`, in the forward pass alone.

    A layer calls it with its projected query as `first` and its normalised input as `then`, and
    projects keys and values from what comes back. The queries can then be gathered over the team
    beneath these projections (https://arxiv.org/abs/2407.00611). XLA would compute all three
    projections first and then gather, with nothing left to run meanwhile.
    """
    first, then = lax.optimization_barrier((first, then))
    return first, then


compute_first.defvjp(
    lambda first, then: (compute_first(first, then), None), lambda _, cotangents: cotangents
)


@jax.custom_vjp
def in_turn(done: Any, then: Any) -> tuple[Any, Any]:
    """Makes what is computed from `then` wait for `done`, and in the backward pass the reverse.

    There, what is computed from the gradient of `done` waits for the gradient of `then`. So of two
    equal computations, one that gives `done` and one that takes `then`, one ends before the other
    begins, and they never need memory at the same time.
    """
    return done, lax.optimization_barrier((done, then))[1]


def _in_turn_backward(_: None, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    d_done, d_then = gradients
    return lax.optimization_barrier((d_done, d_then))[0], d_then


in_turn.defvjp(lambda done, then: (in_turn(done, then), None), _in_turn_backward)


def recompute_in_backward(
    values: Any, dout: Float[Array, "b t n v"], lse: Float32[Array, "b n t"]
) -> Any:
    """Makes what a backward rule computes from its residuals wait for the gradient of its output.

    A backward rule that gathers its residuals repeats what the forward rule did. XLA sees that the
    two are the same, gathers once, and keeps the gathered units of every layer alive from the
    forward to the backward pass. An `optimization_barrier` does not prevent this: XLA on CPU (jax
    0.10.2) drops it before the last elimination of common subexpressions. So the values, any
    pytree, are made to depend on `dout`, through a test that is always false.
    """
    never = (lse.ravel()[0] < _BELOW_ALL) & (dout.ravel()[0] > 0)
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), values)


def zeros_after(
    like: Float[Array, "b t n h"], dim: int, opaque_false: Bool[Array, ""]
) -> Float32[Array, "b t n v"]:
    """Zeros of the shape of `like` but for the last `dim`, to sum into, which no scheduler can set
    up before `like` is there.

    Zeros that depend on nothing may be allocated long before they are needed, and hold memory.
    Inside `shard_map`, these also vary over the mesh axes over which the sums vary.
    """
    zeros = jnp.where(opaque_false, like[..., :1].astype(jnp.float32), 0.0)
    return jnp.broadcast_to(zeros, (*like.shape[:-1], dim))

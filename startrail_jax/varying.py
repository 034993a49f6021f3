"""Over which manual mesh axes an array varies, inside a `shard_map` that checks it."""

from __future__ import annotations

import jax
from jax import lax
from jaxtyping import Array


def alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, all varying over every manual mesh axis that one of them varies over.

    The gradient of one that was replicated over an axis is summed over it.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    return tuple(vary(x, *axes) for x in arrays)


def vary(x: Array, *axes: str) -> Array:
    """The array, varying over these axes too; its gradient is summed over those that are new."""
    new = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, new, to="varying") if new else x

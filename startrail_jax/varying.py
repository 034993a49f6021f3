"""Over which manual mesh axes an array varies, inside a `shard_map` that checks it."""

from __future__ import annotations

import jax
from jax import lax
from jaxtyping import Array


def alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, all varying over every manual mesh axis that one of them varies over.

    The gradient of one that was replicated over an axis is summed over it.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    axes = frozenset().union(*varying)
    return tuple(
        lax.pcast(x, tuple(axes - own), to="varying") if axes - own else x
        for x, own in zip(arrays, varying, strict=True)
    )

"""Where derivatives end: an error that says so, in place of one from deep inside of jax."""

from __future__ import annotations

import functools
from typing import Any

import jax

from startrail_jax.errors import UnsupportedError

FIRST_ONLY = (
    "Sequence-parallel attention has first derivatives only; got a gradient of its gradient. Use "
    "jax.nn.dot_product_attention where second derivatives are needed, or finite differences of "
    "the gradient."
)

# jax (0.10 to 0.12) cannot lower the residuals of a shard_map inside a shard_map over other axes.
FORWARD_ONLY = (
    "A call inside a shard_map over other axes, such as the stages of a pipeline, has no gradient. "
    "Make that shard_map manual over all axes of the mesh, with attention.query_spec(heads) and "
    "the like among its in_specs, and call attention.local in it."
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def without_derivative(message: str, values: Any) -> Any:
    """The values, unchanged; a derivative with respect to them raises an error when it is traced.

    Args:
        message: what the error says.
        values: tree of arrays.
    """
    del message
    return values


def _refuse(message: str, values: Any) -> Any:
    del values
    raise UnsupportedError(message)


without_derivative.defvjp(_refuse, lambda message, _, cotangents: (cotangents,))

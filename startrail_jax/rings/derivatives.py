"""Where derivatives end: an error that says so, in place of one from deep inside of jax."""

from __future__ import annotations

from typing import Any

import jax

from startrail_jax.errors import UnsupportedError


@jax.custom_vjp
def without_derivative(values: Any) -> Any:
    """The values of a backward pass, unchanged; a derivative of them raises when it is traced."""
    return values


def _refuse(values: Any) -> Any:
    del values
    raise UnsupportedError(
        "Sequence-parallel attention has first derivatives only; got a gradient of its gradient. "
        "Use jax.nn.dot_product_attention where second derivatives are needed, or finite "
        "differences of the gradient."
    )


without_derivative.defvjp(_refuse, lambda _, cotangents: (cotangents,))

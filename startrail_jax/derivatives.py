"""Where derivatives end: an error that says so, in place of one from deep inside of jax."""

from __future__ import annotations

import functools
from typing import Any

import jax

from startrail_jax.errors import UnsupportedError


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

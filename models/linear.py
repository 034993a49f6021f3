"""Bias-free projections whose weights get float32 gradients, whatever the activations are."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from startrail_jax.errors import InputError


def linear(
    inputs: int | tuple[int, ...],
    outputs: int | tuple[int, ...],
    *,
    gain: float = 1.0,
    dtype: Any,
    out_dtype: Any = None,
    rngs: nnx.Rngs,
) -> nnx.LinearGeneral:
    """A projection of the last dimensions, of sizes `inputs`, to dimensions of sizes `outputs`.

    It turns inputs of variance 1 into outputs of variance gain^2, whatever the sizes. The kernel,
    [*inputs, *outputs], is float32, and is used in `dtype`, which is the type of the output too if
    `out_dtype` is None.
    """
    axis = tuple(range(-len(inputs), 0)) if isinstance(inputs, tuple) else -1
    return nnx.LinearGeneral(
        inputs,
        outputs,
        axis=axis,
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(gain**2, "fan_in", "normal"),
        dtype=dtype,
        # Only `project` casts the kernel: the gradient of a cast outside of it would be rounded.
        promote_dtype=_cast_activations,
        dot_general=_dot_general,
        preferred_element_type=out_dtype,
        rngs=rngs,
    )


def _cast_activations(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Casts the activations alone; `nnx.LinearGeneral` calls it to give all arrays one type."""
    x, *weights = arrays
    return x.astype(dtype), *weights


def _dot_general(
    x: Array, kernel: Array, dims: Any, *, preferred_element_type: Any = None, **options: Any
) -> Array:
    """`project` with the arguments with which `nnx.LinearGeneral` calls `lax.dot_general`."""
    if any(value is not None for value in options.values()):
        raise InputError(
            f"linear() takes no option of lax.dot_general; got {options}. Leave them out."
        )
    return project(x, kernel, len(dims[0][0]), preferred_element_type)


def project_adapted(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    lora_a: Float[Array, "..."],
    lora_b: Float[Array, "..."],
    scale: float,
    contracted: int = 1,
    out_dtype: Any = None,
) -> Float[Array, "..."]:
    """`project` with a low-rank adapter: x W + scale * (x A) B. The sum is rounded once."""
    out: Any = project(x, kernel, contracted, out_dtype)
    added: Any = project(project(x, lora_a, contracted), lora_b, 1, jnp.float32)
    return (out.astype(jnp.float32) + scale * added).astype(out.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def project(
    x: Float[Array, "..."], kernel: Float[Array, "..."], contracted: int = 1, out_dtype: Any = None
) -> Float[Array, "..."]:
    """Contracts the last dimensions of x, [..., *inputs], with a kernel's, [*inputs, *outputs].

    The kernel is float32, and cast to the type of x, which is also the type of the output if
    `out_dtype` is None. `contracted` is the number of dimensions in `inputs`.

    The gradient of the kernel is float32. A matrix product of 16-bit arrays adds in float32 anyway,
    and the sums that follow it, over tiles, parts of a batch and devices, should not round.
    """
    return jnp.tensordot(
        x, kernel.astype(x.dtype), contracted, preferred_element_type=out_dtype or x.dtype
    )


def _project_backward(contracted: int, _: Any, residuals: Any, dout: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    dout = dout.astype(x.dtype)
    outputs = tuple(range(contracted - kernel.ndim, 0))
    tokens = tuple(range(x.ndim - contracted))
    dx = jnp.tensordot(dout, kernel.astype(x.dtype), (outputs, outputs))
    dkernel = jnp.tensordot(x, dout, (tokens, tokens), preferred_element_type=jnp.float32)
    return dx, dkernel.astype(kernel.dtype)


project.defvjp(lambda x, w, *options: (project(x, w, *options), (x, w)), _project_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project_to_rows(
    x: Float[Array, "... C"], table: Float[Array, "V C"], out_dtype: Any = None
) -> Float[Array, "... V"]:
    """`project` with a table whose rows take the place of a kernel's columns: a tied embedding.

    The table is float32, and its gradient is computed as it lies in memory. XLA would join the
    transpose of another one with its product, in a form that its compiler for CPUs lacks for 16-bit
    arrays.
    """
    return jnp.tensordot(
        x, table.astype(x.dtype), (-1, 1), preferred_element_type=out_dtype or x.dtype
    )


def _to_rows_backward(_: Any, residuals: Any, dout: Array) -> tuple[Array, Array]:
    x, table = residuals
    dout = dout.astype(x.dtype)
    tokens = tuple(range(x.ndim - 1))
    dtable = jnp.tensordot(dout, x, (tokens, tokens), preferred_element_type=jnp.float32)
    return jnp.tensordot(dout, table.astype(x.dtype), 1), dtable.astype(table.dtype)


project_to_rows.defvjp(
    lambda x, table, out_dtype: (project_to_rows(x, table, out_dtype), (x, table)),
    _to_rows_backward,
)

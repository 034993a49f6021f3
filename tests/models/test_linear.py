"""Projections: what they compute, and in which types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.linear import linear, project, project_to_rows

TOKENS = 4096


def exact(x, kernel, dout):
    """Output and gradients in float64."""
    x, kernel, dout = (np.asarray(y.astype(jnp.float32), np.float64) for y in (x, kernel, dout))
    return (
        np.einsum("bti,iho->btho", x, kernel),
        np.einsum("btho,iho->bti", dout, kernel),
        np.einsum("bti,btho->iho", x, dout),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_project_gives_the_weights_float32_gradients(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, TOKENS // 2, 5), dtype)
    # Values that bfloat16 can hold, so that only sums can round.
    kernel = jax.random.normal(keys[1], (5, 3, 7), "bfloat16").astype(jnp.float32)
    dout = jax.random.normal(keys[2], (2, TOKENS // 2, 3, 7), dtype)

    @jax.jit
    def run(x, kernel, dout):
        out, transpose = jax.vjp(lambda x, kernel: project(x, kernel, 1), x, kernel)
        return out, *transpose(dout)

    out, dx, dkernel = run(x, kernel, dout)
    assert (out.dtype, dx.dtype, dkernel.dtype) == (dtype, dtype, "float32")
    expected = exact(x, kernel, dout)
    rounding = 1e-5 if dtype == "float32" else 2**-7
    for actual, wanted in zip((out, dx), expected, strict=False):
        np.testing.assert_allclose(
            actual.astype(jnp.float32), wanted, rtol=rounding, atol=rounding * np.abs(wanted).max()
        )
    # Far below what bfloat16 can tell apart, 4e-3.
    np.testing.assert_allclose(dkernel, expected[2], atol=1e-5 * np.abs(expected[2]).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_table_are_columns_of_a_kernel(dtype):
    """As a tied embedding uses them, compiled: XLA for CPUs refuses some 16-bit products."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 32, 16), dtype)
    table = jax.random.normal(keys[1], (24, 16))
    dout = jax.random.normal(keys[2], (2, 32, 24))

    @jax.jit
    def run(x, table, dout):
        out, transpose = jax.vjp(lambda x, table: project_to_rows(x, table, jnp.float32), x, table)
        return out, *transpose(dout)

    out, dx, dtable = run(x, table, dout)
    wanted, transpose = jax.vjp(lambda x, kernel: project(x, kernel, 1, jnp.float32), x, table.T)
    dx_wanted, dkernel = transpose(dout)
    assert (out.dtype, dx.dtype, dtable.dtype) == ("float32", dtype, "float32")
    for actual, expected in ((out, wanted), (dx, dx_wanted), (dtable, dkernel.T)):
        actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
        np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=1e-4)


def test_linear_contracts_all_its_inputs():
    layer = linear((3, 4), 6, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 5, 3, 4))
    expected = np.einsum("btij,ijo->bto", x, layer.kernel[...])
    np.testing.assert_allclose(layer(x), expected, atol=1e-5)

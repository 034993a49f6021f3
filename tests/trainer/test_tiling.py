"""Tiles of tokens: the same values and gradients, from fewer tokens at a time."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from models.linear import project
from trainer.parallel.tiling import in_tiles, summed_in_tiles


@pytest.mark.parametrize("tile", [None, 1, 5, 15, 30, 99, 7])
def test_in_tiles_gives_the_same_values_and_gradients(tile):
    x = jax.random.normal(jax.random.key(0), (2, 15, 3))
    y = jnp.arange(30.0).reshape(2, 15)
    w = jax.random.normal(jax.random.key(1), (3, 7))
    seen = []

    def function(w, x, y):
        seen.append(x.shape)
        return jnp.tanh(x @ w) * y[:, :, None]

    def total(w, x, run):
        return jnp.sum(run(lambda x, y: function(w, x, y))(x, y) ** 2)

    results = [
        jax.jit(jax.value_and_grad(lambda w, x, run=run: total(w, x, run), (0, 1)))(w, x)
        for run in (lambda f: f, lambda f: in_tiles(f, tile, jnp.float32))
    ]
    expected, actual = results
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-4)
    # Thirty tokens are five tiles of six rather than four of seven and one of two.
    size = {7: 6}.get(tile, tile)
    assert seen[-1] == ((2, 15, 3) if tile in (None, 30, 99) else (1, size, 3))


def test_in_tiles_keeps_the_order_of_tokens():
    x = jnp.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(in_tiles(lambda x: x + 1, 2, jnp.float32)(x), x + 1)


def test_loops_over_tiles_have_matrices_in_the_type_of_their_products():
    """Cast once, and not once for each tile, with the same gradients in float32."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 15, 8), jnp.bfloat16)
    weights = [jax.random.normal(key, (8, 8)) for key in keys[1:]]

    def gradients(dtype):
        def total(weights, x):
            def function(x):
                return project(jnp.tanh(project(x, weights[0])), weights[1])

            return in_tiles(function, 7, dtype)(x).astype(jnp.float32).sum()

        return jax.jit(jax.grad(total)), (weights, x)

    narrow, given = gradients(jnp.bfloat16)
    wide, _ = gradients(jnp.float32)
    found = narrow(*given)
    assert {w.dtype for w in found} == {jnp.dtype(jnp.float32)}
    chex.assert_trees_all_equal(found, wide(*given))
    carried = [
        [
            x.aval.dtype
            for x in equation.invars[: equation.params["num_consts"]]
            if x.aval.size == 64
        ]
        for equation in equations(jax.make_jaxpr(narrow)(*given).jaxpr)
        if equation.primitive.name == "scan"
    ]
    assert carried
    assert carried == [[jnp.bfloat16] * 2] * len(carried)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_sums_of_tiles_that_do_not_divide_the_tokens_are_the_same():
    """Eleven tokens in three tiles of four, or in two of six, which end with a zero."""
    x, w = jax.random.normal(jax.random.key(0), (1, 11, 3)), jnp.ones((3, 2))
    counted = jnp.arange(11.0)[None]

    def total(w, x, counted):
        return jnp.sum(jax.nn.logsumexp(x @ w, -1) * counted)

    def on_a_device(function):
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        specs = dict(in_specs=(PartitionSpec(),) * 3, out_specs=PartitionSpec())
        return jax.jit(jax.shard_map(function, mesh=mesh, **specs))(w, x, counted)

    wanted = jax.value_and_grad(total, (0, 1))(w, x, counted)
    for tile in (4, 10):
        summed = summed_in_tiles(total, tile, jnp.float32)
        found = on_a_device(jax.value_and_grad(summed, (0, 1)))
        chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-5)
        value = on_a_device(summed_in_tiles(total, tile, jnp.float32, differentiated=False))
        np.testing.assert_allclose(value, wanted[0], rtol=1e-5)

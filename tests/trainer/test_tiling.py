"""Tiles of tokens: the same values and gradients, from fewer tokens at a time."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

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
        for run in (lambda f: f, lambda f: in_tiles(f, tile))
    ]
    expected, actual = results
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-4)
    # Thirty tokens are five tiles of six rather than four of seven and one of two.
    size = {7: 6}.get(tile, tile)
    assert seen[-1] == ((2, 15, 3) if tile in (None, 30, 99) else (1, size, 3))


def test_in_tiles_keeps_the_order_of_tokens():
    x = jnp.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(in_tiles(lambda x: x + 1, 2)(x), x + 1)


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

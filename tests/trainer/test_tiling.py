"""Tiles of tokens: the same values and gradients, from fewer tokens at a time."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.parallel.tiling import (
    check_tile,
    in_tiles,
)


@pytest.mark.parametrize("tile", [None, 1, 5, 15, 30, 99])
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
    assert seen[-1] == ((2, 15, 3) if tile in (None, 30, 99) else (1, tile, 3))


def test_in_tiles_keeps_the_order_of_tokens():
    x = jnp.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(in_tiles(lambda x: x + 1, 2)(x), x + 1)


def test_tile_that_does_not_divide_raises():
    for tile, tokens in ((None, 7), (4, 8), (9, 8), (8, 8)):
        check_tile(tile, tokens)
    with pytest.raises(ValueError, match=r"tile must divide.*tile=6 for 16 tokens. Use --tile 4"):
        check_tile(6, 16)

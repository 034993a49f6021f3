"""The merge of partial attentions."""

import jax.numpy as jnp
import numpy as np

from startrail_jax.blocks.shapes import EMPTY
from startrail_jax.blocks.softmax import merge_partials, merge_precisely


def test_merge_ignores_empty_parts_and_keeps_rows_that_are_empty_everywhere():
    out = jnp.arange(6.0).reshape(1, 2, 1, 3).at[0, 1].set(0)
    lse = jnp.array([[[3.0, EMPTY]]])
    merged, merged_lse = merge_partials([(out, lse), (0 * out, jnp.full_like(lse, EMPTY))])
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_array_equal(merged_lse, lse)


def test_merge_of_far_apart_logits_does_not_overflow():
    out = jnp.ones((1, 1, 1, 1))
    low, high = (jnp.full((1, 1, 1), x) for x in (-3e4, 3e4))
    merged, lse = merge_partials([(out, low), (2 * out, high)])
    assert merged.item() == 2.0
    assert lse.item() == 3e4


def test_merges_of_large_logits_lose_nothing_to_the_rounding_of_lse():
    """Near 1e4, neighbouring float32 numbers are 1e-3 apart, and each merge would round to one."""
    rng = np.random.default_rng(0)
    logits = 1e4 + rng.integers(0, 1024, 40) / 256
    values = rng.normal(size=40)
    merged = (jnp.zeros((1, 1, 1, 1)), jnp.full((1, 1, 1), EMPTY))
    for logit, value in zip(logits, values, strict=True):
        key = jnp.full((1, 1, 1, 1), value), jnp.full((1, 1, 1), logit)
        merged = merge_precisely([merged, key])
    out, lse, low = (np.asarray(x, np.float64).item() for x in merged)
    expected = np.log(np.exp(logits - 1e4).sum())
    np.testing.assert_allclose(lse - 1e4 + low, expected, rtol=1e-6)
    weights = np.exp(logits - 1e4 - expected)
    np.testing.assert_allclose(out, weights @ values, atol=2e-6)


def test_merge_of_the_greatest_values_does_not_overflow():
    part = jnp.full((1, 1, 1, 1), 3e38), jnp.zeros((1, 1, 1))
    out, _ = merge_partials([part, part, part])
    np.testing.assert_allclose(out, 3e38, rtol=1e-6)

"""The oracle against finite differences and against cases worked out by hand."""

import numpy as np
import pytest

import oracle

pytestmark = pytest.mark.quick

EPSILON = 1e-5

PACKED = np.array([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, -1, -1]])
CROSS = (np.array([[0, 0, 1, 1, 2, -1, 3]] * 2), np.array([[1, 0, 0, -1, 1]] * 2))

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "packed": {"causal": True, "segment_ids": PACKED},
    "packed_window": {"causal": True, "window": 2, "segment_ids": PACKED},
    "cross": {"segment_ids": CROSS},
    "scale": {"causal": True, "scale": 0.7},
}


def arrays(kv_heads=1, key_len=7):
    """query, key, value, dout, dlse with batch 2, length 7, 2 heads per KV head, widths 3 and 5."""
    rng = np.random.default_rng(0)
    heads = 2 * kv_heads
    shapes = [(2, 7, heads, 3), (2, key_len, kv_heads, 3), (2, key_len, kv_heads, 5)]
    shapes += [(2, 7, heads, 5), (2, heads, 7)]
    return [rng.normal(size=shape) for shape in shapes]


@pytest.mark.parametrize("name", MASKS)
def test_gradients_match_finite_differences(name):
    *inputs, dout, dlse = arrays(kv_heads=2, key_len=5 if name == "cross" else 7)

    def objective(*inputs):
        out, lse = oracle.attention(*inputs, **MASKS[name])
        return (out * dout).sum() + np.where(lse > oracle.EMPTY, lse * dlse, 0).sum()

    found = oracle.gradients(*inputs, dout, dlse, **MASKS[name])
    for number, gradient in enumerate(found):
        expected = np.zeros_like(gradient)
        for index in np.ndindex(gradient.shape):
            step = np.zeros_like(gradient)
            step[index] = EPSILON
            shifted = [
                [*inputs[:number], inputs[number] + s, *inputs[number + 1 :]] for s in (step, -step)
            ]
            expected[index] = (objective(*shifted[0]) - objective(*shifted[1])) / (2 * EPSILON)
        np.testing.assert_allclose(gradient, expected, rtol=1e-7, atol=1e-9)


def test_causal_running_mean_and_lse():
    query, key, value, _, _ = arrays()
    zero = np.zeros_like(query)
    out, lse = oracle.attention(zero, key, value, causal=True)
    count = np.arange(1, 8)
    mean = value.cumsum(1) / count[:, None, None]
    np.testing.assert_allclose(out[:, :, 1:], mean, rtol=1e-12)
    np.testing.assert_allclose(lse, np.broadcast_to(np.log(count), lse.shape), rtol=1e-12)


def test_window_of_one_sees_only_itself():
    query, key, value, _, _ = arrays()
    out, lse = oracle.attention(query, key, value, causal=True, window=1, scale=2.0)
    np.testing.assert_allclose(out[:, :, :1], value, rtol=1e-12)
    self_logit = 2.0 * (query * key).sum(-1)
    np.testing.assert_allclose(lse, self_logit.transpose(0, 2, 1), rtol=1e-12)


def test_two_keys_by_hand():
    query = np.full((1, 1, 1, 1), 2.0)
    key = np.array([0.0, np.log(3.0) / 2.0]).reshape(1, 2, 1, 1)
    value = np.array([1.0, 5.0]).reshape(1, 2, 1, 1)
    out, lse = oracle.attention(query, key, value)
    np.testing.assert_allclose(out, 4.0)
    np.testing.assert_allclose(lse, np.log(4.0))
    dq, dk, dv = oracle.gradients(query, key, value, np.ones((1, 1, 1, 1)))
    # p = (1/4, 3/4), ds = p * (v - out) = (-3/4, 3/4)
    np.testing.assert_allclose(dq.ravel(), 0.75 * np.log(3.0) / 2.0)
    np.testing.assert_allclose(dk.ravel(), [-1.5, 1.5])
    np.testing.assert_allclose(dv.ravel(), [0.25, 0.75])

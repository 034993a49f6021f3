"""Rotary positions beside the formulas of the papers, written out again."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.rope import Rope, rotate
from refusals import refused
from startrail_jax.errors import InputError


def test_rotate_turns_the_pairs_of_both_halves():
    rope = Rope(head_dim=4, base=100.0)
    x = jnp.array([1.0, 0.0, 0.0, 1.0]).reshape(1, 1, 1, 4)
    actual = rotate(x, rope.rotation(jnp.full((1, 1), 3, jnp.int32))).ravel()
    expected = [math.cos(3), -math.sin(0.3), math.sin(3), math.cos(0.3)]
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_interleaved_pairs_are_neighbours():
    """Channels behind those that turn stay as they are."""
    rotation = Rope(head_dim=6, base=100.0).rotation(jnp.array([[0, 3]], jnp.int32))
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 8)).astype("f4")
    actual = rotate(jnp.asarray(x), rotation, interleaved=True)
    angles = np.array([0.0, 3.0])[:, None, None] * 100.0 ** (-np.arange(3) / 3)
    turned = (x[..., 0:6:2] + 1j * x[..., 1:6:2]) * np.exp(1j * angles)
    expected = x.copy()
    expected[..., 0:6:2], expected[..., 1:6:2] = turned.real, turned.imag
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_rotation_is_exact_in_long_contexts():
    rope = Rope(head_dim=128, base=500_000.0)
    positions = np.array([[0, 1, 77_777, 524_287]])
    cos, sin = jax.jit(rope.rotation)(jnp.asarray(positions, jnp.int32))
    angles = positions[:, :, None] * 500_000.0 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(cos, np.cos(angles), atol=5e-4)
    np.testing.assert_allclose(sin, np.sin(angles), atol=5e-4)
    np.testing.assert_allclose(cos[:, :2], np.cos(angles)[:, :2], atol=1e-6)
    # What matters is the angle between two tokens: it does not depend on where they are.
    near, far = (
        jax.jit(rope.rotation)(jnp.array([[start, start + 1000]], jnp.int32))
        for start in (0, 523_000)
    )
    between = [
        (x[0, 0, 0] + 1j * x[1, 0, 0]).conj() * (x[0, 0, 1] + 1j * x[1, 0, 1]) for x in (near, far)
    ]
    np.testing.assert_allclose(*between, atol=2e-6)


def stretched(scaling, *, base=10_000.0, head_dim=16, factor=8.0, original_length=64):
    plain = np.array([base ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    rope = Rope(
        head_dim=head_dim, base=base, scaling=scaling, factor=factor,
        original_length=None if scaling in ("linear", "ntk") else original_length,
    )  # fmt: skip
    return plain, rope.frequencies()


def test_linear_scaling_slows_all_alike():
    plain, actual = stretched("linear")
    np.testing.assert_allclose(actual, plain / 8, rtol=1e-6)


def test_llama3_scaling_slows_the_long_wavelengths():
    plain, actual = stretched("llama3", head_dim=64)
    expected = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4:
            expected.append(frequency)
        elif wavelength > 64 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert actual[0] == 1
    np.testing.assert_allclose(actual[-1], plain[-1] / 8, rtol=1e-6)
    blended = (actual < plain * 0.999) & (actual > plain / 8 * 1.001)
    assert blended.any()


def test_yarn_scaling_blends_between_32_turns_and_one():
    head_dim, base, length = 64, 10_000.0, 4096
    plain, actual = stretched("yarn", head_dim=head_dim, original_length=length)

    def index(turns):
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(index(32)), math.ceil(index(1))
    assert 0 < low < high < head_dim // 2
    for i, frequency in enumerate(plain):
        ramp = min(max((i - low) / (high - low), 0), 1)
        expected = frequency / 8 * ramp + frequency * (1 - ramp)
        np.testing.assert_allclose(actual[i], expected, rtol=1e-6)
    rope = Rope(head_dim=8, scaling="yarn", factor=8.0, original_length=64)
    rotation = rope.rotation(jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(rotation[0], 0.1 * math.log(8) + 1, rtol=1e-6)


def test_odd_head_dim_and_scaling_without_the_length_before_raise():
    with refused(InputError, head_dim=5):
        Rope(head_dim=5)
    with refused(InputError, scaling="llama3"):
        Rope(head_dim=4, scaling="llama3", factor=2.0)


def test_ntk_scaling_slows_the_longest_wavelength_by_the_whole_factor():
    plain, actual = stretched("ntk", head_dim=64, factor=8.0)
    expected = [(10_000.0 * 8 ** (64 / 62)) ** (-2 * i / 64) for i in range(32)]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert actual[0] == plain[0] == 1
    np.testing.assert_allclose(actual[-1], plain[-1] / 8, rtol=1e-6)


@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_turns_say_which_wavelengths_are_stretched(scaling):
    options = dict(head_dim=64, scaling=scaling, factor=8.0, original_length=4096)
    standard = Rope(**options, turns={"llama3": (4.0, 1.0), "yarn": (32.0, 1.0)}[scaling])
    np.testing.assert_array_equal(Rope(**options).frequencies(), standard.frequencies())
    plain = Rope(head_dim=64).frequencies()
    turns = 4096 * plain / (2 * np.pi)
    actual = Rope(**options, turns=(100.0, 10.0)).frequencies()
    kept, whole = turns > 130, turns < 8
    assert kept.any()
    assert whole.any()
    np.testing.assert_allclose(actual[kept], plain[kept], rtol=1e-6)
    np.testing.assert_allclose(actual[whole], plain[whole] / 8, rtol=1e-6)


def test_attention_factor_takes_the_place_of_that_of_the_paper():
    rope = Rope(head_dim=8, scaling="yarn", factor=8.0, original_length=64, attention_factor=1.25)
    assert rope.magnitude == 1.25

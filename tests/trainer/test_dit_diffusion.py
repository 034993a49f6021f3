"""Samplers against the exact solution for Gaussian data, and the equations of each kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.dit import diffusion
from trainer.dit.diffusion import draw_times, estimates, guided, noised, sample

KINDS = ["flow", "v", "eps"]
PAIRS = [(kind, sampler) for kind in KINDS for sampler in diffusion.SAMPLERS[kind]]
MEAN, STD = 0.7, 0.4
SHAPE = (5, 3, 7)


def make_noise(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def coefficients(kind, time, like=np):
    if kind == "flow":
        return 1 - time, time
    return like.cos(np.pi / 2 * time), like.sin(np.pi / 2 * time)


def best_prediction(kind, mean=MEAN, std=STD):
    """The mean of the target for data of N(mean, std^2): what a perfect model says of x_t."""

    def predict(x, time):
        time = time.reshape(-1, *[1] * (x.ndim - 1))
        signal, spread = coefficients(kind, time, like=jnp)
        normalised = (x - signal * mean) / (signal**2 * std**2 + spread**2)
        x0, noise = mean + signal * std**2 * normalised, spread * normalised
        return {"flow": noise - x0, "v": signal * noise - spread * x0, "eps": noise}[kind]

    return predict


def exact(kind, noise):
    """Where the probability flow leads, in float64: it keeps quantiles of the marginals."""
    signal, spread = coefficients(kind, 1.0 if kind == "flow" else 1 - diffusion.CLIPPED)
    start = np.asarray(noise, np.float64)
    return MEAN + STD * (start - signal * MEAN) / np.hypot(signal * STD, spread)


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def samples(kind, sampler, noise, steps):
    return sample(kind, sampler, best_prediction(kind), noise, steps)


def worst_error(kind, sampler, steps):
    noise = make_noise(*SHAPE)
    return np.abs(samples(kind, sampler, noise, steps) - exact(kind, noise)).max()


@pytest.mark.parametrize("kind", KINDS)
def test_noised_mixes_data_and_noise_as_its_kind_says(kind):
    x0, noise = make_noise(*SHAPE), make_noise(*SHAPE, seed=1)
    time = jnp.linspace(0.1, 0.9, SHAPE[0])
    x_t, target = noised(kind, x0, noise, time)
    assert x_t.dtype == target.dtype == jnp.float32
    signal, spread = coefficients(kind, np.asarray(time)[:, None, None])
    np.testing.assert_allclose(x_t, signal * x0 + spread * noise, atol=1e-6)
    expected = {"flow": noise - x0, "v": signal * noise - spread * x0, "eps": noise}[kind]
    np.testing.assert_allclose(target, expected, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6,), (6, 2), (6, 2, 3, 4, 5)], ids=str)
def test_estimates_invert_noised_at_all_times(kind, shape):
    x0, noise = make_noise(*shape), make_noise(*shape, seed=1)
    time = jnp.array([0.0, 1e-3, 0.3, 0.7, 0.999, 1.0])
    x_t, target = noised(kind, x0, noise, time)
    found = estimates(kind, x_t, target, time)
    # By 1/127, the least signal, rounding errors of x_t are divided.
    np.testing.assert_allclose(found[0], x0, atol=1e-4 if kind == "eps" else 1e-6)
    np.testing.assert_allclose(found[1], noise, atol=1e-6)


def test_clipped_times_leave_a_little_noise_and_a_little_signal():
    time = jnp.array([0.0, 1.0])
    ones, zeros = jnp.ones(2), jnp.zeros(2)
    for kind in ("v", "eps"):
        np.testing.assert_allclose(noised(kind, ones, zeros, time)[0][1], 1 / 127, rtol=0.01)
        np.testing.assert_allclose(noised(kind, zeros, ones, time)[0][0], 1 / 127, rtol=0.01)


@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("heun", 2)])
def test_errors_of_samplers_of_flow_fall_with_their_order(sampler, order):
    errors = [worst_error("flow", sampler, steps) for steps in (8, 16, 32)]
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    np.testing.assert_allclose(orders, order, atol=0.3)


@pytest.mark.parametrize("kind", ["v", "eps"])
def test_ddim_converges(kind):
    errors = [worst_error(kind, "ddim", steps) for steps in (10, 40, 160)]
    assert errors[0] < 0.3
    assert errors[1] < errors[0] / 3
    assert errors[2] < errors[1] / 3


@pytest.mark.parametrize(("kind", "sampler"), [(k, s) for k, s in PAIRS if s != "heun"])
def test_data_of_one_value_are_sampled_in_one_step(kind, sampler):
    found = sample(kind, sampler, best_prediction(kind, std=0.0), make_noise(*SHAPE), 1)
    np.testing.assert_allclose(found, MEAN, atol=1e-4)


def test_samplers_call_the_model_at_times_that_it_has_learnt():
    times = []

    def predict(x, time):
        jax.debug.callback(times.append, time)
        return jnp.zeros_like(x)

    for kind, sampler in PAIRS:
        jax.block_until_ready(sample(kind, sampler, predict, make_noise(3, 2), 4))
        jax.effects_barrier()
    assert {time.shape for time in times} == {(3,)}
    values = np.sort([time[0] for time in times])
    ddim = np.linspace(1 - diffusion.CLIPPED, diffusion.CLIPPED, 4)
    flow = [1, 0.75, 0.5, 0.25]
    expected = [*flow, *flow, 0.75, 0.5, 0.25, 0, *ddim, *ddim]
    np.testing.assert_allclose(values, np.sort(expected), atol=1e-6)


def test_guidance_goes_from_the_unconditional_prediction_to_the_conditional_and_further():
    x, time = make_noise(2, 3), jnp.zeros(2)
    for scale, expected in [(0.0, x - 1), (1.0, 2 * x), (3.0, 4 * x + 2)]:
        predict = guided(lambda x, _: 2 * x, lambda x, _: x - 1, scale)
        np.testing.assert_allclose(predict(x, time), expected, atol=1e-6)


@pytest.mark.parametrize(("density", "quartile"), [("uniform", 0.25), ("logit_normal", 0.3375)])
def test_times_have_their_density(density, quartile):
    times = draw_times(jax.random.key(0), density, (4000,))
    assert times.dtype == jnp.float32
    assert 0 <= times.min() < times.max() <= 1
    found = np.quantile(times, [0.25, 0.5, 0.75])
    np.testing.assert_allclose(found, [quartile, 0.5, 1 - quartile], atol=0.03)

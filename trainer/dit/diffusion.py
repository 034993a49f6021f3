"""Diffusion without a model: how noise is added, what a model predicts, how samples are drawn.

Time runs from 0, data, to 1, noise: x_t = signal(t) * x0 + spread(t) * noise. The kinds are

    kind    signal(t)       spread(t)       target of the model
    flow    1 - t           t               noise - x0, the velocity dx_t / dt
    v       cos(pi t / 2)   sin(pi t / 2)   signal(t) * noise - spread(t) * x0
    eps     cos(pi t / 2)   sin(pi t / 2)   noise

Everything is float32. Arrays are [B ...], with one time for each row.

References:
    Rectified flow: https://arxiv.org/abs/2209.03003
    DDPM, which predicts the noise: https://arxiv.org/abs/2006.11239
    The cosine schedule: https://arxiv.org/abs/2102.09672
    v, and continuous time: https://arxiv.org/abs/2202.00512
    DDIM: https://arxiv.org/abs/2010.02502
    Heun's method for sampling: https://arxiv.org/abs/2206.00364
    Logit-normal times: https://arxiv.org/abs/2403.03206
    Classifier-free guidance: https://arxiv.org/abs/2207.12598
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Key

from startrail_jax.errors import InputError

Kind = Literal["flow", "v", "eps"]
Sampler = Literal["euler", "heun", "ddim"]
Density = Literal["uniform", "logit_normal"]

# (x [B ...], time [B]) -> prediction of the model, [B ...]
Predict = Callable[[Float[Array, "B ..."], Float32[Array, " B"]], Float[Array, "B ..."]]

SAMPLERS: dict[Kind, tuple[Sampler, ...]] = {
    "flow": ("euler", "heun"),
    "v": ("ddim",),
    "eps": ("ddim",),
}
"""The samplers for each kind; the first is the usual one."""

CLIPPED = 0.005
"""Distance that times of "v" and "eps" keep from 0 and 1. The least noise is then 1/127, the
distance of two values of an 8-bit pixel, as in the cosine schedule. The least signal, which is a
divisor in the estimate of x0 from a predicted noise, is equally large."""


def draw_times(
    key: Key[Array, ""],
    density: Density = "uniform",
    shape: tuple[int, ...] = (),
    *,
    shift: float = 1.0,
    within: tuple[float, float] = (0.0, 1.0),
) -> Float32[Array, "..."]:
    """Times in [0, 1] to train at: uniform, or the logistic function of a standard normal, which
    favours the middle."""
    # A shift by s is undone by one by 1 / s.
    low, high = (shifted(x, 1 / shift) for x in within)
    if density == "uniform":
        return shifted(low + (high - low) * jax.random.uniform(key, shape, jnp.float32), shift)
    if within == (0.0, 1.0):
        normal = jax.random.normal(key, shape, jnp.float32)
    else:
        least, most = jax.scipy.special.logit(jnp.array([low, high], jnp.float32))
        normal = jax.random.truncated_normal(key, least, most, shape, jnp.float32)
    return shifted(jax.nn.sigmoid(normal), shift)


def shifted(time: Any, shift: float) -> Any:
    """s t / (1 + (s - 1) t): a shift s above 1 moves times towards noise. The more tokens an
    example has, the more noise hides it (arXiv 2403.03206, equation 23)."""
    return time if shift == 1 else shift * time / (1 + (shift - 1) * time)


def noised(
    kind: Kind, x0: Float[Array, "B ..."], noise: Float[Array, "B ..."], time: Float32[Array, " B"]
) -> tuple[Float32[Array, "B ..."], Float32[Array, "B ..."]]:
    """x_t and the target of the model at times in [0, 1], which are clipped for "v" and "eps"."""
    x0, noise = x0.astype(jnp.float32), noise.astype(jnp.float32)
    signal, spread = _coefficients(kind, _clip(kind, time), x0.ndim)
    x_t = signal * x0 + spread * noise
    if kind == "flow":
        return x_t, noise - x0
    if kind == "v":
        return x_t, signal * noise - spread * x0
    return x_t, noise


def estimates(
    kind: Kind,
    x_t: Float[Array, "B ..."],
    prediction: Float[Array, "B ..."],
    time: Float32[Array, " B"],
) -> tuple[Float32[Array, "B ..."], Float32[Array, "B ..."]]:
    """x0 and the noise by a prediction: the inverse of `noised`, with times clipped as there."""
    x_t, prediction = x_t.astype(jnp.float32), prediction.astype(jnp.float32)
    signal, spread = _coefficients(kind, _clip(kind, time), x_t.ndim)
    if kind == "flow":
        return x_t - spread * prediction, x_t + signal * prediction
    if kind == "v":
        return signal * x_t - spread * prediction, spread * x_t + signal * prediction
    return (x_t - spread * prediction) / signal, prediction


def guided(predict_conditional: Predict, predict_unconditional: Predict, scale: float) -> Predict:
    """Classifier-free guidance: u + scale * (c - u). Above a scale of 1, samples are more typical
    of their class, and less varied."""

    def predict(x: Float[Array, "B ..."], time: Float32[Array, " B"]) -> Float[Array, "B ..."]:
        unconditional = predict_unconditional(x, time)
        return unconditional + scale * (predict_conditional(x, time) - unconditional)

    return predict


def sample(
    kind: Kind, sampler: Sampler, predict: Predict, noise: Float[Array, "B ..."], steps: int
) -> Float32[Array, "B ..."]:
    """Turns noise into data, with one call of `predict` for each step, or two with "heun". "euler"
    and "heun" integrate the velocity from t = 1 to 0 in equal steps, to first and second order.
    "ddim" estimates data and noise in each step, and mixes them again as at the next time; the last
    estimate of the data, at the smallest time, is the sample."""
    if sampler not in SAMPLERS[kind]:
        raise InputError(
            f"A model of target={kind!r} needs one of the samplers {SAMPLERS[kind]}; got "
            f"sampler={sampler!r}. Use {SAMPLERS[kind][0]!r}."
        )
    if steps < 1:
        raise InputError(f"steps must be at least 1; got steps={steps}. Use 50.")

    def predicted(x: Array, time: Array) -> Array:
        return predict(x, jnp.full(x.shape[:1], time)).astype(jnp.float32)

    def euler(x: Array, now: Array, then: Array) -> Array:
        return x + (then - now) * predicted(x, now)

    def heun(x: Array, now: Array, then: Array) -> Array:
        first = predicted(x, now)
        second = predicted(x + (then - now) * first, then)
        return x + (then - now) * (first + second) / 2

    def ddim(x: Array, now: Array, then: Array) -> Array:
        rows = jnp.full(x.shape[:1], now)
        x0, noise = estimates(kind, x, predicted(x, now), rows)
        signal, spread = _coefficients(kind, then[None], x.ndim)
        return signal * x0 + spread * noise

    if sampler == "ddim":
        # All times at which the model was trained, and then 0, where no noise is left.
        times = jnp.append(jnp.linspace(1 - CLIPPED, CLIPPED, steps), 0.0)
    else:
        times = jnp.linspace(1.0, 0.0, steps + 1)
    advance = {"euler": euler, "heun": heun, "ddim": ddim}[sampler]
    x, _ = lax.scan(
        lambda x, ends: (advance(x, *ends), None),
        noise.astype(jnp.float32),
        (times[:-1], times[1:]),
    )
    return x


def _clip(kind: Kind, time: Float32[Array, " B"]) -> Float32[Array, " B"]:
    return time if kind == "flow" else jnp.clip(time, CLIPPED, 1 - CLIPPED)


def _coefficients(
    kind: Kind, time: Float32[Array, " B"], ndim: int
) -> tuple[Float32[Array, "B ..."], Float32[Array, "B ..."]]:
    """signal(t) and spread(t), in the shape to be multiplied with arrays of `ndim` dimensions."""
    time = jnp.expand_dims(time, tuple(range(1, ndim)))
    if kind == "flow":
        return 1 - time, time
    return jnp.cos(jnp.pi / 2 * time), jnp.sin(jnp.pi / 2 * time)

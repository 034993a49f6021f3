"""Samplers of video models that predict the velocity of rectified flow, with shifted times.

Both are linear: each step mixes what it has with what the model predicts, and the weights of the
mixture depend on the times alone. Time runs from 1, noise, to 0, data.

UniPC: https://arxiv.org/abs/2302.04867, algorithms 5 to 8, with B_2(h) = exp(h) - 1; times and
their rounding as in the schedulers of diffusers, with which Wan is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Float64

from trainer.dit.diffusion import Predict, shifted

TRAINED = 1000
"""Steps of the discrete times at which Wan was trained."""
BELOW_ONE = 1e-6
"""How far the first time of UniPC is below 1, where the logarithm of the signal is finite."""


class UniPCTable(NamedTuple):
    """The weights of the mixtures of every step of UniPC, [steps] each, and the times."""

    shown: Float64[np.ndarray, " steps"]
    """The time that the model is told."""
    time: Float64[np.ndarray, " steps"]
    corrected: Float64[np.ndarray, "steps 5"]
    """Of what was predicted, of the last corrected example, and of the estimates of the data of
    this step, the last, and the one before."""
    predicted: Float64[np.ndarray, "steps 3"]
    """Of the corrected example, and of the estimates of this step and the last."""


def euler(
    predict: Predict, noise: Float[Array, "B ..."], *, steps: int, shift: float
) -> Float32[Array, "B ..."]:
    """Euler's method, as diffusers' `FlowMatchEulerDiscreteScheduler`: one `predict` per step."""
    times = shifted(np.linspace(1, shifted(1 / TRAINED, shift), steps), shift)
    times = jnp.asarray(np.append(times, 0), jnp.float32)

    def advance(x: Array, ends: tuple[Array, Array]) -> tuple[Array, None]:
        now, then = ends
        velocity = predict(x, jnp.full(x.shape[:1], now)).astype(jnp.float32)
        return x + (then - now) * velocity, None

    x, _ = lax.scan(advance, noise.astype(jnp.float32), (times[:-1], times[1:]))
    return x


def unipc(
    predict: Predict, noise: Float[Array, "B ..."], *, steps: int, shift: float
) -> Float32[Array, "B ..."]:
    """UniPC of order 2, as `UniPCMultistepScheduler` of diffusers. Arguments as in `euler`."""
    table = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), unipc_table(steps, shift))

    def advance(carry: Any, row: Any) -> tuple[Any, None]:
        x, corrected, last, before = carry
        velocity = predict(x, jnp.full(x.shape[:1], row.shown)).astype(jnp.float32)
        data = x - row.time * velocity
        corrected = _mixed(row.corrected, x, corrected, data, last, before)
        x = _mixed(row.predicted, corrected, data, last)
        return (x, corrected, data, last), None

    x = noise.astype(jnp.float32)
    nothing = jnp.zeros_like(x)
    (x, *_), _ = lax.scan(advance, (x, nothing, nothing, nothing), table)
    return x


def _mixed(weights: Float32[Array, " n"], *arrays: Array) -> Array:
    return sum((weights[i] * x for i, x in enumerate(arrays)), jnp.zeros_like(arrays[0]))


def unipc_table(steps: int, shift: float) -> UniPCTable:
    """The weights of all steps. The first and the last are of order 1, the others of order 2."""
    times = shifted(np.linspace(1, 1 / TRAINED, steps + 1)[:-1], shift)
    times[0] -= BELOW_ONE
    ends = np.append(times, 0)
    with np.errstate(divide="ignore"):
        half_snr = np.log(1 - ends) - np.log(ends)
    orders = [min(2, i + 1, steps - i) for i in range(steps)]
    corrected, predicted = np.zeros((steps, 5)), np.zeros((steps, 3))
    corrected[0, 0] = 1
    for i in range(steps):
        # The predictor goes from time i to i + 1; the corrector does so again, one step later, when
        # the estimate of the data there is known.
        h, signal = half_snr[i + 1] - half_snr[i], 1 - ends[i + 1]
        grown = np.expm1(-h)
        kept = ends[i + 1] / ends[i]
        ratio = (half_snr[i - 1] - half_snr[i]) / h if orders[i] == 2 else np.nan
        older = 0.0
        if orders[i] == 2:
            older = -signal * grown * 0.5 / ratio
        predicted[i] = kept, -signal * grown - older, older
        if i + 1 == steps:
            continue
        newer, older = 0.5, 0.0
        if orders[i] == 2:
            first = (grown / -h - 1) / grown
            second = ((grown / -h - 1) / -h - 0.5) * 2 / grown
            # [[1, 1], [ratio, 1]] @ [older, newer] = [first, second]
            older = (second - first) / (ratio - 1)
            newer = first - older
            older /= ratio
        of_new, of_older = -signal * grown * newer, -signal * grown * older
        corrected[i + 1] = 0, kept, of_new, -signal * grown - of_new - of_older, of_older
    shown = np.floor(times * TRAINED) / TRAINED
    return UniPCTable(shown, times, corrected, predicted)

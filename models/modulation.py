"""Modulation by time: layers of diffusion transformers shift and scale inputs, and gate outputs.

References:
    DiT, adaLN: https://arxiv.org/abs/2212.09748
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

TIME_SCALE = 1000.0
"""Factor of times: their sinusoids are made for the steps 0 to 1000 of DDPM."""
LONGEST = 10_000.0
"""Longest wavelength of sinusoids divided by 2 pi, in positions or steps."""
EPSILON = 1e-6
"""Added to the variance in a norm."""


def modulate(
    x: Float[Array, "B T width"],
    shift: Float32[Array, "B #T width"],
    scale: Float32[Array, "B #T width"],
    epsilon: float = EPSILON,
) -> Float[Array, "B T width"]:
    """layer_norm(x) * (1 + scale) + shift, computed in float32 and then rounded."""
    return (layer_norm(x, epsilon) * (1 + scale) + shift).astype(x.dtype)


def layer_norm(x: Float[Array, "*B width"], epsilon: float) -> Float32[Array, "*B width"]:
    """x with a mean of 0 and a variance of 1 along its last dimension."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + epsilon)


def add_gated(x: Array, gate: Array, y: Array) -> Array:
    """x + gate * y in float32, the type of the gate [B 1 width] or [B T width], then rounded."""
    return (x + gate * y).astype(x.dtype)


def one_by_one(modulations: Float32[Array, "B count width"]) -> list[Float32[Array, "B 1 width"]]:
    """The modulations one by one."""
    return jnp.split(modulations, modulations.shape[1], axis=1)


def sinusoids(
    x: Float32[Array, "..."] | Int32[Array, "..."], channels: int
) -> Float32[Array, "... channels"]:
    """Sines, then cosines, of x times frequencies that fall geometrically from 1.

    Args:
        x: positions or steps.
        channels: number of sines and cosines, even; pair i has the frequency LONGEST^(-i / pairs).
    """
    pairs = channels // 2
    frequencies = jnp.asarray(LONGEST ** (-np.arange(pairs) / max(pairs, 1)), jnp.float32)
    angles = jnp.expand_dims(x.astype(jnp.float32), -1) * jnp.expand_dims(
        frequencies, tuple(range(x.ndim))
    )
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)

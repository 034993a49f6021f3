"""Losses per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


def cross_entropy(
    logits: Float32[Array, "B T vocab"], targets: Int32[Array, "B T"]
) -> Float32[Array, "B T"]:
    """-log softmax(logits)[target] of every token, in nats."""
    target = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
    return jax.nn.logsumexp(logits, axis=-1) - target

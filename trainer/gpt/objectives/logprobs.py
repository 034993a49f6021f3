"""Numbers of tokens from their logits, which need no more memory than a cross-entropy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


@jax.custom_vjp
def logprobs_and_entropy(
    logits: Float32[Array, "B T vocab"], targets: Int32[Array, "B T"]
) -> Float32[Array, "B T 2"]:
    """The log-probability of each target, and the entropy, in nats. Logits are finite."""
    return _forward(logits, targets)[0]


def _forward(logits: Array, targets: Array) -> tuple[Array, Any]:
    lse = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    p = jnp.exp(logits - lse[..., None])
    entropy = lse - jnp.sum(p * logits, axis=-1)
    return jnp.stack([own - lse, entropy], axis=-1), (logits, targets, lse, entropy)


def _backward(residuals: Any, dout: Array) -> tuple[Array, None]:
    logits, targets, lse, entropy = residuals
    of_own, of_entropy = dout[..., :1], dout[..., 1:]
    logprobs = logits - lse[..., None]
    is_own = jnp.arange(logits.shape[-1])[None, None] == targets[..., None]
    # With the exponential in one place, a device holds no second array of the size of the logits.
    factor = of_own + of_entropy * (logprobs + entropy[..., None])
    return of_own * is_own - jnp.exp(logprobs) * factor, None


logprobs_and_entropy.defvjp(_forward, _backward)


def logprobs_of(
    logits: Float32[Array, "B T vocab"], ids: Int32[Array, "B T k"]
) -> tuple[Float32[Array, "B T k"], Float32[Array, "B T"]]:
    """The log-probabilities of some tokens in each place, all different, and of all others
    together: at least -80, if they are none."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, ids, -1)
    # Not 1 minus the others: where these are nearly 1, rounding would be all that is left.
    others = jnp.put_along_axis(logits, ids, -jnp.inf, -1, inplace=False)
    highest = jax.lax.stop_gradient(jnp.max(others, axis=-1, keepdims=True))
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    rest = highest[..., 0] - lse + jnp.log(jnp.sum(jnp.exp(others - highest), -1) + 1e-35)
    return own - lse[..., None], jnp.maximum(rest, -80.0)

"""Gated DeltaNet: the linear attention of hybrid models, such as Qwen3.5 and Olmo Hybrid.

References:
    Gated DeltaNet: https://arxiv.org/abs/2412.06464, figure 1 and section 3.4
    Factors of beta up to 2: https://arxiv.org/abs/2411.12537
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from models.layers import projected
from models.parts import gated_delta
from models.recurrent import (
    CachedLinearFn,
    Heads,
    RecurrentMixer,
    in_float32,
)


class GatedDeltaNet(RecurrentMixer):
    """Projections, short convolution, decay, and gated norm around linear attention."""

    declared = gated_delta
    # As in the code of the paper: a token is 0.001 to 0.1 units of time at first.
    decay_rates = (0.01, 16.0)
    out_gate: nnx.LinearGeneral
    decay: nnx.LinearGeneral
    beta: nnx.LinearGeneral
    out: nnx.LinearGeneral
    decay_rate: nnx.Param
    decay_bias: nnx.Param
    out_norm: nnx.RMSNorm

    def __call__(
        self, x: Float[Array, "B T width"], rotation: Any, window: Any, attend: CachedLinearFn
    ) -> tuple[Float[Array, "B T width"], Any]:
        """The layer, without rotation and window; returns its output and the cache of `attend`."""

        def finish(query: Array, key: Array, value: Array) -> Heads:
            return normalised(query), normalised(key), value

        inputs = self.inputs(x)
        decay = in_float32(projected(self.decay(x))) + self.decay_bias[...][None, None]
        decay = -jnp.exp(self.decay_rate[...])[None, None] * jax.nn.softplus(decay)
        beta = self.own.largest_beta * jax.nn.sigmoid(in_float32(projected(self.beta(x))))
        out, _, cache = self.mix(inputs, finish, decay, beta, attend)
        gate = jax.nn.silu(in_float32(projected(self.out_gate(x))))
        return self.out((self.out_norm(out) * gate).astype(self.dtype)), cache


def normalised(x: Float[Array, "B T heads K"]) -> Float[Array, "B T heads K"]:
    """Vectors of length 1, with the 1e-6 beneath the root that the code of the paper has."""
    y = in_float32(x)
    return (y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)

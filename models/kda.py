"""Kimi Delta Attention: the linear attention of Kimi Linear.

References:
    Kimi Linear: https://arxiv.org/abs/2510.26692, section 4
    `KimiLinearDeltaAttention` of the library transformers
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.gated_delta import normalised
from models.layers import projected
from models.parts import kda
from models.recurrent import CachedLinearFn, Heads, RecurrentMixer, in_float32


class KimiDeltaAttention(RecurrentMixer):
    """Projections, short convolution, decays of channels, and gated norm around linear
    attention."""

    declared = kda
    decay_rates = (1.0, 16.0)
    out_gate_down: nnx.LinearGeneral
    out_gate: nnx.LinearGeneral
    decay_down: nnx.LinearGeneral
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
        decay = in_float32(projected(self.decay(projected(self.decay_down(x)))))
        decay = jax.nn.softplus(decay + self.decay_bias[...][None, None])
        decay = -jnp.exp(self.decay_rate[...])[None, None, :, None] * decay
        beta = jax.nn.sigmoid(in_float32(projected(self.beta(x))))
        out, _, cache = self.mix(inputs, finish, decay, beta, attend)
        gate = in_float32(projected(self.out_gate(projected(self.out_gate_down(x)))))
        return self.out((self.out_norm(out) * jax.nn.sigmoid(gate)).astype(self.dtype)), cache

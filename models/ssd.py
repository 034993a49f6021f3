"""Mamba-2: linear attention whose states decay, without the delta rule, as in Nemotron-H.

References:
    Mamba-2: https://arxiv.org/abs/2405.21060, sections 7 and 8
    `NemotronHMamba2Mixer` of the library transformers
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from models.config import GPTConfig
from models.hooks import Hooks
from models.layers import projected
from models.parts import ssd
from models.recurrent import (
    CachedLinearFn,
    RecurrentMixer,
    in_float32,
)


class Mamba2(RecurrentMixer):
    """Projections, short convolution, steps, skip, and gated norm of groups around SSD."""

    declared = ssd
    decay_rates = (1.0, 16.0)
    out_gate: nnx.LinearGeneral
    step: nnx.LinearGeneral
    out: nnx.LinearGeneral
    decay_rate: nnx.Param
    step_bias: nnx.Param
    skip: nnx.Param
    out_scale: nnx.Param
    query_conv_bias: nnx.Param | None = None
    key_conv_bias: nnx.Param | None = None
    value_conv_bias: nnx.Param | None = None

    def __init__(self, config: GPTConfig, *, hooks: Hooks, **options: Any) -> None:
        """Takes the arguments of all layers with a recurrence."""
        super().__init__(config, hooks=hooks, **options)
        self.mean = hooks.mean_over_tensor

    def __call__(
        self, x: Float[Array, "B T width"], rotation: Any, window: Any, attend: CachedLinearFn
    ) -> tuple[Float[Array, "B T width"], Any]:
        """The layer, without rotation and window; returns its output and the cache of `attend`."""
        inputs = self.inputs(x)
        step = in_float32(projected(self.step(x))) + self.step_bias[...][None, None]
        step = jnp.maximum(jax.nn.softplus(step), self.own.least_step)
        decay = -jnp.exp(self.decay_rate[...])[None, None] * step
        params = (self.query_conv_bias, self.key_conv_bias, self.value_conv_bias)
        biases = [param[...] for param in params if param is not None]
        out, value, cache = self.mix(inputs, lambda *heads: heads, decay, step, attend, biases)
        out = in_float32(out) + self.skip[...][None, None, :, None] * in_float32(value)
        out = out * jax.nn.silu(in_float32(projected(self.out_gate(x))))
        return self.out(self._normalised(out).astype(self.dtype)), cache

    def _normalised(self, x: Float32[Array, "B T heads V"]) -> Float32[Array, "B T heads V"]:
        """RMSNorm of the heads of each group together. Devices along `tensor` may share a group."""
        heads, groups = self.own.heads, self.own.groups
        count = x.shape[2] // min(x.shape[2], heads // groups)
        grouped = x.reshape(*x.shape[:2], count, -1)
        mean_square = jnp.mean(grouped * grouped, axis=-1, keepdims=True)
        if x.shape[2] < heads // groups:
            mean_square = self.mean(mean_square, groups)
        grouped = grouped * lax.rsqrt(mean_square + self.own.norm_eps)
        return grouped.reshape(x.shape) * self.out_scale[...][None, None]

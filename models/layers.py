"""Parts shared by several models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from models.hooks import Hooks
from models.linear import linear

PROJECTION, HIDDEN = "projection", "hidden"
"""`checkpoint_name`s of the projections around attention, and of the hidden channels of an MLP."""
ADAPTERS = ("lora_a", "lora_b")
"""The narrow matrices beside a kernel, [*inputs, rank] and [rank, *outputs]: see `models.lora`."""
PRECISE = ("heads_scale", "modulation_table", "router", "expert_gate_bias", "expert_up_bias")
PRECISE += ("expert_down_bias",)
"""Weights of several dimensions that are used in float32, as vectors are."""


AttentionFn = Callable[..., Float[Array, "B T N H"]]
"""(query [B T N H], key [B T K H], value [B T K H], segment_ids=[B T] or None) -> [B T N H]

A layer with a window also gives local_window_size=(keys before, 0), and one with sinks sinks=[N].
"""
MakeNorm = Callable[..., nnx.RMSNorm]
"""(channels, rngs=) -> a norm"""
Norms = Literal["before", "both", "after"]
"""Norms of a block: before attention and MLP, after each of them, or both."""


def projected(x: Array) -> Array:
    """A projection before or after attention, under its name."""
    return checkpoint_name(x, PROJECTION)


def biased(x: Float[Array, "B T ..."], bias: nnx.Param | None) -> Float[Array, "B T ..."]:
    """x + bias. The sum is in float32, so that the gradient of the bias, a long sum, is too."""
    if bias is None:
        return x
    return (x.astype(jnp.float32) + bias[...][None, None]).astype(x.dtype)


def run_blocks(blocks: nnx.Module, hooks: Hooks, x: Array, *context: Any) -> Array:
    """Runs stacked blocks, (x, *context) -> x, in order."""
    graph, weights = nnx.split(blocks)

    def run_block(weights: Any, x: Array, *context: Any) -> Array:
        return nnx.merge(graph, weights)(x, *context)

    layer = hooks.wrap_layer(run_block)
    x, _ = lax.scan(lambda x, weights: (layer(weights, x, *context), None), x, weights)
    return x


class OffsetNorm(nnx.RMSNorm):
    """RMSNorm that multiplies by 1 + scale, as in Gemma, whose scales begin with 0."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Normalises the last dimension."""
        scale: Any = self.scale
        x = x.astype(jnp.float32)
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        factor = (1.0 + scale[...]).reshape((1,) * (x.ndim - 1) + (-1,))
        return x * lax.rsqrt(mean_square + self.epsilon) * factor


def make_norm(channels: int, *, epsilon: float, offset: bool, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """A norm whose outputs are float32, to be rounded afterwards.

    In 16 bits its scale, which is near 1, would be rounded itself.

    Args:
        channels: size of the last dimension.
        epsilon: number added to the mean square.
        offset: whether it multiplies by 1 + its scale, which begins with 0.
        rngs: as `nnx.RMSNorm` takes them.
    """
    if offset:
        zeros = nnx.initializers.zeros_init()
        return OffsetNorm(channels, epsilon=epsilon, dtype=jnp.float32, scale_init=zeros, rngs=rngs)
    return nnx.RMSNorm(channels, epsilon=epsilon, dtype=jnp.float32, rngs=rngs)


class NormOverHeads(nnx.Module):
    """RMSNorm over the channels of all heads together, which devices may share."""

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        epsilon: float,
        offset: bool,
        mean: Callable[[Array], Array],
    ) -> None:
        """Builds the scale, [heads, head_dim].

        Args:
            heads: heads of queries, or of keys.
            head_dim: channels of a head.
            epsilon: number added to the mean square.
            offset: whether it multiplies by 1 + its scale, which begins with 0.
            mean: the mean over the devices that share the heads: see `Hooks.mean_over_tensor`.
        """
        self.epsilon, self.offset, self.mean = epsilon, offset, mean
        self.heads_scale = nnx.Param(jnp.full((heads, head_dim), 0.0 if offset else 1.0))

    def __call__(self, x: Float[Array, "B T heads H"]) -> Float[Array, "B T heads H"]:
        x = x.astype(jnp.float32)
        mean_square = self.mean(jnp.mean(x * x, axis=(-2, -1), keepdims=True))
        scale = self.heads_scale[...][None, None]
        return x * lax.rsqrt(mean_square + self.epsilon) * (1.0 + scale if self.offset else scale)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), the same with gelu, or down(gelu(up(x)))."""

    def __init__(
        self,
        kind: Literal["swiglu", "geglu", "gelu"],
        *,
        width: int,
        hidden: int,
        out_gain: float,
        bias: bool = False,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        """Builds the projections.

        Args:
            kind: "swiglu" and "geglu" have a gate and three matrices, "gelu" has two.
            width: channels of inputs and outputs.
            hidden: channels between the projections.
            out_gain: standard deviation of the outputs of `down` for inputs of variance 1.
            bias: whether `up` has a bias.
            dtype: type of activations and matrix products.
            rngs: source of the initial weights.
        """
        gated = kind != "gelu"
        self.activation = jax.nn.silu if kind == "swiglu" else jax.nn.gelu
        self.gate = linear(width, hidden, dtype=dtype, rngs=rngs) if gated else None
        self.up = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.up_bias = nnx.Param(jnp.zeros(hidden)) if bias else None
        self.down = linear(hidden, width, gain=out_gain, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        up = checkpoint_name(biased(self.up(x), self.up_bias), HIDDEN)
        if self.gate is None:
            return self.down(self.activation(up))
        return self.down(self.activation(checkpoint_name(self.gate(x), HIDDEN)) * up)

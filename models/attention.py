"""The attention of a language model: projections around a callable that attends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from models.config import GPTConfig
from models.hooks import Hooks
from models.layers import (
    AttentionFn,
    Documents,
    MakeNorm,
    NormOverHeads,
    biased,
    give_weights,
    projected,
)
from models.parts import attention
from models.rope import rotate
from models.weights import Weight
from startrail_jax.xla.ordering import compute_first

CachedAttentionFn = Callable[..., tuple[Float[Array, "B T N H"], Any]]
"""(query, key, value, local_window_size=, sinks=) -> (out [B T N H], kv_cache)"""
Rotation = Float32[Array, "2 B T half"] | None
"""Cosines and sines of a layer; None for a layer without rotary positions."""


class GPTAttention(nnx.Module):
    """Projections, norms of heads, rotary positions, sinks and gate around an attention callable.

    With a gate, the projection to queries has twice the channels: each head has its query and then
    its gate, whose sigmoid multiplies the output (Qwen3-Next, https://arxiv.org/abs/2505.06708).
    """

    query: nnx.LinearGeneral
    key: nnx.LinearGeneral
    value: nnx.LinearGeneral | None = None
    """None if the projection to keys also makes the values."""
    out: nnx.LinearGeneral
    # No biases of `nnx.LinearGeneral`, which would look for all heads on a device that has some of
    # them.
    query_bias: nnx.Param | None = None
    key_bias: nnx.Param | None = None
    value_bias: nnx.Param | None = None
    query_norm: nnx.RMSNorm | NormOverHeads | None = None
    key_norm: nnx.RMSNorm | NormOverHeads | None = None
    sinks: nnx.Param | None = None
    out_bias: nnx.Param | None = None
    """Added where the outputs of all devices along `tensor` are summed."""

    def __init__(
        self,
        config: GPTConfig,
        *,
        attention_fn: AttentionFn,
        hooks: Hooks,
        out_gain: float,
        rngs: nnx.Rngs,
    ) -> None:
        self.attention_fn = attention_fn
        self.gated, self.interleaved = config.attention_gate, config.rope.interleaved
        make_norm = MakeNorm(config.norm_eps, config.norm_offset, hooks.mean_over_tensor)
        self.value_epsilon = config.norm_eps if config.value_norm else None
        weights, sizes = self._declared(config)
        sizes |= {"width": config.width}
        options: dict[str, Any] = dict(dtype=config.dtype, out_gain=out_gain, rngs=rngs)
        give_weights(self, weights, sizes, make_norm=make_norm, **options)

    @staticmethod
    def _declared(config: GPTConfig) -> tuple[dict[str, Weight], dict[str, int]]:
        """The weights of a layer, and the sizes of their dimensions."""
        return attention.weights(config), attention.sizes(config)

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Rotation,
        window: int | None,
        attend: CachedAttentionFn,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """Attention with projections; returns its output and the cache that `attend` returned."""
        query = biased(projected(self.query(x)), self.query_bias)
        gate = None
        if self.gated:
            query, gate = jnp.split(query, 2, axis=-1)
        query = self._normalised_and_rotated(query, self.query_norm, rotation)
        query, x = compute_first(query, x)
        value = key = biased(projected(self.key(x)), self.key_bias)
        key = self._normalised_and_rotated(key, self.key_norm, rotation)
        if self.value is not None:
            value = biased(projected(self.value(x)), self.value_bias)
        if self.value_epsilon is not None:
            value = _normalised(value, self.value_epsilon)
        # In the words of `jax.nn.dot_product_attention`; only what a layer has is asked for.
        options: dict[str, Any] = {} if window is None else {"local_window_size": (window - 1, 0)}
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        out, kv_cache = attend(query, key, value, **options)
        if gate is not None:
            opened = out.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
            out = opened.astype(out.dtype)
        return self.out(out), kv_cache

    def uncached(self, documents: Documents) -> CachedAttentionFn:
        """The model's attention callable, with None in the place of a cache."""
        attention_fn = functools.partial(self.attention_fn, **documents)
        return lambda *arrays, **options: (attention_fn(*arrays, **options), None)

    def _normalised_and_rotated(
        self,
        x: Float[Array, "B T heads H"],
        norm: nnx.RMSNorm | NormOverHeads | None,
        rotation: Rotation,
    ) -> Float[Array, "B T heads H"]:
        """Queries or keys with their positions. Nothing is rounded between norm and rotation."""
        out = x if norm is None else norm(x)
        if rotation is not None:
            out = rotate(out, rotation, interleaved=self.interleaved)
        return out.astype(x.dtype)


class GlobalAttention(GPTAttention):
    """Attention with the sizes of `GPTConfig.global_attention`."""

    @staticmethod
    def _declared(config: GPTConfig) -> tuple[dict[str, Weight], dict[str, int]]:
        return attention.global_weights(config), attention.global_sizes(config)


def _normalised(x: Float[Array, "B T heads H"], epsilon: float) -> Float[Array, "B T heads H"]:
    """RMSNorm of each head, without a scale."""
    precise = x.astype(jnp.float32)
    mean_square = jnp.mean(precise * precise, axis=-1, keepdims=True)
    return (precise * lax.rsqrt(mean_square + epsilon)).astype(x.dtype)

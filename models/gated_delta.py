"""Gated DeltaNet: the linear attention of hybrid models, such as Qwen3.5 and Olmo Hybrid.

References:
    Gated DeltaNet: https://arxiv.org/abs/2412.06464, figure 1 and section 3.4
    Factors of beta up to 2: https://arxiv.org/abs/2411.12537
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from models.config import GPTConfig
from models.hooks import Hooks
from models.layers import MakeNorm, give_weights, projected
from models.parts import gated_delta


@runtime_checkable
class LinearAttentionFn(Protocol):
    """The callable of a layer: a `startrail_jax.LinearAttention`, or one with its methods."""

    def __call__(
        self, query: Any, key: Any, value: Any, decay: Any, beta: Any, *, segment_ids: Any = None
    ) -> Any:
        """Outputs [B T heads value_dim]."""
        ...

    def causal_conv(self, x: Any, kernel: Any, *, segment_ids: Any = None) -> Any:
        """x [B T channels], convolved."""
        ...


Heads = tuple[Array, Array, Array]
"""Query and key [B T key_heads key_dim], and value [B T heads value_dim]."""
CachedLinearFn = Callable[
    [Array, Array, Callable[[Array], Heads], Array, Array], tuple[Float[Array, "B T N V"], Any]
]
"""(x, kernel, heads_of, decay, beta) -> (out, cache): x [B T channels] is convolved, `heads_of`
splits it into query, key and value, and their linear attention is the output."""


class GatedDeltaNet(nnx.Module):
    """Projections, short convolution, decay, and gated norm around linear attention."""

    query: nnx.LinearGeneral
    key: nnx.LinearGeneral
    value: nnx.LinearGeneral
    out_gate: nnx.LinearGeneral
    decay: nnx.LinearGeneral
    beta: nnx.LinearGeneral
    out: nnx.LinearGeneral
    query_conv: nnx.Param
    key_conv: nnx.Param
    value_conv: nnx.Param
    decay_rate: nnx.Param
    decay_bias: nnx.Param
    out_norm: nnx.RMSNorm
    out_bias: nnx.Param | None = None
    """A bias of what the layer adds to the stream; none."""

    def __init__(
        self,
        config: GPTConfig,
        *,
        attention_fn: Any,
        hooks: Hooks,
        out_gain: float,
        rngs: nnx.Rngs,
    ) -> None:
        """Takes the config of the model; `attention_fn` is for other layers."""
        del attention_fn
        self.config, self.dtype = config.linear.of_model(config), jnp.dtype(config.dtype)
        self.linear_attention = hooks.linear_attention
        recurrence = gated_delta.recurrence(config)
        self.rule, sizes = recurrence.rule, recurrence.sizes | {"width": config.width}
        give_weights(
            self,
            gated_delta.weights(config),
            sizes,
            dtype=config.dtype,
            out_gain=out_gain,
            make_norm=MakeNorm(self.config.norm_eps),
            inits={"conv": _conv, "decay_rate": _decay_rate, "decay_bias": _decay_bias},
            rngs=rngs,
        )

    def __call__(
        self, x: Float[Array, "B T width"], rotation: Any, window: Any, attend: CachedLinearFn
    ) -> tuple[Float[Array, "B T width"], Any]:
        """The layer, without rotation and window; returns its output and the cache of `attend`."""
        inputs = [projected(project(x)) for project in (self.query, self.key, self.value)]
        kernels = [param[...] for param in (self.query_conv, self.key_conv, self.value_conv)]

        def joined(arrays: list[Array]) -> Array:
            return jnp.concatenate([y.reshape(*y.shape[:-2], -1) for y in arrays], -1)

        def heads_of(mixed: Array) -> Heads:
            ends = [math.prod(y.shape[2:]) for y in inputs]
            parts = jnp.split(jax.nn.silu(mixed), [ends[0], ends[0] + ends[1]], axis=-1)
            query, key, value = (
                part.reshape(*part.shape[:2], *y.shape[2:])
                for part, y in zip(parts, inputs, strict=True)
            )
            return _normalised(query), _normalised(key), value

        decay = _in_float32(projected(self.decay(x))) + self.decay_bias[...][None, None]
        decay = -jnp.exp(self.decay_rate[...])[None, None] * jax.nn.softplus(decay)
        beta = self.config.largest_beta * jax.nn.sigmoid(_in_float32(projected(self.beta(x))))
        out, cache = attend(joined(inputs), joined(kernels), heads_of, decay, beta)
        gate = jax.nn.silu(_in_float32(projected(self.out_gate(x))))
        return self.out((self.out_norm(out) * gate).astype(self.dtype)), cache

    def uncached(self, segment_ids: Int32[Array, "B T"] | None) -> CachedLinearFn:
        """The model's linear attention, with None in the place of a cache."""
        attention_fn = self.linear_attention(self.rule)

        def attend(
            x: Array, kernel: Array, heads_of: Callable[[Array], Heads], decay: Array, beta: Array
        ) -> tuple[Array, None]:
            mixed = attention_fn.causal_conv(x, kernel, segment_ids=segment_ids)
            out = attention_fn(*heads_of(mixed), decay, beta, segment_ids=segment_ids)
            return out, None

        return attend


def _uniform(key: Array, shape: tuple[int, ...], low: float, high: float) -> Float32[Array, "..."]:
    return jax.random.uniform(key, shape, jnp.float32, low, high)


def _conv(key: Array, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    bound = shape[0] ** -0.5
    return _uniform(key, shape, -bound, bound)


# As in the code of the paper: rates of 0 to 16 for each unit of time, which is 0.001 to 0.1 for a
# token at first.
def _decay_rate(key: Array, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    return jnp.log(_uniform(key, shape, 0.01, 16.0))


def _decay_bias(key: Array, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    time = jnp.exp(_uniform(key, shape, math.log(0.001), math.log(0.1)))
    return time + jnp.log(-jnp.expm1(-time))


def _normalised(x: Float[Array, "B T heads K"]) -> Float[Array, "B T heads K"]:
    """Vectors of length 1, with the 1e-6 beneath the root that the code of the paper has."""
    y = _in_float32(x)
    return (y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _in_float32(x: Array) -> Array:
    return x.astype(jnp.float32)

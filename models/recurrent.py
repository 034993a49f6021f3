"""Layers and weights that all mixers with a recurrence have: see `models.parts.recurrence`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from models.config import GPTConfig
from models.hooks import Hooks
from models.layers import INITS, Documents, MakeNorm, give_weights, projected


@runtime_checkable
class LinearAttentionFn(Protocol):
    """The callable of a layer: a `startrail_jax.LinearAttention`, or an object with its methods."""

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        decay: Any,
        beta: Any,
        *,
        segment_ids: Any = None,
        visible_until: Any = None,
    ) -> Any:
        """Outputs [B T heads value_dim]."""
        ...

    def causal_conv(
        self, x: Any, kernel: Any, *, segment_ids: Any = None, visible_until: Any = None
    ) -> Any:
        """x [B T channels], convolved."""
        ...


Heads = tuple[Array, Array, Array]
"""Query and key [B T key_heads key_dim], and value [B T heads value_dim]."""
CachedLinearFn = Callable[
    [Array, Array, Callable[[Array], Heads], Array, Array],
    tuple[Float[Array, "B T N V"], Array, Any],
]
"""(x, kernel, heads_of, decay, beta) -> (out, value, cache): x [B T channels] is convolved,
`heads_of` splits it into query, key and value, and their linear attention is `out`."""


class RecurrentMixer(nnx.Module):
    """Projections and a short convolution in front of a recurrence."""

    declared: ClassVar[Any]
    """The file of `models.parts` that declares the layer."""
    decay_rates: ClassVar[tuple[float, float]]
    """Bounds of the rates by which states decay at first, for each unit of time."""
    rule: str
    """See `Recurrence.rule`."""
    linear_attention: Callable[[str], LinearAttentionFn]
    """`Hooks.linear_attention`."""
    query: nnx.LinearGeneral
    key: nnx.LinearGeneral
    value: nnx.LinearGeneral
    query_conv: nnx.Param
    key_conv: nnx.Param
    value_conv: nnx.Param
    out_bias: nnx.Param | None = None
    """Bias of the output of the layer; always None."""

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
        declared = self.declared
        self.own, recurrence = declared.options(config), declared.recurrence(config)
        self.dtype = jnp.dtype(config.dtype)
        self.rule, self.linear_attention = recurrence.rule, hooks.linear_attention
        give_weights(
            self,
            declared.weights(config),
            recurrence.sizes | {"width": config.width},
            make_norm=MakeNorm(self.own.norm_eps),
            dtype=config.dtype,
            inits={
                **INITS,
                "conv": _conv_kernel,
                "step_bias": _step_bias,
                "decay_rate": functools.partial(_decay_rate, bounds=self.decay_rates),
            },
            out_gain=out_gain,
            rngs=rngs,
        )

    def inputs(self, x: Float[Array, "B T width"]) -> list[Float[Array, "B T _ _"]]:
        """Query, key and value, before the convolution."""
        return [projected(project(x)) for project in (self.query, self.key, self.value)]

    def mix(
        self,
        inputs: Sequence[Float[Array, "B T _ _"]],
        finish: Callable[[Array, Array, Array], Heads],
        decay: Float32[Array, "B T heads"] | Float32[Array, "B T heads channels"],
        beta: Float32[Array, "B T heads"],
        attend: CachedLinearFn,
        biases: Sequence[Array] = (),
    ) -> tuple[Array, Array, Any]:
        """Convolves query, key and value, and runs the recurrence.

        Args:
            inputs: the result of `inputs`.
            finish: turns the convolved and activated arrays into query, key and value.
            decay, beta: as `startrail_jax.LinearAttention` takes them.
            attend: the function that keeps a cache.
            biases: of the convolutions, [heads, channels]; none by default.

        Returns:
            Output, value [B T heads value_dim], and the cache of `attend`.
        """
        kernels = [param[...] for param in (self.query_conv, self.key_conv, self.value_conv)]

        def heads_of(mixed: Array) -> Heads:
            ends = [math.prod(y.shape[2:]) for y in inputs]
            if biases:
                mixed = (in_float32(mixed) + _joined(biases)[None, None]).astype(mixed.dtype)
            parts = jnp.split(jax.nn.silu(mixed), [ends[0], ends[0] + ends[1]], axis=-1)
            shapes = ((*z.shape[:2], *y.shape[2:]) for z, y in zip(parts, inputs, strict=True))
            return finish(*(z.reshape(shape) for z, shape in zip(parts, shapes, strict=True)))

        return attend(_joined(inputs), _joined(kernels), heads_of, decay, beta)

    def uncached(self, documents: Documents) -> CachedLinearFn:
        """The model's linear attention, with None in the place of a cache."""
        attention_fn = self.linear_attention(self.rule)

        def attend(
            x: Array, kernel: Array, heads_of: Callable[[Array], Heads], decay: Array, beta: Array
        ) -> tuple[Array, Array, None]:
            query, key, value = heads_of(attention_fn.causal_conv(x, kernel, **documents))
            out = attention_fn(query, key, value, decay, beta, **documents)
            return out, value, None

        return attend


def _joined(arrays: Sequence[Array]) -> Array:
    """Arrays [..., heads, channels], beside each other in [..., channels]."""
    return jnp.concatenate([y.reshape(*y.shape[:-2], -1) for y in arrays], -1)


def in_float32(x: Array) -> Float32[Array, "..."]:
    return x.astype(jnp.float32)


def _uniform(key: Array, shape: tuple[int, ...], low: float, high: float) -> Float32[Array, "..."]:
    return jax.random.uniform(key, shape, jnp.float32, low, high)


def _conv_kernel(key: Array, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """The initial kernel of a convolution, [tokens, ...]."""
    bound = shape[0] ** -0.5
    return _uniform(key, shape, -bound, bound)


def _decay_rate(
    key: Array, shape: tuple[int, ...], *, bounds: tuple[float, float]
) -> Float32[Array, "..."]:
    return jnp.log(_uniform(key, shape, *bounds))


def _step_bias(key: Array, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """Biases that softplus turns into steps of 0.001 to 0.1."""
    time = jnp.exp(_uniform(key, shape, math.log(0.001), math.log(0.1)))
    return time + jnp.log(-jnp.expm1(-time))

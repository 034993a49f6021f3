"""Parts shared by several models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from models.hooks import Hooks
from models.linear import linear
from models.parts import mlp
from models.weights import Weight

PROJECTION, HIDDEN = "projection", "hidden"
"""`checkpoint_name`s of the projections around attention, and of the hidden channels of an MLP."""


Documents = Mapping[str, Any]
"""What tells the texts of a row apart: `segment_ids` [B T] or None, or `visible_until` [B T], as
`startrail_jax.Attention` takes them."""

AttentionFn = Callable[..., Float[Array, "B T N H"]]
"""(query [B T N H], key [B T K H], value [B T K H], **Documents) -> [B T N H]

A layer with a window also gives local_window_size=(keys before, 0), and one with sinks sinks=[N].
"""


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


@dataclass(frozen=True)
class MakeNorm:
    """Makes norms whose outputs are float32, to be rounded afterwards.

    In 16 bits their scales, which are near 1, would be rounded themselves.
    """

    epsilon: float
    """Number added to the mean square."""
    offset: bool = False
    """True if norms multiply by 1 + their scale, which begins with 0."""
    mean: Callable[[Array], Array] = lambda x: x
    """The mean over the devices that share heads: see `Hooks.mean_over_tensor`."""

    def __call__(self, channels: int, *, rngs: nnx.Rngs) -> nnx.RMSNorm:
        """A norm of the last dimension."""
        options: dict[str, Any] = dict(epsilon=self.epsilon, dtype=jnp.float32, rngs=rngs)
        if self.offset:
            zeros = nnx.initializers.zeros_init()
            return OffsetNorm(channels, scale_init=zeros, **options)
        return nnx.RMSNorm(channels, **options)

    def over_heads(self, heads: int, head_dim: int) -> NormOverHeads:
        """A norm over the channels of all heads together."""
        return NormOverHeads(heads, head_dim, **vars(self))


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
            offset: True if it multiplies by 1 + its scale, which begins with 0.
            mean: the mean over the devices that share the heads: see `Hooks.mean_over_tensor`.
        """
        self.epsilon, self.offset, self.mean = epsilon, offset, mean
        self.heads_scale = nnx.Param(jnp.full((heads, head_dim), 0.0 if offset else 1.0))

    def __call__(self, x: Float[Array, "B T heads H"]) -> Float[Array, "B T heads H"]:
        x = x.astype(jnp.float32)
        mean_square = self.mean(jnp.mean(x * x, axis=(-2, -1), keepdims=True))
        scale = self.heads_scale[...][None, None]
        return x * lax.rsqrt(mean_square + self.epsilon) * (1.0 + scale if self.offset else scale)


INITS: dict[str, Callable[..., Array]] = {
    "normal": nnx.initializers.variance_scaling(1.0, "fan_in", "normal"),
    "zeros": lambda _, shape: jnp.zeros(shape),
    "ones": lambda _, shape: jnp.ones(shape),
}
"""Initial values by `Weight.init`: (key, shape) -> array."""


def give_weights(
    module: Any,
    weights: Mapping[str, Weight],
    sizes: Mapping[str, int],
    *,
    dtype: Any,
    out_gain: float = 1.0,
    make_norm: MakeNorm | None = None,
    inits: Mapping[str, Callable[..., Array]] = INITS,
    rngs: nnx.Rngs,
) -> None:
    """Gives a module its weights, drawn in their order.

    Args:
        module: gets a projection or a norm as the attribute `name` for the path `name/kernel` or
            `name/scale`, and a parameter for a path without a slash.
        weights: of one layer, by path in the module.
        sizes: of dimensions by name.
        dtype: type of activations and matrix products.
        out_gain: standard deviation of the outputs of matrices that begin with "out", for inputs of
            variance 1.
        make_norm: makes norms.
        inits: initial values by `Weight.init`.
        rngs: source of the initial weights.
    """
    for path, weight in weights.items():
        name, _, leaf = path.rpartition("/")
        shape = weight.shape(sizes)
        if not name:
            key = None if weight.init in ("zeros", "ones") else rngs.params()
            setattr(module, leaf, nnx.Param(inits[weight.init](key, shape)))
        elif leaf == "kernel":
            cut, gain = len(weight.inputs) or 1, out_gain if weight.init == "out" else 1.0
            base = linear(shape[:cut], shape[cut:], gain=gain, dtype=dtype, rngs=rngs)
            setattr(module, name, base)
        else:
            assert make_norm is not None, "a layer with norms says how they are made"
            over_heads = leaf == "heads_scale"
            norm = make_norm.over_heads(*shape) if over_heads else make_norm(*shape, rngs=rngs)
            setattr(module, name, norm)


def relu2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The square of a ReLU (https://arxiv.org/abs/2109.08668)."""
    return jnp.square(jax.nn.relu(x))


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), the same with gelu, or down(gelu(up(x))) or down(relu(up(x))^2)
    without a gate."""

    gate: nnx.LinearGeneral | None = None
    up: nnx.LinearGeneral
    up_bias: nnx.Param | None = None
    down: nnx.LinearGeneral

    def __init__(
        self,
        activation: Literal["swiglu", "geglu", "gelu", "relu2"],
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
            activation: "swiglu" and "geglu" have a gate and three matrices, "gelu" and "relu2" two.
            width: channels of inputs and outputs.
            hidden: channels between the projections.
            out_gain: standard deviation of the outputs of `down` for inputs of variance 1.
            bias: True if `up` has a bias.
            dtype: type of activations and matrix products.
            rngs: source of the initial weights.
        """
        self.activation = {"swiglu": jax.nn.silu, "relu2": relu2}.get(activation, jax.nn.gelu)
        weights = mlp.weights_of("hidden", gated=activation not in mlp.UNGATED, biased=bias)
        sizes = {"width": width, "hidden": hidden}
        give_weights(self, weights, sizes, out_gain=out_gain, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        up = checkpoint_name(biased(self.up(x), self.up_bias), HIDDEN)
        if self.gate is None:
            return self.down(self.activation(up))
        return self.down(self.activation(checkpoint_name(self.gate(x), HIDDEN)) * up)

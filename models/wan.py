"""The transformer of Wan 2.1 and 2.2, which predicts the noise in the latents of videos.

The model knows no mesh. Its tokens may come in any order and in any number: `positions`, which are
data, say where each token lies, and only self-attention looks at several of them. Text, and the
image that a Wan 2.1 may begin with, are whole wherever tokens are: each token attends to them by
itself.

References:
    Wan, https://arxiv.org/abs/2503.20314; `WanTransformer3DModel` of the library diffusers
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from models.hooks import Hooks
from models.layers import MLP, AttentionFn, MakeNorm, NormOverHeads, biased, projected, run_blocks
from models.linear import linear
from models.modulation import TIME_SCALE, add_gated, layer_norm, modulate, sinusoids
from models.rope import Rope, rotate
from startrail_jax.xla.ordering import compute_first

IMAGE_EPSILON = 1e-5
"""Number that the norms around the projection of images add to the variance."""


class Conditions(NamedTuple):
    """Inputs of the layers beside the tokens."""

    modulations: Float32[Array, "B K 6 width"]
    """Modulations for each time of a row."""
    time_index: Int32[Array, "B T"] | None
    """Index of the time of each token; None where a row has one time."""
    rotation: Float32[Array, "2 B T half"]
    segment_ids: Int32[Array, "B T"] | None
    text: Float[Array, "B S width"]
    image: Float[Array, "B I width"] | None


class Wan(nnx.Module):
    """Predicts the velocity of rectified flow for every patch of the latents of videos."""

    def __init__(
        self,
        *,
        in_channels: int,
        out_channels: int,
        patch: tuple[int, int, int],
        width: int,
        layers: int,
        heads: int,
        mlp_width: int,
        text_dim: int,
        time_channels: int = 256,
        image_dim: int | None = None,
        text_norm: bool = True,
        norm_eps: float = 1e-6,
        attention_fn: AttentionFn,
        dtype: Any = jnp.float32,
        hooks: Hooks | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Builds the model with float32 weights; weights of the layers are stacked, [layers, ...].

        The weights of the output begin as 0, as in Wan.

        Args:
            in_channels: channels of the input: a noisy latent, and for models that begin with an
                image, its latent and the mask of given frames.
            out_channels: channels of a latent.
            patch: frames, height and width of the patch that becomes one token.
            width: channels of the residual stream.
            layers: number of blocks.
            heads: attention heads, a divisor of `width`.
            mlp_width: hidden channels of the MLP.
            text_dim: channels of an embedded token of text.
            time_channels: sines and cosines in which a time is coded.
            image_dim: channels of an embedded token of an image (Wan 2.1, image to video); None
                for models without.
            text_norm: True if tokens are normalised before they attend to the text.
            norm_eps: number that norms add to the variance or the mean square.
            attention_fn: attention without a mask; called with `segment_ids` by keyword.
            dtype: type of activations and matrix products. Norms, modulations and the output are
                float32 in any case.
            hooks: how the model runs; None runs it as it is written.
            rngs: source of the initial weights.
        """
        self.dtype = jnp.dtype(dtype)
        self.head_dim, self.time_channels = width // heads, time_channels
        self.hooks = Hooks() if hooks is None else hooks
        wide = dict(dtype=jnp.float32, rngs=rngs)
        self.patches = linear((*patch, in_channels), width, dtype=dtype, rngs=rngs)
        self.time_in = linear(time_channels, width, **wide)
        self.time_out = linear(width, width, **wide)
        self.modulation = linear(width, (6, width), **wide)
        self.text_in = linear(text_dim, width, dtype=dtype, rngs=rngs)
        self.text_out = linear(width, width, dtype=dtype, rngs=rngs)
        self.patches_bias, self.time_in_bias, self.time_out_bias, self.text_in_bias = (
            _bias(width) for _ in range(4)
        )
        self.modulation_bias, self.text_out_bias = _bias(6, width), _bias(width)
        self.image = (
            None if image_dim is None else ImageTokens(image_dim, width, dtype=dtype, rngs=rngs)
        )

        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> WanBlock:
            return WanBlock(
                width=width,
                heads=heads,
                mlp_width=mlp_width,
                image=image_dim is not None,
                text_norm=text_norm,
                epsilon=norm_eps,
                attention_fn=attention_fn,
                dtype=dtype,
                hooks=self.hooks,
                rngs=rngs,
            )

        self.blocks = make_blocks(rngs.split(layers))
        self.modulation_table = _table(2, width, rngs)
        self.epsilon = norm_eps
        self.head = WanHead(width, math.prod(patch) * out_channels, dtype=dtype, rngs=rngs)

    def __call__(self, *arguments: Any, **options: Any) -> Float32[Array, "B T P"]:
        """The prediction for each patch. Arguments as in `hidden`."""
        return self.output(self.hidden(*arguments, **options))

    def hidden(
        self,
        patches: Float[Array, "B T P"],
        positions: Int32[Array, "B T 3"],
        times: Float32[Array, "B K"],
        text: Float[Array, "B S D"],
        *,
        time_index: Int32[Array, "B T"] | None = None,
        image: Float[Array, "B I E"] | None = None,
        segment_ids: Int32[Array, "B T"] | None = None,
    ) -> Float[Array, "B T width"]:
        """The input of `output`: the last layer's output, normalised and modulated.

        Args:
            patches: noisy patches, in the order that `attention_fn` expects.
            positions: frame, row and column of each patch, in patches.
            times: times of each row, from 0 (data) to 1 (noise).
            text: embedded tokens of the text. As in Wan, none is masked: shorter texts end with
                zeros.
            time_index: index of the time of each token; None where a row has one time.
            image: embedded tokens of the image with which the video begins, for a model with
                `image_dim`.
            segment_ids: segment of each token; one with a negative id is padding. None means that
                all tokens of a row belong to segment 0.
        """
        pixels = patches.astype(self.dtype).reshape(*patches.shape[:2], *self.patches.in_features)
        x = biased(self.patches(pixels), self.patches_bias)
        coded = sinusoids(times * TIME_SCALE, self.time_channels)
        # Cosines come first.
        coded = jnp.roll(coded, self.time_channels // 2, axis=-1)
        hidden = jax.nn.silu(biased(self.time_in(coded), self.time_in_bias))
        time = biased(self.time_out(hidden), self.time_out_bias)
        modulations = biased(self.modulation(jax.nn.silu(time)), self.modulation_bias)
        text = jax.nn.gelu(biased(self.text_in(text.astype(self.dtype)), self.text_in_bias))
        conditions = Conditions(
            modulations=modulations,
            time_index=time_index,
            rotation=self._rotation(positions),
            segment_ids=segment_ids,
            text=biased(self.text_out(text), self.text_out_bias),
            image=None if self.image is None or image is None else self.image(image),
        )
        x = run_blocks(self.blocks, self.hooks, x, conditions)
        table = self.modulation_table[...][None, None]
        shift, scale = _of_tokens(table + time[:, :, None], time_index)
        return modulate(x, shift, scale, self.epsilon)

    def output(self, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T P"]:
        """The prediction for each patch, from the result of `hidden`."""
        return self.head(hidden)

    def _rotation(self, positions: Int32[Array, "B T 3"]) -> Float32[Array, "2 B T half"]:
        """Angles of frame, then row, then column; row and column have a third of the channels."""
        third = 2 * (self.head_dim // 6)
        parts = (self.head_dim - 2 * third, third, third)
        return jnp.concatenate(
            [
                Rope(head_dim=channels).rotation(positions[:, :, axis])
                for axis, channels in enumerate(parts)
                if channels
            ],
            axis=-1,
        )


class WanHead(nnx.Module):
    """The output projection, whose weights begin as 0."""

    def __init__(self, width: int, outputs: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.outputs = linear(
            width, outputs, gain=0.0, dtype=dtype, out_dtype=jnp.float32, rngs=rngs
        )
        self.outputs_bias = _bias(outputs)

    def __call__(self, x: Float[Array, "B T width"]) -> Float32[Array, "B T P"]:
        return biased(self.outputs(x), self.outputs_bias)


class ImageTokens(nnx.Module):
    """norm(out(gelu(in(norm(x))))): tokens of an image, for the layers."""

    def __init__(self, image_dim: int, width: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.image_in = linear(image_dim, image_dim, dtype=dtype, rngs=rngs)
        self.image_out = linear(image_dim, width, dtype=dtype, rngs=rngs)
        self.image_in_bias, self.image_out_bias = _bias(image_dim), _bias(width)
        self.norm_in = AffineNorm(image_dim, IMAGE_EPSILON)
        self.norm_out = AffineNorm(width, IMAGE_EPSILON)

    def __call__(self, x: Float[Array, "B I E"]) -> Float[Array, "B I width"]:
        dtype = self.image_in.dtype
        x = biased(self.image_in(self.norm_in(x).astype(dtype)), self.image_in_bias)
        x = biased(self.image_out(jax.nn.gelu(x, approximate=False)), self.image_out_bias)
        return self.norm_out(x).astype(dtype)


class AffineNorm(nnx.Module):
    """LayerNorm with scale and bias, in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.norm_scale, self.norm_bias = nnx.Param(jnp.ones(width)), _bias(width)

    def __call__(self, x: Float[Array, "B T width"]) -> Float32[Array, "B T width"]:
        scale, bias = self.norm_scale[...][None, None], self.norm_bias[...][None, None]
        return layer_norm(x, self.epsilon) * scale + bias


class WanBlock(nnx.Module):
    """Self-attention, attention to the text, and an MLP; the first and the last are modulated."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        mlp_width: int,
        image: bool,
        text_norm: bool,
        epsilon: float,
        attention_fn: AttentionFn,
        dtype: Any,
        hooks: Hooks,
        rngs: nnx.Rngs,
    ) -> None:
        self.hooks, self.dtype, self.epsilon = hooks, jnp.dtype(dtype), epsilon
        self.attention_fn = attention_fn
        common: dict[str, Any] = dict(
            width=width, heads=heads, epsilon=epsilon, dtype=dtype, hooks=hooks, rngs=rngs
        )
        self.attention = WanAttention(image=False, **common)
        self.text_attention = WanAttention(image=image, **common)
        self.text_norm = AffineNorm(width, epsilon) if text_norm else None
        sizes: dict[str, Any] = dict(width=width, hidden=mlp_width, out_gain=1.0, bias=True)
        self.mlp = MLP("gelu", **sizes, dtype=dtype, rngs=rngs)
        self.mlp_bias = _bias(width)
        self.modulation_table = _table(6, width, rngs)

    def __call__(self, x: Float[Array, "B T width"], conditions: Conditions) -> Array:
        """Runs the block."""
        copy = self.hooks.copy_to_tensor
        table = self.modulation_table[...][None, None]
        modulations = _of_tokens(conditions.modulations + table, conditions.time_index)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulations

        def attend(query: Array, key: Array, value: Array) -> Array:
            return self.attention_fn(query, key, value, segment_ids=conditions.segment_ids)

        modulated = copy(modulate(x, shift, scale, self.epsilon))
        x = add_gated(x, gate, self.attention(modulated, modulated, attend, conditions.rotation))
        asking = x if self.text_norm is None else self.text_norm(x).astype(self.dtype)
        attend_whole, image = self.hooks.attend_whole, conditions.image
        image = None if image is None else copy(image)
        x = x + self.text_attention(copy(asking), copy(conditions.text), attend_whole, image=image)
        # A tile may hold tokens of several rows, so that modulation, by row, stays outside of it.
        mlp = self.hooks.tiled(self._feed_forward)
        return add_gated(x, mlp_gate, mlp(modulate(x, mlp_shift, mlp_scale, self.epsilon)))

    def _feed_forward(self, x: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        out = self.hooks.reduce_from_tensor(self.mlp(self.hooks.copy_to_tensor(x)))
        return biased(out, self.mlp_bias)


class WanAttention(nnx.Module):
    """Projections with biases, and norms over all heads, around a callable that attends."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        image: bool,
        epsilon: float,
        dtype: Any,
        hooks: Hooks,
        rngs: nnx.Rngs,
    ) -> None:
        self.hooks = hooks
        sizes = heads, width // heads

        def norm() -> NormOverHeads:
            return MakeNorm(epsilon, mean=hooks.mean_over_tensor).over_heads(*sizes)

        self.query, self.key, self.value = (
            linear(width, sizes, dtype=dtype, rngs=rngs) for _ in range(3)
        )
        self.out = linear(sizes, width, dtype=dtype, rngs=rngs)
        self.query_bias, self.key_bias, self.value_bias = (_bias(*sizes) for _ in range(3))
        self.out_bias = _bias(width)
        self.query_norm, self.key_norm = norm(), norm()
        self.image_key, self.image_value = (
            linear(width, sizes, dtype=dtype, rngs=rngs) if image else None for _ in range(2)
        )
        self.image_key_bias, self.image_value_bias = (
            _bias(*sizes) if image else None for _ in range(2)
        )
        self.image_key_norm = norm() if image else None

    def __call__(
        self,
        x: Float[Array, "B T width"],
        context: Float[Array, "B S width"],
        attend: AttentionFn,
        rotation: Float32[Array, "2 B T half"] | None = None,
        image: Float[Array, "B I width"] | None = None,
    ) -> Float[Array, "B T width"]:
        """Attention of x to other tokens, and of the same queries to the tokens of an image."""
        query = biased(projected(self.query(x)), self.query_bias)
        query = _rotated(self.query_norm(query), rotation).astype(x.dtype)
        query, context = compute_first(query, context)
        key = biased(projected(self.key(context)), self.key_bias)
        key = _rotated(self.key_norm(key), rotation).astype(x.dtype)
        value = biased(projected(self.value(context)), self.value_bias)
        out = attend(query, key, value)
        if image is not None:
            assert self.image_key is not None
            assert self.image_value is not None
            assert self.image_key_norm is not None
            key = self.image_key_norm(biased(projected(self.image_key(image)), self.image_key_bias))
            value = biased(projected(self.image_value(image)), self.image_value_bias)
            out = out + attend(query, key.astype(x.dtype), value)
        return biased(projected(self.hooks.reduce_from_tensor(self.out(out))), self.out_bias)


def _bias(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape))


def _table(count: int, width: int, rngs: nnx.Rngs) -> nnx.Param:
    """Numbers added to the modulations that follow from a time."""
    return nnx.Param(jax.random.normal(rngs.params(), (count, width)) * width**-0.5)


def _of_tokens(
    modulations: Float32[Array, "B K count width"], index: Int32[Array, "B T"] | None
) -> list[Float32[Array, "B #T width"]]:
    """The modulations of each token, one by one: [B 1 width] where a row has one time."""
    each = [modulations[:, :, i] for i in range(modulations.shape[2])]
    if index is None:
        return each
    return [jnp.take_along_axis(x, index[:, :, None], axis=1) for x in each]


def _rotated(
    x: Float[Array, "B T heads H"], rotation: Float32[Array, "2 B T half"] | None
) -> Float[Array, "B T heads H"]:
    return x if rotation is None else rotate(x, rotation, interleaved=True)

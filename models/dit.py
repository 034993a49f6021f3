"""A diffusion transformer: full attention and adaLN-Zero conditioning.

The model knows no mesh. Its tokens may come in any order and in any number: `positions`, which are
data, say where each token lies, and only attention looks at several tokens. Each row has one time
and one class or text, which every device with tokens of the row needs.

Unlike the models of the papers, this one has no biases.

References:
    DiT, adaLN-Zero: https://arxiv.org/abs/2212.09748
    PixArt-alpha, attention to a text between self-attention and the MLP:
    https://arxiv.org/abs/2310.00426, section 2.3
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from models.hooks import Hooks
from models.layers import MLP, AttentionFn, projected, run_blocks
from models.linear import linear
from models.modulation import (
    EPSILON,
    TIME_SCALE,
    add_gated,
    layer_norm,
    modulate,
    one_by_one,
    sinusoids,
)
from models.parts.dit import TIME_CHANNELS
from models.sizes import check_dit_width
from startrail_jax.errors import InputError
from startrail_jax.xla.ordering import compute_first


class DiT(nnx.Module):
    """Predicts the target of a diffusion process for every patch of images or videos."""

    def __init__(
        self,
        *,
        channels: int,
        classes: int,
        patch: tuple[int, int, int],
        width: int,
        layers: int,
        heads: int,
        mlp_width: int,
        text_dim: int | None = None,
        attention_fn: AttentionFn,
        dtype: Any = jnp.float32,
        hooks: Hooks | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Builds the model with float32 weights; weights of the layers are stacked, [layers, ...].

        The weights of modulations, of the outputs of attention to a text, and of the output
        projection begin as 0, so that at first every block is the identity and the output is 0.

        Args:
            channels: channels of a latent, or of an image.
            classes: number of classes. The label `classes` means "no class", for samples whose
                class was dropped or is not asked for; with 0 classes it is the only label.
            patch: frames, height and width of the patch that becomes one token.
            width: channels of the residual stream, even and at least 8.
            layers: number of blocks.
            heads: attention heads, a divisor of `width`.
            mlp_width: hidden channels of the MLP.
            text_dim: channels of an embedded token of text; None for a model without texts.
            attention_fn: attention without a mask; called with `segment_ids` by keyword.
            dtype: type of activations and matrix products. Norms, the conditioning vector, products
                with it, and the output are float32 in any case.
            hooks: how the model runs; None runs it as it is written.
            rngs: source of the initial weights.

        Raises:
            ValueError: if `width` is not divisible by `heads`, or positions cannot be coded in it.
        """
        check_dit_width(width=width, heads=heads)
        self.width = width
        self.dtype = jnp.dtype(dtype)
        self.hooks = Hooks() if hooks is None else hooks
        patch_channels = math.prod(patch) * channels
        small = nnx.initializers.normal(0.02)
        # The outputs are float32: positions are added to them before they are rounded.
        self.patches = linear(patch_channels, width, dtype=dtype, out_dtype=jnp.float32, rngs=rngs)
        self.time_in = linear(TIME_CHANNELS, width, dtype=jnp.float32, rngs=rngs)
        self.time_out = linear(width, width, dtype=jnp.float32, rngs=rngs)
        self.classes = nnx.Embed(classes + 1, width, embedding_init=small, rngs=rngs)
        self.text = (
            None if text_dim is None else TextTokens(text_dim, width, dtype=dtype, rngs=rngs)
        )

        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> DiTBlock:
            stream = DiTStream(
                width=width,
                heads=heads,
                mlp_width=mlp_width,
                text=text_dim is not None,
                dtype=dtype,
                hooks=self.hooks,
                rngs=rngs,
            )
            return DiTBlock(image=stream, attention_fn=attention_fn)

        self.blocks = make_blocks(rngs.split(layers))
        self.modulation = linear(width, (2, width), gain=0.0, dtype=jnp.float32, rngs=rngs)
        self.head = linear(
            width, patch_channels, gain=0.0, dtype=dtype, out_dtype=jnp.float32, rngs=rngs
        )

    def __call__(self, *arguments: Any, **options: Any) -> Float32[Array, "B T P"]:
        """The prediction for each patch. Arguments as in `hidden`."""
        return self.output(self.hidden(*arguments, **options))

    def hidden(
        self,
        patches: Float[Array, "B T P"],
        positions: Int32[Array, "B T 3"],
        time: Float32[Array, " B"],
        labels: Int32[Array, " B"],
        segment_ids: Int32[Array, "B T"] | None = None,
        *,
        text: Float[Array, "B S D"] | None = None,
        text_ids: Int32[Array, "B S"] | None = None,
    ) -> Float[Array, "B T width"]:
        """The input of `output`: the last layer's output, normalised and modulated.

        Args:
            patches: noisy patches, in the order that `attention_fn` expects.
            positions: frame, row and column of each patch, in patches.
            time: time of the diffusion process, from 0 (data) to 1 (noise).
            labels: class of each row, or `classes` for none.
            segment_ids: segment of each token. A token sees only its own segment; a token with a
                negative id is padding and sees nothing. None means that all tokens of a row belong
                to segment 0.
            text: embedded tokens of the text of each row, for a model with `text_dim`.
            text_ids: 0 for the tokens of a text, negative for what fills it up. In a row of
                negative ids, attention to the text gives 0. None means that all are tokens.

        Raises:
            ValueError: if a model with `text_dim` is given no text, or another is given one.
        """
        if (text is None) != (self.text is None):
            raise InputError(
                "A DiT with text_dim needs a text, and others take none; got "
                f"{'no text' if text is None else 'a text'}. "
                f"{'Give' if text is None else 'Leave out'} text."
            )
        context = None
        if self.text is not None and text is not None:
            context = Context(self.text(text), text_ids)
        x = self.patches(patches) + grid_sinusoids(positions, self.width)
        condition = jax.nn.silu(self._embed_time(time) + self.classes(labels))
        x = x.astype(self.dtype)
        x = run_blocks(self.blocks, self.hooks, x, condition, segment_ids, context)
        shift, scale = one_by_one(self.modulation(condition))
        return modulate(x, shift, scale)

    def output(self, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T P"]:
        """The prediction for each patch, from the result of `hidden`."""
        return self.head(hidden)

    def _embed_time(self, time: Float32[Array, " B"]) -> Float32[Array, "B width"]:
        return self.time_out(jax.nn.silu(self.time_in(sinusoids(time * TIME_SCALE, TIME_CHANNELS))))


class Context(NamedTuple):
    """The text of each row, for the layers."""

    tokens: Float[Array, "B S width"]
    ids: Int32[Array, "B S"] | None


class TextTokens(nnx.Module):
    """text_out(gelu(text_in(norm(x)))): the tokens of a text, for the layers.

    The norm has no weights: encoders differ in the scale of their outputs.
    """

    def __init__(self, text_dim: int, width: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.text_in = linear(text_dim, width, dtype=dtype, rngs=rngs)
        self.text_out = linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(self, text: Float[Array, "B S D"]) -> Float[Array, "B S width"]:
        text = layer_norm(text, EPSILON).astype(self.text_in.dtype)
        return self.text_out(jax.nn.gelu(self.text_in(text)))


class DiTBlock(nnx.Module):
    """A block whose part `image` has the weights and calls attention over all tokens."""

    def __init__(self, *, image: DiTStream, attention_fn: AttentionFn) -> None:
        self.image = image
        self.attention_fn = attention_fn

    def __call__(
        self,
        x: Float[Array, "B T width"],
        condition: Float32[Array, "B width"],
        segment_ids: Int32[Array, "B T"] | None,
        context: Context | None,
    ) -> Float[Array, "B T width"]:
        """Runs the block.

        Args:
            x: tokens.
            condition: conditioning vector of each row, from which modulations are projected.
            segment_ids: segment of each token.
            context: the text of each row, if the model has texts.
        """
        attend = functools.partial(self.attention_fn, segment_ids=segment_ids)
        return self.image(x, condition, attend, context)


class DiTStream(nnx.Module):
    """x + gate * attention(modulate(x)), x + attention(norm(x), text) in a model with texts, and
    x + gate * mlp(modulate(x)).

    Each row has one shift, scale and gate for all its tokens (adaLN-Zero).
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        mlp_width: int,
        text: bool,
        dtype: Any,
        hooks: Hooks,
        rngs: nnx.Rngs,
    ) -> None:
        self.hooks = hooks
        head_dim = width // heads
        # In float32, which costs little: each row has one conditioning vector.
        self.modulation = linear(width, (6, width), gain=0.0, dtype=jnp.float32, rngs=rngs)
        self.query = linear(width, (heads, head_dim), dtype=dtype, rngs=rngs)
        self.key = linear(width, (heads, head_dim), dtype=dtype, rngs=rngs)
        self.value = linear(width, (heads, head_dim), dtype=dtype, rngs=rngs)
        self.out = linear((heads, head_dim), width, dtype=dtype, rngs=rngs)
        self.text = (
            TextAttention(width, heads, dtype=dtype, hooks=hooks, rngs=rngs) if text else None
        )
        self.mlp = MLP("gelu", width=width, hidden=mlp_width, out_gain=1.0, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T width"],
        condition: Float32[Array, "B width"],
        attend: AttentionFn,
        context: Context | None,
    ) -> Float[Array, "B T width"]:
        copy, reduce = self.hooks.copy_to_tensor, self.hooks.reduce_from_tensor
        modulations = one_by_one(self.modulation(condition))
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulations

        def feed_forward(x: Array) -> Array:
            return reduce(self.mlp(copy(x)))

        modulated = copy(modulate(x, shift, scale))
        query, modulated = compute_first(projected(self.query(modulated)), modulated)
        out = attend(query, projected(self.key(modulated)), projected(self.value(modulated)))
        x = add_gated(x, gate, projected(reduce(self.out(out))))
        if self.text is not None:
            assert context is not None, "the model has compared them"
            x = x + self.text(x, context)
        # A tile may hold tokens of several rows, so that modulation, by row, stays outside of it.
        mlp = self.hooks.tiled(feed_forward)
        return add_gated(x, mlp_gate, mlp(modulate(x, mlp_shift, mlp_scale)))


class TextAttention(nnx.Module):
    """attention(norm(x), text): each token attends to the text of its row, whose tokens are whole
    wherever it lies."""

    def __init__(self, width: int, heads: int, *, dtype: Any, hooks: Hooks, rngs: nnx.Rngs) -> None:
        self.hooks = hooks
        self.query, self.key, self.value = (
            linear(width, (heads, width // heads), dtype=dtype, rngs=rngs) for _ in range(3)
        )
        self.out = linear((heads, width // heads), width, gain=0.0, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T width"], context: Context) -> Float[Array, "B T width"]:
        copy = self.hooks.copy_to_tensor
        query = projected(self.query(copy(layer_norm(x, EPSILON).astype(x.dtype))))
        text = copy(context.tokens)
        key, value = projected(self.key(text)), projected(self.value(text))
        out = self.hooks.attend_whole(query, key, value, context.ids)
        return projected(self.hooks.reduce_from_tensor(self.out(out)))


def grid_sinusoids(positions: Int32[Array, "B T 3"], width: int) -> Float32[Array, "B T width"]:
    """The `sinusoids` of frame, row and column, concatenated.

    The frame has a quarter of the channels; row and column share the others.
    """
    pairs = width // 2
    frame = pairs // 4
    row = (pairs - frame) // 2
    parts = (frame, row, pairs - frame - row)
    return jnp.concatenate(
        [sinusoids(positions[:, :, i], 2 * count) for i, count in enumerate(parts)], axis=-1
    )

"""A diffusion transformer: full attention, adaLN-Zero conditioning, and text as in MM-DiT.

The model knows no mesh. Its tokens may come in any order and in any number: `positions`, which are
data, say where each token lies, and only attention looks at several tokens. Each row has one time
and one class, whichever of its tokens a device holds.

This model differs from those of the papers in two points. It has no biases; and as there is no text
encoder, whose pooled output MM-DiT uses, the conditioning vector depends on time and class alone.

References:
    DiT, adaLN-Zero: https://arxiv.org/abs/2212.09748
    MM-DiT, the model of Stable Diffusion 3: https://arxiv.org/abs/2403.03206
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from models.hooks import Hooks
from models.layers import MLP, AttentionFn, projected
from models.linear import linear
from models.modulation import add_gated, modulate, one_by_one, sinusoids
from models.sizes import check_dit_width
from startrail_jax.errors import InputError
from startrail_jax.xla.ordering import compute_first

Captions = tuple[Int32[Array, "B S"], Int32[Array, "B S"], Int32[Array, "B S"]]
"""Text tokens: ids, positions in the text, and segment ids."""

BYTES = 256
"""Ids of text tokens."""
TIME_CHANNELS = 256
"""Sines and cosines in which a time is coded."""
TIME_SCALE = 1000.0
"""Factor of times: DiT's embedding is made for the steps 0 to 1000 of DDPM."""


class DiT(nnx.Module):
    """Predicts the target of a diffusion process for every patch of images or videos."""

    def __init__(
        self,
        *,
        channels: int,
        classes: int,
        caption_length: int = 0,
        patch: tuple[int, int, int],
        width: int,
        layers: int,
        heads: int,
        mlp_width: int,
        attention_fn: AttentionFn,
        dtype: Any = jnp.float32,
        hooks: Hooks | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Builds the model with float32 weights; those of all layers are stacked, [layers, ...].

        The weights of modulations and of the output projection begin as 0, so that at first every
        block is the identity and the output is 0.

        Args:
            channels: channels of a latent, or of an image.
            classes: number of classes. The label `classes` means "no class", for samples whose
                class was dropped or is not asked for; with 0 classes it is the only label.
            caption_length: bytes of text; above 0 the model has a text stream with its own weights.
            patch: frames, height and width of the patch that becomes one token.
            width: channels of the residual stream, even and at least 8.
            layers: number of blocks.
            heads: attention heads, a divisor of `width`.
            mlp_width: hidden channels of the MLP.
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
        self.bytes = (
            nnx.Embed(BYTES, width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
            if caption_length
            else None
        )

        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> DiTBlock:
            def make_stream() -> DiTStream:
                return DiTStream(
                    width=width,
                    heads=heads,
                    mlp_width=mlp_width,
                    dtype=dtype,
                    hooks=self.hooks,
                    rngs=rngs,
                )

            return DiTBlock(
                image=make_stream(),
                text=make_stream() if caption_length else None,
                attention_fn=attention_fn,
            )

        self.blocks = make_blocks(rngs.split(layers))
        self.modulation = linear(width, (2, width), gain=0.0, dtype=jnp.float32, rngs=rngs)
        self.head = linear(
            width, patch_channels, gain=0.0, dtype=dtype, out_dtype=jnp.float32, rngs=rngs
        )

    def __call__(
        self,
        patches: Float[Array, "B T P"],
        positions: Int32[Array, "B T 3"],
        time: Float32[Array, " B"],
        labels: Int32[Array, " B"],
        segment_ids: Int32[Array, "B T"] | None = None,
        captions: Captions | None = None,
    ) -> Float32[Array, "B T P"]:
        """The prediction for each patch. Arguments as in `hidden`."""
        return self.output(self.hidden(patches, positions, time, labels, segment_ids, captions))

    def hidden(
        self,
        patches: Float[Array, "B T P"],
        positions: Int32[Array, "B T 3"],
        time: Float32[Array, " B"],
        labels: Int32[Array, " B"],
        segment_ids: Int32[Array, "B T"] | None = None,
        captions: Captions | None = None,
    ) -> Float[Array, "B T width"]:
        """What `output` takes: the last layer's output, normalised and modulated.

        Text and image tokens attend to each other in one call of attention: the queries of both
        streams are concatenated, [text, image], and so are keys, values and segment ids. Where
        tokens are divided among devices, each device has its share of the text too, and what it
        concatenates is no contiguous part of the whole concatenation. That does not matter: without
        a causal mask, attention does not depend on the order of its tokens. So sequence-parallel
        attention serves unchanged and exactly, and no device repeats work on another device's text.

        Args:
            patches: noisy patches, in the order that `attention_fn` expects.
            positions: frame, row and column of each patch, in patches.
            time: time of the diffusion process, from 0 (data) to 1 (noise).
            labels: class of each row, or `classes` for none.
            segment_ids: segment of each token. A token sees only its own segment; a token with a
                negative id is padding and sees nothing. None means that all tokens of a row belong
                to segment 0.
            captions: text tokens, their positions in the text, and their segment ids. Text has the
                segment id of its image; padding has a negative id, and a row may be all padding.
                Captions are given if, and only if, the model has a text stream.

        Raises:
            ValueError: if there are captions but no text stream, or a text stream but no captions.
        """
        if (self.bytes is None) != (captions is None):
            raise InputError(
                "captions must be given for a model with caption_length above 0, and for no other; "
                f"got captions {'missing' if captions is None else 'given'}. For an image without "
                "text, give padding: segment ids of -1."
            )
        x = self.patches(patches) + grid_sinusoids(positions, self.width)
        texts = 0
        if captions is not None:
            text, text_segments = self._embed_text(captions), captions[2]
            texts = text.shape[1]
            if segment_ids is None:
                segment_ids = jnp.zeros_like(positions[:, :, 0])
            # Layers take one array, in which the text comes first.
            x = jnp.concatenate([text, x], axis=1)
            segment_ids = jnp.concatenate([text_segments, segment_ids], axis=1)
        condition = jax.nn.silu(self._embed_time(time) + self.classes(labels))

        graph, weights = nnx.split(self.blocks)

        def run_block(weights: Any, x: Array, *context: Any) -> Array:
            return nnx.merge(graph, weights)(x, *context, texts=texts)

        layer = self.hooks.wrap_layer(run_block)
        context = condition, segment_ids
        x = x.astype(self.dtype)
        x, _ = lax.scan(lambda x, weights: (layer(weights, x, *context), None), x, weights)
        shift, scale = one_by_one(self.modulation(condition))
        return modulate(x[:, texts:], shift, scale)

    def output(self, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T P"]:
        """The prediction for each patch, from what `hidden` returns."""
        return self.head(hidden)

    def _embed_time(self, time: Float32[Array, " B"]) -> Float32[Array, "B width"]:
        return self.time_out(jax.nn.silu(self.time_in(sinusoids(time * TIME_SCALE, TIME_CHANNELS))))

    def _embed_text(self, captions: Captions) -> Float32[Array, "B S width"]:
        assert self.bytes is not None, "as hidden has checked"
        tokens, positions, _ = captions
        return self.bytes(tokens) + sinusoids(positions, self.width)


class DiTBlock(nnx.Module):
    """Attention over the tokens of all streams; each stream treats its own before and after it."""

    def __init__(
        self, *, image: DiTStream, text: DiTStream | None, attention_fn: AttentionFn
    ) -> None:
        self.image = image
        self.text = text
        self.attention_fn = attention_fn

    def __call__(
        self,
        x: Float[Array, "B T width"],
        condition: Float32[Array, "B width"],
        segment_ids: Int32[Array, "B T"] | None,
        *,
        texts: int,
    ) -> Float[Array, "B T width"]:
        """Runs the block.

        Args:
            x: text tokens, if there are any, then image tokens.
            condition: conditioning vector of each row, from which modulations are projected.
            segment_ids: segment of each token.
            texts: number of text tokens.
        """
        streams = (self.image,) if self.text is None else (self.text, self.image)

        def parts(x: Array) -> tuple[Array, ...]:
            return (x,) if self.text is None else (x[:, :texts], x[:, texts:])

        def whole(parts: Sequence[Array]) -> Array:
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

        inputs = [
            stream.prepare(part, condition) for stream, part in zip(streams, parts(x), strict=True)
        ]
        query, key, value = (
            whole([getattr(part, name) for part in inputs]) for name in ("query", "key", "value")
        )
        attended = self.attention_fn(query, key, value, segment_ids=segment_ids)
        return whole(
            [
                stream.finish(part, mixed)
                for stream, part, mixed in zip(streams, inputs, parts(attended), strict=True)
            ]
        )


class _Prepared(NamedTuple):
    """A stream's tokens on their way through a block."""

    x: Array
    """The residual stream."""
    query: Array
    key: Array
    value: Array
    modulations: Sequence[Array]
    """Modulations used after attention: its gate; then shift, scale and gate of the MLP."""


class DiTStream(nnx.Module):
    """x + gate * attention(modulate(x)), then x + gate * mlp(modulate(x)).

    `DiTBlock` calls attention, between `prepare` and `finish`. Each row has one shift, scale and
    gate for all its tokens (adaLN-Zero).
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        mlp_width: int,
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
        self.mlp = MLP("gelu", width=width, hidden=mlp_width, out_gain=1.0, dtype=dtype, rngs=rngs)

    def prepare(
        self, x: Float[Array, "B T width"], condition: Float32[Array, "B width"]
    ) -> _Prepared:
        """What the stream does before attention."""
        shift, scale, *later = one_by_one(self.modulation(condition))
        normalised = self.hooks.copy_to_tensor(modulate(x, shift, scale))
        query, normalised = compute_first(projected(self.query(normalised)), normalised)
        return _Prepared(
            x=x,
            query=query,
            key=projected(self.key(normalised)),
            value=projected(self.value(normalised)),
            modulations=later,
        )

    def finish(
        self, prepared: _Prepared, attended: Float[Array, "B T N H"]
    ) -> Float[Array, "B T width"]:
        """What the stream does after attention."""
        copy, reduce = self.hooks.copy_to_tensor, self.hooks.reduce_from_tensor
        attention_gate, shift, scale, mlp_gate = prepared.modulations

        def feed_forward(x: Array) -> Array:
            return reduce(self.mlp(copy(x)))

        out = projected(reduce(self.out(attended)))
        x = add_gated(prepared.x, attention_gate, out)
        # A tile may hold tokens of several rows, so that modulation, by row, stays outside of it.
        mlp = self.hooks.tiled(feed_forward)
        return add_gated(x, mlp_gate, mlp(modulate(x, shift, scale)))


def grid_sinusoids(positions: Int32[Array, "B T 3"], width: int) -> Float32[Array, "B T width"]:
    """The `sinusoids` of frame, row and column, concatenated.

    The frame has a quarter of the channels; row and column share the others.
    """
    pairs = width // 2
    frame = pairs // 4
    row = (pairs - frame) // 2
    parts = (frame, row, pairs - frame - row)
    return jnp.concatenate(
        [sinusoids(positions[:, :, i], 2 * part) for i, part in enumerate(parts)], axis=-1
    )

"""The objective of a Wan: to predict the velocity of rectified flow in the latents of videos."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, Key

from models.hooks import Hooks
from models.wan import Wan
from startrail_jax.tokens.layout import Layout
from trainer.data.batches import OfRows
from trainer.dit.batches import Grid, tokens_of
from trainer.dit.diffusion import draw_times
from trainer.dit.objective import Denoiser
from trainer.dit.wan.batches import ClipBatch, Texts
from trainer.dit.wan.sizes import sizes_of
from trainer.objective import add_lora
from trainer.planner.models import IMAGE_TOKENS, ModelSizes


class Given(NamedTuple):
    """What rows are given beside tokens."""

    times: Float32[Array, "B K"]
    """0 is the video, 1 is noise; two for models whose first frame has the time 0."""
    text: Float[np.ndarray | Array, "B S D"]
    image: Float[np.ndarray | Array, "B I E"] | None


class Asked(NamedTuple):
    """What the model is asked for."""

    text: Float[np.ndarray | Array, "B S D"]
    """Embedded tokens of the captions."""
    given: Float32[np.ndarray | Array, "B T G"] | None = None
    """For models with `first_frame` "channels", the mask and the latent that are given; for those
    with "time", patches whose first frame is the one that is given."""
    image: Float[np.ndarray | Array, "B I E"] | None = None
    """Embedded tokens of the first frame, for models with `image_dim`."""


class NoisyClips(NamedTuple):
    """What the model is given, and what it should predict."""

    patches: Float32[Array, "B T P"]
    """Noisy latents, and what is given of the video in more channels."""
    positions: Int32[Array, "B T 3"]
    """Frame, row and column of each patch."""
    time_index: Int32[Array, "B T"] | None
    """Which of the times a token has; None where there is one."""
    rows: OfRows
    """`Given`."""
    segment_ids: Int32[Array, "B T"] | None
    """0 for tokens of the video, `PADDING` for others; None if there are no others."""
    targets: Float32[Array, "B T P"]
    weights: Float32[Array, "B T"]
    """1 for tokens whose noise is to be predicted, else 0."""


class VideoFlow(Denoiser):
    """The velocity of rectified flow, noise - latent."""

    target = "flow"

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        return sizes_of(self._config)

    def make_model(self, attention_fn: Callable[..., Array], hooks: Hooks, rngs: nnx.Rngs) -> Wan:
        config, model = self._config, self._config.model
        others = ("channels", "text_tokens", "first_frame")
        sizes = {name: value for name, value in vars(model).items() if name not in others}
        wan = Wan(
            **sizes,
            in_channels=model.channels + model.given_channels,
            out_channels=model.channels,
            attention_fn=attention_fn,
            hooks=hooks,
            rngs=rngs,
        )
        add_lora(wan, self.weights, config.lora, model.dtype, rngs)
        return wan

    def batch_shapes(self, layout: Layout) -> ClipBatch:
        config, model = self._config, self._config.model
        tokens = layout.padded_length(config.num_tokens)

        def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
            return jax.ShapeDtypeStruct((config.batch_size, *sizes), dtype)

        channels = config.patch_elements // model.channels * model.given_channels
        text = shape(model.text_tokens, model.text_dim, dtype=jnp.bfloat16)
        image = None
        if model.image_dim is not None:
            image = shape(IMAGE_TOKENS, model.image_dim, dtype=jnp.bfloat16)
        return ClipBatch(
            patches=shape(tokens, config.patch_elements),
            given=shape(tokens, channels) if channels else None,
            numbers=shape(dtype=jnp.int32),
            rows=OfRows(Texts(text, text, image)),
            grid=Grid.of(config.size, model.patch),
        )

    def draw_time(self, key: Key[Array, ""]) -> Float32[Array, ""]:
        diffusion = self._config.diffusion
        return draw_times(key, diffusion.times, shift=diffusion.shift, within=diffusion.range)

    def asked(self, batch: ClipBatch, dropped: Bool[Array, " B"]) -> Asked:
        texts: Texts = batch.rows.arrays
        text = jnp.where(dropped[:, None, None], texts.empty, texts.text)
        is_first = self._config.model.first_frame == "time"
        return Asked(text, batch.patches if is_first else batch.given, texts.image)

    def shown(
        self,
        patches: Float32[Array, "B T P"],
        times: Float32[Array, " B"],
        asked: Asked,
        *,
        grid: Grid,
    ) -> NoisyClips:
        model, (rows, length) = self._config.model, patches.shape[:2]
        tokens = tokens_of(grid, rows, length)
        times, time_index, weights = times[:, None], None, tokens.weights
        shown = patches
        if model.first_frame == "time":
            is_later = tokens.positions[:, :, 0] > 0
            shown = jnp.where(is_later[:, :, None], patches, jnp.asarray(asked.given))
            times = jnp.concatenate([jnp.zeros_like(times), times], axis=1)
            time_index, weights = is_later.astype(jnp.int32), weights * is_later
        elif model.first_frame == "channels":
            # Channels are the innermost dimension of a patch.
            both = (x.reshape(rows, length, -1, n) for x, n in (
                (patches, model.channels), (jnp.asarray(asked.given), model.given_channels)
            ))  # fmt: skip
            shown = jnp.concatenate([*both], axis=-1).reshape(rows, length, -1)
        return NoisyClips(
            patches=shown,
            positions=tokens.positions,
            time_index=time_index,
            rows=OfRows(Given(times, asked.text, asked.image)),
            segment_ids=tokens.segment_ids,
            targets=patches,
            weights=weights,
        )

    def hidden(self, model: Wan, batch: NoisyClips) -> Float[Array, "B T width"]:
        given: Given = batch.rows.arrays
        return model.hidden(
            batch.patches,
            batch.positions,
            given.times,
            jnp.asarray(given.text),
            time_index=batch.time_index,
            image=None if given.image is None else jnp.asarray(given.image),
            segment_ids=batch.segment_ids,
        )

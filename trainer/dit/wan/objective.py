"""The objective of a Wan: to predict the velocity of rectified flow in the latents of videos."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from models.hooks import Hooks
from models.lora import add_adapters
from models.wan import Wan
from startrail_jax.planner.models import ModelSizes
from startrail_jax.tokens.layout import Layout
from trainer.config import LoraConfig
from trainer.data.batches import NO_EXAMPLE, OfRows
from trainer.dit.batches import Grid, tokens_of
from trainer.dit.diffusion import draw_times, noised
from trainer.dit.objective import MEASURING, TRAINING
from trainer.dit.wan.batches import ClipBatch, Texts, batch_shapes
from trainer.dit.wan.config import WanConfig, WanTrainConfig
from trainer.objective import Objective, sizes_in


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


class VideoFlow(Objective):
    """Mean squared error of the predicted velocity, noise - latent."""

    causal = WanTrainConfig.causal
    head = "head"

    def __init__(self, config: WanTrainConfig) -> None:
        self._config = config
        self.flops_per_token = self.flops_at(config.num_tokens)

    def flops_at(self, length: int) -> float:
        return self.sizes.flops_per_token(length)

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        return sizes_in(self._config)

    def make_model(self, attention_fn: Callable[..., Array], hooks: Hooks, rngs: nnx.Rngs) -> Wan:
        return make_wan(self._config.model, self._config.lora, attention_fn, hooks, rngs)

    def batch_shapes(self, layout: Layout) -> ClipBatch:
        return batch_shapes(self._config, layout)

    def prepare(self, batch: ClipBatch, *, training: bool) -> NoisyClips:
        config, diffusion = self._config, self._config.diffusion
        key = jax.random.fold_in(jax.random.key(config.seed), TRAINING if training else MEASURING)

        def draw(number: Array) -> tuple[Array, Array, Array]:
            for_time, for_noise, for_dropout = jax.random.split(jax.random.fold_in(key, number), 3)
            noise = jax.random.normal(for_noise, batch.patches.shape[1:])
            dropped = training & (jax.random.uniform(for_dropout) < diffusion.dropout)
            time = draw_times(
                for_time, diffusion.times, shift=diffusion.shift, within=diffusion.range
            )
            return time, noise, dropped

        times, noise, dropped = jax.vmap(draw)(jnp.asarray(batch.numbers))
        latents = jnp.asarray(batch.patches)
        patches, targets = noised("flow", latents, noise, times)
        texts: Texts = batch.rows.arrays
        text = jnp.where(dropped[:, None, None], texts.empty, texts.text)
        given = latents if config.model.first_frame == "time" else batch.given
        asked = Asked(text, given, texts.image)
        shown = self.shown(patches, times, asked, grid=batch.grid)
        shown = shown._replace(targets=targets)
        if training:
            return shown
        is_example = jnp.asarray(batch.numbers) != NO_EXAMPLE
        return shown._replace(weights=shown.weights * is_example[:, None])

    def shown(
        self,
        patches: Float32[Array, "B T P"],
        times: Float32[Array, " B"],
        asked: Asked,
        *,
        grid: Grid,
    ) -> NoisyClips:
        """What the model is given to predict the velocity. The field `targets` is not set.

        Args:
            patches: noisy patches, in the order of a contiguous layout: attention without a causal
                mask uses that layout on every mesh.
            times: 0 is the video, 1 is noise.
            asked: captions, and first frames.
            grid: the patches of each video.
        """
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

    def outputs(self, model: Wan, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T P"]:
        return model.output(hidden)

    def losses(
        self, model: Wan, hidden: Float[Array, "B T width"], targets: Float32[Array, "B T P"]
    ) -> Float32[Array, "B T"]:
        return jnp.mean(jnp.square(model.output(hidden) - targets), axis=-1)


def make_wan(
    model: WanConfig,
    lora: LoraConfig,
    attention_fn: Callable[..., Array],
    hooks: Hooks,
    rngs: nnx.Rngs,
) -> Wan:
    """The model of a run, with its adapters if it has some."""
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
    if lora.rank is not None:
        add_adapters(
            wan,
            rank=lora.rank,
            scale=lora.scale,
            targets=lora.targets,
            base_dtype=lora.base_dtype or model.dtype,
            rngs=rngs,
        )
    return wan

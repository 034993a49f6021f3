"""The objective of a diffusion transformer: to predict the noise in an image, or what follows
from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from models.dit import DiT
from models.hooks import Hooks
from startrail_jax.planner.models import ModelSizes
from startrail_jax.tokens.layout import Layout
from trainer.data.batches import NO_EXAMPLE
from trainer.dit.batches import Grid, ImageBatch, tokens_of
from trainer.dit.config import DiTTrainConfig
from trainer.dit.diffusion import draw_times, noised
from trainer.objective import Objective, sizes_in

# Folded into the key of the seed. Initial weights fold in 0, 1, 2, ...
TRAINING, MEASURING, DRAWING = range(2**31, 2**31 + 3)


class NoisyBatch(NamedTuple):
    """What the model is given, and what it should predict."""

    patches: Float32[Array, "B T P"]
    positions: Int32[Array, "B T 3"]
    """Frame, row and column of each patch."""
    times: Float32[Array, " B"]
    """0 is the image, 1 is noise."""
    labels: Int32[Array, " B"]
    segment_ids: Int32[Array, "B T"] | None
    """0 for tokens of the image, `PADDING` for others; None if there are no others."""
    targets: Float32[Array, "B T P"]
    weights: Float32[Array, "B T"]
    """1 for tokens of the image, else 0."""


class Denoising(Objective):
    """Mean squared error of the prediction of `DiffusionConfig.target`."""

    causal = DiTTrainConfig.causal
    head = "head"

    def __init__(self, config: DiTTrainConfig) -> None:
        self._config = config
        self.flops_per_token = self.flops_at(config.num_tokens)

    def flops_at(self, length: int) -> float:
        return dit_flops_per_token(self._config, length)

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        return sizes_in(self._config)

    def make_model(self, attention_fn: Callable[..., Array], hooks: Hooks, rngs: nnx.Rngs) -> DiT:
        return DiT(**vars(self._config.model), attention_fn=attention_fn, hooks=hooks, rngs=rngs)

    def batch_shapes(self, layout: Layout) -> ImageBatch:
        config = self._config
        rows, tokens = config.batch_size, layout.padded_length(config.num_tokens)
        patches: Any = jax.ShapeDtypeStruct((rows, tokens, config.patch_elements), jnp.float32)
        integers: Any = jax.ShapeDtypeStruct((rows,), jnp.int32)
        grid = Grid.of(config.size, config.model.patch)
        return ImageBatch(patches, integers, integers, grid)

    def prepare(self, batch: ImageBatch, *, training: bool) -> NoisyBatch:
        config, diffusion = self._config, self._config.diffusion
        key = jax.random.fold_in(jax.random.key(config.seed), TRAINING if training else MEASURING)

        def draw(number: Array) -> tuple[Array, Array, Array]:
            for_time, for_noise, for_dropout = jax.random.split(jax.random.fold_in(key, number), 3)
            noise = jax.random.normal(for_noise, batch.patches.shape[1:])
            dropped = training & (jax.random.uniform(for_dropout) < diffusion.dropout)
            return draw_times(for_time, diffusion.times), noise, dropped

        times, noise, dropped = jax.vmap(draw)(jnp.asarray(batch.numbers))
        patches, targets = noised(diffusion.target, jnp.asarray(batch.patches), noise, times)
        labels = jnp.where(dropped, config.model.classes, batch.labels)
        shown = self.shown(patches, times, labels, grid=batch.grid)
        shown = shown._replace(targets=targets)
        if training:
            return shown
        is_example = jnp.asarray(batch.numbers) != NO_EXAMPLE
        return shown._replace(weights=shown.weights * is_example[:, None])

    def shown(
        self,
        patches: Float32[Array, "B T P"],
        times: Float32[Array, " B"],
        labels: Int32[Array, " B"],
        *,
        grid: Grid,
    ) -> NoisyBatch:
        """What the model is given to predict the noise of patches. The field `targets` is not set.

        Args:
            patches: noisy patches, in the order of a contiguous layout: attention without a causal
                mask uses that layout on every mesh.
            times: 0 is the image, 1 is noise.
            labels: classes; the number of classes stands for no class.
            grid: the patches of each image.
        """
        tokens = tokens_of(grid, *patches.shape[:2])
        return NoisyBatch(
            patches=patches, times=times, labels=labels, targets=patches, **tokens._asdict()
        )

    def hidden(self, model: DiT, batch: NoisyBatch) -> Float[Array, "B T width"]:
        return model.hidden(
            batch.patches,
            batch.positions,
            batch.times,
            batch.labels,
            batch.segment_ids,
        )

    def outputs(self, model: DiT, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T P"]:
        return model.output(hidden)

    def losses(
        self, model: DiT, hidden: Float[Array, "B T width"], targets: Float32[Array, "B T P"]
    ) -> Float32[Array, "B T"]:
        return jnp.mean(jnp.square(model.output(hidden) - targets), axis=-1)


def dit_flops_per_token(config: DiTTrainConfig, length: int) -> float:
    """FLOPs of a training step for each token of an image: 3 * (2 N + 4 L W T).

    N weights are in matrix products; attention is to all T tokens of the image, in L layers of
    width W. Only matrix products count, and what remat recomputes does not. What is computed once
    for an image, from its time and class, is left out.

    Args:
        config: sizes of the model.
        length: T.

    Returns:
        FLOPs per token, of all devices together.
    """
    model = config.model
    layer = 4 * model.width**2 + 2 * model.width * model.mlp_width
    layers = model.layers * (2 * layer + 4 * model.width * length)
    return 3.0 * (layers + 4 * model.width * config.patch_elements)

"""The objective of a diffusion transformer: to predict the noise in an image, or what follows
from it."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, Key

from models.dit import DiT
from models.hooks import Hooks
from startrail_jax.tokens.layout import Layout
from trainer.data.batches import OfRows
from trainer.data.order import NO_EXAMPLE
from trainer.dit.batches import PADDING, Grid, ImageBatch, RowTexts, tokens_of
from trainer.dit.config import DiTTrainConfig
from trainer.dit.diffusion import Kind, draw_times, noised
from trainer.dit.sizes import sizes_of
from trainer.objective import Objective
from trainer.planner.models import ModelSizes

# Folded into the key of the seed. Initial weights fold in 0, 1, 2, ...
TRAINING, MEASURING, DRAWING = range(2**31, 2**31 + 3)


class ImageRequest(NamedTuple):
    """What the model is asked for."""

    labels: Int32[np.ndarray | Array, " B"]
    """Classes; the number of classes stands for no class."""
    texts: RowTexts | None = None
    """For a model with texts."""


class NoisyBatch(NamedTuple):
    """What the model is given, and what it should predict."""

    patches: Float32[Array, "B T P"]
    positions: Int32[Array, "B T 3"]
    """Frame, row and column of each patch."""
    times: Float32[Array, " B"]
    """0 is the image, 1 is noise."""
    labels: Int32[Array, " B"]
    rows: OfRows | None
    """`RowTexts`; None for a model without texts."""
    segment_ids: Int32[Array, "B T"] | None
    """0 for tokens of the image, `PADDING` for others; None if there are no others."""
    targets: Float32[Array, "B T P"]
    weights: Float32[Array, "B T"]
    """1 for tokens of the image, else 0."""


class Denoiser(Objective):
    """Mean squared error of a prediction about the noise in latents, at random times."""

    causal = False
    head = "head"
    target: Kind

    def __init__(self, config: Any) -> None:
        self._config = config
        self.flops_per_token = self.flops_at(config.num_tokens)

    def flops_at(self, length: int) -> float:
        return self.sizes.flops_per_token(length)

    @abstractmethod
    def draw_time(self, key: Key[Array, ""]) -> Float32[Array, ""]:
        """The time of an example."""

    @abstractmethod
    def asked(self, batch: Any, dropped: Bool[Array, " B"]) -> Any:
        """What `shown` takes of a batch; a row that is dropped asks for nothing."""

    @abstractmethod
    def shown(
        self,
        patches: Float32[Array, "B T P"],
        times: Float32[Array, " B"],
        asked: Any,
        *,
        grid: Any,
    ) -> Any:
        """What the model is given to predict the noise of patches; the field `targets` is not set.
        Patches are in the order of a contiguous layout, which attention without a causal mask uses
        on every mesh. Times run from 0, data, to 1, noise."""

    def prepare(self, batch: Any, *, training: bool) -> Any:
        seed = jax.random.key(self._config.seed)
        key = jax.random.fold_in(seed, TRAINING if training else MEASURING)
        dropout = self._config.diffusion.dropout

        def draw(number: Array) -> tuple[Array, Array, Array]:
            for_time, for_noise, for_dropout = jax.random.split(jax.random.fold_in(key, number), 3)
            noise = jax.random.normal(for_noise, batch.patches.shape[1:])
            dropped = training & (jax.random.uniform(for_dropout) < dropout)
            return self.draw_time(for_time), noise, dropped

        times, noise, dropped = jax.vmap(draw)(jnp.asarray(batch.numbers))
        patches, targets = noised(self.target, jnp.asarray(batch.patches), noise, times)
        shown = self.shown(patches, times, self.asked(batch, dropped), grid=batch.grid)
        shown = shown._replace(targets=targets)
        if training:
            return shown
        is_example = jnp.asarray(batch.numbers) != NO_EXAMPLE
        return shown._replace(weights=shown.weights * is_example[:, None])

    def outputs(self, model: Any, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T P"]:
        return model.output(hidden)

    def losses(
        self, model: Any, hidden: Float[Array, "B T width"], targets: Float32[Array, "B T P"]
    ) -> Float32[Array, "B T"]:
        return jnp.mean(jnp.square(model.output(hidden) - targets), axis=-1)


class Denoising(Denoiser):
    """The objective of a DiT, whose target is `DiffusionConfig.target`."""

    def __init__(self, config: DiTTrainConfig) -> None:
        super().__init__(config)
        self.target = config.diffusion.target

    def make_model(self, attention_fn: Callable[..., Array], hooks: Hooks, rngs: nnx.Rngs) -> DiT:
        return DiT(**vars(self._config.model), attention_fn=attention_fn, hooks=hooks, rngs=rngs)

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        return sizes_of(self._config)

    def batch_shapes(self, layout: Layout) -> ImageBatch:
        config = self._config
        rows, tokens = config.batch_size, layout.padded_length(config.num_tokens)
        patches: Any = jax.ShapeDtypeStruct((rows, tokens, config.patch_elements), jnp.float32)
        integers: Any = jax.ShapeDtypeStruct((rows,), jnp.int32)
        grid = Grid.of(config.size, config.model.patch)
        texts, length = None, config.data.text_tokens
        if length is not None:
            shape = (rows, length, config.model.text_dim)
            embedded: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            texts = OfRows(RowTexts(embedded, integers))
        return ImageBatch(patches, integers, texts, integers, grid)

    def draw_time(self, key: Key[Array, ""]) -> Float32[Array, ""]:
        return draw_times(key, self._config.diffusion.times)

    def asked(self, batch: ImageBatch, dropped: Bool[Array, " B"]) -> ImageRequest:
        labels = jnp.where(dropped, self._config.model.classes, batch.labels)
        if batch.rows is None:
            return ImageRequest(labels)
        texts: RowTexts = batch.rows.arrays
        counts = jnp.where(dropped, 0, jnp.asarray(texts.counts))
        return ImageRequest(labels, texts._replace(counts=counts))

    def shown(
        self,
        patches: Float32[Array, "B T P"],
        times: Float32[Array, " B"],
        asked: ImageRequest,
        *,
        grid: Grid,
    ) -> NoisyBatch:
        tokens = tokens_of(grid, *patches.shape[:2])
        return NoisyBatch(
            patches=patches,
            times=times,
            labels=jnp.asarray(asked.labels),
            rows=None if asked.texts is None else OfRows(asked.texts),
            targets=patches,
            **tokens._asdict(),
        )

    def hidden(self, model: DiT, batch: NoisyBatch) -> Float[Array, "B T width"]:
        given: dict[str, Any] = {}
        if batch.rows is not None:
            texts: RowTexts = batch.rows.arrays
            index = jnp.arange(texts.tokens.shape[1])
            ids = jnp.where(index[None] < jnp.asarray(texts.counts)[:, None], 0, PADDING)
            given = {"text": jnp.asarray(texts.tokens), "text_ids": ids}
        row = batch.times, batch.labels, batch.segment_ids
        return model.hidden(batch.patches, batch.positions, *row, **given)

"""Images from a diffusion transformer whose tokens are sharded, and their grid as a PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32, UInt8

from startrail_jax.training.config import DiTTrainConfig
from startrail_jax.training.denoising import PADDING, Denoising, padded_caption
from startrail_jax.training.diffusion import Sampler, guided, sample
from startrail_jax.training.patches import unpatchify
from startrail_jax.training.step import Program


class Drawing:
    """Samples of a trained model, on the mesh of a `Program`."""

    def __init__(
        self, program: Program, *, sampler: Sampler, steps: int, guidance: float, rows: int
    ) -> None:
        """Prepares the program that draws; it is compiled when it is called first.

        Args:
            program: of a `DiTTrainConfig`.
            sampler: one that serves the target of the model: see `diffusion.SAMPLERS`.
            steps: of the sampler.
            guidance: 1 draws what the model has learnt; above 1, samples are more typical of their
                class or caption, and each step asks the model twice.
            rows: images that are drawn at a time; rounded up to a multiple of the data degree.
        """
        config, layout = program.config, program.attention.layout
        assert isinstance(config, DiTTrainConfig)
        assert isinstance(program.objective, Denoising)
        self._config, self._program, self._objective = config, program, program.objective
        self._sampler, self._steps, self._guidance = sampler, steps, guidance
        self._layout = layout
        degree = program.attention.degrees.data
        self._rows = -(-rows // degree) * degree
        whole = NamedSharding(program.batch_sharding.mesh, PartitionSpec())
        self._draw = jax.jit(self._draw_rows, out_shardings=whole)

    def draw(
        self, weights: Any, *, labels: Sequence[int], captions: Sequence[bytes] | None, seed: int
    ) -> Iterator[Float32[np.ndarray, "F H W C"]]:
        """Draws one image for each label.

        An image depends on its label, its caption, its place in `labels` and the seed, and not on
        the mesh.

        Args:
            weights: of the model, sharded as `Program` has them.
            labels: classes; the number of classes for none.
            captions: UTF-8, as many as labels; None where the model takes no text.
            seed: seed of the noise.

        Yields:
            Latents, or pixels in [-1, 1].
        """
        config = self._config
        length = self._layout.padded_length(config.model.caption_length)
        for first in range(0, len(labels), self._rows):
            numbers = np.minimum(np.arange(first, first + self._rows), len(labels) - 1)
            chosen = np.array([labels[number] for number in numbers], np.int32)
            text = None
            if captions is not None:
                text = np.stack([padded_caption(captions[n], length) for n in numbers])
            patches = self._draw(weights, chosen, text, numbers, jnp.uint32(seed))
            patches = np.asarray(patches)[:, : config.num_tokens]
            drawn = unpatchify(patches, config.size, config.model.patch, config.model.channels)
            yield from drawn[: len(labels) - first]

    def _draw_rows(
        self,
        weights: Any,
        labels: Int32[Array, " B"],
        captions: Int32[Array, "B S"] | None,
        numbers: Int32[Array, " B"],
        seed: Array,
    ) -> Float32[Array, "B T P"]:
        config = self._config
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(numbers)
        shape = (self._layout.padded_length(config.num_tokens), config.patch_elements)
        noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
        no_labels = jnp.full_like(labels, config.model.classes)
        no_captions = None if captions is None else jnp.full_like(captions, PADDING)
        wanted = self._predict(weights, labels, captions)
        if self._guidance != 1:
            wanted = guided(wanted, self._predict(weights, no_labels, no_captions), self._guidance)
        return sample(config.diffusion.target, self._sampler, wanted, noise, self._steps)

    def _predict(self, weights: Any, labels: Array, captions: Array | None) -> Any:
        def predict(x: Array, times: Array) -> Array:
            shown = self._objective.shown(x, times, labels, captions)
            return self._program.outputs(weights, shown)

        return predict


def to_pixels(latent: Float32[np.ndarray, "F H W C"]) -> UInt8[np.ndarray, "H W C"]:
    """Pixels of a sample in [-1, 1]; frames of a video lie side by side."""
    across = np.concatenate(list(latent), axis=1)
    return np.round((np.clip(across, -1, 1) + 1) * 127.5).astype(np.uint8)


def image_grid(
    images: Sequence[UInt8[np.ndarray, "H W C"]], *, columns: int
) -> UInt8[np.ndarray, "rows across C"]:
    """Images row by row, with a black gap of a pixel between and around them.

    Args:
        images: at least one, and all of one shape.
        columns: images in a row.
    """
    height, width, channels = images[0].shape
    rows = -(-len(images) // columns)
    grid = np.zeros((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), np.uint8)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        top, left = row * (height + 1) + 1, column * (width + 1) + 1
        grid[top : top + height, left : left + width] = image
    return grid


def save_grid(
    images: Sequence[UInt8[np.ndarray, "H W C"]], path: Path, *, columns: int, scale: int
) -> None:
    """Writes an `image_grid` as PNG; a reader finds an old file or the whole new one.

    Args:
        images: with 1 or 3 channels.
        path: the file.
        columns: images in a row.
        scale: pixels of the file for one of an image, across and down.
    """
    # Here, because training does without it.
    from PIL import Image

    grid = image_grid(images, columns=columns).repeat(scale, axis=0).repeat(scale, axis=1)
    part = path.with_name(f"{path.name}.part")
    Image.fromarray(grid.squeeze(-1) if grid.shape[-1] == 1 else grid).save(part, format="PNG")
    part.replace(path)

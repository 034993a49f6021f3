"""Drawing of images by a diffusion transformer whose tokens are sharded, and grids of images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32, UInt8, UInt32

from startrail_jax.errors import InputError
from startrail_jax.xla.compiler import compiler_options
from trainer.data.batches import sharding_of
from trainer.dit.batches import Grid
from trainer.dit.config import DiTTrainConfig
from trainer.dit.diffusion import Predict, Sampler, guided, sample
from trainer.dit.objective import DRAWING, Denoising
from trainer.dit.patches import unpatchify
from trainer.parallel.step import Program


class Drawing:
    """Draws images with a trained model, on the mesh of a `Program`."""

    def __init__(
        self, program: Program, *, sampler: Sampler, steps: int, guidance: float, rows: int
    ) -> None:
        """Prepares the program that draws; its first call compiles it.

        Args:
            program: program of a run of a diffusion transformer. Images are of its `config.size`.
            sampler: a sampler for the target of the model: see `diffusion.SAMPLERS`.
            steps: number of steps of the sampler.
            guidance: 1 draws what the model has learnt. Above 1, images are more typical of their
                class, and each step evaluates the model twice.
            rows: number of images that are drawn at a time; it is rounded up to a multiple of the
                data degree.

        Raises:
            ValueError: if the sampler is not for this model, or the model has no guidance.
        """
        config, attention = program.config, program.attention
        assert isinstance(config, DiTTrainConfig)
        assert isinstance(program.objective, Denoising)
        self._config, self._program, self._objective = config, program, program.objective
        self.sampler: Sampler = sampler
        self._steps, self._guidance = steps, guidance
        self._layout = attention.layout
        self._grid = Grid.of(config.size, config.model.patch)
        degree = attention.degrees.data
        self._rows = -(-rows // degree) * degree
        _check_guidance(guidance, config)
        # Raises the errors of the sampler now, before anything is drawn.
        jax.eval_shape(
            lambda noise: sample(config.diffusion.target, sampler, lambda x, _: x, noise, steps),
            jax.ShapeDtypeStruct((1, 1), jnp.float32),
        )
        mesh: Any = attention.mesh
        self._draw = jax.jit(
            self._draw_rows,
            out_shardings=NamedSharding(mesh, PartitionSpec()),
            compiler_options=compiler_options(mesh),
        )

    def draw(
        self, weights: Any, *, labels: Sequence[int], seed: int
    ) -> Iterator[Float32[np.ndarray, "F H W C"]]:
        """Draws one image for each label.

        An image depends on its label, its place in `labels` and the seed. Up to
        rounding it depends on neither the mesh nor the number of images that are drawn at a time.

        Args:
            weights: weights of the model, sharded as those of the program.
            labels: classes; the number of classes stands for no class.
            seed: seed of the noise, below 2**32.

        Returns:
            An iterator over latents in the scale of the data, or over images with values of about
            -1 to 1.

        Raises:
            ValueError: if the seed is out of range.
        """
        config = self._config
        if not 0 <= seed < 2**32:
            raise InputError(
                f"seed must be at least 0 and below 2**32; got seed={seed}. Use another."
            )
        for first in range(0, len(labels), self._rows):
            # The last image is repeated to fill the batch: another size would be compiled again.
            numbers = np.minimum(np.arange(first, first + self._rows), len(labels) - 1)
            chosen = np.array([labels[number] for number in numbers], np.int32)
            patches = self._draw(weights, chosen, numbers.astype(np.int32), np.uint32(seed))
            patches = np.asarray(patches)[:, : config.num_tokens]
            drawn = unpatchify(patches, config.size, config.model.patch)
            # Back to the scale of the data.
            yield from drawn[: len(labels) - first] / np.float32(config.data.latent_scale)

    def _draw_rows(
        self,
        weights: Any,
        labels: Int32[Array, " B"],
        numbers: Int32[Array, " B"],
        seed: UInt32[Array, ""],
    ) -> Float32[Array, "B T P"]:
        config = self._config
        key = jax.random.fold_in(jax.random.key(seed), DRAWING)
        keys = jax.vmap(partial(jax.random.fold_in, key))(numbers)
        # Without padding, whose length depends on the mesh.
        shape = (config.num_tokens, config.patch_elements)
        noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
        missing = self._layout.padded_length(config.num_tokens) - config.num_tokens
        noise = jnp.pad(noise, ((0, 0), (0, missing), (0, 0)))
        sharding = sharding_of(self._program.batch_sharding, noise.ndim)
        noise = lax.with_sharding_constraint(noise, sharding)
        predict = self._predict(weights, labels)
        if self._guidance != 1:
            no_labels = jnp.full_like(labels, config.model.classes)
            unconditional = self._predict(weights, no_labels)
            predict = guided(predict, unconditional, self._guidance)
        return sample(config.diffusion.target, self.sampler, predict, noise, self._steps)

    def _predict(self, weights: Any, labels: Int32[Array, " B"]) -> Predict:
        def predict(x: Array, times: Array) -> Array:
            shown = self._objective.shown(x, times, labels, grid=self._grid)
            return self._program.outputs(weights, shown)

        return predict


def _check_guidance(guidance: float, config: DiTTrainConfig) -> None:
    if not 0 <= guidance < math.inf:
        raise InputError(
            f"guidance must be at least 0 and finite; got guidance={guidance}. Use 1 for none."
        )
    model, dropout = config.model, config.diffusion.dropout
    if guidance != 1 and not (dropout and model.classes):
        raise InputError(
            "guidance other than 1 needs a model that has learnt to draw with a class and without; "
            f"got guidance={guidance}, classes={model.classes}, dropout={dropout}. Use guidance=1."
        )


def to_pixels(latent: Float32[np.ndarray, "F H W C"]) -> UInt8[np.ndarray, "H F*W C"]:
    """The pixels of a sample with values from -1 to 1; frames of a video lie side by side."""
    across = np.concatenate(list(latent), axis=1)
    return np.round((np.clip(across, -1, 1) + 1) * 127.5).astype(np.uint8)


def save_grid(
    images: Sequence[UInt8[np.ndarray, "H W C"]], file: IO[bytes], *, columns: int, scale: int
) -> None:
    """Writes many images as one PNG, row by row, with black lines of one pixel around them.

    Args:
        images: at least one image with 1 or 3 channels; all have one shape.
        file: an open file.
        columns: number of images in a row.
        scale: width and height of an image pixel, in pixels of the file.
    """
    # Imported here, since training does not need Pillow.
    from PIL import Image

    height, width, channels = images[0].shape
    rows = -(-len(images) // columns)
    grid = np.zeros((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), np.uint8)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        top, left = row * (height + 1) + 1, column * (width + 1) + 1
        grid[top : top + height, left : left + width] = image
    grid = grid.repeat(scale, axis=0).repeat(scale, axis=1)
    Image.fromarray(grid.squeeze(-1) if channels == 1 else grid).save(file, format="PNG")

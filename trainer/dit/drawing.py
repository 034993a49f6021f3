"""Drawing of images and videos by a model whose tokens are sharded, and grids of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32, UInt8, UInt32

from models.checks import check_range
from startrail_jax.xla.compiler import compiler_options
from trainer.data.batches import shardings
from trainer.dit.batches import Grid
from trainer.dit.diffusion import Predict, guided
from trainer.dit.objective import DRAWING
from trainer.dit.patches import unpatchify
from trainer.parallel.step import Program

Sample = Callable[[Predict, Array], Array]
"""(model, noise [B T P]) -> data [B T P]"""


class Below(NamedTuple):
    """A second model, which predicts at the times below one; it has the mesh of the first."""

    program: Program
    guidance: float
    time: float


class Drawing:
    """Draws images or videos with a trained model, on the mesh of a `Program`."""

    def __init__(
        self, program: Program, *, sample: Sample, guidance: float, below: Below | None = None
    ) -> None:
        """Prepares the program that draws `config.batch_size` examples of `config.size` at a time;
        its first call compiles it. A guidance above 1 makes them more typical of their class or
        caption, and evaluates the model twice in each step. `below` is the model of the lower
        times, if that is another one."""
        config: Any = program.config
        attention = program.attention
        self._config, self._program = config, program
        self._objective: Any = program.objective
        self._sample, self._below = sample, below
        self._layout = attention.layout
        self._grid = Grid.of(config.size, config.model.patch)
        self._rows = config.batch_size
        self._guidance = guidance, guidance if below is None else below.guidance
        for strength in self._guidance:
            check_range("guidance", strength, "at least 0 and finite", "Use 1 for none.")
        # Raises the errors of the sampler now, before anything is drawn.
        noise: Any = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        jax.eval_shape(lambda noise: sample(lambda x, _: x, noise), noise)
        mesh: Any = attention.mesh
        self._draw = jax.jit(
            self._draw_rows,
            out_shardings=NamedSharding(mesh, PartitionSpec()),
            compiler_options=compiler_options(mesh),
        )

    def draw(
        self, weights: Any, *, given: Any, without: Any = None, seed: int
    ) -> Iterator[Float32[np.ndarray, "F H W C"]]:
        """Draws one example for each that is given: latents, or images with values of about -1 to
        1. `given` is what the objective's `shown` takes, a tree of arrays [N ...]; `without` is the
        same where nothing is asked for, which guidance other than 1 needs. With `below`, `weights`
        are a pair, its own last. An example depends on what is given, its place in that and the
        seed, and only up to rounding on the mesh and the batch."""
        config = self._config
        check_range("seed", seed, "at least 0 and below 2**32", "Use another.")
        count = len(jax.tree.leaves(given)[0])
        both = (given, None if self._guidance == (1, 1) else without)
        for first in range(0, count, self._rows):
            # The last one is repeated to fill the batch: another size would be compiled again.
            numbers = np.minimum(np.arange(first, first + self._rows), count - 1)
            chosen = jax.tree.map(lambda x: x[numbers], both)  # noqa: B023
            patches = self._draw(weights, chosen, numbers.astype(np.int32), np.uint32(seed))
            patches = np.asarray(patches)[:, : config.num_tokens]
            yield from unpatchify(patches, config.size, config.model.patch)[: count - first]

    def _draw_rows(
        self,
        weights: Any,
        both: tuple[Any, Any],
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
        sharding = shardings(noise, self._program.batch_sharding)
        noise = lax.with_sharding_constraint(noise, sharding)
        below, guidance = self._below, self._guidance
        if below is None:
            return self._sample(self._predict(self._program, weights, both, guidance[0]), noise)
        above = self._predict(self._program, weights[0], both, guidance[0])
        others = self._predict(below.program, weights[1], both, guidance[1])

        def predict(x: Array, times: Array) -> Array:  # All rows have one time.
            return lax.cond(times[0] >= below.time, above, others, x, times)

        return self._sample(predict, noise)

    def _predict(
        self, program: Program, weights: Any, both: tuple[Any, Any], guidance: float
    ) -> Predict:
        def of(given: Any) -> Predict:
            def predict(x: Array, times: Array) -> Array:
                shown = self._objective.shown(x, times, given, grid=self._grid)
                return program.outputs(weights, shown)

            return predict

        given, without = both
        return of(given) if guidance == 1 else guided(of(given), of(without), guidance)


def to_pixels(latent: Float32[np.ndarray, "F H W C"]) -> UInt8[np.ndarray, "H F*W C"]:
    """The pixels of a sample with values from -1 to 1; frames of a video lie side by side."""
    across = np.concatenate(list(latent), axis=1)
    return np.round((np.clip(across, -1, 1) + 1) * 127.5).astype(np.uint8)


def save_grid(
    images: Sequence[UInt8[np.ndarray, "H W C"]], file: IO[bytes], *, columns: int, scale: int
) -> None:
    """Writes images of one shape, with 1 or 3 channels, as one PNG, row by row, with black lines of
    one pixel around them."""
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

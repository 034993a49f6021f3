"""Batches of images as tokens, in layout order: patches, and classes or texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.data.batches import OfRows
from trainer.dit.config import DiTTrainConfig
from trainer.dit.images import Example
from trainer.dit.patches import Size, grid_of, patchify

PADDING = -1
"""Segment of tokens that only fill up the share of a device."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Grid:
    """What a compiled program knows of the size of the images of a batch: their patches."""

    size: Size
    """Number of patches along frames, height and width."""

    @classmethod
    def of(cls, size: Size, patch: Size) -> Grid:
        """That of images of a size."""
        return cls(grid_of(size, patch))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of an image."""
        return math.prod(self.size)


class GridTokens(NamedTuple):
    """What follows from a grid alone, for tokens in the order of a contiguous layout."""

    positions: Int32[Array, "B T 3"]
    """Frame, row and column of each patch."""
    segment_ids: Int32[Array, "B T"] | None
    """0 for patches, `PADDING` for others; None if there are no others."""
    weights: Float32[Array, "B T"]
    """1 for patches, else 0."""


def tokens_of(grid: Grid, rows: int, length: int) -> GridTokens:
    """The tokens of so many rows, of which those after the last patch are padding."""
    index = jnp.arange(length)
    is_patch = index < grid.num_tokens
    positions = jnp.stack(jnp.unravel_index(index, grid.size), axis=-1)
    segment_ids: Any = None
    if length > grid.num_tokens:
        segment_ids = jnp.tile(jnp.where(is_patch, 0, PADDING), (rows, 1))
    return GridTokens(
        positions=jnp.tile(positions, (rows, 1, 1)),
        segment_ids=segment_ids,
        weights=jnp.tile(is_patch.astype(jnp.float32), (rows, 1)),
    )


class RowTexts(NamedTuple):
    """The texts of rows, on the host or on devices."""

    tokens: Float[np.ndarray | Array, "B S D"]
    """Embedded tokens in bfloat16, filled up with zeros."""
    counts: Int32[np.ndarray | Array, " B"]
    """Number of tokens of each text; 0 for no text."""


class ImageBatch(NamedTuple):
    """Images of one size as tokens, in layout order; on the host or on devices."""

    patches: Float32[np.ndarray | Array, "B T P"]
    """Pixels, or latents, of each patch; 0 in tokens after the last patch."""
    labels: Int32[np.ndarray | Array, " B"]
    """Class of each image; the number of classes stands for no class."""
    rows: OfRows | None
    """`RowTexts`; None for a model without texts."""
    numbers: Int32[np.ndarray | Array, " B"]
    """Number of each example in the run, on which its noise depends."""
    grid: Grid
    """Patches of each image; part of the structure of a batch, and no array."""


def image_batch(
    examples: list[Example], numbers: list[int], *, config: DiTTrainConfig, layout: Layout
) -> ImageBatch:
    """Rows of a batch, from examples of one size and their numbers in the run."""
    latents = np.stack([example.latent for example in examples])
    _, *size, _ = latents.shape
    grid = Grid.of(tuple(size), config.model.patch)
    missing = layout.padded_length(grid.num_tokens) - grid.num_tokens
    patches = np.pad(patchify(latents, config.model.patch), ((0, 0), (0, missing), (0, 0)))
    labels = [config.model.classes if x.label is None else x.label for x in examples]
    rows = None
    if config.data.text_tokens is not None:
        rows = OfRows(texts_of([example.text for example in examples], config.data.text_tokens))
    return ImageBatch(
        patches=layout.permute(patches),
        labels=np.array(labels, np.int32),
        rows=rows,
        numbers=(np.array(numbers) % 2**31).astype(np.int32),
        grid=grid,
    )


def texts_of(texts: Sequence[Float[np.ndarray, "_ D"] | None], length: int) -> RowTexts:
    """Texts, all of which are there, filled up to `length` tokens."""
    there = [text for text in texts if text is not None]
    assert len(there) == len(texts), "the data have been compared with the model"
    tokens = [padded_text(text, length, "data.text_tokens") for text in there]
    return RowTexts(np.stack(tokens), np.array([len(text) for text in there], np.int32))


def padded_text(
    text: Float[np.ndarray, "S D"], length: int, setting: str
) -> Float[np.ndarray, "length D"]:
    """A text in bfloat16, filled up with zeros to a length, which is that of a setting."""
    if len(text) > length:
        raise InputError(
            f"Captions must have at most {setting}={length} tokens; got {len(text)}. Encode them "
            f"again, or use --{setting.replace('_', '-')} {len(text)}."
        )
    return np.pad(text.astype(jnp.bfloat16), ((0, length - len(text)), (0, 0)))

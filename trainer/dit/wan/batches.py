"""Batches of videos as tokens, in layout order, with their texts."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from startrail_jax.tokens.layout import Layout
from trainer.data.batches import OfRows
from trainer.dit.batches import Grid, padded_text
from trainer.dit.patches import patchify
from trainer.dit.wan.config import MASK_CHANNELS, WanTrainConfig


class Clip(NamedTuple):
    """One video, encoded."""

    latent: Float[np.ndarray, "F H W C"]
    """Frames, height, width, channels; of mean 0 and variance 1 or so."""
    text: Float[np.ndarray, "S D"]
    """Embedded tokens of its caption, without those that fill it up."""
    given: Float[np.ndarray, "F H W C"] | None = None
    """Latent of the first frame followed by grey ones; None if the model takes none."""
    image: Float[np.ndarray, "I E"] | None = None
    """Embedded tokens of the first frame; None if the model takes none."""


class Texts(NamedTuple):
    """What a row has beside its tokens."""

    text: Float[np.ndarray | Array, "B S D"]
    empty: Float[np.ndarray | Array, "B S D"]
    """An empty text."""
    image: Float[np.ndarray | Array, "B I E"] | None
    """Embedded tokens of the first frame."""


class ClipBatch(NamedTuple):
    """Videos of one size as tokens, in layout order; on the host or on devices."""

    patches: Float32[np.ndarray | Array, "B T P"]
    """Latents of each patch; 0 in tokens after the last patch."""
    given: Float32[np.ndarray | Array, "B T G"] | None
    """Mask and latent of what is given, for models with `first_frame` "channels"."""
    numbers: Int32[np.ndarray | Array, " B"]
    """Number of each example in the run, on which its noise depends."""
    rows: OfRows
    """`Texts`."""
    grid: Grid
    """Patches of each video; part of the structure of a batch, and no array."""


def clip_batch(
    clips: list[Clip],
    numbers: list[int],
    *,
    empty: Float[np.ndarray, "S D"],
    config: WanTrainConfig,
    layout: Layout,
) -> ClipBatch:
    """Rows of a batch, from videos of one size and their numbers in the run."""
    model = config.model
    latents = np.stack([clip.latent for clip in clips]).astype(np.float32)
    _, *size, _ = latents.shape
    grid = Grid.of((size[0], size[1], size[2]), model.patch)
    missing = layout.padded_length(grid.num_tokens) - grid.num_tokens

    def tokens(x: np.ndarray) -> np.ndarray:
        patches = np.pad(patchify(x, model.patch), ((0, 0), (0, missing), (0, 0)))
        return layout.permute(patches)

    def texts(found: list[Any]) -> np.ndarray:
        return np.stack([padded_text(x, model.text_tokens, "model.text_tokens") for x in found])

    rows = texts([clip.text for clip in clips]), texts([empty] * len(clips))
    given = image = None
    if model.first_frame == "channels":
        given = tokens(np.stack([given_channels(clip.given) for clip in clips]))
    if model.image_dim is not None:
        images: list[Any] = [clip.image for clip in clips]
        image = np.stack(images).astype(jnp.bfloat16)
    return ClipBatch(
        patches=tokens(latents),
        given=given,
        numbers=(np.array(numbers) % 2**31).astype(np.int32),
        rows=OfRows(Texts(*rows, image)),
        grid=grid,
    )


def given_channels(given: Float[np.ndarray, "F H W C"] | None) -> Float32[np.ndarray, "F H W G"]:
    """The mask, 1 in the first frame, and the latent of what is given."""
    assert given is not None, "the data have been compared with the model"
    mask = np.zeros((*given.shape[:3], MASK_CHANNELS), np.float32)
    mask[0] = 1
    return np.concatenate([mask, given.astype(np.float32)], axis=-1)

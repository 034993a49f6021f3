"""Examples for a diffusion model: what all places that they can be read from have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Integer

from startrail_jax.errors import InputError


class Example(NamedTuple):
    """One image, video or latent."""

    latent: Float32[np.ndarray, "F H W C"]
    """Frames, height, width, channels."""
    label: int | None
    """Class of the image; None if the model has no classes."""
    caption: bytes | None
    """Caption in UTF-8; None if the model takes no text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """One part of the data, by number: a `trainer.data.dataset.Source`."""

    numbers: Integer[np.ndarray, " examples"]
    """Numbers of these examples among all examples."""
    read: Callable[[int], Example]
    """Returns an example by its number among all examples."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Example:
        """Example `index` of this part.

        Raises:
            IndexError: if this part has fewer examples.
            ValueError: if the file of the example, or its pixels, cannot be read.
        """
        return self.read(int(self.numbers[index]))


class ImageSet(NamedTuple):
    """All examples that were found, before any is held out."""

    name: str
    """What the examples are, for the log and for errors."""
    latent: Callable[[int], Float32[np.ndarray, "F H W C"]]
    """Returns the latent of an example by its number. Images have values from -1 to 1."""
    labels: Sequence[int | None]
    captions: Sequence[bytes | None]
    remark: str = ""
    """End of the line in the log that describes the data."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the model needs examples to be."""

    size: tuple[int, int, int]
    """Frames, height and width that every example must have."""
    channels: int
    """Number of channels that every example must have."""
    classes: int
    """Number of classes; with 0, labels are not read."""
    caption_length: int
    """Largest number of bytes of a caption; with 0, captions are not read."""


def encode_caption(text: str, place: str, caption_length: int) -> bytes:
    """The UTF-8 of a caption.

    Args:
        text: the caption.
        place: where the caption was found, for errors.
        caption_length: largest number of bytes that the model takes.

    Raises:
        ValueError: if the caption is longer, or is not Unicode.
    """
    try:
        caption = text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"Captions must be Unicode; got the lone surrogate {text[error.start]!a} in {place}. "
            "Mend it."
        ) from None
    if len(caption) > caption_length:
        raise InputError(
            "Captions must have at most model.caption_length bytes of UTF-8; got "
            f"{len(caption)} in {place} for caption_length={caption_length}. Use "
            f"--model.caption-length {len(caption)}, or shorten it."
        )
    return caption

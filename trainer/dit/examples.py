"""Examples for a diffusion model: what those who read them, from wherever, have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Integer


class Example(NamedTuple):
    """One image or latent."""

    latent: Float32[np.ndarray, "F H W C"]
    """Frames, height, width, channels."""
    label: int | None
    """Its class; None where the model has none."""
    caption: bytes | None
    """Its text in UTF-8; None where the model takes none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """A part of the data, by number. May be read by several threads at once."""

    numbers: Integer[np.ndarray, " examples"]
    """Which examples these are, of all."""
    read: Callable[[int], Example]
    """Gives an example by its number among all."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Example:
        """Example `index` of this part.

        Raises:
            IndexError: if there are not so many.
            ValueError: if its file can no longer be read, or its pixels cannot.
        """
        return self.read(int(self.numbers[index]))


class Source(NamedTuple):
    """All examples, before any is held out."""

    name: str
    """What they are, for the log and for errors."""
    latent: Callable[[int], Float32[np.ndarray, "F H W C"]]
    """Gives the latent of an example by its number."""
    labels: Sequence[int | None]
    captions: Sequence[bytes | None]
    class_names: tuple[str, ...]
    """Names of the classes, by label; none where the model has none."""
    pixels: bool
    """Whether latents are images, with values from -1 to 1, so that samples can be looked at."""
    remark: str = ""
    """What else the log should say."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the model takes."""

    size: tuple[int, int, int]
    """Frames, height and width that every example must have."""
    channels: int
    """Channels that every example must have."""
    classes: int
    """Classes that there must be; with 0, labels are not read."""
    caption_length: int
    """Most bytes of a caption; with 0, captions are not read."""


def encode_caption(text: str, place: str, caption_length: int) -> bytes:
    """The UTF-8 of a caption.

    Args:
        text: the caption.
        place: where it is, for errors.
        caption_length: bytes that the model takes.

    Raises:
        ValueError: if it is longer, or no Unicode.
    """
    try:
        caption = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"Captions must be Unicode; got the lone surrogate {text[error.start]!a} in {place}. "
            "Mend it."
        ) from None
    if len(caption) > caption_length:
        raise ValueError(
            "Captions must have at most model.caption_length bytes of UTF-8; got "
            f"{len(caption)} in {place} for caption_length={caption_length}. Use "
            f"--model.caption-length {len(caption)}, or shorten it."
        )
    return caption

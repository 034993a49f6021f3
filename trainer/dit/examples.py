"""Examples for a diffusion model: what all places that they can be read from have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
    """Numbers of these examples among all examples. One that is bad is replaced by another, which
    then comes twice: the length of a part and its order do not depend on which are bad."""
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
    bad: Mapping[int, str]
    """Why each bad example that this process found cannot be used, by its number: a sentence
    without its full stop. Nothing else in this tuple depends on which examples are bad."""
    keys: Sequence[str] = ()
    """Names of the files of the examples, which all processes must have in common."""
    remark: str = ""
    """End of the line in the log that describes the data."""
    warning: str = ""
    """What is legal but probably not meant: a line for the log."""
    content: Callable[[int], bytes] = lambda number: b""
    """Returns bytes by which the pixels or latents of an example are known, whether it is bad or
    not."""


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
    resize: Literal["crop", "pad", "stretch"] | None = None
    """How images of another size are brought to this one; None to refuse them."""


def encode_captions(
    captions: Iterable[tuple[str, str]], caption_length: int
) -> tuple[list[bytes | None], str]:
    """The UTF-8 of captions.

    Args:
        captions: each caption, and where it was found.
        caption_length: largest number of bytes that the model takes.

    Returns:
        The captions, and a remark for the log that names the longest.

    Raises:
        ValueError: if a caption is longer, or is not Unicode.
    """
    encoded: list[bytes | None] = []
    longest, place_of_longest, too_long = -1, "", 0
    for text, place in captions:
        caption = _encode(text, place)
        encoded.append(caption)
        too_long += len(caption) > caption_length
        if len(caption) > longest:
            longest, place_of_longest = len(caption), place
    if too_long:
        raise InputError(
            f"Captions must have at most model.caption_length bytes of UTF-8; got {longest} in "
            f"{place_of_longest} for caption_length={caption_length}, the longest of {too_long} "
            f"that do not fit. Use --model.caption-length {longest}, or shorten them."
        )
    if not encoded:
        return encoded, ""
    return encoded, (
        f"; the longest caption has {longest} of {caption_length} bytes, in {place_of_longest}"
    )


def _encode(text: str, place: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"Captions must be Unicode; got the lone surrogate {text[error.start]!a} in {place}. "
            "Mend it."
        ) from None

"""Images or latents that a diffusion model trains on, and those that are held out, by number.

    data.path    what is read                                       latents
    none         the handwritten digits of scikit-learn             images, kept in memory
    a folder     *.png, *.jpg, *.jpeg, *.webp, *.bmp, in a folder   images, read when needed
                 for each class if the model has classes
    *.npz        the arrays `latents`, `labels`, `captions`         unchanged, kept in memory

Images have values from -1 to 1. Nothing is resized or cropped. Everything is checked when the data
are opened, except the pixels of files in a folder.

Which examples are held out depends only on their number, not on the seed, the hosts or the mesh.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Integer

from startrail_jax.errors import InputError
from trainer.data.files import find_files
from trainer.dit.config import ImageConfig
from trainer.dit.examples import (
    Example,
    Examples,
    ImageSet,
    Wanted,
    encode_caption,
)
from trainer.dit.image_folder import open_folder
from trainer.errors import MissingPackageError

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Number of examples of an *.npz file that are checked at a time.
CHECKED_EXAMPLES = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Examples to train on and examples to measure with."""

    train: Examples
    """Examples to train on."""
    held_out: Examples
    """Examples that training never sees."""
    description: str
    """One line for the log."""


def open_images(
    config: ImageConfig,
    *,
    size: tuple[int, int, int],
    channels: int,
    classes: int,
    caption_length: int,
) -> Images:
    """Opens what `config` names; by default, the handwritten digits of scikit-learn.

    An *.npz file is read as a whole, since its arrays cannot be mapped into memory. The size and
    the caption of every image in a folder are read now, which takes a moment for each.

    Args:
        config: what to read.
        size: frames, height and width that every example must have.
        channels: number of channels that every example must have; images are converted to 1 or 3.
        classes: number of classes; with 0, labels are not read.
        caption_length: largest number of bytes of a caption; with 0, captions are not read.

    Raises:
        ImportError: if the package that reads the data is missing.
        ValueError: if the data cannot be read, are of another kind than their names say, do not fit
            the model, or are fewer than two examples.
    """
    wanted = Wanted(size=size, channels=channels, classes=classes, caption_length=caption_length)
    path = config.path
    if path is None:
        source = _open_digits(wanted)
    elif path.is_dir():
        source = open_folder(path, wanted)
    else:
        source = _open_npz(path, wanted)
    count = len(source.labels)
    if count < 2:
        raise InputError(
            f"Data must be at least 2 examples, of which one is held out; got {count} in "
            f"{source.name!r}. Give others: --data.path."
        )

    def read(number: int) -> Example:
        return Example(source.latent(number), source.labels[number], source.captions[number])

    held_out = min(max(1, round(config.held_out * count)), count - 1)
    order = np.random.default_rng(0).permutation(count)
    parts = np.sort(order[held_out:]), np.sort(order[:held_out])
    train, measured = (Examples(numbers=part, read=read) for part in parts)
    return Images(
        train=train,
        held_out=measured,
        description=f"{source.name}: {len(train):,} examples to train on, {len(measured):,} held "
        f"out{source.remark}",
    )


# The digits of scikit-learn.


def _open_digits(wanted: Wanted) -> ImageSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackageError(
            "Without --data.path, data are the handwritten digits of scikit-learn, which is "
            f"missing ({error}). Run: pip install -e '.[images]'"
        ) from error
    name = "handwritten digits of scikit-learn"
    if (wanted.size, wanted.channels) != ((1, 8, 8), 1) or wanted.classes not in (0, len(DIGITS)):
        raise InputError(
            f"The {name} need size=(1, 8, 8), model.channels=1 and model.classes=10 or 0; got "
            f"size={wanted.size}, channels={wanted.channels}, classes={wanted.classes}. Use those, "
            "or give --data.path."
        )
    digits: Any = load_digits()
    # Pixels have values from 0 to 16.
    images = (digits.images / 8 - 1).astype(np.float32)[:, None, :, :, None]
    count = len(images)
    captions: list[bytes | None] = [None] * count
    if wanted.caption_length:
        words = [encode_caption(word, repr(word), wanted.caption_length) for word in DIGITS]
        captions = [words[digit] for digit in digits.target]
    return ImageSet(
        name=name,
        latent=lambda number: images[number],
        labels=digits.target.tolist() if wanted.classes else [None] * count,
        captions=captions,
    )


# Latents in an *.npz file.


def _open_npz(path: Path, wanted: Wanted) -> ImageSet:
    find_files(path, "data.path")  # Raises if the file is missing.
    if path.suffix != ".npz":
        raise InputError(
            "data.path must be a folder of images, or a whole *.npz file of arrays without "
            f"objects; got {str(path)!r}. Rename it, or convert it."
        )
    needed = ["latents"]
    needed += ["labels"] * (wanted.classes > 0) + ["captions"] * (wanted.caption_length > 0)
    arrays = _load_npz(path, needed)
    latents = _check_latents(arrays["latents"], path, wanted)
    count = len(latents)
    labels: list[int | None] = [None] * count
    captions: list[bytes | None] = [None] * count
    if wanted.classes:
        labels = _check_labels(arrays["labels"], path, count, wanted.classes).tolist()
    if wanted.caption_length:
        captions = _check_captions(arrays["captions"], path, count, wanted.caption_length)
    shape = (*wanted.size, wanted.channels)
    return ImageSet(
        name=str(path),
        latent=lambda number: latents[number].astype(np.float32).reshape(shape),
        labels=labels,
        captions=captions,
    )


def _load_npz(path: Path, needed: list[str]) -> dict[str, np.ndarray]:
    """The arrays of a file by name."""
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            missing = [name for name in needed if name not in arrays]
            if not missing:
                return {name: arrays[name] for name in needed}
            found = list(arrays)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            "data.path must be a folder of images, or a whole *.npz file of arrays without "
            f"objects; got {type(error).__name__}: {error}, in {str(path)!r}. Save it again: "
            "np.savez(path, latents=latents, labels=labels)."
        ) from error
    raise InputError(
        f"{str(path)!r} must hold the arrays {needed} for this model; got {found}. Add "
        f"{missing}, or use --model.classes 0 for no labels, --model.caption-length 0 for no "
        "captions."
    )


def _check_latents(
    latents: np.ndarray, path: Path, wanted: Wanted
) -> Float[np.ndarray, "examples ..."]:
    example = (*wanted.size, wanted.channels)
    # Images of one frame may leave out its dimension.
    shapes = [example, example[1:]] if wanted.size[0] == 1 else [example]
    if latents.shape[1:] not in shapes:
        raise _npz_error(
            path,
            f"`latents` must have the shape [number, {', '.join(map(str, shapes[-1]))}]",
            latents,
            "Correct --size (frames, height, width) or --model.channels.",
        )
    if not np.issubdtype(latents.dtype, np.floating):
        raise _npz_error(path, "`latents` must be floating", latents, "Convert and scale them.")
    for start in range(0, len(latents), CHECKED_EXAMPLES):
        with np.errstate(over="ignore"):
            part = latents[start : start + CHECKED_EXAMPLES].astype(np.float32)
        finite = np.isfinite(part.reshape(len(part), -1)).all(axis=1)
        if not finite.all():
            raise InputError(
                "`latents` must be finite in float32; got others in example "
                f"{start + int(finite.argmin())} of {str(path)!r}. Remove or correct it."
            )
    return latents


def _check_labels(
    labels: np.ndarray, path: Path, count: int, classes: int
) -> Integer[np.ndarray, " examples"]:
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != (count,):
        raise _npz_error(
            path,
            f"`labels` must be {count} integers, one for each of `latents`",
            labels,
            "Save them so, or use --model.classes 0.",
        )
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        number = int(wrong.argmax())
        raise InputError(
            "`labels` must be at least 0 and below model.classes; got "
            f"{labels[number]} for example {number} of {str(path)!r} with classes={classes}. Use "
            f"--model.classes {max(int(labels.max()) + 1, 1)}, or correct it."
        )
    return labels


def _check_captions(
    captions: np.ndarray, path: Path, count: int, caption_length: int
) -> list[bytes | None]:
    if captions.dtype.kind != "U" or captions.shape != (count,):
        raise _npz_error(
            path,
            f"`captions` must be {count} strings, one for each of `latents`",
            captions,
            "Save np.array(captions) of a list of str, or use --model.caption-length 0.",
        )
    return [
        encode_caption(str(caption), f"caption {number} of {str(path)!r}", caption_length)
        for number, caption in enumerate(captions)
    ]


def _npz_error(path: Path, rule: str, found: np.ndarray, way_out: str) -> InputError:
    given = f"shape {found.shape} of {found.dtype}"
    return InputError(f"{rule}; got {given} in {str(path)!r}. {way_out}")

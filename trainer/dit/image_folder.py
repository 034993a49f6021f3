"""Folders of images, read with Pillow.

The sizes and captions of all files are checked when a folder is opened; pixels are read when they
are needed. Nothing is resized or cropped.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Float32

from startrail_jax.errors import InputError
from trainer.data.files import walk_files
from trainer.dit.examples import (
    ImageSet,
    Wanted,
    encode_caption,
)
from trainer.errors import MissingPackageError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# Pillow's modes of at most 8 bits a channel. Pillow would clip the values of wider modes.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
EXIF_ORIENTATION = 0x0112


def open_folder(folder: Path, wanted: Wanted) -> ImageSet:
    """Finds the images of a folder; checks their sizes and reads their captions.

    Args:
        folder: holds images with a suffix in `SUFFIXES`, in a subfolder for each class if the model
            has classes. The caption of name.png is in name.txt. Hidden files are left out.
        wanted: what the model needs.

    Raises:
        ImportError: if Pillow is missing.
        ValueError: if there are no images, or images that the model cannot take.
    """
    _import_pillow()
    if wanted.size[0] != 1 or wanted.channels not in (1, 3):
        raise InputError(
            "A folder of images needs size=(1, height, width) and model.channels=1 or 3; got "
            f"size={wanted.size}, channels={wanted.channels} for {str(folder)!r}. Use those, or "
            "give an *.npz file of latents."
        )
    found = _files_of_folder(folder)
    keys = [key for key in found if _suffix(key) in SUFFIXES]
    if not keys:
        raise InputError(
            f"A folder of images must hold some, as {', '.join(SUFFIXES)}; got none of these among "
            f"{len(found)} files in {str(folder)!r}. Give another --data.path, or convert them."
        )
    names = _classes_of_folder(folder, keys, wanted)
    label_of = {name: label for label, name in enumerate(names)}
    files = [folder / key for key in keys]
    captions: list[bytes | None] = [None] * len(files)
    if wanted.caption_length:
        captions = [_caption_of_file(path, wanted.caption_length) for path in files]
    for path in files:
        _with_pillow(path, wanted, _check_image)
    others = [key for key in found if _suffix(key) not in (*SUFFIXES, ".txt")]
    suffixes = ", ".join(sorted({_suffix(key) or PurePosixPath(key).name for key in others})[:5])
    return ImageSet(
        name=str(folder),
        latent=lambda number: _with_pillow(files[number], wanted, _pixels),
        labels=[label_of.get(key.split("/")[0]) for key in keys],
        captions=captions,
        remark=f"; {len(others):,} other files left out ({suffixes})" if others else "",
    )


def _files_of_folder(folder: Path) -> list[str]:
    """Sorted relative paths of the files in a folder and its subfolders, without hidden ones."""
    try:
        return sorted(walk_files(folder))
    except OSError as error:
        raise InputError(
            f"{str(error.filename)!r} must be readable; got {type(error).__name__}: "
            f"{error.strerror}. Correct its permissions, or leave it out."
        ) from error


def _suffix(key: str) -> str:
    return PurePosixPath(key).suffix.lower()


def _classes_of_folder(folder: Path, keys: list[str], wanted: Wanted) -> tuple[str, ...]:
    """The sorted names of the subfolders; none if the model has no classes."""
    if not wanted.classes:
        return ()
    loose = [key for key in keys if "/" not in key]
    if loose:
        raise InputError(
            "Each class must have a folder of its own in data.path; got "
            f"{len(loose)} images beside them, such as {loose[0]!r} in {str(folder)!r}. Move them, "
            "or use --model.classes 0."
        )
    names = tuple(sorted({key.split("/")[0] for key in keys}))
    if len(names) != wanted.classes:
        raise InputError(
            "model.classes must be the number of folders with images in data.path; got "
            f"classes={wanted.classes} and {len(names)} folders in {str(folder)!r}. Use "
            f"--model.classes {len(names)}, or 0 for no classes."
        )
    return names


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingPackageError(
            f"Folders of images are read with Pillow, which is missing ({error}). "
            "Run: pip install -e '.[images]'"
        ) from error
    return Image


def _with_pillow(path: Path, wanted: Wanted, function: Callable[[Any, Path, Wanted], Any]) -> Any:
    """Calls a function with an opened image, whose pixels are not decoded yet."""
    library = _import_pillow()
    damaged = (OSError, SyntaxError, EOFError, zlib.error, struct.error)
    try:
        with library.open(path) as image:
            return function(image, path, wanted)
    except (*damaged, library.DecompressionBombError) as error:
        raise InputError(
            f"{str(path)!r} must be a whole image; got {type(error).__name__}: {error}. Write it "
            "again, or remove it."
        ) from error


def _check_image(image: Any, path: Path, wanted: Wanted) -> None:
    """Raises if the header of an image says another size or mode than the model needs."""
    _, height, width = wanted.size
    found = (image.height, image.width)
    # If the header holds no EXIF data, `getexif` would decode the whole image to look for it.
    if "exif" in image.info and image.getexif().get(EXIF_ORIENTATION, 1) >= 5:
        found = found[::-1]
    if found != (height, width):
        raise InputError(
            f"All images must be of the size height={height}, width={width}; got height={found[0]},"
            f" width={found[1]} in {str(path)!r}. Resize or crop them before, or use "
            f"--size 1 {found[0]} {found[1]}."
        )
    if getattr(image, "n_frames", 1) > 1:
        raise InputError(
            f"Images must not be animated; got {image.n_frames} frames in {str(path)!r}. Save one, "
            "or give an *.npz file of latents."
        )
    if image.mode not in MODES:
        raise InputError(
            f"Images must have 8 bits a channel; got the mode {image.mode!r} in {str(path)!r}. "
            "Convert it, or give an *.npz file of latents."
        )


def _pixels(image: Any, path: Path, wanted: Wanted) -> Float32[np.ndarray, "1 H W C"]:
    """The upright image, without transparency, with values from -1 to 1."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    # The file may have been rewritten since it was checked.
    _check_image(upright, path, wanted)
    if "transparency" in upright.info:
        upright = upright.convert("RGBA")
    upright = upright.convert("L" if wanted.channels == 1 else "RGB")
    values = np.asarray(upright, np.float32) / 127.5 - 1
    return values.reshape(*wanted.size, wanted.channels)


def _caption_of_file(image: Path, caption_length: int) -> bytes:
    path = image.with_suffix(".txt")
    try:
        text = path.read_bytes().decode("utf-8-sig").strip()
    except OSError as error:
        raise InputError(
            f"Every image must have its caption in a file beside it; got {type(error).__name__} "
            f"for {str(path)!r}. Write it, or use --model.caption-length 0."
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"Captions must be UTF-8; got byte {error.object[error.start]:#04x} at offset "
            f"{error.start} of {str(path)!r}. Convert the file."
        ) from None
    return encode_caption(text, repr(str(path)), caption_length)

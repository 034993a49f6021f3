"""Folders of images.

The captions and the sizes of all files are checked when a folder is opened; pixels are read when
they are needed, and before the run as well if some files are expected to be bad.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from startrail_jax.errors import InputError
from trainer.data.files import walk_files
from trainer.dit.examples import ImageSet, Wanted, encode_captions
from trainer.dit.pixels import (
    BadImageError,
    check_header,
    check_pixels,
    import_pillow,
    read_pixels,
)
from trainer.printable import say
from trainer.processes import Peers

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# Number of files that wait for the threads which check them.
FILES_AT_A_TIME = 1024
# Between two lines that say how many files are checked.
SECONDS_BETWEEN_LINES = 10.0
# Number of bytes at each end of a file by which its content is known.
COMPARED_BYTES = 1 << 12
# Number of bytes of a file with a caption.
LONGEST_CAPTION = 1 << 20


def open_folder(folder: Path, wanted: Wanted, *, decode: bool, peers: Peers) -> ImageSet:
    """Finds the images of a folder; checks them and reads their captions.

    Args:
        folder: holds images with a suffix in `SUFFIXES`, in a subfolder for each class if the model
            has classes. The caption of name.png is in name.txt. Hidden files are left out.
        wanted: what the model needs.
        decode: whether to decode the pixels of all files, which finds every bad one but takes as
            long as reading the data once. Else, only sizes and formats are checked.
        peers: the processes that decode, each a share of the files.

    Raises:
        ImportError: if Pillow is missing.
        ValueError: if there are no images, or images that the model cannot take for another reason
            than that they are bad.
    """
    import_pillow()
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
    remark = _other_files(found)
    captions: list[bytes | None] = [None] * len(files)
    if wanted.caption_length:
        captions, longest = encode_captions(map(_read_caption, files), wanted.caption_length)
        remark += longest
    check = partial(check_pixels if decode else check_header, wanted=wanted)
    numbers = range(peers.index, len(files), peers.count) if decode else range(len(files))
    return ImageSet(
        name=str(folder),
        latent=lambda number: read_pixels(files[number], wanted),
        labels=[label_of.get(key.split("/")[0]) for key in keys],
        captions=captions,
        bad=_find_bad(files, numbers, check, shown=peers.index == 0),
        keys=keys,
        remark=remark,
        content=lambda number: _ends_of(files[number]),
    )


def _ends_of(path: Path) -> bytes:
    """The size of a file, and its first and last bytes; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - COMPARED_BYTES, 0))
            last = file.read(COMPARED_BYTES)
            file.seek(0)
            return b"%d " % size + file.read(COMPARED_BYTES) + last
    except (OSError, InputError):  # It is one of the bad examples, or is noticed when it is read.
        return b""


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


def _other_files(keys: list[str]) -> str:
    """A remark about the files that are neither images nor captions."""
    others = [key for key in keys if _suffix(key) not in (*SUFFIXES, ".txt")]
    suffixes = ", ".join(sorted({_suffix(key) or PurePosixPath(key).name for key in others})[:5])
    return f"; {len(others):,} other files left out ({suffixes})" if others else ""


def _find_bad(
    files: Sequence[Path], numbers: range, check: Callable[[Path], Any], *, shown: bool
) -> dict[int, str]:
    """Why each bad image cannot be used, by its number.

    Args:
        files: all files.
        numbers: numbers of the files to check.
        check: raises `BadImageError` for a bad image. Threads call it.
        shown: whether to say how far it is, if it takes long.
    """

    def reason(number: int) -> str:
        try:
            check(files[number])
        except BadImageError as error:
            return str(error)
        return ""

    bad: dict[int, str] = {}
    due = time.monotonic() + SECONDS_BETWEEN_LINES
    with ThreadPoolExecutor() as threads:
        for start in range(0, len(numbers), FILES_AT_A_TIME):
            if shown and time.monotonic() > due:
                due = time.monotonic() + SECONDS_BETWEEN_LINES
                say(f"{start:,} of {len(numbers):,} images are checked")
            part = numbers[start : start + FILES_AT_A_TIME]
            reasons = zip(part, threads.map(reason, part), strict=True)
            bad |= {number: text for number, text in reasons if text}
    return bad


def _read_caption(image: Path) -> tuple[str, str]:
    """The caption of an image, and where it was found."""
    path = image.with_suffix(".txt")
    try:
        return path.read_bytes().decode("utf-8-sig").strip(), repr(str(path))
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

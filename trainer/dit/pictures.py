"""Files of images: found with their classes or captions, and read upright, in RGB."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from startrail_jax.errors import InputError
from trainer.data.files import list_names, walk_files
from trainer.data.opening import json_lines, read_utf8, reading
from trainer.errors import MissingPackageError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
OTHERS = (".gif", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl", ".jp2", ".ppm", ".tga")
"""Suffixes of images that are not read."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""Formats of images. For some others, Pillow would start programs."""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")
"""Modes of Pillow that become RGB by its own rules; those of 16 bits become L."""
METADATA = ("metadata.jsonl", "metadata.csv")
COLUMNS = ("text", "caption")
"""Columns that hold captions, if there are several beside `file_name`."""


class Picture(NamedTuple):
    """A file, and what it shows."""

    file: str
    """Its path in the folder of images."""
    label: int | None = None
    """Number of its class."""
    caption: str | None = None


class Pictures(NamedTuple):
    """The images of a folder, in the order of their paths."""

    images: list[Picture]
    classes: tuple[str, ...] | None
    """Names of the classes in their order; None for a folder without classes."""
    has_captions: bool
    others: list[str]
    """Files that are left out."""


def find_pictures(folder: Path, column: str | None) -> Pictures:
    """The images of a folder, as `imagefolder` of the library datasets reads them.

    Either each image lies in the folder of its class, in the order of Python's `sorted`; or a file
    metadata.jsonl or metadata.csv has a `file_name` and a caption for each; or all lie in the
    folder itself, and have neither.

    Args:
        folder: of images.
        column: name of the column of captions; None for `text`, `caption`, or the only one.

    Raises:
        ValueError: if images are missing, lie in other places, or lack captions.
    """
    with reading(folder):
        files = sorted(walk_files(folder))
        folders = sorted(x.name for x in folder.iterdir() if x.is_dir() and x.name[0] != ".")
    images = [x for x in files if PurePosixPath(x).suffix.lower() in SUFFIXES]
    others = [x for x in files if PurePosixPath(x).suffix.lower() not in SUFFIXES]
    if unread := [x for x in others if PurePosixPath(x).suffix.lower() in OTHERS]:
        raise InputError(
            f"IMAGES must be {', '.join(SUFFIXES)}; got {list_names(unread)} in {str(folder)!r}. "
            "Convert or remove them."
        )
    if not images:
        raise InputError(
            f"IMAGES must hold files {', '.join(SUFFIXES)}; got none in {str(folder)!r}. Give "
            "another folder."
        )
    metadata = [x for x in others if PurePosixPath(x).name in (*METADATA, "metadata.parquet")]
    if metadata:
        captions = _read_captions(folder, metadata, column, images)
        found = [Picture(image, None, captions[image]) for image in images]
        return Pictures(found, None, True, [x for x in others if x not in metadata])
    if column is not None:
        raise InputError(
            f"--text-column is for a folder with {' or '.join(METADATA)}; got none in "
            f"{str(folder)!r}. Leave it out, or write the file."
        )
    depths = Counter(image.count("/") for image in images)
    if set(depths) == {0}:
        return Pictures([Picture(image) for image in images], None, False, others)
    _check_places(folder, images, folders, depths)
    numbers = {name: number for number, name in enumerate(folders)}
    found = [Picture(image, numbers[image.partition("/")[0]]) for image in images]
    return Pictures(found, tuple(folders), False, others)


def _check_places(
    folder: Path, images: list[str], folders: list[str], depths: Counter[int]
) -> None:
    """Raises ValueError unless each image lies in the folder of its class."""
    way_out = "Give each class one folder, in IMAGES itself, or write metadata.jsonl."
    if len(depths) > 1:
        first = {image.count("/"): image for image in reversed(images)}
        raise InputError(
            "Images must all lie in folders of classes, or all in IMAGES itself; got "
            f"{' and '.join(map(repr, sorted(first.values())[:3]))} in {str(folder)!r}. {way_out}"
        )
    if depths.keys() != {1}:
        top = images[0].partition("/")[0]
        raise InputError(
            "Images must lie in folders of classes in IMAGES itself; got "
            f"{images[0]!r} in {str(folder)!r}, which is deeper. Give another folder, such as "
            f"{str(folder / top)!r}."
        )
    filled = {image.partition("/")[0] for image in images}
    if empty := [name for name in folders if name not in filled]:
        raise InputError(
            f"Every folder of a class must hold images; got none in {list_names(empty)} of "
            f"{str(folder)!r}. Remove it, or fill it."
        )


def _read_captions(
    folder: Path, metadata: list[str], column: str | None, images: list[str]
) -> dict[str, str]:
    """The caption of each image."""
    if len(metadata) > 1 or metadata[0] not in METADATA:
        raise InputError(
            f"Captions must be in one file {' or '.join(METADATA)} of IMAGES itself; got "
            f"{list_names(metadata)} in {str(folder)!r}. Write one of them with all."
        )
    path = folder / metadata[0]
    rows = _rows_of_csv(path) if path.suffix == ".csv" else _rows_of_jsonl(path)
    names = list(dict.fromkeys(name for row in rows for name in row if name != "file_name"))
    choice = [column] if column is not None else [x for x in COLUMNS if x in names][:1] or names
    if len(choice) != 1 or choice[0] not in names:
        raise InputError(
            f"{str(path)!r} must have one column of captions beside file_name, or one of the name "
            f"text; got the columns {names}. Name it: --text-column NAME."
        )
    captions: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        file, caption = row["file_name"], row.get(choice[0])
        if not isinstance(caption, str) or not caption.strip():
            raise InputError(
                f"Every image must have a caption in the column {choice[0]!r}; got "
                f"{caption!r} for {file!r} in {str(path)!r}. Write it, or remove the image."
            )
        if file in captions:
            raise InputError(
                f"{str(path)!r} must name each image once; got {file!r} again in row {number}. "
                "Remove one."
            )
        captions[file] = caption.strip()
    known = set(images)
    if gone := [file for file in captions if file not in known]:
        raise InputError(
            f"{str(path)!r} must name images that are in the folder; got {list_names(gone)}, which "
            "are not. Correct the names, or remove these rows."
        )
    if lacking := [image for image in images if image not in captions]:
        raise InputError(
            f"{str(path)!r} must name every image; got none of {list_names(lacking)}. Add them, or "
            "remove these images."
        )
    return captions


def _rows_of_jsonl(path: Path) -> list[dict[str, Any]]:
    def parse(values: Any) -> dict[str, Any]:
        # A TypeError for a name that is no string.
        return {**values, "file_name": os.fspath(values["file_name"])}

    return list(json_lines(path, parse, needed="file_name and a caption", way_out="Correct it."))


def _rows_of_csv(path: Path) -> list[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(read_utf8(path), newline=""), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise InputError(
            f"{str(path)!r} must be a CSV file; got {error} in line {reader.line_num}. Correct it."
        ) from error
    if "file_name" not in (reader.fieldnames or ()):
        raise InputError(
            f"{str(path)!r} must have a column file_name; got {list(reader.fieldnames or ())}. "
            "Write it in the first line."
        )
    if wrong := [number for number, row in enumerate(rows, 1) if None in row]:
        raise InputError(
            f"Rows of {str(path)!r} must have the columns of its first line; got more in row "
            f"{wrong[0]}. Put captions with commas into quotes."
        )
    return rows


def open_picture(file: Any, name: str, what: str = "An image") -> Any:
    """An image of Pillow in RGB, upright, with 8 bits and on white.

    Args:
        file: a path, or an open file.
        name: its name, for errors.
        what: what it is, for errors.

    Raises:
        ValueError: if it cannot be read as a whole, or as what it is.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingPackageError(
            f"Images are read with Pillow; got {error}. Run: pip install -e '.[images]'"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as image:
                # Cameras put a second picture behind a JPEG, for other uses.
                if image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:
                    raise InputError("an animation, of which no single picture is meant")
                return _in_rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise
    except Exception as error:  # For damaged files, Pillow raises many types.
        raise InputError(
            f"{what} must be a whole image, as {', '.join(FORMATS)}; got {error} in {name!r}. "
            "Mend or remove it."
        ) from error


def _in_rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith("I"):
        values = np.asarray(image)
        # PNG has 16 bits at most; Pillow would cut what is above 255.
        if "transparency" in image.info or values.min() < 0 or values.max() > 2**16 - 1:
            raise InputError("grey of 16 bits with transparency")
        grey = np.round(values / 257).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode not in MODES:
        raise InputError(f"pixels of the mode {image.mode!r}")
    if not image.has_transparency_data:
        return image.convert("RGB")
    # Transparent pixels may have any colour: they lie on white.
    above = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")


def fitted(image: Any, height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
    """An image, scaled until it covers the size, and cut at the edges."""
    from PIL import Image, ImageOps

    return np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC))


def nearest_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The size of the nearest proportions, then area. Ratios are exact: the same everywhere."""

    def distance(size: tuple[int, int]) -> tuple[Fraction, Fraction]:
        rows, columns = size
        return _ratio(height * columns, width * rows), _ratio(height * width, rows * columns)

    return min(sizes, key=distance)


def sizes_of_area(side: int, step: int, most: float) -> tuple[tuple[int, int], ...]:
    """Heights and widths that are multiples of `step`, of at most the area of side x side and of
    proportions up to 1 : `most`, and cannot be larger; the square first, then the nearest to it."""

    def fits(height: int, width: int) -> bool:
        return height * width <= side * side and max(height, width) <= most * min(height, width)

    sides = range(step, int(side * most) + 1, step)
    found = [
        (height, width)
        for height in sides
        for width in sides
        if fits(height, width)
        and not any(fits(height + x, width + y) for x, y in ((step, 0), (0, step), (step, step)))
    ]
    return tuple(sorted(found, key=lambda x: (_ratio(*x), x)))


def _ratio(a: int, b: int) -> Fraction:
    return Fraction(max(a, b), min(a, b))

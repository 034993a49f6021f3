"""Encoded images that a DiT trains on.

A folder that `python -m trainer.dit.encode` has written of images holds

    encoded.json             that they are images; their channels, classes and VAE
    images-*.jsonl           lines of images: file and row, size, label, caption; for encoding also
                             image, its hash, and a version: that of the highest version counts, and
                             one without a file says that the image is no longer there
    images/*.safetensors     `images` [N H W C] of one size: latents in float32, or pixels from 0 to
                             255; rows that no line names are left over from earlier versions

Imports no jax.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32
from safetensors import SafetensorError, safe_open

from startrail_jax.errors import InputError
from trainer.data.opening import json_lines, read_object
from trainer.dit.config import DiTTrainConfig
from trainer.dit.encoded import ENCODED, IMAGES, KIND, require_sizes

ROWS = "images"
"""The tensor of a file."""
KEPT = "images.json"
"""In the folder of a run: encoded.json of its images."""


class ImageLine(NamedTuple):
    """A line of images-*.jsonl."""

    image: str
    """Path in the folder of images."""
    version: int
    sha256: str
    """Hash of the content of the image."""
    file: str | None
    """File of its row; None if the image is no longer there."""
    row: int
    size: tuple[int, int, int]
    """One frame, height and width of the latent."""
    label: int | None
    caption: str | None


def read_images(folder: Path) -> dict[str, ImageLine]:
    """The line that counts of each image."""
    found: dict[str, ImageLine] = {}
    way_out = "Remove the line, and encode the images again."
    for path in sorted(folder.glob("images-*.jsonl")):
        needed = ", ".join(ImageLine._fields)
        for line in json_lines(path, _line_of, needed=needed, way_out=way_out):
            former = found.get(line.image, line)
            found[line.image] = max(line, former, key=lambda x: x.version)
    return found


def _line_of(values: Any) -> ImageLine:
    frames, height, width = map(int, values["size"])
    own: Any = {name: values[name] for name in ImageLine._fields}
    return ImageLine(**own | {"size": (frames, height, width)})


class About(NamedTuple):
    """What all images of a folder share."""

    channels: int
    pixels: bool
    """Whether they are pixels, and no latents."""
    model: str | None
    """A hash of the VAE."""
    classes: tuple[str, ...] | None
    """Names of the classes, in their order."""
    captions: bool


def read_about(path: Path) -> About:
    """What a file encoded.json of images says, or its copy in the folder of a run."""
    values = read_object(path) if path.is_file() else {}
    if values.get(KIND) != IMAGES:
        got = "one of videos, for a Wan" if values else "no folder of this kind"
        raise InputError(
            "data.path must be an *.npz file, or a folder of images that `python -m "
            f"trainer.dit.encode` has written; got {str(path.parent)!r}, {got}. Encode images "
            "first, or correct the path."
        )
    classes = values["classes"]
    return About(
        channels=values["channels"],
        pixels=values["pixels"],
        model=values["model"],
        classes=None if classes is None else tuple(classes),
        captions=values["captions"],
    )


def sizes_in(folder: Path) -> list[tuple[int, int, int]]:
    """The sizes of the images of a folder, the largest first."""
    sizes = {line.size for line in read_images(folder).values() if line.file is not None}
    return sorted(sizes, key=lambda x: (-np.prod(x), x))


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedImages:
    """The images of a folder in the order of their paths, read when they are needed."""

    folder: Path
    about: About
    files: tuple[str, ...]
    """All files of rows."""
    places: np.ndarray
    """File and row of each image: integers [images, 2]."""
    labels: list[int | None]
    sizes: list[tuple[int, int, int]]
    """Size of each image."""
    digest: str
    """A hash of what is in them."""

    def read(self, number: int) -> Float32[np.ndarray, "1 H W C"]:
        """The latent of an image, or its pixels from -1 to 1."""
        which, row = (int(x) for x in self.places[number])
        path = self.folder / IMAGES / self.files[which]
        must, way_out = "", "Remove the file, and encode the images again."
        try:
            with safe_open(path, framework="numpy") as file:
                rows = file.get_slice(ROWS)
                count, *shape = rows.get_shape()
                if row < count and shape == [*self.sizes[number][1:], self.about.channels]:
                    found = rows[row : row + 1]
                    must = "" if np.isfinite(found).all() else "hold finite latents; got others"
                else:
                    must = (
                        f"hold what its lines in images-*.jsonl say, {self.sizes[number][1:]} in "
                        f"row {row}; got {shape} and {count} rows"
                    )
        except (SafetensorError, OSError) as error:
            must = f"be a whole safetensors file; got {error}"
        if must:
            raise InputError(f"{str(path)!r} must {must}. {way_out}")
        return found.astype(np.float32) / 127.5 - 1 if self.about.pixels else found


def open_folder(path: Path, config: DiTTrainConfig) -> EncodedImages:
    """The images of a folder, after they were compared with the settings of a run."""
    about, model = read_about(path / ENCODED), config.model
    for name, wanted, given in (
        ("model.channels", about.channels, model.channels),
        ("data.pixels", about.pixels, config.data.pixels),
    ):
        if wanted != given:
            raise InputError(
                f"{name} must be {wanted} for the images of {str(path)!r}; got {given}. Leave the "
                "flag out, or give other images."
            )
    if model.classes and about.classes is None:
        what = "captions, by which a DiT learns nothing" if about.captions else "none"
        raise InputError(
            "A DiT learns the classes of images, which are folders in IMAGES; got images with "
            f"{what} in {str(path)!r}. Encode a folder with classes, or use --model.classes 0 to "
            "train without them."
        )
    if model.classes and model.classes < len(about.classes or ()):
        raise InputError(
            f"model.classes must be at least the number of classes of {str(path)!r}, "
            f"{len(about.classes or ())}; got classes={model.classes}. Leave --model.classes out."
        )
    lines = sorted(line for line in read_images(path).values() if line.file is not None)
    require_sizes(config, Counter(line.size for line in lines), path)
    files: dict[str, int] = {}
    for line in lines:
        files.setdefault(str(line.file), len(files))
    content = [(line.image, line.sha256, line.size) for line in lines]
    known = hashlib.sha256(repr((about, content)).encode("utf-8", "surrogatepass"))
    return EncodedImages(
        folder=path,
        about=about,
        files=tuple(files),
        places=np.array([(files[str(x.file)], x.row) for x in lines]).reshape(-1, 2),
        labels=[line.label if model.classes else None for line in lines],
        sizes=[line.size for line in lines],
        digest=known.hexdigest(),
    )

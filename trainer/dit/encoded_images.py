"""Encoded images that a DiT trains on.

A folder that `python -m trainer.dit.encode` has written of images holds

    encoded.json             that they are images; their channels, classes, VAE and text encoder
    images-*.jsonl           lines of images: file and row, size, label, caption, place of its text;
                             for encoding also image, its hash, and a version: that of the highest
                             version counts, and one without a file says that the image is no longer
                             there
    images/*.safetensors     `images` [N H W C] of one size: latents in float32, or pixels from 0 to
                             255; `texts` [tokens D]: the embedded tokens of all captions in
                             bfloat16; rows that no line names are left over from earlier versions

Imports no jax.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32
from safetensors import SafetensorError, safe_open

from startrail_jax.errors import InputError
from trainer.data.files import list_names
from trainer.data.opening import json_lines, read_object
from trainer.dit.config import DiTTrainConfig
from trainer.dit.encoded import ENCODED, IMAGES, KIND, require_sizes

ROWS, TEXTS = "images", "texts"
"""The tensors of a file."""
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
    text: tuple[int, int] | None = None
    """Row of the first token of its caption, and their number; None if it is not encoded."""


def read_images(folder: Path) -> dict[str, ImageLine]:
    """The line that counts of each image."""
    found: dict[str, ImageLine] = {}
    way_out = "Remove the line, and encode the images again."
    for path in sorted(folder.glob("images-*.jsonl")):
        needed = ", ".join(x for x in ImageLine._fields if x not in ImageLine._field_defaults)
        for line in json_lines(path, _line_of, needed=needed, way_out=way_out):
            former = found.get(line.image, line)
            found[line.image] = max(line, former, key=lambda x: x.version)
    return found


def _line_of(values: Any) -> ImageLine:
    frames, height, width = map(int, values["size"])
    defaults = ImageLine._field_defaults
    own: Any = {x: values.get(x) if x in defaults else values[x] for x in ImageLine._fields}
    if own["text"] is not None:
        first, count = map(int, own["text"])
        own["text"] = first, count
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
    text_dim: int | None
    """Channels of a token of a caption; None if captions are not encoded."""
    text_model: str | None
    """A hash of the text encoder."""


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
        text_dim=values.get("text_dim"),
        text_model=values.get("text_model"),
    )


class Extent(NamedTuple):
    """The sizes of what is in a folder."""

    sizes: list[tuple[int, int, int]]
    """Sizes of the images, the largest first."""
    text_tokens: int
    """Tokens of the longest caption; 0 if none is encoded."""


def extent_of(folder: Path) -> Extent:
    """The sizes of what is in a folder."""
    lines = [line for line in read_images(folder).values() if line.file is not None]
    sizes = sorted({line.size for line in lines}, key=lambda x: (-np.prod(x), x))
    return Extent(sizes, max((line.text[1] for line in lines if line.text), default=0))


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
    texts: list[tuple[int, int]] | None
    """The first row and the number of the tokens of each caption, if the model has texts."""
    captions: list[str | None]
    digest: str
    """A hash of what is in them."""

    def read(self, number: int) -> Float32[np.ndarray, "1 H W C"]:
        """The latent of an image, or its pixels from -1 to 1."""
        which, row = (int(x) for x in self.places[number])
        shape = (*self.sizes[number][1:], self.about.channels)
        found = self._rows(which, ROWS, row, 1, shape, "latents")
        return found.astype(np.float32) / 127.5 - 1 if self.about.pixels else found

    def read_text(self, number: int) -> Float[np.ndarray, "S D"] | None:
        """The embedded tokens of the caption of an image, if the model has texts."""
        if self.texts is None or self.about.text_dim is None:
            return None
        first, count = self.texts[number]
        which = int(self.places[number, 0])
        return self._rows(which, TEXTS, first, count, (self.about.text_dim,), "texts")

    def _rows(
        self, which: int, name: str, first: int, count: int, shape: tuple[int, ...], what: str
    ) -> np.ndarray:
        """So many rows of a tensor of a file, each of a shape."""
        path = self.folder / IMAGES / self.files[which]
        must, way_out = "", "Remove the file, and encode the images again."
        found = np.zeros((0, *shape), np.float32)
        try:
            with safe_open(path, framework="numpy") as file:
                rows = file.get_slice(name)
                total, *its_shape = rows.get_shape()
                if first + count <= total and its_shape == [*shape]:
                    found = rows[first : first + count]
                    is_finite = np.isfinite(found.astype(np.float32)).all()
                    must = "" if is_finite else f"hold finite {what}; got others"
                else:
                    must = (
                        f"hold what its lines in images-*.jsonl say, {shape} in row {first}"
                        f" and {count - 1} more; got {its_shape} and {total} rows"
                    )
        except (SafetensorError, OSError) as error:
            must = f"be a whole safetensors file; got {error}"
        if must:
            raise InputError(f"{str(path)!r} must {must}. {way_out}")
        return found


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
    if model.text_dim is not None and model.text_dim != about.text_dim:
        got = "captions that are not encoded" if about.captions else "none"
        if about.text_dim is not None:
            got = f"text_dim={about.text_dim}"
        raise InputError(
            f"Captions must be encoded for model.text_dim={model.text_dim}; got {got} in "
            f"{str(path)!r}. Encode them with --text-encoder, or leave --model.text-dim out."
        )
    if model.classes and about.classes is None:
        what = "captions that are not encoded" if about.captions else "none"
        what = what if about.text_dim is None else "captions in their place"
        raise InputError(
            "A DiT learns classes of images, which are folders in IMAGES, or captions that are "
            f"encoded with --text-encoder; got images with {what} in {str(path)!r}. Encode them "
            "so, or use --model.classes 0 to train without."
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
    texts: Any = None
    content: list[Any] = [(line.image, line.sha256, line.size) for line in lines]
    if model.text_dim is not None:
        texts = [line.text for line in lines]
        lacking = [line.image for line in lines if line.text is None]
        if lacking:
            raise InputError(
                f"All captions of {str(path)!r} must be encoded; got none of "
                f"{list_names(lacking)}. Encode the images again, to a new folder."
            )
        longest, most = max((count for _, count in texts), default=0), config.data.text_tokens
        if most is not None and longest > most:
            raise InputError(
                f"data.text_tokens must be at least the {longest} tokens of the longest caption "
                f"of {str(path)!r}; got {most}. Leave --data.text-tokens out."
            )
        content = [(*known, x.caption) for known, x in zip(content, lines, strict=True)]
    known = hashlib.sha256(repr((about, content)).encode("utf-8", "surrogatepass"))
    return EncodedImages(
        folder=path,
        about=about,
        files=tuple(files),
        places=np.array([(files[str(x.file)], x.row) for x in lines]).reshape(-1, 2),
        labels=[line.label if model.classes else None for line in lines],
        sizes=[line.size for line in lines],
        texts=texts,
        captions=[line.caption for line in lines],
        digest=known.hexdigest(),
    )

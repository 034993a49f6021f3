"""Encodes images with classes or captions, for training a DiT."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from startrail_jax.errors import InputError
from trainer.data.cache import storing
from trainer.data.files import list_names
from trainer.data.opening import reading
from trainer.dit.encoded import (
    ENCODED,
    IMAGES,
    KIND,
    Encoding,
    check_kind,
    check_multiples,
    pixels_of,
    require_common,
    require_same,
    tracked,
    write_tensors,
    write_whole,
)
from trainer.printable import say

if TYPE_CHECKING:
    from trainer.dit.encoded_images import ImageLine
    from trainer.dit.pictures import Picture, Pictures

SIZE, TEXT_TOKENS = 256, 256
PATCH = 2
"""Rows and columns of positions in a token."""
MOST_ROWS, MOST_PIXELS = 256, 2**24
"""Images of a file, and pixels of all of them, at most."""


@dataclass(frozen=True, kw_only=True)
class ImageFlags:
    """Flags for images."""

    vae: Path | None = None
    """Folder of an AutoencoderKL in the format of diffusers, which makes latents of images. Needs
    the extra video."""
    pixels: bool = False
    """Whether to keep pixels in place of latents, without a VAE."""
    size: int | None = None
    """Images are squares of this height and width in pixels: they are scaled until they cover it,
    and cut at the edges. The default is 256."""
    max_ratio: float = 1.0
    """With 2, there are sizes of all proportions from 1:2 to 2:1, with at most the area of the
    square, and an image is brought to the nearest. The default is squares alone."""
    text_encoder: Path | None = None
    """Folder of a text encoder of transformers with its tokenizer, such as a T5 or a CLIP, for
    captions that a DiT learns. Needs the extra video."""
    text_column: str | None = None
    """Column of captions in metadata.jsonl or metadata.csv. The default is `text` or `caption`, or
    the only one beside `file_name`."""

    def __post_init__(self) -> None:
        # Neither is right where there are videos.
        if self.vae is not None and self.pixels:
            raise InputError(
                "Images become latents or stay pixels; got --vae and --pixels. Leave one out."
            )
        if self.size is not None and not 1 <= self.size <= 2**14:
            raise InputError(
                f"--size must be from 1 to {2**14} pixels; got {self.size}. Leave it out for "
                f"{SIZE}."
            )
        if not 1 <= self.max_ratio <= 8:
            raise InputError(
                f"--max-ratio must be from 1 to 8; got {self.max_ratio}. Use 1 for squares, or 2."
            )


class _Waiting(NamedTuple):
    """An image that is not written yet."""

    picture: Picture
    sha256: str
    pixels: Any


def encode_images(options: Encoding, flags: ImageFlags) -> list[str]:
    """Brings the encoded images of this process to what the images are now; returns the errors of
    those left out."""
    from trainer.dit.encoded_images import read_images
    from trainer.dit.pictures import find_pictures, fitted, nearest_size, open_picture

    out, folder = options.out, options.folder
    about, sizes = _settings(options, flags)
    found = find_pictures(folder, flags.text_column)
    about |= {"classes": found.classes and list(found.classes), "captions": found.has_captions}
    encoder = _text_encoder(options, flags, found)
    about |= {
        "text_dim": encoder and encoder.sizes.text_dim,
        "text_model": encoder and encoder.digest,
    }
    check_kind(out, IMAGES, (IMAGES, "images-*-of-*.jsonl", f"{ENCODED}*"))
    if out.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"OUT must not lie in IMAGES; got {str(out)!r} in {str(folder)!r}. Give another OUT."
        )
    entries = read_images(out)
    former = {image: line for image, line in entries.items() if line.file is not None}
    if former:
        require_same(out, about, "images")
        require_common(out, set(former), {picture.file for picture in found.images}, "images")
    index, count = options.process
    mine = found.images[index::count]
    _describe(found, folder, len(mine))
    # It is enough that one process drops them.
    gone = sorted(former.keys() - {picture.file for picture in found.images}) if index == 0 else []
    with storing(out, "OUT"):
        (out / IMAGES).mkdir(parents=True, exist_ok=True)
        there = set(os.listdir(out / IMAGES))
    errors, renewed, smaller, kept = [], [], 0, 0
    waiting: dict[tuple[int, int], list[_Waiting]] = defaultdict(list)
    with (
        storing(out, "OUT"),
        (out / f"images-{index}-of-{count}.jsonl").open("a", encoding="utf-8") as lines,
    ):
        writer = _ImageWriter(options, flags, about, entries, lines, encoder)
        writer.note(writer.without(image) for image in gone)
        for picture in tracked(mine, "encoding"):
            line = former.get(picture.file)
            try:
                with reading(folder / picture.file):
                    content = (folder / picture.file).read_bytes()
                sha256 = hashlib.sha256(content).hexdigest()
                is_same = line is not None and line.caption == picture.caption
                is_kept = line is not None and line.sha256 == sha256 and line.file in there
                if line is not None and is_kept and (is_same or encoder is None):
                    kept += 1
                    if not is_same:
                        renewed.append(picture.file)
                        version = line.version + 1
                        writer.note([line._replace(version=version, caption=picture.caption)])
                    continue
                image = open_picture(io.BytesIO(content), str(folder / picture.file))
                if encoder is not None:
                    encoder.check(picture)
            except InputError as error:
                errors.append(str(error))
                say(f"left out: {error}")
                writer.note([writer.without(picture.file)] if line is not None else [])
                continue
            is_renewed = line is not None and (line.sha256 != sha256 or not is_same)
            renewed += [picture.file] * is_renewed
            size = nearest_size(image.height, image.width, sizes)
            smaller += image.height < size[0] or image.width < size[1]
            waiting[size].append(_Waiting(picture, sha256, fitted(image, *size)))
            if len(waiting[size]) >= max(min(MOST_ROWS, MOST_PIXELS // (size[0] * size[1])), 1):
                errors += writer.write(size, waiting.pop(size))
        for size, images in sorted(waiting.items()):
            errors += writer.write(size, images)
    _remove_unused(out, {str(line.file) for line in former.values()})
    if kept:
        say(f"{kept} images are as they were")
    if smaller:
        say(f"{smaller} images are smaller than their size, and were scaled up")
    if renewed:
        say(f"renewed, since the image or its caption has changed: {list_names(renewed)}")
    if gone:
        say(f"dropped, since no longer in {str(folder)!r}: {list_names(gone)}")
    return errors


class _CaptionEncoder:
    """Embeds the captions of images."""

    def __init__(self, folder: Path, options: Encoding) -> None:
        from trainer.dit.texts import TextEncoder, digest_of_encoder

        self._encoder = TextEncoder(folder, device=options.device)
        self.sizes, self.digest = self._encoder.sizes, digest_of_encoder(folder)
        limit = self.sizes.most or TEXT_TOKENS
        self._most = options.text_tokens or min(TEXT_TOKENS, limit)
        if self._most > limit and self.sizes.most is not None:
            raise InputError(
                f"--text-tokens must be at most the {limit} of the text encoder; got "
                f"{self._most}. Leave it out."
            )

    def check(self, picture: Picture) -> None:
        """Raises ValueError if the caption has too many tokens."""
        try:
            self._encoder.tokens(picture.caption or "", self._most)
        except InputError as error:
            raise InputError(f"{picture.file}: {error}") from error

    def encode(self, captions: list[str]) -> list[Any]:
        """The embedded tokens of captions."""
        return self._encoder.encode(captions, most=self._most)


def _text_encoder(options: Encoding, flags: ImageFlags, found: Pictures) -> _CaptionEncoder | None:
    if flags.text_encoder is not None:
        if not found.has_captions:
            raise InputError(
                "--text-encoder is for images with captions, in a metadata.jsonl or metadata.csv; "
                f"got none in {str(options.folder)!r}. Leave it out, or write the file."
            )
        return _CaptionEncoder(flags.text_encoder, options)
    if options.text_tokens is not None:
        raise InputError(
            f"--text-tokens belongs to --text-encoder; got {options.text_tokens} without it. Add "
            "--text-encoder FOLDER, or leave it out."
        )
    return None


def _settings(
    options: Encoding, flags: ImageFlags
) -> tuple[dict[str, Any], tuple[tuple[int, int], ...]]:
    """What all images share, and their sizes in pixels. Loads no VAE."""
    from trainer.dit.pictures import sizes_of_area
    from trainer.dit.vae import digest_of_vae, vae_sizes

    if flags.vae is None and not flags.pixels:
        raise InputError(
            "Images become latents or stay pixels; got neither --vae nor --pixels. Add --vae "
            "FOLDER, such as a download of stabilityai/sd-vae-ft-ema, or --pixels."
        )
    channels, factor, digest = 3, 1, None
    if flags.vae is not None:
        of_vae = vae_sizes(flags.vae, "--vae")
        channels, factor = of_vae.channels, of_vae.pixels_of_latent
        digest = digest_of_vae(flags.vae)
    step = factor * PATCH
    if options.sizes:
        if flags.size is not None or flags.max_ratio != 1:
            raise InputError(
                "--sizes gives all sizes; got --size or --max-ratio too. Leave one of them out."
            )
        sizes = tuple(dict.fromkeys(pixels_of(options.sizes)))
        check_multiples(sizes, step)
    else:
        side = flags.size or SIZE
        check_multiples([(side, side)], step, "--size")
        sizes = sizes_of_area(side, step, flags.max_ratio)
    about = {
        **{KIND: IMAGES, "channels": channels, "pixels": flags.pixels, "model": digest},
        "sizes": [f"{height}x{width}" for height, width in sizes],
        "pixels_of_latent": factor,
    }
    return about, sizes


def _describe(found: Pictures, folder: Path, mine: int) -> None:
    say(f"{len(found.images)} images, of which this process reads {mine}")
    if found.classes is not None:
        say(f"{len(found.classes)} classes, in this order: {list_names(found.classes)}")
        numbered = ((x, i) for i, x in enumerate(found.classes) if x.isdecimal() and int(x) != i)
        for name, number in list(numbered)[:1]:
            say(
                f"warning: classes are in the order of their names as text, so that class {name!r} "
                f"has the number {number}. Begin names with zeros, such as 007, for another order."
            )
    elif not found.has_captions:
        say(f"no classes and no captions: there are no folders in {str(folder)!r}")
    if found.others:
        say(f"{len(found.others)} other files are left out: {list_names(found.others)}")


class _ImageWriter:
    """Writes images of one size each to a file, and then their lines."""

    def __init__(
        self,
        options: Encoding,
        flags: ImageFlags,
        about: dict[str, Any],
        entries: dict[str, ImageLine],
        lines: TextIO,
        encoder: _CaptionEncoder | None,
    ) -> None:
        self._options, self._flags, self._about = options, flags, about
        self._entries, self._lines, self._encoder = entries, lines, encoder
        self._vae: Any = None

    def write(self, size: tuple[int, int], images: list[_Waiting]) -> list[str]:
        """Writes images of one size; returns the errors of those left out."""
        import numpy as np

        from trainer.dit.encoded_images import ROWS, TEXTS, ImageLine

        latents, texts = self._encoded(np.stack([image.pixels for image in images])), None
        if self._encoder is not None:
            texts = self._encoder.encode([str(image.picture.caption) for image in images])
        errors = _not_finite(images, latents, texts)
        for error in errors.values():
            say(f"left out: {error}")
        rows = [row for row in range(len(images)) if row not in errors]
        if not rows:
            return [*errors.values()]
        images = [images[row] for row in rows]
        out, (height, width) = self._options.out, size
        if not (out / ENCODED).is_file():
            text = json.dumps(self._about, indent=2) + "\n"
            write_whole(out / ENCODED, lambda part: part.write_text(text, encoding="utf-8"))
        else:  # Another process may have begun.
            require_same(out, self._about, "images")
        tensors, places = {ROWS: latents[rows]}, [None] * len(images)
        known = [[x.picture.file, x.sha256] for x in images]
        if texts is not None:
            known = [[x.picture.file, x.sha256, x.picture.caption] for x in images]
            tensors[TEXTS], places = _joined([texts[row] for row in rows])
        content = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        name = f"{height}x{width}-{content[:16]}.safetensors"
        write_tensors(out / IMAGES / name, tensors)
        shape = (1, *latents.shape[1:3])
        self.note(
            ImageLine(
                image=picture.file,
                version=self._version(picture.file),
                sha256=sha256,
                file=name,
                row=row,
                size=shape,
                label=picture.label,
                caption=picture.caption,
                text=place,
            )
            for row, ((picture, sha256, _), place) in enumerate(zip(images, places, strict=True))
        )
        return [*errors.values()]

    def without(self, image: str) -> ImageLine:
        """A line which says that an image is no longer there."""
        line = self._entries[image]
        return line._replace(version=line.version + 1, file=None)

    def note(self, found: Iterable[ImageLine]) -> None:
        """Adds lines, which are then on the disk."""
        self._lines.writelines(json.dumps(line._asdict()) + "\n" for line in found)
        self._lines.flush()
        os.fsync(self._lines.fileno())

    def _version(self, image: str) -> int:
        return self._entries[image].version + 1 if image in self._entries else 0

    def _encoded(self, images: Any) -> Any:
        flags = self._flags
        if flags.vae is None:
            return images
        if self._vae is None:
            from trainer.dit.vae import ImageVae

            self._vae = ImageVae(flags.vae, option="--vae", device=self._options.device)
        return self._vae.encode(images)


def _not_finite(images: list[_Waiting], latents: Any, texts: list[Any] | None) -> dict[int, str]:
    """An error for each image whose latent or text is not finite, by its row."""
    import numpy as np

    errors = {}
    for what, model, arrays in (("latent", "VAE", latents), ("text", "text encoder", texts)):
        for row, x in enumerate(() if arrays is None else arrays):
            if not np.isfinite(x).all():
                errors[row] = (
                    f"The {what} of an image must be finite; got others of "
                    f"{images[row].picture.file!r}. Remove it, or use another {model}."
                )
    return errors


def _joined(texts: list[Any]) -> tuple[Any, list[Any]]:
    """All tokens of texts in bfloat16, and the first and the number of those of each."""
    import jax.numpy as jnp
    import numpy as np

    counts = [len(text) for text in texts]
    firsts = np.cumsum([0, *counts[:-1]]).tolist()
    return np.concatenate(texts).astype(jnp.bfloat16), list(zip(firsts, counts, strict=True))


def _remove_unused(out: Path, former: set[str]) -> None:
    """Removes files of which no line names a row any longer."""
    from trainer.dit.encoded_images import read_images

    used = {line.file for line in read_images(out).values()} if former else set()
    for name in former - used:
        (out / IMAGES / name).unlink(missing_ok=True)

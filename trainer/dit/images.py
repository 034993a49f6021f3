"""Images or latents that a diffusion model trains on, and those that are held out, by number.

    data.path    what is read                                       latents
    none         the handwritten digits of scikit-learn             images, kept in memory
    a folder     *.png, *.jpg, *.jpeg, *.webp, *.bmp, in a folder   images, read when needed
                 for each class if the model has classes
    *.npz        the arrays `latents`, `labels`, `captions`         unchanged, kept in memory

Images have values from -1 to 1. Everything is checked when the data are opened, except the pixels
of files in a folder, which are checked then only if `data.max_bad` allows for bad ones.

Which examples are held out depends only on their number, not on the seed, the hosts or the mesh. A
bad example keeps its number, and the next good one of its part takes its place. So the order of the
data does not depend on which examples are bad, and a run goes on in its order when one more is.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Integer

from startrail_jax.errors import InputError
from trainer.data.arrays import ArrayHeader, opened_archive
from trainer.data.files import find_files
from trainer.dit.config import ImageConfig
from trainer.dit.examples import (
    Example,
    Examples,
    ImageSet,
    Wanted,
    encode_captions,
)
from trainer.dit.image_folder import open_folder
from trainer.dit.pixels import BadImageError
from trainer.errors import MissingPackageError
from trainer.processes import Peers

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Number of values of an *.npz file that are checked at a time.
CHECKED_VALUES = 1 << 22
# Root mean squares of latents that need no factor. The latents of Stable Diffusion before its
# factor of 0.18215 lie above, those after it within.
USUAL_RMS = (0.2, 5.0)
# Examples of which a checkpoint keeps a hash.
COMPARED_EXAMPLES = 64
# Bad examples that an error names; the log names all.
NAMED_IN_ERROR = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Examples to train on and examples to measure with."""

    train: Examples
    """Examples to train on."""
    held_out: Examples
    """Examples that training never sees."""
    description: str
    """For the log: a line about the data, and others that name the bad examples and what is
    probably not meant."""
    fingerprints: tuple[str, ...]
    """Hashes of the content of some examples, spread evenly over all."""


def open_images(
    config: ImageConfig,
    *,
    size: tuple[int, int, int],
    channels: int,
    classes: int,
    caption_length: int,
    peers: Peers | None = None,
) -> Images:
    """Opens what `config` names; by default, the handwritten digits of scikit-learn.

    An *.npz file is read as a whole, since its arrays cannot be mapped into memory. The size and
    the caption of every image in a folder are read now, which takes a moment for each, and its
    pixels too if `config.max_bad` is above 0.

    Args:
        config: what to read.
        size: frames, height and width that every example must have.
        channels: number of channels that every example must have; images are converted to 1 or 3.
        classes: number of classes; with 0, labels are not read.
        caption_length: largest number of bytes of a caption; with 0, captions are not read.
        peers: the processes that open the same data; all must call this function.

    Raises:
        ImportError: if the package that reads the data is missing.
        ValueError: if the data cannot be read, are of another kind than their names say, do not fit
            the model, hold too many bad examples, are fewer than two examples, or are not the same
            in all processes.
    """
    wanted = Wanted(
        size=size,
        channels=channels,
        classes=classes,
        caption_length=caption_length,
        resize=config.resize,
    )
    peers = peers or Peers()
    source = _open_source(config, wanted, peers)
    count = len(source.labels)
    bad = _agree_on_bad(source, peers)
    if count < 2:
        raise InputError(
            f"Data must be at least 2 examples, of which one is held out; got {count} in "
            f"{source.name!r}. Give others: --data.path."
        )
    if len(bad) > config.max_bad:
        raise _too_many_bad(bad, config, source)

    def read(number: int) -> Example:
        try:
            latent = source.latent(number)
        except BadImageError as error:
            # Pixels are damaged that were not checked, or not yet.
            raise InputError(f"{error}. {_way_out(len(bad) + 1, config)}") from error
        return Example(latent, source.labels[number], source.captions[number])

    held_out = min(max(1, round(config.held_out * count)), count - 1)
    order = np.random.default_rng(0).permutation(count)
    parts = np.sort(order[held_out:]), np.sort(order[:held_out])
    train, measured = (Examples(numbers=_good(part, bad, source), read=read) for part in parts)
    lines = [
        f"{source.name}: {len(train):,} examples to train on, {len(measured):,} held out"
        f"{source.remark}",
        *(f"bad, and replaced by the example after it: {reason}" for reason in bad.values()),
        *([f"warning: {source.warning}"] if source.warning else []),
    ]
    return Images(
        train=train,
        held_out=measured,
        description="\n".join(lines),
        fingerprints=_fingerprints(source),
    )


def _fingerprints(source: ImageSet) -> tuple[str, ...]:
    count = len(source.labels)
    compared = min(count, COMPARED_EXAMPLES)
    numbers = [i * (count - 1) // max(compared - 1, 1) for i in range(compared)]
    return tuple(
        hashlib.sha256(
            repr((source.labels[n], source.captions[n])).encode() + source.content(n)
        ).hexdigest()[:8]
        for n in numbers
    )


def _open_source(config: ImageConfig, wanted: Wanted, peers: Peers) -> ImageSet:
    path = config.path
    if path is None:
        return _open_digits(wanted)
    if path.is_dir():
        return open_folder(path, wanted, decode=config.max_bad > 0, peers=peers)
    return _open_npz(path, wanted, config.latent_scale)


# Examples that are bad.


def _agree_on_bad(source: ImageSet, peers: Peers) -> dict[int, str]:
    """The bad examples that any process has found, in their order.

    Raises:
        ValueError: if the processes do not have the same examples.
    """
    examples = "" if peers.count == 1 else repr((source.keys, source.labels, source.captions))
    found = {
        "examples": len(source.labels),
        "digest": hashlib.sha256(examples.encode()).hexdigest(),
        "bad": list(source.bad.items()),
    }
    gathered = peers.gather(found)
    for index, other in enumerate(gathered):
        if (other["examples"], other["digest"]) != (found["examples"], found["digest"]):
            raise InputError(
                "All processes must have the same data; got "
                f"{found['examples']} examples in {source.name!r} of process {peers.index}, and "
                f"{other['examples']} of process {index}, with other names, labels or captions. "
                "Copy the files to all machines, or use a folder that they share."
            )
    return dict(sorted((number, reason) for other in gathered for number, reason in other["bad"]))


def _too_many_bad(bad: dict[int, str], config: ImageConfig, source: ImageSet) -> InputError:
    reasons = list(bad.values())
    named = "".join(f"\n  {reason}" for reason in reasons[:NAMED_IN_ERROR])
    more = len(reasons) - NAMED_IN_ERROR
    return InputError(
        f"At most data.max_bad={config.max_bad} examples may be bad; got {len(bad)} of "
        f"{len(source.labels):,} in {source.name!r}:{named}\n"
        f"{f'  and {more} more. ' if more > 0 else ''}{_way_out(len(bad), config)}"
    )


def _way_out(count: int, config: ImageConfig) -> str:
    all_checked = config.max_bad > 0 or config.holds_latents
    unchecked = "" if all_checked else " It checks all pixels first, and may find more."
    return (
        f"Mend what is bad, or use --data.max-bad {count}: the example after a bad one then takes "
        f"its place.{unchecked} A run that has begun goes on with either, but not if the file is "
        "removed."
    )


def _good(
    part: Integer[np.ndarray, " part"], bad: Collection[int], source: ImageSet
) -> Integer[np.ndarray, " part"]:
    """Numbers of examples, with the next good one (after the last the first) for each bad one."""
    good = np.flatnonzero(~np.isin(part, list(bad)))
    if not len(good):
        raise InputError(
            "Of the examples to train on and of those that are held out, some must not be bad; got "
            f"a part of {len(part)} bad ones in {source.name!r}. Mend them."
        )
    following = np.searchsorted(good, np.arange(len(part)))
    return part[good[following % len(good)]]


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
    remark = ""
    if wanted.caption_length:
        words, remark = encode_captions(
            [(word, repr(word)) for word in DIGITS], wanted.caption_length
        )
        captions = [words[digit] for digit in digits.target]
    return ImageSet(
        name=name,
        latent=lambda number: images[number],
        labels=digits.target.tolist() if wanted.classes else [None] * count,
        captions=captions,
        bad={},
        remark=remark,
        content=lambda number: images[number].tobytes(),
    )


# Latents in an *.npz file.


def _open_npz(path: Path, wanted: Wanted, scale: float) -> ImageSet:
    find_files(path, "data.path")  # Raises if the file is missing.
    if path.suffix != ".npz":
        raise InputError(
            "data.path must be a folder of images, or a whole *.npz file of arrays without "
            f"objects; got {str(path)!r}. Rename it, or convert it."
        )
    needed = ["latents"]
    needed += ["labels"] * (wanted.classes > 0) + ["captions"] * (wanted.caption_length > 0)
    arrays = _load_npz(path, needed, wanted)
    latents = arrays["latents"]
    count = len(latents)
    labels: list[int | None] = [None] * count
    captions: list[bytes | None] = [None] * count
    remark = ""
    if wanted.classes:
        labels = _check_labels(arrays["labels"], path, wanted.classes).tolist()
    if wanted.caption_length:
        captions, remark = _encode_captions(arrays["captions"], path, wanted.caption_length)
    shape = (*wanted.size, wanted.channels)
    bad, rms = _measure_latents(latents, path, scale)
    return ImageSet(
        name=str(path),
        latent=lambda number: _scaled(latents[number], scale).reshape(shape),
        labels=labels,
        captions=captions,
        bad=bad,
        remark=remark,
        warning=_warning_of_scale(rms, scale),
        content=lambda number: latents[number].tobytes(),
    )


def _load_npz(path: Path, needed: list[str], wanted: Wanted) -> dict[str, np.ndarray]:
    """The arrays of a file by name. Nothing is unpacked before all headers are right."""
    try:
        with opened_archive(path) as archive:
            found = archive.names()
            missing = [name for name in needed if name not in found]
            if not missing:
                headers = {name: archive.header(name) for name in needed}
                _check_headers(headers, path, wanted)
                return archive.read(headers)
    except InputError:
        raise
    # For damaged archives, Python's own package raises errors of many types.
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error,
            struct.error, OverflowError) as error:  # fmt: skip
        raise InputError(
            "data.path must be a folder of images, or a whole *.npz file of arrays without "
            f"objects; got {type(error).__name__}: {error}, in {str(path)!r}. Save it again, "
            "without compression: np.savez(path, latents=latents, labels=labels)."
        ) from error
    raise InputError(
        f"{str(path)!r} must hold the arrays {needed} for this model; got {found}. Add "
        f"{missing}, or use --model.classes 0 for no labels, --model.caption-length 0 for no "
        "captions."
    )


def _check_headers(headers: dict[str, ArrayHeader], path: Path, wanted: Wanted) -> None:
    """Raises unless all arrays have the shapes and types that the model needs."""
    latents = headers["latents"]
    _check_latents(latents, path, wanted)
    count = latents.shape[0]
    labels, captions = headers.get("labels"), headers.get("captions")
    if labels and (not np.issubdtype(labels.dtype, np.integer) or labels.shape != (count,)):
        raise _npz_error(
            path,
            f"`labels` must be {count} integers, one for each of `latents`",
            labels,
            "Save them so, or use --model.classes 0.",
        )
    if captions and (captions.dtype.kind != "U" or captions.shape != (count,)):
        raise _npz_error(
            path,
            f"`captions` must be {count} strings, one for each of `latents`",
            captions,
            "Save np.array(captions) of a list of str, or use --model.caption-length 0.",
        )


def _check_latents(latents: ArrayHeader, path: Path, wanted: Wanted) -> None:
    example = (*wanted.size, wanted.channels)
    # Images of one frame may leave out its dimension.
    shapes = [example, example[1:]] if wanted.size[0] == 1 else [example]
    if not latents.shape or latents.shape[1:] not in shapes:
        raise _npz_error(
            path,
            f"`latents` must have the shape [number, {', '.join(map(str, shapes[-1]))}]",
            latents,
            "Correct --size (frames, height, width) or --model.channels.",
        )
    if not np.issubdtype(latents.dtype, np.floating):
        raise _npz_error(path, "`latents` must be floating", latents, "Convert and scale them.")


def _scaled(latents: Float[np.ndarray, "..."], scale: float) -> Float32[np.ndarray, "..."]:
    """Latents as the model sees them; infinite where float32 cannot hold them."""
    with np.errstate(over="ignore"):
        return latents.astype(np.float32) * np.float32(scale)


def _measure_latents(
    latents: Float[np.ndarray, "examples ..."], path: Path, scale: float
) -> tuple[dict[int, str], float]:
    """Why each bad example cannot be used, and the root mean square of the good ones as scaled."""
    bad: dict[int, str] = {}
    squares, values = 0.0, 0
    step = max(1, CHECKED_VALUES // max(1, math.prod(latents.shape[1:])))
    for start in range(0, len(latents), step):
        part = _scaled(latents[start : start + step], scale)
        part = part.reshape(len(part), -1)
        finite = np.isfinite(part).all(axis=1)
        for number in start + np.flatnonzero(~finite):
            bad[int(number)] = (
                f"`latents` must be finite in float32; got others in example {number} of "
                f"{str(path)!r}"
            )
        good = part[finite].astype(np.float64)
        squares, values = squares + float(np.sum(good * good)), values + good.size
    return bad, math.sqrt(squares / values) if values else 0.0


def _warning_of_scale(rms: float, scale: float) -> str:
    least, most = USUAL_RMS
    if least <= rms <= most or not rms:
        return ""
    factor = float(f"{scale / rms:.3g}")
    return (
        f"the latents have a root mean square of {rms:.3g}, but the noise that is added to them "
        f"has 1, so the model would learn little. Use --data.latent-scale {factor:g}, by which "
        "latents are multiplied; samples are divided by it."
    )


def _check_labels(
    labels: Integer[np.ndarray, " examples"], path: Path, classes: int
) -> Integer[np.ndarray, " examples"]:
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        number = int(wrong.argmax())
        raise InputError(
            "`labels` must be at least 0 and below model.classes; got "
            f"{labels[number]} for example {number} of {str(path)!r} with classes={classes}. Use "
            f"--model.classes {max(int(labels.max()) + 1, 1)}, or correct it."
        )
    return labels


def _encode_captions(
    captions: np.ndarray, path: Path, caption_length: int
) -> tuple[list[bytes | None], str]:
    places = (f"caption {number} of {str(path)!r}" for number in range(len(captions)))
    return encode_captions(zip(map(str, captions), places, strict=True), caption_length)


def _npz_error(path: Path, rule: str, found: ArrayHeader, way_out: str) -> InputError:
    return InputError(f"{rule}; got {found} in {str(path)!r}. {way_out}")

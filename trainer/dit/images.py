"""Images or latents that a diffusion model trains on, and those that are held out, by number.

    data.path    what is read                             latents
    none         the handwritten digits of scikit-learn   pixels from -1 to 1
    *.npz        the arrays `latents`, `labels`, `texts`  unchanged
    a folder     what `trainer.dit.encode` has written    unchanged; pixels from -1 to 1

The first two are kept in memory, and checked when they are opened. Which examples are held out
depends only on their number, not on the seed, the hosts or the mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int

from startrail_jax.errors import InputError
from trainer.data.dataset import Dataset, held_out_of
from trainer.data.files import find_files
from trainer.data.opening import read_utf8
from trainer.dit.config import DiTTrainConfig
from trainer.dit.encoded import ENCODED, groups_by_size
from trainer.dit.encoded_images import KEPT, open_folder
from trainer.durable import replace_text
from trainer.errors import MissingPackageError

COUNTS = "text_tokens"
"""The array of an *.npz file with the number of tokens of each text; without it, all count."""
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Root mean squares of latents that need no factor. The latents of Stable Diffusion before its
# factor of 0.18215 lie above, those after it within.
USUAL_RMS = (0.2, 5.0)


SCALES_READ = 64
"""Latents of a folder whose root mean square is compared with those."""


class Example(NamedTuple):
    """One image, video or latent."""

    latent: Float32[np.ndarray, "F H W C"]
    label: int | None
    """Class of the image; None if the model has no classes."""
    text: Float[np.ndarray, "S D"] | None = None
    """Embedded tokens of its text, none for no text; None if the model has no texts."""
    caption: str | None = None
    """What the text says, if it is known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Source:
    """All examples that were found, before any is held out."""

    name: str
    latent: Callable[[int], Float32[np.ndarray, "F H W C"]]
    labels: Sequence[int | None]
    text: Callable[[int], Float[np.ndarray, "S D"] | None] = lambda number: None
    captions: Sequence[str | None] = ()
    """Captions of all examples, if they have any."""
    content: Any
    """What tells the latents from others."""
    sizes: Sequence[Any] = ()
    """Size of each latent, if there are several."""
    about: Path | None = None
    """The file that says what images of a folder share."""
    remark: str = ""
    """End of the line in the log that describes the data."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        caption = self.captions[index] if self.captions else None
        return Example(self.latent(index), self.labels[index], self.text(index), caption)


@dataclass(frozen=True, kw_only=True)
class ImageDataset(Dataset):
    """The images of a run."""

    about: Path | None
    """The file that says what images of a folder share."""

    def keep(self, run_dir: Path) -> None:
        if self.about is not None:
            replace_text(run_dir / KEPT, read_utf8(self.about).rstrip())


def open_images(config: DiTTrainConfig, collate: Callable[..., Any]) -> Dataset:
    """Opens what `config.data` names; by default, the handwritten digits of scikit-learn."""
    path = config.data.path
    if path is None:
        if config.model.text_dim is not None:
            raise InputError(
                "A model of texts needs data.path; got model.text_dim="
                f"{config.model.text_dim} without it. Encode images with --text-encoder, and give "
                "--data.path."
            )
        source = _open_digits(config)
    else:
        source = (_open_folder if path.is_dir() else _open_npz)(path, config)
    count = len(source.labels)
    if count < 2:
        raise InputError(
            f"Data must be at least 2 examples, of which one is held out; got {count} in "
            f"{source.name!r}. Give others: --data.path."
        )

    train, measured = held_out_of(source, config.data.validation_fraction)
    # The third entry is that of older runs, whose examples could have a caption.
    known = repr((source.content, source.labels, [None] * count))
    groups = None
    if len(config.sizes) > 1:
        if not source.sizes:
            raise InputError(
                "data.sizes is for a folder that `python -m trainer.dit.encode` has written; got "
                f"sizes={config.data.sizes} with {source.name!r}. Leave it out."
            )
        groups = groups_by_size(config, source.sizes, train, measured)
    return ImageDataset(
        about=source.about,
        train=train,
        held_out=measured,
        collate=collate,
        groups=groups,
        description=f"{source.name}: {len(train):,} examples to train on, {len(measured):,} held "
        f"out{source.remark}",
        loss_unit="mean squared error",
        digest=hashlib.sha256(known.encode()).hexdigest()[:16],
    )


# The digits of scikit-learn.


def images_of_digits(what: str) -> tuple[Float32[np.ndarray, "N 8 8"], Int[np.ndarray, " N"]]:
    """The images of scikit-learn, with values from -1 to 1, and the digit of each. For the error,
    `what` says what is made of them."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackageError(
            f"Without --data.path, data are {what} of scikit-learn, which is missing ({error}). "
            "Run: pip install -e '.[images]'"
        ) from error
    digits: Any = load_digits()
    # Pixels have values from 0 to 16.
    return (digits.images / 8 - 1).astype(np.float32), digits.target


def _open_digits(config: DiTTrainConfig) -> _Source:
    images, labels = images_of_digits("the handwritten digits")
    name = "handwritten digits of scikit-learn"
    if (config.size, config.model.channels) != ((1, 8, 8), 1) or config.model.classes not in (
        0,
        len(DIGITS),
    ):
        raise InputError(
            f"The {name} need size=(1, 8, 8), model.channels=1 and model.classes=10 or 0; got "
            f"size={config.size}, channels={config.model.channels}, "
            f"classes={config.model.classes}. Use those, or give --data.path."
        )
    return _Source(
        name=name,
        latent=lambda number: images[number, None, :, :, None],
        labels=labels.tolist() if config.model.classes else [None] * len(images),
        content=_digest(images),
    )


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


# Images in a folder.


def _open_folder(path: Path, config: DiTTrainConfig) -> _Source:
    images, scale = open_folder(path, config), np.float32(config.data.latent_scale)
    remark = ""
    if not images.about.pixels:
        some = range(0, len(images.labels), -(-len(images.labels) // SCALES_READ) or 1)
        squares = [
            np.mean((images.read(number) * scale).astype(np.float64) ** 2) for number in some
        ]
        rms = float(np.sqrt(np.mean(squares))) if squares else 0.0
        remark = _warning_of_scale(rms, float(scale))
    return _Source(
        name=str(path),
        latent=lambda number: images.read(number) * scale,
        labels=images.labels,
        text=images.read_text,
        captions=images.captions,
        content=images.digest,
        remark=remark,
        sizes=images.sizes,
        about=path / ENCODED,
    )


# Latents in an *.npz file.


def _open_npz(path: Path, config: DiTTrainConfig) -> _Source:
    scale = config.data.latent_scale
    find_files(path, "data.path")  # Raises if the file is missing.
    is_of_texts = config.model.text_dim is not None
    needed = ["latents"] + ["labels"] * (config.model.classes > 0) + ["texts"] * is_of_texts
    wanted = [*needed, *[COUNTS] * is_of_texts]
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            found = archive.files
            arrays = {name: archive[name] for name in wanted if name in found}
    except Exception as error:  # For damaged archives, zipfile and numpy raise many types.
        raise InputError(
            "data.path must be a whole *.npz file of arrays without objects; got "
            f" {type(error).__name__}: {error}, in {str(path)!r}. Save it again: "
            "np.savez(path, latents=latents, labels=labels)."
        ) from error
    if missing := [name for name in needed if name not in arrays]:
        raise InputError(
            f"{str(path)!r} must hold the arrays {needed} for this model; got {found}. Add "
            f"{missing}, or use --model.classes 0 for no labels, and no --model.text-dim for no "
            "texts."
        )
    latents, count = arrays["latents"], len(np.atleast_1d(arrays["latents"]))
    rms = _check_latents(latents, path, config, scale)
    labels: list[int | None] = [None] * count
    if config.model.classes:
        labels = _check_labels(arrays["labels"], count, path, config.model.classes)
    texts, shape = _texts_of_npz(arrays, count, path, config), (*config.size, config.model.channels)
    return _Source(
        name=str(path),
        text=lambda number: None if texts is None else texts[number],
        latent=lambda number: (latents[number].astype(np.float32) * np.float32(scale)).reshape(
            shape
        ),
        labels=labels,
        content=(_digest(latents), [_digest(x) for x in texts]) if texts else _digest(latents),
        remark=_warning_of_scale(rms, scale),
    )


def _check_latents(latents: np.ndarray, path: Path, config: DiTTrainConfig, scale: float) -> float:
    """The root mean square of the latents as the model sees them."""
    example = (*config.size, config.model.channels)
    # Images of one frame may leave out its dimension.
    shapes = [example, example[1:]] if config.size[0] == 1 else [example]
    if latents.shape[1:] not in shapes:
        raise _npz_error(
            path,
            f"`latents` must have the shape [number, {', '.join(map(str, shapes[-1]))}]",
            latents,
            "Correct --size (frames, height, width) or --model.channels.",
        )
    if not np.issubdtype(latents.dtype, np.floating):
        raise _npz_error(path, "`latents` must be floating", latents, "Convert and scale them.")
    squares = np.zeros(len(latents))
    for number, latent in enumerate(latents):
        with np.errstate(over="ignore"):
            values = latent.astype(np.float32) * np.float32(scale)
        if not np.isfinite(values).all():
            raise InputError(
                f"`latents` must be finite in float32; got others in example {number} of "
                f"{str(path)!r}. Mend or remove it."
            )
        squares[number] = np.mean(values.astype(np.float64) ** 2)
    return float(np.sqrt(squares.mean())) if len(squares) else 0.0


def _warning_of_scale(rms: float, scale: float) -> str:
    least, most = USUAL_RMS
    if least <= rms <= most or not rms:
        return ""
    return (
        f"\nwarning: the latents have a root mean square of {rms:.3g}, but the noise that is added "
        "to them has 1, so the model would learn little. Use --data.latent-scale "
        f"{float(f'{scale / rms:.3g}'):g}, by which latents are multiplied; samples are divided by "
        "it."
    )


def _check_labels(labels: np.ndarray, count: int, path: Path, classes: int) -> list[int | None]:
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
    return labels.tolist()


def _texts_of_npz(
    arrays: dict[str, np.ndarray], count: int, path: Path, config: DiTTrainConfig
) -> list[np.ndarray] | None:
    """The text of each example; None if the model has no texts."""
    text_dim, most = config.model.text_dim, config.data.text_tokens
    if text_dim is None or most is None:
        return None
    texts = arrays["texts"]
    if texts.ndim != 3 or (len(texts), texts.shape[2]) != (count, text_dim):
        rule = f"`texts` must have the shape [{count}, tokens, model.text_dim={text_dim}]"
        raise _npz_error(path, rule, texts, "Correct it, or --model.text-dim.")
    if not np.issubdtype(texts.dtype, np.floating):
        raise _npz_error(path, "`texts` must be floating", texts, "Convert them.")
    counts = arrays.get(COUNTS, np.full(count, texts.shape[1]))
    if not np.issubdtype(counts.dtype, np.integer) or counts.shape != (count,):
        rule = f"`{COUNTS}` must be {count} integers, one for each of `texts`"
        raise _npz_error(path, rule, counts, "Save them so, or leave them out.")
    wrong = (counts < 0) | (counts > min(texts.shape[1], most))
    if wrong.any():
        number = int(wrong.argmax())
        raise InputError(
            f"A text must have from 0 to {min(texts.shape[1], most)} tokens, as `texts` has "
            f"{texts.shape[1]} and data.text_tokens is {most}; got {counts[number]} for example "
            f"{number} of {str(path)!r}. Correct `{COUNTS}`, or --data.text-tokens."
        )
    found = [x[:n].astype(np.float32) for x, n in zip(texts, counts, strict=True)]
    for number, x in enumerate(found):
        if not np.isfinite(x).all():
            raise InputError(
                f"`texts` must be finite in float32; got others in example {number} of "
                f"{str(path)!r}. Mend or remove it."
            )
    return found


def _npz_error(path: Path, rule: str, found: np.ndarray, way_out: str) -> InputError:
    return InputError(
        f"{rule}; got shape {found.shape} of {found.dtype} in {str(path)!r}. {way_out}"
    )

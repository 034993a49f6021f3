"""Images or latents that a diffusion model trains on, and those that are held out, by number.

    data.path    what is read                                       latents
    none         the handwritten digits of scikit-learn             images, kept in memory
    a folder     *.png, *.jpg, *.jpeg, *.webp, *.bmp, in a folder   images, read when needed
                 for each class if the model has classes
    *.npz        the arrays `latents`, `labels`                     unchanged, kept in memory

Images have values from -1 to 1. All is checked when the data are opened, except the pixels of files
in a folder. Which examples are held out depends only on their number, not on the seed, the hosts or
the mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Integer

from startrail_jax.errors import InputError, UserError
from trainer.data.dataset import Dataset, Groups
from trainer.data.files import find_files, walk_files
from trainer.data.opening import reading
from trainer.dit.config import DiTTrainConfig
from trainer.errors import MissingPackageError

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Root mean squares of latents that need no factor. The latents of Stable Diffusion before its
# factor of 0.18215 lie above, those after it within.
USUAL_RMS = (0.2, 5.0)
# Classes whose names the log has.
CLASSES_LISTED = 20
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# Pillow looks at the content of a file and not at its name, and would start other programs for some
# formats, such as Ghostscript for EPS.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
# Pillow's modes of at most 8 bits a channel. Pillow would clip the values of wider modes.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
EXIF_ORIENTATION = 0x0112


class Example(NamedTuple):
    """One image, video or latent."""

    latent: Float32[np.ndarray, "F H W C"]
    """Frames, height, width, channels."""
    label: int | None
    """Class of the image; None if the model has no classes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """One part of the data, by number: a `trainer.data.dataset.Source`."""

    numbers: Integer[np.ndarray, " examples"]
    """Numbers of these examples among all examples."""
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


class _Source(NamedTuple):
    """All examples that were found, before any is held out."""

    name: str
    latent: Callable[[int], Float32[np.ndarray, "F H W C"]]
    labels: Sequence[int | None]
    content: Any
    """What tells the latents from others."""
    remark: str = ""
    """End of the line in the log that describes the data."""
    sizes: Sequence[int] | None = None
    """Which of the sizes of the config each example has; None if there is one size."""


def open_images(config: DiTTrainConfig, collate: Callable[..., Any]) -> Dataset:
    """Opens what `config.data` names; by default, the handwritten digits of scikit-learn.

    An *.npz file is read as a whole. The size of every image in a folder is read now.

    Args:
        config: config of the run. Images are converted to the 1 or 3 channels of its model.
        collate: see `Dataset`.

    Raises:
        ImportError: if the package that reads the data is missing.
        ValueError: if the data cannot be read, are of another kind than their names say, do not fit
            the model, or are fewer than two examples.
    """
    path = config.data.path
    if path is None:
        source = _open_digits(config)
    elif path.is_dir():
        source = _open_folder(path, config)
    else:
        source = _open_npz(path, config, config.data.latent_scale)
    count = len(source.labels)
    if count < 2:
        raise InputError(
            f"Data must be at least 2 examples, of which one is held out; got {count} in "
            f"{source.name!r}. Give others: --data.path."
        )

    def read(number: int) -> Example:
        return Example(source.latent(number), source.labels[number])

    held_out = min(max(1, round(config.data.validation_fraction * count)), count - 1)
    order = np.random.default_rng(0).permutation(count)
    parts = np.sort(order[held_out:]), np.sort(order[:held_out])
    train, measured = (Examples(numbers=part, read=read) for part in parts)
    # An image that was damaged may be restored while a run goes on: of images, names tell them.
    # The third entry is that of older runs, whose examples could have a caption.
    known = repr((source.content, source.labels, [None] * count))
    groups = None
    if source.sizes is not None:
        sizes = np.array(source.sizes)
        lengths = np.array([config.of_size(size).num_tokens for size in config.sizes])
        groups = Groups(
            sizes[train.numbers], sizes[measured.numbers], lengths, config.names_of_sizes
        )
    return Dataset(
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


def _open_digits(config: DiTTrainConfig) -> _Source:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackageError(
            "Without --data.path, data are the handwritten digits of scikit-learn, which is "
            f"missing ({error}). Run: pip install -e '.[images]'"
        ) from error
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
    digits: Any = load_digits()
    # Pixels have values from 0 to 16.
    images = (digits.images / 8 - 1).astype(np.float32)[:, None, :, :, None]
    return _Source(
        name=name,
        latent=lambda number: images[number],
        labels=digits.target.tolist() if config.model.classes else [None] * len(images),
        content=_digest(images),
    )


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


# Latents in an *.npz file.


def _open_npz(path: Path, config: DiTTrainConfig, scale: float) -> _Source:
    find_files(path, "data.path")  # Raises if the file is missing.
    needed = ["latents"] + ["labels"] * (config.model.classes > 0)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            found = archive.files
            arrays = {name: archive[name] for name in needed if name in found}
    except Exception as error:  # For damaged archives, zipfile and numpy raise many types.
        raise InputError(
            "data.path must be a folder of images, or a whole *.npz file of arrays without "
            f"objects; got {type(error).__name__}: {error}, in {str(path)!r}. Save it again: "
            "np.savez(path, latents=latents, labels=labels)."
        ) from error
    if missing := [name for name in needed if name not in arrays]:
        raise InputError(
            f"{str(path)!r} must hold the arrays {needed} for this model; got {found}. Add "
            f"{missing}, or use --model.classes 0 for no labels."
        )
    latents, count = arrays["latents"], len(np.atleast_1d(arrays["latents"]))
    rms = _check_latents(latents, path, config, scale)
    labels: list[int | None] = [None] * count
    if config.model.classes:
        labels = _check_labels(arrays["labels"], count, path, config.model.classes)
    shape = (*config.size, config.model.channels)
    return _Source(
        name=str(path),
        latent=lambda number: (latents[number].astype(np.float32) * np.float32(scale)).reshape(
            shape
        ),
        labels=labels,
        content=_digest(latents),
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


def _npz_error(path: Path, rule: str, found: np.ndarray, way_out: str) -> InputError:
    return InputError(
        f"{rule}; got shape {found.shape} of {found.dtype} in {str(path)!r}. {way_out}"
    )


# A folder of images.


def _open_folder(folder: Path, config: DiTTrainConfig) -> _Source:
    """Finds the images of a folder, and checks their sizes. Hidden files are left out."""
    if config.size[0] != 1 or config.model.channels not in (1, 3):
        raise InputError(
            "A folder of images needs size=(1, height, width) and model.channels=1 or 3; got "
            f"size={config.size}, channels={config.model.channels} for {str(folder)!r}. Use those, "
            "or give an *.npz file of latents."
        )
    with reading(folder):
        found = sorted(walk_files(folder))
    keys = [key for key in found if _suffix(key) in SUFFIXES]
    if not keys:
        raise InputError(
            f"A folder of images must hold some, as {', '.join(SUFFIXES)}; got none of these among "
            f"{len(found)} files in {str(folder)!r}. Give another --data.path, or convert them."
        )
    names = _check_classes(folder, keys, config)
    label_of = {name: label for label, name in enumerate(names)}
    files = [folder / key for key in keys]
    with ThreadPoolExecutor() as threads:
        found_sizes = list(threads.map(lambda file: _nearest_size(file, config), files))
    of_sizes = [config.of_size(size) for size in config.sizes]
    several = len(of_sizes) > 1
    return _Source(
        name=str(folder),
        latent=lambda number: _read_image(files[number], of_sizes[found_sizes[number]]),
        labels=[label_of.get(key.split("/")[0]) for key in keys],
        # A file in place of another may have other proportions, which changes the batches.
        content=[keys, found_sizes] if several else keys,
        remark=_said_size(config) + _said_classes(names) + _other_files(found),
        sizes=found_sizes if several else None,
    )


class FolderLook(NamedTuple):
    """What a folder of images shows before a config is known."""

    class_names: tuple[str, ...]
    """Names of the subfolders; none if images lie beside them."""
    channels: int
    """1 if all images are grey, else 3."""
    size: tuple[int, int, int]
    """One frame, height and width of the first image."""


def look_at(folder: Path) -> FolderLook | None:
    """Looks at the images of a folder; None if it holds none, or the first is damaged."""
    with reading(folder):
        keys = [key for key in sorted(walk_files(folder)) if _suffix(key) in SUFFIXES]
    try:
        with ThreadPoolExecutor() as threads:
            grey = list(threads.map(lambda key: _is_grey(folder / key), keys))
        with _opened(folder / keys[0]) as image:
            size = (1, *_upright_size(image))
    except (UserError, IndexError):  # Opening the data says so.
        return None
    names = () if any("/" not in key for key in keys) else _class_names(keys)
    return FolderLook(names, 1 if all(grey) else 3, size)


def _is_grey(path: Path) -> bool:
    with _opened(path) as image:
        return image.mode in ("1", "L", "LA")


def _suffix(key: str) -> str:
    return PurePosixPath(key).suffix.lower()


def _class_names(keys: Iterable[str]) -> tuple[str, ...]:
    """The names of the subfolders, in order, numbers as such."""
    names = {key.split("/")[0] for key in keys}
    numbers = all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))


def _check_classes(folder: Path, keys: list[str], config: DiTTrainConfig) -> tuple[str, ...]:
    """The names of the classes, in order; none if the model has no classes."""
    if not config.model.classes:
        return ()
    loose = [key for key in keys if "/" not in key]
    if loose:
        raise InputError(
            "Each class must have a folder of its own in data.path; got "
            f"{len(loose)} images beside them, such as {loose[0]!r} in {str(folder)!r}. Move them, "
            "or use --model.classes 0."
        )
    names, given = _class_names(keys), config.data.class_names
    if given and given != names:
        raise InputError(
            f"The folders in data.path must be data.class_names, in order; got {', '.join(names)} "
            f"in {str(folder)!r} and class_names={', '.join(given)}. Use --data.class-names."
        )
    if len(names) != config.model.classes:
        raise InputError(
            "model.classes must be the number of folders with images in data.path; got "
            f"classes={config.model.classes} and {len(names)} folders in {str(folder)!r}. Use "
            f"--model.classes {len(names)}, or 0 for no classes."
        )
    return names


def _said_classes(names: tuple[str, ...]) -> str:
    """A remark about the label of each class."""
    shown = [f"{label} {name}" for label, name in enumerate(names[:CLASSES_LISTED])]
    more = [f"and {len(names) - len(shown)} more"] * (len(names) > len(shown))
    return f"; labels: {', '.join(shown + more)}" if names else ""


def _said_size(config: DiTTrainConfig) -> str:
    """A remark about the size to which images are brought."""
    colours = "grey" if config.model.channels == 1 else "in colour"
    return f"; {', '.join(config.names_of_sizes)} pixels, {colours}"


def _other_files(keys: list[str]) -> str:
    """A remark about the files that are no images."""
    others = [key for key in keys if _suffix(key) not in SUFFIXES]
    suffixes = ", ".join(sorted({_suffix(key) or PurePosixPath(key).name for key in others})[:5])
    return f"; {len(others):,} other files left out ({suffixes})" if others else ""


def _read_image(path: Path, config: DiTTrainConfig) -> Float32[np.ndarray, "1 H W C"]:
    """The upright image with values from -1 to 1; on white where transparent."""
    with _checked(path, config) as image:
        return _pixels(image, config)


def _nearest_size(path: Path, config: DiTTrainConfig) -> int:
    """Which of the sizes an image is brought to; the first of those that are equally near.

    Sizes and mode are checked, and pixels are not decoded. Ratios are exact, so that the answer is
    the same everywhere.
    """
    with _checked(path, config) as image:
        height, width = _upright_size(image)

    sizes = config.sizes

    def distance(number: int) -> tuple[Fraction, Fraction]:
        _, rows, columns = sizes[number]
        return _ratio(height * columns, width * rows), _ratio(height * width, rows * columns)

    return min(range(len(sizes)), key=distance)


def _ratio(a: int, b: int) -> Fraction:
    return Fraction(max(a, b), min(a, b))


@contextmanager
def _checked(path: Path, config: DiTTrainConfig) -> Iterator[Any]:
    """An image of Pillow; an error unless it is whole, not animated, of 8 bits and of a size."""
    with _opened(path) as image:
        _check_image(image, path, config)
        yield image


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An image of Pillow; an error unless it is whole, be it while it is used."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingPackageError(
            f"Folders of images are read with Pillow, which is missing ({error}). "
            "Run: pip install -e '.[images]'"
        ) from error
    try:
        with Image.open(path, formats=FORMATS) as image:
            yield image
    except (UserError, MemoryError):
        raise
    # For damaged files Pillow raises errors of many types, ValueError and TypeError among them.
    except Exception as error:
        raise InputError(
            f"{str(path)!r} must be a whole image, of the formats {', '.join(FORMATS)}; got "
            f"{type(error).__name__}: {error}. Mend or restore it."
        ) from error


def _check_image(image: Any, path: Path, config: DiTTrainConfig) -> None:
    if getattr(image, "n_frames", 1) > 1:
        raise InputError(
            f"Images must not be animated; got {image.n_frames} frames in {str(path)!r}. Remove it."
        )
    if image.mode not in MODES:
        raise InputError(
            f"Images must have 8 bits a channel; got the mode {image.mode!r} in {str(path)!r}. "
            "Convert it."
        )
    found = _upright_size(image)
    if config.data.resize is not None or (1, *found) in config.sizes:
        return
    got = f"got height={found[0]}, width={found[1]} in {str(path)!r}"
    if config.data.sizes:
        raise InputError(
            f"All images must be of one of the sizes {', '.join(config.names_of_sizes)} (height x "
            f"width); {got}. Bring images of other sizes to the nearest of these with "
            f"--data.resize crop, pad or stretch, or add {found[0]}x{found[1]} to --data.sizes."
        )
    _, height, width = config.size
    raise InputError(
        f"All images must be of the size height={height}, width={width}; {got}. Bring images of "
        "other sizes to this one with --data.resize crop, pad or stretch, or take "
        f"--size 1 {found[0]} {found[1]} if all are of that size."
    )


def _upright_size(image: Any) -> tuple[int, int]:
    """Height and width of an image of Pillow."""
    # If the header holds no EXIF data, `getexif` would decode the whole image to look for it.
    if "exif" in image.info and image.getexif().get(EXIF_ORIENTATION, 1) >= 5:
        return image.width, image.height
    return image.height, image.width


def _pixels(image: Any, config: DiTTrainConfig) -> Float32[np.ndarray, "1 H W C"]:
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        upright = upright.convert("RGBA")
        white = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(white, upright)
    # Colours are resized, which the numbers of a palette cannot be.
    upright = upright.convert("L" if config.model.channels == 1 else "RGB")
    _, height, width = config.size
    size, bicubic = (width, height), Image.Resampling.BICUBIC
    if upright.size != size and config.data.resize == "crop":
        upright = ImageOps.fit(upright, size, bicubic)
    elif upright.size != size and config.data.resize == "pad":
        upright = ImageOps.pad(upright, size, bicubic)
    elif upright.size != size:
        upright = upright.resize(size, bicubic)
    values = np.asarray(upright, np.float32) / 127.5 - 1
    return values.reshape(*config.size, config.model.channels)

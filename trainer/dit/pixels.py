"""One image file as an array, read with Pillow: what it may be, and how it gets its size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from startrail_jax.errors import InputError, UserError
from trainer.dit.examples import Wanted
from trainer.errors import MissingPackageError

# Pillow's modes of at most 8 bits a channel. Pillow would clip the values of wider modes.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
EXIF_ORIENTATION = 0x0112
# Pillow looks at the content of a file and not at its name, and would start other programs for some
# formats, such as Ghostscript for EPS.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


class BadImageError(InputError):
    """A file that was read and holds no image that a model can take. Other files may be fine.

    It depends on the bytes of the file alone, so all processes that read the file agree. A file
    that cannot be read, which may be a passing fault, is another error.
    """


def import_pillow() -> Any:
    """The module `PIL.Image`.

    Raises:
        ImportError: if Pillow is missing.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingPackageError(
            f"Folders of images are read with Pillow, which is missing ({error}). "
            "Run: pip install -e '.[images]'"
        ) from error
    return Image


def check_header(path: Path, wanted: Wanted) -> None:
    """Checks the size and the mode of an image; its pixels are not decoded.

    Raises:
        BadImageError: if the file is no image, or one that no model can take.
        ValueError: if the image has another size and is not to be resized, or cannot be read.
    """
    _with_image(path, wanted, _check_image)


def check_pixels(path: Path, wanted: Wanted) -> None:
    """Decodes an image.

    Raises:
        BadImageError, ValueError: as `check_header`, and if the pixels are damaged.
    """
    _with_image(path, wanted, _upright)


def read_pixels(path: Path, wanted: Wanted) -> Float32[np.ndarray, "1 H W C"]:
    """The upright image, without transparency, with values from -1 to 1.

    Raises:
        BadImageError, ValueError: as `check_pixels`.
    """
    return _with_image(path, wanted, _pixels)


def _with_image(path: Path, wanted: Wanted, function: Callable[[Any, Path, Wanted], Any]) -> Any:
    """Calls a function with an opened image, whose pixels are not decoded yet."""
    library = import_pillow()
    try:
        with path.open("rb") as file, library.open(file, formats=FORMATS) as image:
            return function(image, path, wanted)
    except (UserError, MemoryError):
        raise
    except (library.DecompressionBombError, library.DecompressionBombWarning) as error:
        raise _too_many_pixels(library, str(error), path) from None
    except library.UnidentifiedImageError:
        raise BadImageError(
            f"{str(path)!r} must be a whole image; got UnidentifiedImageError: it has none of the "
            f"formats {', '.join(FORMATS)}"
        ) from None
    # For damaged files Pillow raises errors of many types, ValueError and TypeError among them.
    except Exception as error:
        rule = f"{str(path)!r} must be a whole image; got {type(error).__name__}: {error}"
        # Pillow's own errors of the type OSError have no number.
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(
                f"{rule}. Correct its permissions or the link to it, or restore it."
            ) from error
        raise BadImageError(rule) from error


def _too_many_pixels(library: Any, found: str, path: Path) -> BadImageError:
    return BadImageError(
        f"Images must have at most {library.MAX_IMAGE_PIXELS:,} pixels; got {found} in "
        f"{str(path)!r}"
    )


def _check_image(image: Any, path: Path, wanted: Wanted) -> None:
    library = import_pillow()
    _, height, width = wanted.size
    found = (image.height, image.width)
    # Pillow itself warns of so many pixels, and refuses only twice as many.
    if library.MAX_IMAGE_PIXELS and image.height * image.width > library.MAX_IMAGE_PIXELS:
        raise _too_many_pixels(library, f"height={image.height}, width={image.width}", path)
    # If the header holds no EXIF data, `getexif` would decode the whole image to look for it.
    if "exif" in image.info and image.getexif().get(EXIF_ORIENTATION, 1) >= 5:
        found = found[::-1]
    if getattr(image, "n_frames", 1) > 1:
        raise BadImageError(
            f"Images must not be animated; got {image.n_frames} frames in {str(path)!r}"
        )
    if image.mode not in MODES:
        raise BadImageError(
            f"Images must have 8 bits a channel; got the mode {image.mode!r} in {str(path)!r}"
        )
    if found != (height, width) and wanted.resize is None:
        raise InputError(
            f"All images must be of the size height={height}, width={width}; got height={found[0]},"
            f" width={found[1]} in {str(path)!r}. Bring images of other sizes to this one with "
            "--data.resize crop, pad or stretch, or take "
            f"--size 1 {found[0]} {found[1]} if all are of that size."
        )


def _upright(image: Any, path: Path, wanted: Wanted) -> Any:
    """The decoded image without transparency, in the channels that are wanted."""
    from PIL import ImageOps

    # The file may have been rewritten since it was checked.
    _check_image(image, path, wanted)
    upright = ImageOps.exif_transpose(image)
    if "transparency" in upright.info:
        upright = upright.convert("RGBA")
    return upright.convert("L" if wanted.channels == 1 else "RGB")


def _pixels(image: Any, path: Path, wanted: Wanted) -> Float32[np.ndarray, "1 H W C"]:
    # Colours are resized, which the numbers of a palette cannot be.
    resized = _resized(_upright(image, path, wanted), wanted)
    values = np.asarray(resized, np.float32) / 127.5 - 1
    return values.reshape(*wanted.size, wanted.channels)


def _resized(image: Any, wanted: Wanted) -> Any:
    """The image in the size that is wanted; one that has it keeps its pixels."""
    from PIL import Image, ImageOps

    _, height, width = wanted.size
    filter = Image.Resampling.BICUBIC
    if wanted.resize is None or image.size == (width, height):
        return image
    if wanted.resize == "crop":
        return ImageOps.fit(image, (width, height), filter)
    if wanted.resize == "pad":
        return ImageOps.pad(image, (width, height), filter)
    return image.resize((width, height), filter)

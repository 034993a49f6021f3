"""Files of videos: found with their captions, read in the size and at the rate that is wanted, and
written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import UInt8

from startrail_jax.errors import InputError, UserError
from trainer.data.files import walk_files
from trainer.data.opening import json_lines, read_utf8, reading
from trainer.dit.pictures import fitted, nearest_size, open_picture
from trainer.errors import MissingPackageError

SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")

Frame = TypeVar("Frame")


class Video(NamedTuple):
    """A file, and what it shows."""

    file: str
    """Its path in the folder of videos."""
    caption: str


class Shape(NamedTuple):
    """What videos are brought to."""

    frames: tuple[int, ...]
    """Numbers of frames: a video has the largest for which it is long enough."""
    sizes: tuple[tuple[int, int], ...]
    """Height and width, in pixels: a video has that of the nearest proportions."""
    rate: float
    """Frames in a second."""


def find_videos(folder: Path, captions: Path | None) -> list[Video]:
    """The videos of a folder and of its subfolders. Their captions are in a JSONL file with `file`,
    a path in the folder, and `caption`, or by default in a file NAME.txt beside each NAME.mp4."""
    with reading(folder):
        files = sorted(x for x in walk_files(folder) if PurePosixPath(x).suffix.lower() in SUFFIXES)
    if not files:
        raise InputError(
            f"VIDEOS must hold files {', '.join(SUFFIXES)}; got none in {str(folder)!r}. Give "
            "another folder."
        )
    known: dict[str, str] = {}
    if captions is not None:
        options = dict(needed="file and caption", way_out="Correct it.")
        lines = json_lines(captions, lambda x: (str(x["file"]), str(x["caption"])), **options)
        known = {file: caption.strip() for file, caption in lines}
    found, lacking = [], []
    for file in files:
        beside = (folder / file).with_suffix(".txt")
        if captions is None and beside.is_file():
            known[file] = read_utf8(beside).strip()
        if known.get(file):
            found.append(Video(file, known[file]))
        else:
            lacking.append(file)
    if lacking:
        where = f"in {str(captions)!r}" if captions else "in a file NAME.txt beside NAME.mp4"
        raise InputError(
            f"Every video must have a caption {where}; got {len(lacking)} of {len(files)} without, "
            f"such as {lacking[0]!r}. Write them, or remove these videos."
        )
    return found


def read_video(path: Path, shape: Shape) -> UInt8[np.ndarray, "N H W 3"]:
    """The frames of a video that are shown at multiples of 1 / rate after its first, scaled until
    they cover the size, and cut at the edges."""
    found: list[np.ndarray] = []
    size = last = None
    with _opened(path) as container:
        stream = container.streams.video[0]
        frames = _timed(container.decode(stream), path)
        if container.format.name == "avi":
            frames = without_wait(frames)
        shown = frames_shown(frames, tick=stream.time_base, rate=shape.rate)
        for frame in islice(shown, max(shape.frames)):
            if frame is not last:
                image = frame.to_image()
                size = size or nearest_size(image.height, image.width, shape.sizes)
                height, width = size
                last, pixels = frame, fitted(image, height, width)
            found.append(pixels)
    fitting = [n for n in shape.frames if n <= len(found)]
    if not fitting:
        raise InputError(
            f"Videos must have at least {min(shape.frames)} frames at {shape.rate:g} a second; got "
            f"{len(found)} in {str(path)!r}. Remove it, or use a smaller --frames."
        )
    return np.stack(found[: max(fitting)])


def frames_shown(
    frames: Iterable[tuple[int, Frame]], *, tick: Fraction, rate: float
) -> Iterator[Frame]:
    """The frames that are shown at multiples of 1 / rate after the first, and then the last one.
    `frames` are pairs of a time in ticks, of `tick` seconds each, and a frame."""
    step = 1 / Fraction(str(rate))
    start = before = last = None
    count = 0
    for time, frame in frames:
        if start is None or before is None or last is None:
            start = time
        else:
            # Times are rounded to ticks, such as the milliseconds of mkv, that of the first frame
            # too: a frame may be a tick late. If it lasts a tick or two, as in avi, they are exact.
            late = 1 if time - before > 2 else 0
            while count * step < (time - late - start) * tick:
                yield last
                count += 1
        before, last = time, frame
    if last is not None:
        yield last


def without_wait(frames: Iterator[tuple[int, Frame]]) -> Iterator[tuple[int, Frame]]:
    """Frames of an avi file, whose first is always at time 0: of a video that begins late, ffmpeg
    writes the first frame there and the others in their time."""
    head = list(islice(frames, 3))
    if len(head) == 3:
        (first, frame), (second, _), (third, _) = head
        head[0] = max(first, 2 * second - third), frame
    return chain(head, frames)


def _timed(frames: Iterable[Any], path: Path) -> Iterator[tuple[int, Any]]:
    for frame in frames:
        if frame.pts is None or getattr(frame, "rotation", 0):
            raise InputError(
                f"Frames must have times and be upright; got {str(path)!r}, where they do not. "
                "Write it anew: ffmpeg -i OLD NEW.mp4."
            )
        yield frame.pts, frame


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open video; an error unless it is whole, be it while it is read."""
    try:
        import av  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingPackageError(
            f"Videos are read with PyAV; got {error}. Run: pip install -e '.[video]'"
        ) from error
    try:
        with av.open(str(path)) as container:
            yield container
    except (UserError, MemoryError):
        raise
    except Exception as error:  # For damaged files, PyAV raises many types.
        raise InputError(
            f"{str(path)!r} must be a whole video; got {type(error).__name__}: {error}. Remove or "
            "restore it."
        ) from error


def read_image(path: Path, height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
    """An image, scaled until it covers the size, and cut at the edges."""
    return fitted(open_picture(path, str(path), "--image"), height, width)


def write_video(path: Path, frames: UInt8[np.ndarray, "N H W 3"], *, rate: int) -> None:
    """Writes an mp4 with H.264."""
    import av  # pyright: ignore[reportMissingImports]

    _, height, width, _ = frames.shape
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=rate, options={"crf": "16"})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)

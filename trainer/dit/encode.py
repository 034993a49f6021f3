"""Encodes videos with captions, for training a Wan.

    python -m trainer.dit.encode VIDEOS OUT --model Wan2.1-T2V-1.3B-Diffusers
    python -m trainer.dit.encode VIDEOS OUT --model FOLDER --sizes 480x832 832x480 --frames 81 49
    python -m trainer.dit.encode VIDEOS OUT --model FOLDER --process 0 4   # the first of four

VIDEOS is a folder of mp4 files, each with its caption in a file NAME.txt beside it, or all in a
JSONL file. OUT is what train.py --data.path takes. The same command goes on where it stopped, and
encodes again what has changed.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from startrail_jax.errors import InputError
from trainer import durable
from trainer.data.cache import storing
from trainer.data.files import list_names
from trainer.data.opening import read_object, reading
from trainer.printable import say
from trainer.sums import sha256_of

if TYPE_CHECKING:
    from trainer.dit.wan.clips import ClipEntry, ClipLine
    from trainer.dit.wan.pipelines import PipelineSizes
    from trainer.dit.wan.videos import Video


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """What to encode, and how."""

    videos: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="VIDEOS")]
    """Folder of videos."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the encoded videos."""
    model: Path
    """Folder of a Wan in the format of diffusers, whose VAE and encoders are used."""
    captions: Path | None = None
    """A JSONL file with `file`, a path in VIDEOS, and `caption`. The default is a file NAME.txt
    beside each video."""
    sizes: tuple[str, ...] = ("480x832",)
    """Sizes in pixels, as HEIGHTxWIDTH. A video is brought to that of the nearest proportions."""
    frames: tuple[int, ...] = (81,)
    """Numbers of frames, such as 81: 4 n + 1. A video has the largest for which it is long
    enough."""
    rate: float = 16.0
    """Frames in a second, which are taken from each video; Wan 2.1 has 16, the 5B model 24."""
    text_tokens: int = 512
    """Largest number of tokens of a caption."""
    process: tuple[int, int] = (0, 1)
    """Number of this process, from 0, and of all: each encodes its part of the videos."""
    device: str | None = None
    """Device of PyTorch. The default is the first GPU, or the CPU."""

    def __post_init__(self) -> None:
        for size in self.sizes:
            if not re.fullmatch("[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", size):
                raise InputError(
                    f"--sizes must be HEIGHTxWIDTH; got {size!r}. Write them as 480x832."
                )
        index, count = self.process
        if not 0 <= index < count:
            raise InputError(
                "--process must be a number from 0 and the number of all processes; got "
                f"{index} {count}. Use for example --process 0 4."
            )
        if not self.rate > 0 or not self.frames or not self.sizes:
            raise InputError(
                "--rate must be above 0, and there must be --frames and --sizes; got "
                f"rate={self.rate}, frames={self.frames}, sizes={self.sizes}. Leave them out."
            )

    @property
    def pixels(self) -> tuple[tuple[int, int], ...]:
        """Height and width of the sizes."""
        pairs = (size.split("x") for size in self.sizes)
        return tuple((int(height), int(width)) for height, width in pairs)


def encode(options: EncodeOptions) -> list[str]:
    """Brings the encoded videos of this process to what the videos and captions are now; returns
    the errors of those left out."""
    from rich.progress import track

    from trainer.dit.wan.clips import CLIPS, ClipLine, read_entries, read_tensors
    from trainer.dit.wan.pipelines import TorchModels, digest_of, pipeline_sizes
    from trainer.dit.wan.videos import Shape, find_videos, read_video

    found = find_videos(options.videos, options.captions)
    sizes = pipeline_sizes(options.model)
    _check_shape(options, sizes)
    about = {
        "channels": sizes.channels,
        "text_dim": sizes.text_dim,
        "model": digest_of(options.model),
        **{"sizes": list(options.sizes), "frames": list(options.frames), "rate": options.rate},
    }
    out, entries = options.out, read_entries(options.out)
    former = {video: entry for video, entry in entries.items() if entry.clip is not None}
    if former:
        _require_same(out, about)
        _require_common(out, set(former), {video.file for video in found})
    todo, gone = _changes(options, found, former)
    if not todo and not gone:
        return []
    with storing(out, "OUT"):
        (out / CLIPS).mkdir(parents=True, exist_ok=True)
    shape, errors, is_begun = Shape(options.frames, options.pixels, options.rate), [], bool(former)
    models: Any = TorchModels(options.model, texts=True, device=options.device) if todo else None
    index, count = options.process
    with (out / f"clips-{index}-of-{count}.jsonl").open("a", encoding="utf-8") as lines:
        for video in gone:
            _note(lines, out, video, entries.get(video))
        for video, sha256 in track(todo, "encoding", disable=not sys.stdout.isatty()):
            entry, name = entries.get(video.file), file_of(video, sha256)
            try:
                held = out / CLIPS / entry.clip.file if entry and entry.clip else None
                if entry and held and held.is_file() and entry.sha256 == sha256:
                    tensors = read_tensors(held)  # Only the caption has changed.
                else:
                    tensors = models.video(read_video(options.videos / video.file, shape))
                tensors["text"] = models.text(video.caption, most=options.text_tokens)
            except InputError as error:
                errors.append(str(error))
                say(f"left out: {error}")
                if video.file in former:
                    _note(lines, out, video.file, entry)
                continue
            if not is_begun:
                is_begun = _begin(out, about, models.text("", most=options.text_tokens))
            _write_tensors(out / CLIPS / name, tensors)
            size, tokens = tensors["latent"].shape[:3], len(tensors["text"])
            clip = ClipLine(name, size, tokens, video.caption)
            _note(lines, out, video.file, entry, sha256, clip)
    return errors


def _changes(
    options: EncodeOptions, found: list[Video], former: dict[str, ClipEntry]
) -> tuple[list[tuple[Video, str]], list[str]]:
    """The videos that this process encodes, each with the hash of its content, and those that it
    drops, since they are gone."""
    from rich.progress import track

    from trainer.dit.wan.clips import CLIPS

    index, count = options.process
    todo, renewed = [], []
    for video in track(found[index::count], "hashing", disable=not sys.stdout.isatty()):
        with reading(options.videos / video.file):
            sha256 = sha256_of(options.videos / video.file)
        entry, name = former.get(video.file), file_of(video, sha256)
        is_former = entry is not None and entry.clip is not None and entry.clip.file == name
        if not is_former or not (options.out / CLIPS / name).is_file():
            todo.append((video, sha256))
            renewed += [video.file] * (entry is not None and not is_former)
    # It is enough that one process drops them.
    gone = sorted(former.keys() - {video.file for video in found}) if index == 0 else []
    say(f"{len(found)} videos, of which this process encodes {len(todo)}")
    if renewed:
        say(f"renewed, since the video or its caption has changed: {list_names(renewed)}")
    if gone:
        say(f"dropped, since no longer in {str(options.videos)!r}: {list_names(gone)}")
    return todo, gone


def _note(
    lines: TextIO,
    out: Path,
    video: str,
    former: ClipEntry | None,
    sha256: str = "",
    clip: ClipLine | None = None,
) -> None:
    """Adds a line for a video, in place of the former one, and removes the file of that."""
    from trainer.dit.wan.clips import CLIPS

    version = 1 if former is None else former.version + 1
    line = {"video": video, "version": version, "sha256": sha256}
    line |= {"file": None} if clip is None else clip._asdict()
    lines.write(json.dumps(line) + "\n")
    lines.flush()
    os.fsync(lines.fileno())
    if former is not None and former.clip is not None and former.clip.file != line["file"]:
        (out / CLIPS / former.clip.file).unlink(missing_ok=True)


def file_of(video: Video, sha256: str) -> str:
    """The name of the file of an encoded video, which no other has: it tells the video's path, its
    content and its caption."""
    name = re.sub(r"[^\w.-]", "_", PurePosixPath(video.file).stem)[:80]
    digest = hashlib.sha256(json.dumps([*video, sha256]).encode()).hexdigest()
    return f"{name}-{digest[:10]}.safetensors"


def _check_shape(options: EncodeOptions, of_model: PipelineSizes) -> None:
    frames, pixels = of_model.frames_of_latent, of_model.pixels_of_latent
    wrong = [n for n in options.frames if n < 1 or n % frames != 1 % frames]
    if wrong:
        raise InputError(
            f"--frames must be {frames} n + 1, such as 81, as the VAE makes one frame of {frames}; "
            f"got {wrong[0]}. Use {max(wrong[0] // frames, 0) * frames + 1}."
        )
    # A token is a patch of 2 x 2 positions.
    step = 2 * pixels
    for height, width in options.pixels:
        if height % step or width % step:
            near = "x".join(str(max(round(n / step), 1) * step) for n in (height, width))
            raise InputError(
                f"--sizes must be multiples of {step}, as a token is of {step} x {step} pixels; "
                f"got {height}x{width}. Use {near}."
            )


def _begin(out: Path, about: dict[str, Any], empty: Any) -> bool:
    """Writes what all encoded videos share, unless another process has encoded some already."""
    from trainer.dit.wan.clips import EMPTY, ENCODED, read_entries

    if any(entry.clip for entry in read_entries(out).values()):
        _require_same(out, about)
    else:
        _write_tensors(out / EMPTY, {"text": empty})
        text = json.dumps(about, indent=2) + "\n"
        _write_whole(out / ENCODED, lambda part: part.write_text(text, encoding="utf-8"))
    return True


def _require_same(out: Path, about: dict[str, Any]) -> None:
    from trainer.dit.wan.clips import ENCODED

    there = read_object(out / ENCODED)
    changed = [name for name in about if there.get(name) != about[name]]
    if changed:
        name = changed[0]
        raise InputError(
            f"OUT must be new, or hold videos that were encoded alike; got {str(out)!r} with "
            f"{name}={there.get(name)} and {about[name]} now. Give another OUT."
        )


def _require_common(out: Path, former: set[str], found: set[str]) -> None:
    """As all videos that are gone are dropped, a wrong folder would empty OUT."""
    if not former & found:
        raise InputError(
            f"OUT must be new, or hold videos of VIDEOS; got {str(out)!r} with none of them, but "
            f"{len(former)} others, such as {min(former)!r}. Give another OUT."
        )


def _write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Writes tensors in bfloat16."""
    import jax.numpy as jnp
    import numpy as np
    from safetensors.numpy import save_file

    halves = {name: np.ascontiguousarray(x.astype(jnp.bfloat16)) for name, x in tensors.items()}
    _write_whole(path, lambda part: save_file(halves, part))


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file, also beside other processes: no reader sees a part of it, and it is on the
    disk before anything names it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    write(part)
    durable.flush(part)
    durable.rename(part, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; on a mistake, exits with status 1 or 2."""
    options = tyro.cli(
        EncodeOptions, prog="python -m trainer.dit.encode", description=__doc__, args=arguments
    )
    if errors := encode(options):
        say(
            f"{options.out}: {len(errors)} videos were left out, for the reasons above. Mend or "
            "remove them; the same command then goes on"
        )
        sys.exit(1)
    say(f"{options.out}: all encoded")
    say(f"next: python train.py --init-from {options.model} --data.path {options.out}")


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        main()

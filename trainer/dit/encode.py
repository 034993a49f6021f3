"""Encodes videos with captions, for training a Wan.

    python -m trainer.dit.encode VIDEOS OUT --model Wan2.1-T2V-1.3B-Diffusers
    python -m trainer.dit.encode VIDEOS OUT --model FOLDER --sizes 480x832 832x480 --frames 81 49
    python -m trainer.dit.encode VIDEOS OUT --model FOLDER --process 0 4   # the first of four

VIDEOS is a folder of mp4 files, each with its caption in a file NAME.txt beside it, or all in a
JSONL file. OUT is what train.py --data.path takes. The same command goes on where it stopped.
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
from typing import Annotated, Any

import tyro

from startrail_jax.errors import InputError
from trainer import durable
from trainer.printable import say


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
    """Encodes the videos that are not encoded yet; returns the errors of those left out."""
    from trainer.dit.wan.clips import CLIPS, EMPTY, ENCODED, read_lines
    from trainer.dit.wan.pipelines import TorchModels, digest_of
    from trainer.dit.wan.videos import Shape, find_videos, read_video

    found = find_videos(options.videos, options.captions)
    models = TorchModels(options.model, texts=True, device=options.device)
    _check_shape(options, models)
    about = {
        "channels": models.channels,
        "text_dim": models.text_dim,
        "model": digest_of(options.model),
        **{"sizes": list(options.sizes), "frames": list(options.frames), "rate": options.rate},
    }
    out = options.out
    (out / CLIPS).mkdir(parents=True, exist_ok=True)
    if (out / ENCODED).is_file():
        _require_same(json.loads((out / ENCODED).read_bytes()), about, out)
    else:
        _write_tensors(out / EMPTY, {"text": models.text("", most=options.text_tokens)})
        text = json.dumps(about, indent=2) + "\n"
        _write_whole(out / ENCODED, lambda part: part.write_text(text, encoding="utf-8"))
    index, count = options.process
    done = {line.file for line in read_lines(out)}
    mine = [video for video in found[index::count] if file_of(video.file) not in done]
    say(f"{len(found)} videos, of which this process encodes {len(mine)}")
    shape, errors = Shape(options.frames, options.pixels, options.rate), []
    from rich.progress import track

    with (out / f"clips-{index}-of-{count}.jsonl").open("a", encoding="utf-8") as lines:
        for video in track(mine, "encoding", disable=not sys.stdout.isatty()):
            try:
                tensors = models.video(read_video(options.videos / video.file, shape))
                tensors["text"] = models.text(video.caption, most=options.text_tokens)
            except InputError as error:
                errors.append(str(error))
                say(f"left out: {error}")
                continue
            name = file_of(video.file)
            _write_tensors(out / CLIPS / name, tensors)
            line = {"file": name, "size": tensors["latent"].shape[:3]}
            line |= {"tokens": len(tensors["text"]), "caption": video.caption}
            lines.write(json.dumps(line) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
    return errors


def file_of(video: str) -> str:
    """The name of the file of an encoded video, which no other has."""
    name = re.sub(r"[^\w.-]", "_", PurePosixPath(video).stem)[:80]
    return f"{name}-{hashlib.sha256(video.encode()).hexdigest()[:10]}.safetensors"


def _check_shape(options: EncodeOptions, models: Any) -> None:
    frames, pixels = models.frames_of_latent, models.pixels_of_latent
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


def _require_same(there: dict[str, Any], about: dict[str, Any], out: Path) -> None:
    changed = [name for name in about if there.get(name) != about[name]]
    if changed:
        name = changed[0]
        raise InputError(
            f"OUT must be new, or hold videos that were encoded alike; got {str(out)!r} with "
            f"{name}={there.get(name)} and {about[name]} now. Give another OUT."
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
    errors = encode(options)
    say(f"{options.out}: {f'{len(errors)} videos were left out' if errors else 'all encoded'}")
    say(f"next: python train.py --init-from {options.model} --data.path {options.out}")
    if errors:
        sys.exit(1)


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        main()

"""Encodes videos with captions, for training a Wan."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TextIO

from startrail_jax.errors import InputError
from trainer.data.cache import storing
from trainer.data.files import list_names
from trainer.data.opening import reading
from trainer.dit.encoded import (
    ENCODED,
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
from trainer.sums import sha256_of

if TYPE_CHECKING:
    from trainer.dit.wan.clips import ClipEntry, ClipLine
    from trainer.dit.wan.pipelines import PipelineSizes
    from trainer.dit.wan.videos import Video

SIZES = ("480x832",)
TEXT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class VideoFlags:
    """Flags for videos."""

    model: Path | None = None
    """Folder of a Wan in the format of diffusers, whose VAE and encoders are used."""
    captions: Path | None = None
    """A JSONL file with `file`, a path in the folder, and `caption`. The default is a file NAME.txt
    beside each video."""
    frames: tuple[int, ...] = (81,)
    """Numbers of frames, such as 81: 4 n + 1. A video has the largest for which it is long
    enough."""
    rate: float = 16.0
    """Frames in a second, which are taken from each video; Wan 2.1 has 16, the 5B model 24."""

    def __post_init__(self) -> None:
        if not self.rate > 0 or not self.frames:
            raise InputError(
                f"--rate must be above 0, and there must be --frames; got rate={self.rate}, "
                f"frames={self.frames}. Leave them out."
            )


def encode_videos(options: Encoding, flags: VideoFlags) -> list[str]:
    """Brings the encoded videos of this process to what the videos and captions are now; returns
    the errors of those left out."""
    model = flags.model
    if model is None:
        raise InputError(
            f"Videos are encoded with the models of a Wan; got {str(options.folder)!r} without "
            "--model. Add --model FOLDER, such as a download of "
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers."
        )

    from trainer.dit.wan.clips import CLIPS, ClipLine, read_entries, read_tensors
    from trainer.dit.wan.pipelines import TorchModels, digest_of, pipeline_sizes
    from trainer.dit.wan.videos import Shape, find_videos, read_video

    found = find_videos(options.folder, flags.captions)
    sizes = pipeline_sizes(model)
    wanted = options.sizes or SIZES
    pixels = pixels_of(wanted)
    _check_shape(flags, pixels, sizes)
    about = {
        "channels": sizes.channels,
        "text_dim": sizes.text_dim,
        "model": digest_of(model),
        **{"sizes": list(wanted), "frames": list(flags.frames), "rate": flags.rate},
    }
    check_kind(options.out, None)
    out, entries = options.out, read_entries(options.out)
    former = {video: entry for video, entry in entries.items() if entry.clip is not None}
    if former:
        require_same(out, about, "videos")
        require_common(out, set(former), {video.file for video in found}, "videos")
    todo, gone = _changes(options, found, former)
    if not todo and not gone:
        return []
    with storing(out, "OUT"):
        (out / CLIPS).mkdir(parents=True, exist_ok=True)
    most = options.text_tokens or TEXT_TOKENS
    shape, errors, is_begun = Shape(flags.frames, pixels, flags.rate), [], bool(former)
    models: Any = TorchModels(model, texts=True, device=options.device) if todo else None
    index, count = options.process
    with (out / f"clips-{index}-of-{count}.jsonl").open("a", encoding="utf-8") as lines:
        for video in gone:
            _note(lines, out, video, entries.get(video))
        for video, sha256 in tracked(todo, "encoding"):
            entry, name = entries.get(video.file), file_of(video, sha256)
            try:
                held = out / CLIPS / entry.clip.file if entry and entry.clip else None
                if entry and held and held.is_file() and entry.sha256 == sha256:
                    tensors = read_tensors(held)  # Only the caption has changed.
                else:
                    tensors = models.video(read_video(options.folder / video.file, shape))
                tensors["text"] = models.text(video.caption, most=most)
            except InputError as error:
                errors.append(str(error))
                say(f"left out: {error}")
                if video.file in former:
                    _note(lines, out, video.file, entry)
                continue
            if not is_begun:
                is_begun = _begin(out, about, models.text("", most=most))
            _write_halves(out / CLIPS / name, tensors)
            size, tokens = tensors["latent"].shape[:3], len(tensors["text"])
            clip = ClipLine(name, size, tokens, video.caption)
            _note(lines, out, video.file, entry, sha256, clip)
    return errors


def _changes(
    options: Encoding, found: list[Video], former: dict[str, ClipEntry]
) -> tuple[list[tuple[Video, str]], list[str]]:
    """The videos that this process encodes, each with the hash of its content, and those that it
    drops, since they are gone."""
    from trainer.dit.wan.clips import CLIPS

    index, count = options.process
    todo, renewed = [], []
    for video in tracked(found[index::count], "hashing"):
        with reading(options.folder / video.file):
            sha256 = sha256_of(options.folder / video.file)
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
        say(f"dropped, since no longer in {str(options.folder)!r}: {list_names(gone)}")
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


def _check_shape(
    flags: VideoFlags, pixels: tuple[tuple[int, int], ...], of_model: PipelineSizes
) -> None:
    frames = of_model.frames_of_latent
    wrong = [n for n in flags.frames if n < 1 or n % frames != 1 % frames]
    if wrong:
        raise InputError(
            f"--frames must be {frames} n + 1, such as 81, as the VAE makes one frame of {frames}; "
            f"got {wrong[0]}. Use {max(wrong[0] // frames, 0) * frames + 1}."
        )
    # A token is a patch of 2 x 2 positions.
    check_multiples(pixels, 2 * of_model.pixels_of_latent)


def _begin(out: Path, about: dict[str, Any], empty: Any) -> bool:
    """Writes what all encoded videos share, unless another process has encoded some already."""
    from trainer.dit.wan.clips import EMPTY, read_entries

    if any(entry.clip for entry in read_entries(out).values()):
        require_same(out, about, "videos")
    else:
        _write_halves(out / EMPTY, {"text": empty})
        text = json.dumps(about, indent=2) + "\n"
        write_whole(out / ENCODED, lambda part: part.write_text(text, encoding="utf-8"))
    return True


def _write_halves(path: Path, tensors: dict[str, Any]) -> None:
    """Writes tensors in bfloat16."""
    import jax.numpy as jnp

    write_tensors(path, {name: x.astype(jnp.bfloat16) for name, x in tensors.items()})

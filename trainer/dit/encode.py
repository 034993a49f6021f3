"""Encodes images with classes or captions for training a DiT, or videos with captions for training
a Wan.

    python -m trainer.dit.encode IMAGES OUT --vae FOLDER                    # 256x256 pixels
    python -m trainer.dit.encode IMAGES OUT --vae FOLDER --text-encoder FOLDER  # and captions
    python -m trainer.dit.encode IMAGES OUT --vae FOLDER --size 512 --max-ratio 2
    python -m trainer.dit.encode IMAGES OUT --pixels --size 64              # without a VAE
    python -m trainer.dit.encode VIDEOS OUT --model Wan2.1-T2V-1.3B-Diffusers
    python -m trainer.dit.encode VIDEOS OUT --model FOLDER --sizes 480x832 832x480 --frames 81 49
    python -m trainer.dit.encode VIDEOS OUT --model FOLDER --process 0 4    # the first of four

IMAGES is a folder of PNG, JPEG, WebP or BMP files: one folder for each class, or images with a
metadata.jsonl or metadata.csv of `file_name` and captions. VIDEOS is a folder of mp4 files, each
with its caption in a file NAME.txt beside it, or all in a JSONL file. OUT is what train.py
--data.path takes. The same command goes on where it stopped, and encodes again what has changed.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import tyro

from startrail_jax.errors import InputError
from trainer.data.files import walk_files
from trainer.data.opening import reading
from trainer.dit import pictures
from trainer.dit.encode_images import ImageFlags, encode_images
from trainer.dit.encoded import Encoding
from trainer.dit.wan import videos
from trainer.dit.wan.encode import VideoFlags, encode_videos
from trainer.printable import say


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(Encoding):
    """What to encode, and how."""

    of_images: tyro.conf.OmitArgPrefixes[ImageFlags] = field(default_factory=ImageFlags)
    """Flags for a folder of images."""
    of_videos: tyro.conf.OmitArgPrefixes[VideoFlags] = field(default_factory=VideoFlags)
    """Flags for a folder of videos."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; on a mistake, exits with status 1 or 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = tyro.cli(
        EncodeOptions, prog="python -m trainer.dit.encode", description=__doc__, args=arguments
    )
    kind = _kind_of(options)
    _check_flags(kind, options.folder, arguments)
    if kind == "images":
        errors = encode_images(options, options.of_images)
        following = "dit_1b"
    else:
        errors = encode_videos(options, options.of_videos)
        following = f"--init-from {options.of_videos.model}"
    if errors:
        say(
            f"{options.out}: {len(errors)} {kind} were left out, for the reasons above. Mend or "
            "remove them; the same command then goes on"
        )
        sys.exit(1)
    say(f"{options.out}: all encoded")
    say(f"next: python train.py {following} --data.path {options.out}")


def _kind_of(options: EncodeOptions) -> Literal["images", "videos"]:
    """What a folder holds, by the names of its files."""
    folder, first = options.folder, {}
    kinds: dict[Any, Sequence[str]] = {
        "images": (*pictures.SUFFIXES, *pictures.OTHERS),
        "videos": videos.SUFFIXES,
    }
    with reading(folder):
        os.listdir(folder)  # Raises unless it is a folder.
        for file in walk_files(folder):
            suffix = PurePosixPath(file).suffix.lower()
            for kind, suffixes in kinds.items():
                if suffix in suffixes:
                    first[kind] = min(first.get(kind, file), file)
    if not first:
        raise InputError(
            f"FOLDER must hold images ({', '.join(pictures.SUFFIXES)}) or videos "
            f"({', '.join(videos.SUFFIXES)}); got none in {str(folder)!r}. Give another folder."
        )
    # Beside videos, there may be pictures of them.
    if len(first) > 1 and options.of_videos.model is None:
        raise InputError(
            "FOLDER must hold images or videos, not both; got "
            f"{first['images']!r} and {first['videos']!r} in {str(folder)!r}. Move one kind to "
            "another folder, or give --model for the videos alone."
        )
    return "videos" if "videos" in first else "images"


def _check_flags(kind: str, folder: Path, arguments: Sequence[str]) -> None:
    """Raises ValueError if there are flags of the other kind."""
    other, flags = ("videos", VideoFlags) if kind == "images" else ("images", ImageFlags)
    given = {x.partition("=")[0].replace("_", "-") for x in arguments if x.startswith("--")}
    names = [x.name.replace("_", "-") for x in dataclasses.fields(flags)]
    wrong = [x for name in names for x in (f"--{name}", f"--no-{name}") if x in given]
    if wrong:
        raise InputError(
            f"{wrong[0]} is for a folder of {other}; got one of {kind}, {str(folder)!r}. Leave it "
            "out, or give another folder."
        )


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        main()

"""Encoded videos that a Wan trains on, and those that are held out, by number.

A folder that `python -m trainer.dit.encode` has written holds

    encoded.json             channels of latents and texts, and the models that made them
    empty.safetensors        `text` of an empty caption
    clips-*.jsonl            lines of videos: file, size, tokens of text, caption; for encoding also
                             video, its hash, and a version: that of the highest version counts, and
                             one without a file says that the video is no longer there
    clips/*.safetensors      `latent` [F H W C], `text` [S D]; for image to video also `given`
                             [F H W C], the latent of the first frame and grey ones, and for Wan 2.1
                             `image` [I E], the first frame as the image encoder gives it

Which videos are held out depends only on their number, not on the seed, the hosts or the mesh.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from startrail_jax.errors import InputError
from trainer.data.dataset import Dataset, held_out_of
from trainer.data.opening import json_lines, read_object
from trainer.dit.config import name_of
from trainer.dit.encoded import ENCODED, IMAGES, KIND, groups_by_size, require_sizes
from trainer.dit.wan.batches import Clip
from trainer.dit.wan.config import WanConfig, WanTrainConfig

EMPTY, CLIPS = "empty.safetensors", "clips"


class ClipLine(NamedTuple):
    """What a line of clips-*.jsonl says of an encoded video."""

    file: str
    size: tuple[int, int, int]
    """Frames, height and width of its latent."""
    tokens: int
    caption: str


class ClipEntry(NamedTuple):
    """A line of clips-*.jsonl."""

    video: str
    """Path in the folder of videos; the name of the file in lines of earlier versions."""
    version: int
    sha256: str
    """Hash of the content of the video."""
    clip: ClipLine | None
    """None if the video is no longer there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedClips:
    """The videos of a folder, read when they are needed."""

    folder: Path
    lines: Sequence[ClipLine]
    names: tuple[str, ...]
    """The tensors to read: those that the model takes."""

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> Clip:
        line = self.lines[number]
        clip = Clip(**read_tensors(self.folder / CLIPS / line.file, self.names))
        found = *clip.latent.shape[:3], len(clip.text)
        if found != (*line.size, line.tokens):
            raise InputError(
                f"{str(self.folder / CLIPS / line.file)!r} must hold what its line in clips-*.jsonl"
                f" says, a latent of {name_of(line.size)} and {line.tokens} tokens of text; got "
                f"{found}. Remove the file, and encode the videos again."
            )
        return clip


def read_tensors(path: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Some tensors of a file, or all."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys()) if names is None else names
            missing = [name for name in names if name not in file.keys()]  # noqa: SIM118
            found = {name: file.get_tensor(name) for name in names if name not in missing}
    except FileNotFoundError as error:
        raise InputError(
            f"{str(path)!r} must exist; got no such file. Correct the path, or encode the videos "
            "again."
        ) from error
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{str(path)!r} must be a whole safetensors file; got {error}. Remove it, and encode "
            "the videos again."
        ) from error
    if missing:
        raise InputError(
            f"Videos for this model must be encoded with {', '.join(names)}; got no {missing[0]} in"
            f" {str(path)!r}. Encode them with the folder of the model that is trained, or "
            "change --model.first-frame and --model.image-dim."
        )
    for name, x in found.items():
        if not np.isfinite(x).all():
            raise InputError(
                f"Encoded videos must be finite; got others in {name} of {str(path)!r}. Remove it, "
                "and encode the videos again."
            )
    return found


def read_lines(folder: Path) -> list[ClipLine]:
    """The videos of a folder, in the order of their files."""
    if not (folder / ENCODED).is_file():
        got = f"without {ENCODED}. Encode the videos first"
        got = got if folder.is_dir() else "no such folder. Correct the path"
        raise InputError(
            f"data.path must be a folder that `python -m trainer.dit.encode` has written; got "
            f"{str(folder)!r}, {got}."
        )
    if read_object(folder / ENCODED).get(KIND) == IMAGES:
        raise InputError(
            f"A Wan trains on encoded videos; got {str(folder)!r}, which holds images. Give them "
            "to a DiT: train.py dit_1b --data.path."
        )
    clips = [entry.clip for entry in read_entries(folder).values() if entry.clip is not None]
    return sorted(clips, key=lambda clip: clip.file)


def read_entries(folder: Path) -> dict[str, ClipEntry]:
    """The line that counts of each video."""
    found: dict[str, ClipEntry] = {}
    needed = "file, size, tokens and caption"
    way_out = "Remove the line, and encode the videos again."
    for path in sorted(folder.glob("clips-*.jsonl")):
        for entry in json_lines(path, _entry_of, needed=needed, way_out=way_out):
            former = found.get(entry.video, entry)
            found[entry.video] = max(entry, former, key=lambda line: line.version)
    return found


def _entry_of(values: Any) -> ClipEntry:
    clip, file = None, values["file"]
    if file is not None:
        frames, height, width = map(int, values["size"])
        size = frames, height, width
        clip = ClipLine(file, size, int(values["tokens"]), values["caption"])
    version, sha256 = int(values.get("version", 0)), values.get("sha256", "")
    return ClipEntry(values.get("video", file), version, sha256, clip)


def sizes_of(lines: Sequence[ClipLine]) -> list[tuple[int, int, int]]:
    """The sizes of videos, the largest first."""
    return sorted({line.size for line in lines}, key=lambda x: (-np.prod(x), x))


def open_clips(config: WanTrainConfig, collate: Callable[..., Any]) -> Dataset:
    """Opens what `config.data` names; by default, moving digits."""
    groups, path = None, config.data.path
    if path is None:
        from trainer.dit.wan.digits import MovingDigits, embedded

        source: Any = MovingDigits(config)
        name, known = "moving digits of scikit-learn", "moving digits"
        empty = embedded("", config.model.text_dim)
    else:
        source, empty = _open_folder(path, config)
        name, known = str(path), repr(list(source.lines))
    count = len(source)
    if count < 2:
        raise InputError(
            "Data must be at least 2 videos, of which one is held out; got "
            f"{count} in {name!r}. Give others: --data.path."
        )
    train, measured = held_out_of(source, config.data.validation_fraction)
    if len(config.sizes) > 1:
        sizes = [line.size for line in source.lines]
        groups = groups_by_size(config, sizes, train, measured)

    def with_empty(clips: list[Clip], numbers: list[int]) -> Any:
        return collate(clips, numbers, empty=empty)

    return Dataset(
        train=train,
        held_out=measured,
        collate=with_empty,
        groups=groups,
        description=f"{name}: {len(train):,} videos to train on, {len(measured):,} held out",
        loss_unit="mean squared error",
        digest=hashlib.sha256(known.encode()).hexdigest()[:16],
    )


def _open_folder(path: Path, config: WanTrainConfig) -> tuple[EncodedClips, np.ndarray]:
    """The videos of a folder, and its empty text, after they were compared with the model."""
    model, lines = config.model, read_lines(path)
    about = read_object(path / ENCODED)
    for name in ("channels", "text_dim"):
        if about.get(name) != getattr(model, name):
            raise InputError(
                f"Videos must be encoded for the model that is trained, with model.{name}="
                f"{getattr(model, name)}; got {about.get(name)} in {str(path / ENCODED)!r}. Encode "
                "them with the folder of that model."
            )
    require_sizes(config, Counter(line.size for line in lines), path)
    longest = max((line.tokens for line in lines), default=0)
    if longest > model.text_tokens:
        raise InputError(
            f"Captions must have at most model.text_tokens={model.text_tokens} tokens; got "
            f"{longest} in {str(path)!r}. Use --model.text-tokens {longest}, or shorter captions."
        )
    names = ("latent", *tensors_of(model))
    return EncodedClips(folder=path, lines=lines, names=names), read_empty(path)


def tensors_of(model: WanConfig) -> tuple[str, ...]:
    """The tensors of a video that a model takes beside its latent."""
    channels, image = model.first_frame == "channels", model.image_dim is not None
    return ("text", *["given"] * channels, *["image"] * image)


def read_empty(folder: Path) -> Float[np.ndarray, "S D"]:
    """The text of an empty caption in a folder of encoded videos."""
    return read_tensors(folder / EMPTY, ["text"])["text"]

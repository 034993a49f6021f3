"""What folders of encoded videos and of encoded images share: how `python -m trainer.dit.encode`
writes them, and how they become groups of one size."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from startrail_jax.errors import InputError
from trainer import durable
from trainer.data.dataset import Groups, Subset
from trainer.data.opening import read_object
from trainer.data.progress_bar import SECONDS_BETWEEN_LINES
from trainer.dit.config import name_of
from trainer.printable import say

Item = TypeVar("Item")

ENCODED = "encoded.json"
"""In the folder: what all that is in it shares."""
KIND, IMAGES = "kind", "images"
"""The key of that file which says that a folder holds images; one of videos has none."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """What to encode, where to, and which part of it."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder of videos, or of images."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for what is encoded."""
    sizes: tuple[str, ...] = ()
    """Sizes in pixels, as HEIGHTxWIDTH. A video or an image is brought to that of the nearest
    proportions. The default is 480x832 for videos, and follows from `--size` for images."""
    text_tokens: int | None = None
    """Largest number of tokens of a caption. The default is 512 for videos, and for images 256, or
    fewer if the text encoder takes no more."""
    process: tuple[int, int] = (0, 1)
    """Number of this process, from 0, and of all: each encodes its part."""
    device: str | None = None
    """Device of PyTorch. The default is the first GPU, or the CPU."""

    def __post_init__(self) -> None:
        for size in self.sizes:
            if not re.fullmatch("[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", size):
                raise InputError(
                    f"--sizes must be HEIGHTxWIDTH; got {size!r}. Write them as 480x832."
                )
        if self.text_tokens is not None and self.text_tokens < 1:
            raise InputError(
                f"--text-tokens must be at least 1; got {self.text_tokens}. Leave it out."
            )
        index, count = self.process
        if not 0 <= index < count:
            raise InputError(
                "--process must be a number from 0 and the number of all processes; got "
                f"{index} {count}. Use for example --process 0 4."
            )


def tracked(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items, with a bar on a terminal, and a line now and then in a log."""
    from rich.progress import track

    is_terminal, next_line = sys.stdout.isatty(), time.monotonic() + SECONDS_BETWEEN_LINES
    for number, item in enumerate(track(items, what, disable=not is_terminal)):
        if not is_terminal and time.monotonic() > next_line:
            next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            say(f"{what}: {number:,} of {len(items):,}")
        yield item


def pixels_of(sizes: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Height and width of sizes such as 480x832."""
    pairs = (size.split("x") for size in sizes)
    return tuple((int(height), int(width)) for height, width in pairs)


def check_multiples(sizes: Sequence[tuple[int, int]], step: int, option: str = "--sizes") -> None:
    """Raises ValueError unless tokens of `step` x `step` pixels fill all sizes."""
    for height, width in sizes:
        if height % step or width % step:
            near = "x".join(str(max(round(n / step), 1) * step) for n in (height, width))
            near = near if option == "--sizes" else near.partition("x")[0]
            raise InputError(
                f"{option} must be multiples of {step}, as a token is of {step} x {step} pixels; "
                f"got {height}x{width}. Use {near}."
            )


def check_kind(out: Path, kind: str | None, ours: Sequence[str] = ()) -> None:
    """Raises ValueError unless a folder is new, or holds what is encoded of this kind; `ours` are
    patterns of all names that a folder without `ENCODED` may hold, if not any."""
    if (out / ENCODED).is_file():
        found = read_object(out / ENCODED).get(KIND)
        if found != kind:
            what = "images" if found == IMAGES else "videos"
            raise InputError(
                f"OUT must be new, or hold what was encoded alike; got {str(out)!r}, which holds "
                f"{what}. Give another OUT."
            )
        return
    if os.path.lexists(out) and not out.is_dir():
        raise InputError(f"OUT must be a folder; got {str(out)!r}, which is none. Give another.")
    names = sorted(x.name for x in out.iterdir()) if ours and out.is_dir() else []
    if other := [x for x in names if not any(fnmatch.fnmatch(x, pattern) for pattern in ours)]:
        raise InputError(
            f"OUT must be new, or a folder that this program has written; got {str(out)!r} with "
            f"{other[0]!r}. Give another OUT."
        )


def require_same(out: Path, about: dict[str, Any], what: str) -> None:
    """Raises ValueError unless a folder holds what was encoded alike."""
    there = read_object(out / ENCODED)
    changed = [name for name in about if there.get(name) != about[name]]
    if not changed:
        return
    name = changed[0]
    before, now = there.get(name), about[name]
    if isinstance(before, list) and isinstance(now, list) and len(before) + len(now) > 20:
        apart = [x for x in (*before, *now) if (x in before) != (x in now)]
        before, now = f"{len(before)} of them", f"{len(now)} with others: {apart[:3]}"
    raise InputError(
        f"OUT must be new, or hold {what} that were encoded alike; got {str(out)!r} with "
        f"{name}={before} and {now} now. Give another OUT."
    )


def require_common(out: Path, former: set[str], found: set[str], what: str) -> None:
    """Raises ValueError unless a folder holds something of the input: as all that is gone is
    dropped, a wrong input would empty it."""
    if not former & found:
        raise InputError(
            f"OUT must be new, or hold {what} of FOLDER; got {str(out)!r} with none of them, but "
            f"{len(former)} others, such as {min(former)!r}. Give another OUT."
        )


def write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Writes a safetensors file, of which no reader sees a part."""
    import numpy as np
    from safetensors.numpy import save_file

    whole = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    write_whole(path, lambda part: save_file(whole, part))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file, also beside other processes: no reader sees a part of it, and it is on the
    disk before anything names it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    write(part)
    durable.flush(part)
    durable.rename(part, path)


def groups_by_size(config: Any, sizes: Sequence[Any], train: Subset, held_out: Subset) -> Groups:
    """Groups of one size each, by the sizes of all examples."""
    import numpy as np

    of_size = {size: number for number, size in enumerate(config.sizes)}
    numbers = np.array([of_size[tuple(size)] for size in sizes])
    lengths = np.array([config.tokens_of(size) for size in config.sizes])
    names = tuple(map(name_of, config.sizes))
    return Groups(numbers[train.numbers], numbers[held_out.numbers], lengths, names)


def require_sizes(config: Any, counts: dict[tuple[int, int, int], int], path: Path) -> None:
    """Raises ValueError unless a run has all sizes of a folder, of which there are so many each."""
    others = {size: n for size, n in counts.items() if size not in config.sizes}
    if others:
        found = ", ".join(f"{n} of {name_of(size)}" for size, n in sorted(others.items())[:5])
        raise InputError(
            "Latents must have the sizes of the run, "
            f"{', '.join(map(name_of, config.sizes))}; got {found} in {str(path)!r}. Leave --size "
            "and --data.sizes out for those of the folder."
        )

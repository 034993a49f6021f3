"""Bytes of text files: a corpus split by file, seeded batches, held-out windows.

What a batch holds depends on the seed and the step alone, never on the mesh; `Layout` then puts its
tokens in order.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int32, UInt8

from startrail_jax.layout import Layout

# Ends every file of a corpus; never a byte of Python source.
END_OF_FILE = b"\0"
# One file in HELD_OUT_SHARE is held out.
HELD_OUT_SHARE = 20
# Not part of the library proper, or tables that a program wrote: many of those are nearly the same
# file again, so that what is held out would have been seen.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text to train on and text to measure with, as bytes."""

    train: UInt8[np.ndarray, " train_bytes"]
    """The files to train on, one after another."""
    held_out: UInt8[np.ndarray, " held_out_bytes"]
    """The files that training never sees."""
    num_files: int
    """Files of both parts."""


class Batch(NamedTuple):
    """One batch in layout order, on the host or on devices."""

    tokens: Int32[np.ndarray | Array, "B T"]
    """Token ids."""
    targets: Int32[np.ndarray | Array, "B T"]
    """The token after each of `tokens`."""
    positions: Int32[np.ndarray | Array, "B T"]
    """Position of each of `tokens` in its row."""


def standard_library(folder: Path | None = None) -> Corpus:
    """The source of the Python standard library of the running interpreter.

    Files are sorted by path, and a hash of its path decides whether a file is held out, so that
    another Python version with other files splits the common ones in the same way.

    Args:
        folder: where the library lies; asks the interpreter by default.

    Raises:
        ValueError: if the folder has no source files, as in an interpreter that keeps its library
            in a zip file, or too few for both parts.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    paths = [path for path in paths if EXCLUDED_FOLDERS.isdisjoint(PurePosixPath(path).parts)]
    held_out = {path for path in paths if zlib.crc32(path.encode()) % HELD_OUT_SHARE == 0}
    if not held_out or len(held_out) == len(paths):
        raise ValueError(
            "The standard library must have source files to train on and to hold out; got "
            f"{len(paths) - len(held_out)} and {len(held_out)} *.py files in {str(folder)!r}. "
            "Use a Python that comes with its library as files."
        )

    def text(part: list[str]) -> np.ndarray:
        joined = b"".join((folder / path).read_bytes() + END_OF_FILE for path in part)
        return np.frombuffer(joined, dtype=np.uint8)

    return Corpus(
        train=text([path for path in paths if path not in held_out]),
        held_out=text(sorted(held_out)),
        num_files=len(paths),
    )


def random_windows(
    text: UInt8[np.ndarray, " bytes"], *, length: int, count: int, seed: int, step: int
) -> UInt8[np.ndarray, "count length"]:
    """`count` windows of `text` from anywhere, the same for the same seed and step.

    Raises:
        ValueError: if the text is shorter than a window.
    """
    _check_text(text, length)
    starts = np.random.default_rng((seed, step)).integers(len(text) - length + 1, size=count)
    return np.stack([text[start : start + length] for start in starts])


def spaced_windows(
    text: UInt8[np.ndarray, " bytes"], *, length: int, count: int
) -> UInt8[np.ndarray, "count length"]:
    """`count` windows spread evenly over `text`; they overlap only if the text is too short.

    Raises:
        ValueError: if the text is shorter than a window.
    """
    _check_text(text, length)
    starts = np.linspace(0, len(text) - length, count).astype(np.int64)
    return np.stack([text[start : start + length] for start in starts])


def next_token_batch(windows: UInt8[np.ndarray, "B length"], layout: Layout) -> Batch:
    """Inputs and targets from windows of T + 1 bytes, with the tokens in layout order.

    Raises:
        ValueError: if T tokens cannot be laid out.
    """
    windows = windows.astype(np.int32)
    positions = layout.positions(windows.shape[1] - 1)
    return Batch(
        tokens=layout.permute(windows[:, :-1]),
        targets=layout.permute(windows[:, 1:]),
        positions=np.tile(positions, (len(windows), 1)),
    )


def as_text(tokens: UInt8[np.ndarray, " bytes"]) -> str:
    """Bytes as text to show: what is not UTF-8 is replaced, and so is what ends a file."""
    return tokens.tobytes().replace(END_OF_FILE, b"\n").decode(errors="replace")


def _check_text(text: np.ndarray, length: int) -> None:
    if len(text) < length:
        raise ValueError(
            f"The text must have at least seq_len + 1 bytes; got {len(text)} bytes for "
            f"seq_len={length - 1}. Use a longer text or a shorter sequence."
        )

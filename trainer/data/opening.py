"""Opens files of data: regular ones only, with errors that say what to do."""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError

LARGEST_OBJECT = 1 << 24
"""Number of bytes that a file may have whose content is one object of JSON."""
MOST_EXPANSION, EXPANDS_FREELY = 200, 1 << 30
"""How many times its own size a file may give, and what any file may, in bytes. Text that is
compressed gives 3 to 10 times its size, and 100 times if it often repeats itself."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an error of the operating system into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{str(error.filename or path)!r} must be readable; got {type(error).__name__}: "
            f"{error.strerror or error}. Correct its permissions or the link to it, or leave it "
            "out."
        ) from error


@contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a regular file for reading, in a `with` block. A link is followed.

    The program would wait for the writer of a pipe, and a device may have no end.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: if it is a folder, pipe, socket or device.
    """
    # Before it is opened, as that alone may change the state of a device.
    _require_regular(path.stat().st_mode, path)
    with open(path, "rb", opener=_open_at_once) as file:
        # Something else may have taken its place.
        status = os.fstat(file.fileno())
        _require_regular(status.st_mode, path)
        if status.st_size == 0 and _holds_something(file):
            raise InputError(
                f"{str(path)!r} must be a file of a disk; got one that the system makes up, as "
                "those in /proc. Leave it out."
            )
        yield file


def _holds_something(file: io.BufferedReader) -> bool:
    """Whether a file whose size is 0 gives bytes, or would wait for some."""
    return file.raw.read(1) != b""


def check_expansion(path: Path, size: int, expanded: int) -> None:
    """Raises ValueError if what a file of `size` bytes gives, `expanded` bytes so far, has no end.

    A compressed file, or a table that names a long text once and repeats it, may give terabytes.
    """
    if expanded > max(EXPANDS_FREELY, MOST_EXPANSION * size):
        raise InputError(
            f"{str(path)!r} must not give more than {MOST_EXPANSION} times its size; got a file of "
            f"{size:,} bytes that gives more than {expanded:,}, as one does that is damaged or was "
            "made to do harm. Leave it out, or unpack it and look into it."
        )


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file; does not wait for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _require_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise InputError(
            f"{str(path)!r} must be a regular file; got a folder, pipe, socket or device. Leave it "
            "out."
        )


def read_whole(path: Path, limit: int) -> bytes:
    """The content of a regular file.

    Args:
        path: the file.
        limit: number of bytes that the file may have.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is longer, or a folder, pipe, socket or device.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise InputError(
            f"{str(path)!r} must have at most {limit:,} bytes; got more. Give another file, or "
            "leave it out."
        )
    return content


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file that belongs to a model or to a tokenizer.

    Raises:
        ValueError: if the file cannot be read or holds anything else.
    """
    with reading(path):
        content = read_whole(path, LARGEST_OBJECT)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{str(path)!r} must be JSON; got {type(error).__name__}: {error}. Download it again."
        ) from error
    if not isinstance(values, dict):
        raise InputError(
            f"{str(path)!r} must hold a JSON object; got {type(values).__name__}. Download it "
            "again."
        )
    return values

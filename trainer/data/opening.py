"""Files that cannot be read, as errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from startrail_jax.errors import InputError
from trainer.places import way_to

Entry = TypeVar("Entry")


# Error of the operating system -> what a path must be, and what to do.
WAYS_OUT: dict[type[OSError], tuple[str, str]] = {
    FileNotFoundError: ("exist", "Correct the path or the link to it."),
    NotADirectoryError: ("be a folder", "Correct the path."),
    IsADirectoryError: ("be a file", "Correct the path."),
}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an error of the operating system into an error that says what to do."""
    try:
        yield
    except OSError as error:
        other = "be readable", "Correct its permissions or the link to it, or leave it out."
        must, way_out = WAYS_OUT.get(type(error), other)
        name = str(error.filename or path)
        if isinstance(error, FileNotFoundError):
            way_out = way_to(Path(name), way_out)
        raise InputError(
            f"{name!r} must {must}; got {type(error).__name__}: {error.strerror or error}. "
            f"{way_out}"
        ) from error


def read_utf8(path: Path) -> str:
    """The text of a file of UTF-8, without a byte-order mark."""
    with reading(path):
        content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{str(path)!r} must be UTF-8; got {error}. Convert the file to UTF-8, or leave it out."
        ) from None


def json_lines(
    path: Path, parse: Callable[[Any], Entry], *, needed: str, way_out: str
) -> Iterator[Entry]:
    """What is parsed of each line of a JSONL file.

    By ValueError, KeyError or TypeError, `parse` says that an object is wrong. The error then names
    `needed`, the fields of an object, and ends with `way_out`.
    """
    # Not `splitlines`: a string in JSON may hold other ends of lines, such as U+2028.
    for number, line in enumerate(read_utf8(path).removesuffix("\n").split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield parse(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"Line {number} of {str(path)!r} must be a JSON object with {needed}; got "
                f"{line[:60]!r}. {way_out}"
            ) from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file that belongs to a model or to a tokenizer."""
    with reading(path):
        content = path.read_bytes()
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

"""Files that cannot be read, as errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError


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

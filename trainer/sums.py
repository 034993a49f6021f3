"""Checksums of the files of a folder that is written once, and then only read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from startrail_jax.errors import InputError
from trainer.durable import replace_text
from trainer.errors import StorageError

SUMS_FILE = ".sha256.json"
"""In the folder: the SHA-256 of each other file, by its name."""
_PART = 1 << 24


def sha256_of(file: Path, advance: Callable[[int], object] = lambda size: None) -> str:
    """The SHA-256 of a file, in hexadecimal digits. `advance` is told of all bytes read."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(_PART):
            digest.update(part)
            advance(len(part))
    return digest.hexdigest()


def sums_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file below a folder, by its path in it."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    # Nor what a kill has left of the file with the checksums.
    files = [path for path in files if not path.name.startswith(SUMS_FILE)]
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def write_sums(folder: Path) -> None:
    """Notes the checksums of all files of a folder in one more file."""
    replace_text(folder / SUMS_FILE, json.dumps(sums_of(folder), indent=1) + "\n")


def check_sums(
    folder: Path, way_out: str, advance: Callable[[int], object] = lambda size: None
) -> dict[str, str]:
    """The checksums of all files of a folder, by name, which must be those that `write_sums` noted.
    `advance` is told of all bytes read."""
    file = folder / SUMS_FILE  # The errors name it.
    must = "Files with checksums must be as they were written; got"
    try:
        sums = dict(json.loads(file.read_bytes()))
        for name, expected in sums.items():
            file = folder / name
            if sha256_of(file, advance) != expected:
                raise ValueError("its checksum is another than when it was written")
    except FileNotFoundError as error:
        raise InputError(f"{must} {str(file)!r}, which is gone. {way_out}") from error
    except OSError as error:
        raise StorageError(
            f"Files with checksums must be readable; got {str(file)!r}: {error}. Correct the "
            "rights of the file or the disk; then the same command goes on."
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{must} {str(file)!r}: {error}. {way_out}") from error
    return sums

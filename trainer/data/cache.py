"""Folders that are written once, by one of several processes, and then read by all of them."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from startrail_jax.errors import InputError
from trainer import durable
from trainer.data.progress_bar import shown_progress
from trainer.errors import StorageError
from trainer.places import check_folder
from trainer.printable import say
from trainer.sums import check_sums, sums_of, write_sums

CACHE_OPTION = "--data.cache"
WAY_OUT = "Delete the folder: its tokens are then made again."


@contextmanager
def filled_folder(
    cache: Path | None, key: str, write: Callable[[Path], None]
) -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder of a key in a cache, which one process fills; and the checksums of its files.

    The processes may be on several machines, if the file system has locks that these share. Each
    reads all files once, and compares their checksums with those of what was written. `write` fills
    an empty folder; if it fails or is killed, there is no folder. Without a cache, the folder is
    there for the `with` block alone, but for its files that are mapped into memory.
    """

    if cache is None:
        with tempfile.TemporaryDirectory() as name:
            with storing(Path(name).parent, CACHE_OPTION):
                write(Path(name))
            yield Path(name), sums_of(Path(name))
        return

    def write_with_sums(part: Path) -> None:
        write(part)
        write_sums(part)

    check_folder("data.cache", cache)
    folder = written_once(cache / key, write_with_sums)
    with storing(cache, CACHE_OPTION):
        size = sum(path.stat().st_size for path in folder.iterdir())
    with shown_progress(f"checking the tokens in {folder}", size) as advance:
        sums = check_sums(folder, WAY_OUT, advance)
    yield folder, sums


def written_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """A folder of a cache, which one process writes if there is none, while the others wait."""
    if folder.is_dir():
        return folder
    with storing(folder.parent, CACHE_OPTION):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("ab")
    with lock:
        is_alone = _wait_alone(lock.fileno(), folder)
        if not folder.is_dir():
            # If no other process writes, these are left from writes that were killed.
            for part in folder.parent.glob(_part_of(folder, "*")) if is_alone else ():
                shutil.rmtree(part, ignore_errors=True)
            write_folder(folder, write, option=CACHE_OPTION)
    return folder


def check_new(option: str, folder: Path) -> None:
    """Raises ValueError if a folder to write exists, or is in an object store."""
    check_folder(option, folder)
    if os.path.lexists(folder):
        raise InputError(
            f"{option} must be a folder that does not exist yet; got {str(folder)!r}, which does. "
            "Give another, or delete it."
        )


def write_folder(folder: Path, write: Callable[[Path], None], *, option: str) -> None:
    """Fills a new folder, which appears only when it is whole and on the disk."""
    part = folder.with_name(_part_of(folder, secrets.token_hex(4)))
    try:
        with storing(folder.parent, option):
            part.mkdir(parents=True)
            write(part)
            durable.flush_files(part, 0)
            try:
                durable.rename(part, folder)
            except OSError:
                # Without locks, another process may have written the same.
                if not folder.is_dir():
                    raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _part_of(folder: Path, number: str) -> str:
    return f".{folder.name}.part-{number}"


@contextmanager
def storing(folder: Path, option: str) -> Iterator[None]:
    """Turns an error of the operating system into an error for the user."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        # An error of the data that are read is a UserError and no OSError.
        raise StorageError(
            f"Files must be written to a folder with space; got {str(folder)!r}: "
            f"{error.strerror or error}. Fix that, or give another: {option}."
        ) from error


def _wait_alone(lock: int, folder: Path) -> bool:
    """Waits for a lock, which the end of the process releases, however it ends."""
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process, which writes {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in durable.NO_LOCKS:
            raise
        warnings.warn(
            f"The file system of {folder.parent} has no locks: each process writes {folder}.",
            stacklevel=2,
        )
        return False
    return True

"""Folders that are written once, by one of several processes, and then read by all of them."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer import durable
from trainer.data.progress import SECONDS_BEFORE_LINE, shown_progress
from trainer.errors import StorageError
from trainer.places import check_folder
from trainer.printable import say
from trainer.sums import SUMS_FILE, check_sums, sums_of, write_sums

POLL_SECONDS = 0.2
CACHE_OPTION = "--data.cache"
WAY_OUT = "Delete the folder: its tokens are then made again."
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def cached_folder(
    cache: Path, key: str, write: Callable[[Path], None]
) -> tuple[Path, dict[str, str]]:
    """The folder of a key in a cache. If there is none, one process writes it; others wait.

    The processes may be on several machines, if the file system has locks that these share. Each
    reads all files once, and compares their checksums with those of what was written.

    Args:
        cache: folder of the cache.
        key: what determines the content, as a hash.
        write: fills the folder, which is empty. If it fails or is killed, there is no folder.

    Returns:
        The folder, and the checksums of its files, by their names.

    Raises:
        OSError: if the cache cannot be written.
        ValueError: if it is in an object store, or a file was damaged since it was written.
    """

    def write_with_sums(part: Path) -> None:
        write(part)
        write_sums(part)

    check_folder("data.cache", cache)
    folder = cache / key
    if folder.is_dir() and not os.access(folder, os.W_OK):
        # Tokens of an earlier version that others have written, without checksums.
        return folder, check_sums(folder, WAY_OUT) or sums_of(folder)
    if not (folder / SUMS_FILE).is_file():
        with storing(cache, CACHE_OPTION):
            cache.mkdir(parents=True, exist_ok=True)
            lock = (cache / f".{key}.lock").open("a")
        with lock, alone(lock.fileno(), folder, f"writes tokens to {folder}") as locked:
            if not folder.is_dir():
                if locked:
                    # These are left from writes that were killed: no other program writes here.
                    for part in cache.glob(_part_of(folder, "*")):
                        shutil.rmtree(part, ignore_errors=True)
                write_folder(folder, write_with_sums, option=CACHE_OPTION)
            elif not (folder / SUMS_FILE).is_file():
                say(
                    f"NOTE: {folder} has no checksums, as an earlier version of this program wrote "
                    "it: its tokens are taken as they are, and are checked from now on"
                )
                with storing(cache, CACHE_OPTION):
                    write_sums(folder)
    return folder, _checked(folder)


def _checked(folder: Path) -> dict[str, str]:
    size = sum(path.stat().st_size for path in folder.iterdir())
    with shown_progress(
        f"checking the tokens in {folder}", size, after=SECONDS_BEFORE_LINE
    ) as advance:
        sums = check_sums(folder, WAY_OUT, advance)
    assert sums is not None
    return sums


def write_folder(folder: Path, write: Callable[[Path], None], *, option: str) -> None:
    """Fills a new folder, which appears only when it is whole and on the disk.

    Args:
        folder: where it is to appear.
        write: fills the folder that it is given.
        option: what names the folder on the command line, for errors.

    Raises:
        OSError: if the folder cannot be written.
    """
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
    """Turns an error of the operating system into an error for the user.

    Raises:
        OSError: if the body cannot write to the folder, which the option gives.
    """
    try:
        yield
    except OSError as error:
        # An error of the data that are read is a UserError and no OSError.
        raise StorageError(
            f"Tokens and copies must be written to a folder with space; got {str(folder)!r}: "
            f"{error.strerror or error}. Fix that, or give another: {option}."
        ) from error


@contextmanager
def alone(lock: int, folder: Path, work: str) -> Iterator[bool]:
    """Waits until no other process has the lock. Yields False on a file system without locks.

    Args:
        lock: descriptor of an open file.
        folder: where the file is, for the warning.
        work: what the process that has the lock does, for the log: "writes tokens to cache/3f9a".

    The end of the process, however it ends, releases the lock.
    """
    locked = _try_lock(lock)
    if locked is False:
        say(f"waiting for another process, which {work}")
        while locked is False:
            time.sleep(POLL_SECONDS)
            locked = _try_lock(lock)
    if locked is None:
        warnings.warn(
            f"The file system of {folder.parent} has no locks: each process {work}.",
            stacklevel=2,
        )
    yield bool(locked)


def _try_lock(lock: int) -> bool | None:
    """Whether the lock was free; None if the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True

"""Copies, on a disk, of data that are in an object store.

    CACHE/copies/3f9a12cd04b7e815/wiki/...     the files of gs://bucket/wiki

The name of the folder follows from the place, names, sizes and versions of the files in the store:
data that change there get a new copy, and the same data are copied once, by one of several
processes. A copy that was interrupted goes on at the first file that is missing. It counts as whole
when the store, asked again, still has the same versions. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
from contextlib import suppress
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from startrail_jax.errors import InputError
from trainer.data.cache import alone, storing
from trainer.data.files import walk_files
from trainer.data.progress import shown_progress
from trainer.data.stored.listing import StoredData, list_stored
from trainer.errors import StorageError
from trainer.places import COPIES, is_in_store, text_of
from trainer.stores import batches, reading_store, telling

Data = TypeVar("Data", bound=Any)

WHOLE, LOCK = ".whole", ".lock"
"""Files beside a copy: it is whole; one process works on it."""
INPUTS = ("path", "validation_path")
"""Settings of data that may be in a store."""


def with_copies(data: Data, cache: Path) -> Data:
    """The data of a run with copies in place of what is in stores.

    Args:
        data: a dataclass of settings, with `cache` and some of `INPUTS`.
        cache: the folder for copies unless `data.cache` names one.

    Raises:
        ImportError: if the package of a store is missing.
        OSError: if a store cannot be read, or the folder has no space.
        ValueError: if there are no data.
    """
    stored = {
        name: list_stored(path, f"data.{name}")
        for name in INPUTS
        if (path := getattr(data, name, None)) is not None and is_in_store(path)
    }
    # The outer one of two folders first. A folder that lies in another one is a folder in the copy
    # of that: of the same files at other paths, it would not be known that they are held out.
    names = sorted(stored, key=lambda name: len(stored[name].root))
    inner = {
        name: (outer, path)
        for outer, name in pairwise(names)
        if (path := stored[name].path_in(stored[outer])) is not None
        and _has_files(stored[outer], stored[name], path)
    }
    copies: dict[str, Path] = {}
    for name in names:
        if name in inner:
            outer, path = inner[name]
            copies[name] = copies[outer] / path
        else:
            copies[name] = copy_of(stored[name], data.cache or cache)
    return dataclasses.replace(data, **copies)


def origin_of(data: Any) -> str:
    """The end of the line in the log that describes the data of a run: the stores they are from."""
    paths = [getattr(data, name, None) for name in INPUTS]
    urls = [text_of(path) for path in paths if path is not None and is_in_store(path)]
    return f"; copied from {' and '.join(urls)}" if urls else ""


def copy_of(stored: StoredData, cache: Path) -> Path:
    """The copy of data in a store, which is made if it is missing or not whole.

    The processes that call this may be on several machines, if the file system has locks that these
    share.

    Args:
        stored: the data.
        cache: the folder below which the copy is.

    Raises:
        OSError: if the store cannot be read, or the folder has no space.
        ValueError: if the folder of the copy has other files.
    """
    folder = cache / COPIES / stored.key
    copy = folder / PurePosixPath(stored.root).name
    mark = folder / WHOLE
    if not mark.is_file() or _missing(stored, copy):
        with storing(cache, "--data.cache"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / LOCK).open("a")
        with lock, alone(lock.fileno(), folder, f"copies {stored.url}") as is_alone:
            if is_alone:  # So these are left from copies that were killed.
                for part in folder.rglob(".*.part"):
                    part.unlink(missing_ok=True)
            missing = _missing(stored, copy)
            if missing:
                _copy(stored, missing, copy)
            if missing or not mark.is_file():
                _require_same(stored, folder)
                mark.touch()
    if stored.is_folder and (others := set(walk_files(copy)) - stored.sizes.keys()):
        raise InputError(
            f"The copy of data must have the files of the store; got {str(copy)!r} with others, "
            f"which {stored.url} has not, such as {min(others)!r}. Remove them."
        )
    return copy


def _has_files(outer: StoredData, inner: StoredData, path: str) -> bool:
    """Whether a copy of the outer data has the inner ones, which may be hidden there."""
    if not inner.is_folder:
        return path in outer.sizes or not path
    return all(str(PurePosixPath(path, key)) in outer.sizes for key in inner.sizes)


def _require_same(stored: StoredData, folder: Path) -> None:
    """Raises, and removes the copy, if the store has changed since it was listed."""
    now = list_stored(stored.path, stored.option)
    if now.key == stored.key:
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    raise StorageError(
        f"Data must stay as they are while they are copied; got {stored.url} with others than when "
        "the copy began, so that it has been removed. Start the same command again when nothing "
        "writes there."
    )


def _missing(stored: StoredData, copy: Path) -> list[str]:
    """The files that the copy does not have in their size."""
    return [key for key, size in stored.sizes.items() if _size(_place(stored, copy, key)) != size]


def _place(stored: StoredData, copy: Path, key: str) -> Path:
    return copy / key if stored.is_folder else copy


def _size(path: Path) -> int | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.stat().st_size
    return None


def _copy(stored: StoredData, missing: list[str], copy: Path) -> None:
    """Copies files; each appears when it is whole and on the disk."""
    total = sum(stored.sizes[key] for key in missing)
    free = shutil.disk_usage(copy.parent).free
    if free < total:
        raise StorageError(
            f"There must be space for the copy of {stored.url}, {total / 1e9:.3g} GB, in "
            f"{str(copy.parent)!r}; got {free / 1e9:.3g} GB. Free some, or give --data.cache on "
            "another disk."
        )
    mark = secrets.token_hex(4)
    with shown_progress(f"copying {stored.url} to {copy}", total) as advance:
        for some in batches(missing):
            places = [_place(stored, copy, key) for key in some]
            # The name of a key may have the greatest length that the file system allows, so the
            # name of the unfinished copy does not contain it.
            parts = [
                place.with_name(f".{mark}-{number}.part") for number, place in enumerate(places)
            ]
            with storing(copy.parent, "--data.cache"):
                for place in places:
                    place.parent.mkdir(parents=True, exist_ok=True)
            with reading_store(stored.url, stored.flag):
                paths = [stored.path_of(key) for key in some]
                stored.store.get(paths, list(map(str, parts)), callback=telling(advance))
            for key, part, place in zip(some, parts, places, strict=True):
                _require_size(stored, key, part)
                with storing(copy.parent, "--data.cache"), part.open("rb") as file:
                    os.fsync(file.fileno())
                    part.replace(place)


def _require_size(stored: StoredData, key: str, part: Path) -> None:
    if (size := _size(part)) != stored.sizes[key]:
        raise StorageError(
            f"Data must stay as they are while they are copied; got {key!r} of {stored.url} with "
            f"{stored.sizes[key]} bytes in the list of the store, and {size} in the copy. Start "
            "the same command again when nothing writes there."
        )

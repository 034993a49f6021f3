"""Data in object stores, which are copied to a disk once, by fsspec."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from startrail_jax.errors import InputError
from trainer.data.cache import written_once
from trainer.data.files import TOKEN_KINDS, kind_of, walk_files
from trainer.errors import StorageError
from trainer.places import COPIES, is_in_store, text_of
from trainer.printable import say
from trainer.urls import batches, open_url, reading_store

Data = TypeVar("Data", bound=Any)

INPUTS = ("path", "validation_path")
"""Settings of data that may be in a store."""


def with_copies(data: Data, cache: Path) -> Data:
    """The data of a run with copies in place of what is in stores.

    A copy is named by a hash of the place and of what the store says of each file: its size, its
    version, its checksum. So data that have changed get a new copy.

    Args:
        data: a dataclass of settings, with `cache` and some of `INPUTS`.
        cache: the folder for copies unless `data.cache` names one.

    Raises:
        ImportError: if the package of a store is missing.
        OSError: if a store cannot be read, or the folder has no space.
        ValueError: if there are no data.
    """
    urls = _urls(data)
    copies: dict[str, Path] = {}
    # The outer one of two folders first: what is held out may lie in what is trained on.
    for name in sorted(urls, key=lambda name: len(urls[name])):
        outer = next((x for x in copies if f"{urls[name]}/".startswith(f"{urls[x]}/")), None)
        if outer is not None:
            copies[name] = copies[outer] / urls[name][len(urls[outer]) :].lstrip("/")
        else:
            copies[name] = _copy(urls[name], f"data.{name}", data.cache or cache)
    return dataclasses.replace(data, **copies)


def origin_of(data: Any) -> str:
    """The end of the line in the log that describes the data of a run: the stores they are from."""
    urls = _urls(data).values()
    return f"; copied from {' and '.join(urls)}" if urls else ""


def _urls(data: Any) -> dict[str, str]:
    """The settings of data that are in stores, and their URLs."""
    paths = {name: getattr(data, name, None) for name in INPUTS}
    return {name: text_of(path) for name, path in paths.items() if path and is_in_store(path)}


def holds_tokens(path: Path, option: str) -> bool:
    """Whether data are files of tokens, by their names.

    Args:
        path: a file or a folder, here or in a store. One that is gone has its own name alone.
        option: the setting that names it, for errors: "data.path".

    Raises:
        OSError: if a store cannot be read.
        ValueError: if nothing is at a URL.
    """
    names = [path.name]
    if is_in_store(path) and not path.suffix:
        names = list(_listed(text_of(path), option)[2])
    elif path.is_dir():
        # Of a folder of folders, one file is enough to know it.
        names = [x.name for x in os.scandir(path) if x.is_file() and not x.name.startswith(".")]
        names = names or list(itertools.islice(walk_files(path), 1))
    elif not path.exists() and not path.suffix:
        raise InputError(
            f"{option} must exist, or its name must tell whether it is text or tokens; got "
            f"{str(path)!r}, which is not below {str(Path.cwd())!r}. Start the program where the "
            "run began, or correct the path."
        )
    return any(kind_of(Path(name)) in TOKEN_KINDS for name in names)


def _listed(url: str, option: str) -> tuple[Any, str, dict[str, Any]]:
    """The file system of a URL, the path in it, and what it says of each file there."""
    with reading_store(url, _flag(option)):
        store, root = open_url(url, _flag(option))
        listed = store.find(root, detail=True)
    # Some stores list a folder too, as an object whose name ends in a slash.
    found = {
        path: info
        for path, info in sorted(listed.items())
        if info["type"] == "file" and not path.endswith("/") and "/." not in path[len(root) :]
    }
    if not found:
        raise InputError(
            f"{option} must exist and hold files; got {url!r}, where the store has no files "
            "(but hidden ones). Correct the URL."
        )
    return store, root, found


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _copy(url: str, option: str, cache: Path) -> Path:
    store, root, found = _listed(url, option)
    known = json.dumps([url, found], default=str, sort_keys=True)
    key = hashlib.sha256(known.encode()).hexdigest()[:16]
    name = PurePosixPath(root).name
    size = sum(info["size"] or 0 for info in found.values())

    def write(part: Path) -> None:
        say(f"copying {url}, {size / 1e6:,.1f} MB, to {cache / COPIES / key}")
        places = [part / name / PurePosixPath(path).relative_to(root) for path in found]
        for place in places:
            place.parent.mkdir(parents=True, exist_ok=True)
        with reading_store(url, _flag(option)):
            for some in batches(list(zip(found, map(str, places), strict=True))):
                store.get(*map(list, zip(*some, strict=True)))
        sizes = [place.stat().st_size for place in places]
        if sizes != [x["size"] for x in found.values()] or _listed(url, option)[2] != found:
            raise StorageError(
                f"Data must stay as they are while they are copied; got {url} with others than "
                "when the copy began. Start the same command again when nothing writes there."
            )

    return written_once(cache / COPIES / key, write) / name

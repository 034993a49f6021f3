"""What lies at the URL of data in an object store. Imports no jax."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from startrail_jax.errors import InputError
from trainer.places import text_of
from trainer.stores import open_url, reading_store

VERSIONS = (
    *("md5Hash", "crc32c", "ETag", "etag", "blob_id", "generation"),
    *("LastModified", "last_modified", "updated", "mtime", "created"),
)
"""What stores say of an object that changes with its content, the surest first."""


@dataclass(frozen=True, kw_only=True)
class StoredData:
    """A file or a folder in a store."""

    url: str
    root: str
    """The URL without its protocol, as fsspec has it: the same for all ways to write it."""
    store: Any
    """The file system of fsspec."""
    sizes: dict[str, int]
    """Number of bytes of each file by its path in the folder, or by its name, sorted."""
    is_folder: bool
    key: str
    """A hash of the names, sizes and versions of all files."""

    def path_of(self, key: str) -> str:
        """Where the store has a file."""
        return f"{self.root}/{key}" if self.is_folder else self.root


def list_stored(
    path: Path, option: str, wanted: Callable[[str], bool] = lambda _: True
) -> StoredData:
    """Lists the files at a URL, without hidden ones.

    Args:
        path: the URL, as a path.
        option: the setting that names it, for errors: "data.path".
        wanted: whether to list a file of a folder, by its path in that.

    Raises:
        ImportError: if the package of the store is missing.
        OSError: if the store cannot be read.
        ValueError: if nothing is there, or a name cannot be that of a file.
    """
    url, flag = text_of(path), f"--{option.replace('_', '-')}"
    store, root = open_url(url, flag)
    with reading_store(url, flag):
        try:
            store.invalidate_cache()
            info = store.info(root)
            is_folder = info["type"] == "directory"
            found = store.find(root, detail=True) if is_folder else {}
        except FileNotFoundError as error:
            raise InputError(
                f"{option} must exist; got {url!r}, where the store has nothing. Correct the URL."
            ) from error
    files = {name.removeprefix(f"{root}/"): x for name, x in sorted(found.items())}
    # Some stores list a folder too, as an object of no bytes, whose name may end in a slash.
    files = {
        key: x
        for key, x in files.items()
        if x["type"] == "file"
        and not f"/{key}".endswith("/")
        and not _is_hidden(key)
        and wanted(key)
    }
    if not is_folder:
        files = {PurePosixPath(root).name: info}
    for key in files:
        _check_name(key, url)
    if not files:
        raise InputError(
            f"{option} must hold files that are read, which hidden ones (names that start with a "
            f"dot) are not; got {url!r} with none. Give another."
        )
    content = [[key, x["size"], _version_of(x)] for key, x in files.items()]
    digest = hashlib.sha256(json.dumps([store.protocol, root, content], default=str).encode())
    return StoredData(
        url=url,
        root=root,
        store=store,
        sizes={key: int(x["size"]) for key, x in files.items()},
        is_folder=is_folder,
        key=digest.hexdigest()[:16],
    )


def _is_hidden(key: str) -> bool:
    return any(part.startswith(".") for part in key.split("/"))


def _check_name(key: str, url: str) -> None:
    """Raises if a copy of an object would be no file of the folder of copies."""
    if not key.isprintable() or "\\" in key or "" in key.split("/"):
        raise InputError(
            "Names of data in a store must be usable for files: no control character, backslash or "
            f"doubled slash; got {key!r} in {url}. Rename it, or give a folder without it."
        )


def _version_of(info: dict[str, Any]) -> str:
    return next((str(info[name]) for name in VERSIONS if info.get(name) is not None), "")

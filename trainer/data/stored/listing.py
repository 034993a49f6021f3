"""What lies at the URL of data in an object store. Imports no jax."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from startrail_jax.errors import InputError
from trainer.places import text_of
from trainer.stores import open_url, reading_store

VERSIONS = (
    *("md5Hash", "crc32c", "ETag", "etag", "blob_id", "sha", "generation"),
    *("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "modificationTime"),
    *("modify", "created"),
)
"""What stores say of an object that changes with its content, the surest first."""
PAGES = ("http", "https")
"""Protocols without folders: what is at a URL is a file, or a page that lists some."""
_REVISION = re.compile(r"@[^/]*")


@dataclass(frozen=True, kw_only=True)
class StoredData:
    """A file or a folder in a store."""

    path: Path
    """The URL, as a path."""
    option: str
    """The setting that names it, for errors: "data.path"."""
    host: str
    """The bucket or the host."""
    root: str
    """The URL without its protocol, as fsspec has it: the same for gs:// and gcs://."""
    store: Any
    """The file system of fsspec."""
    sizes: dict[str, int]
    """Number of bytes of each file by its path in the folder, or by its name, sorted."""
    is_folder: bool
    key: str
    """A hash of the place, and of the names, sizes and versions of all files."""

    @property
    def url(self) -> str:
        """The URL, as the user has written it."""
        return text_of(self.path)

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return flag_of(self.option)

    def path_of(self, key: str) -> str:
        """Where the store has a file."""
        return f"{self.root}/{key}" if self.is_folder else self.root

    def path_in(self, other: StoredData) -> str | None:
        """The path of these data in others, of which they are a part; None if they are not.

        Raises:
            ValueError: if one of them is of a revision, and not the other.
        """
        if (self.store.protocol, self.host) != (other.store.protocol, other.host):
            return None
        if f"{self.root}/".startswith(f"{other.root}/"):
            return self.root[len(other.root) :].lstrip("/")
        if f"{_REVISION.sub('', self.root)}/".startswith(f"{_REVISION.sub('', other.root)}/"):
            raise InputError(
                "data.path and data.validation_path must be of one revision if one of them lies in "
                f"the other; got {other.url} and {self.url}. Name the same revision in both, or in "
                "none."
            )
        return None


def flag_of(option: str) -> str:
    """A setting of data as it is called on the command line."""
    return f"--{option.replace('_', '-')}"


def list_stored(path: Path, option: str) -> StoredData:
    """Lists the files at a URL, without hidden ones.

    Args:
        path: the URL, as a path.
        option: the setting that names it, for errors: "data.path".

    Raises:
        ImportError: if the package of the store is missing.
        OSError: if the store cannot be read.
        ValueError: if nothing is there, or a name cannot be that of a file.
    """
    url, flag = text_of(path), flag_of(option)
    with reading_store(url, flag):
        store, root = open_url(url, flag)
        found, is_folder = _find(store, root, url, option)
    if not found:
        raise InputError(
            f"{option} must hold files; got {url!r}, without any but hidden ones (names that start "
            "with a dot). Give another."
        )
    _check_names(found, url)
    host = urlsplit(url).netloc
    content = [[key, info["size"], _version_of(info, key, url)] for key, info in found.items()]
    identity = json.dumps([store.protocol, host, root, content])
    return StoredData(
        path=path,
        option=option,
        host=host,
        root=root,
        store=store,
        sizes={key: int(info["size"]) for key, info in found.items()},
        is_folder=is_folder,
        key=hashlib.sha256(identity.encode()).hexdigest()[:16],
    )


def _find(store: Any, root: str, url: str, option: str) -> tuple[dict[str, Any], bool]:
    """What the store says of each file, by its path in the folder; and whether it is a folder."""
    name = PurePosixPath(root).name
    try:
        store.invalidate_cache()
        info = store.info(root)
    except FileNotFoundError as error:
        raise InputError(
            f"{option} must exist; got {url!r}, where the store has nothing. Correct the URL."
        ) from error
    if urlsplit(url).scheme in PAGES:
        if not PurePosixPath(name).suffix:
            raise InputError(
                f"{option} must be a single file if it is a page of the web; got {url!r}, whose "
                "name has no suffix. Give a file, or a store that has folders."
            )
        return {name: info}, False
    listed = sorted(store.find(root, detail=True).items())
    # Some stores list a folder too, as an object of no bytes, whose name may end in a slash.
    below = {
        path.removeprefix(f"{root}/"): x
        for path, x in listed
        if path.startswith(f"{root}/") and x["type"] == "file" and not path.endswith("/")
    }
    if info["type"] == "directory":
        return {key: x for key, x in below.items() if not _is_hidden(key)}, True
    if below:
        raise InputError(
            f"{option} must be a file or a folder; got {url!r}, where the store has a file and a "
            f"folder of one name, with {len(below):,} files. Rename one of them."
        )
    return {name: info}, False


def _is_hidden(key: str) -> bool:
    return any(part.startswith(".") for part in key.split("/"))


def _check_names(keys: Any, url: str) -> None:
    """Raises if copies of the objects would be no files of the folder of copies."""
    for key in keys:
        parts = key.split("/")
        odd = any(unicodedata.category(x) == "Cc" for x in key) or "\\" in key or "" in parts
        folder = next((x for x in map(str, PurePosixPath(key).parents) if x in keys), None)
        if odd or folder is not None:
            raise InputError(
                "Names of data in a store must be usable for files: no control character, "
                "backslash or doubled slash, and no file with the name of a folder; got "
                f"{folder or key!r} in {url}. Rename it, or give a folder without it."
            )


def _version_of(info: dict[str, Any], key: str, url: str) -> str:
    for name in VERSIONS:
        if info.get(name) is not None:
            return str(info[name])
    raise InputError(
        "A store must say when its files change, by a checksum, a version or a time; got none for "
        f"{key!r} in {url}. Copy the data to a disk, and give their folder."
    )

"""A store and the copies of a run in it, by fsspec. Imports no jax.

    owner.json                          who copies to it now
    manifests/000012_400_1f3a5b7c.json  copy 12, of step 400, by program 1f3a5b7c: it is whole
    files/000012_400_1f3a5b7c/...       the files of that copy
    files/constant_1f3a5b7c/...         files that many copies share

No two programs and no two copies ever write the same object, but for owner.json. What an object is
called says all that must be known to remove it: others in the same bucket are never touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError
from trainer.errors import StorageError
from trainer.mirror.contents import (
    FILES,
    DamagedCopyError,
    Manifest,
    StoredFile,
    is_constant,
    read_manifest,
)
from trainer.places import is_of_disk
from trainer.stores import batches, open_url, reading_store, telling

OWNER = "owner.json"
MANIFESTS = "manifests"
FLAG = "--mirror"
_COPY = re.compile(r"(\d{6,})_(\d+)_([0-9a-f]{8})")
_CONSTANT = re.compile(r"constant_[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True, order=True)
class StoredCopy:
    """A copy of a checkpoint. Copies are ordered by age: a later one is greater."""

    number: int
    """Its place in the order of all copies. A run may go back, so that steps have none."""
    step: int
    """The step of the checkpoint."""
    program: str
    """Who copied it."""

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{self.number:06d}_{self.step}_{self.program}"


class Store:
    """A folder of a store, by its URL. Methods raise whatever the package of the store raises."""

    def __init__(self, url: str) -> None:
        """Opens it; nothing is written.

        Raises:
            ImportError: if a package is missing.
            ValueError: if fsspec does not know the kind of store.
            OSError: if the store is a folder below one that does not exist.
        """
        self.url = url.rstrip("/")
        self._fs, self._root = open_url(self.url, FLAG)
        self._is_of_disk = is_of_disk(self.url)
        if self._is_of_disk and not Path(self._root).parent.is_dir():
            # A disk that is not mounted holds nothing: a run would begin anew beside its copies.
            raise StorageError(
                f"The folder above that of a --mirror must exist; got {self.url}, without "
                f"{Path(self._root).parent}. Mount the disk, or make that folder."
            )
        self._manifests: dict[str, bytes] = {}

    def require_mirror(self) -> None:
        """Raises ValueError if the folder holds anything but a mirror."""
        names = self._names("")
        if names and OWNER not in names:
            raise InputError(
                f"mirror must name a folder that is empty or holds a mirror; got {self.url}, with "
                f"{names[0]!r} and without {OWNER}. Use another."
            )

    def owner(self) -> dict[str, Any] | None:
        """Who copies to the store; None if nobody has yet, or the object is damaged."""
        try:
            owner = json.loads(self._fs.cat_file(self._path(OWNER)))
        except (FileNotFoundError, ValueError):
            return None
        return owner if isinstance(owner, dict) else None

    def write_owner(self, owner: Mapping[str, Any]) -> None:
        """Says who copies to the store."""
        self.put_bytes(OWNER, json.dumps(dict(owner)).encode())

    def copies(self) -> list[StoredCopy]:
        """The copies that have a manifest, the newest last."""
        matches = [_COPY.fullmatch(x.removesuffix(".json")) for x in self._names(MANIFESTS)]
        return sorted(
            StoredCopy(number=int(match[1]), step=int(match[2]), program=match[3])
            for match in matches
            if match
        )

    def manifest(self, copy: StoredCopy) -> Manifest:
        """The files of a copy.

        Raises:
            DamagedCopyError: if its manifest is damaged or gone.
        """
        if copy.name not in self._manifests:
            try:
                self._manifests[copy.name] = self._fs.cat_file(self._path(_manifest_of(copy)))
            except FileNotFoundError as error:
                raise DamagedCopyError("its manifest is gone") from error
        return read_manifest(self._manifests[copy.name])

    def require_complete(self, manifest: Manifest) -> None:
        """Looks for all files of a copy, but not into them.

        Raises:
            DamagedCopyError: if one is gone or has another size.
        """
        folders = {x.object.split("/")[1] for x in manifest.files.values()}
        sizes = {name: n for folder in folders for name, n in self.sizes(folder).items()}
        for path, file in manifest.files.items():
            if sizes.get(file.object) != file.bytes:
                here = "is gone" if file.object not in sizes else "has another size"
                raise DamagedCopyError(f"{path} {here}")

    def is_whole(self, copy: StoredCopy) -> bool:
        """Whether a copy has its manifest and all files of that; they are not looked into."""
        try:
            self.require_complete(self.manifest(copy))
        except DamagedCopyError:
            return False
        return True

    def put_manifest(self, copy: StoredCopy, manifest: Manifest) -> None:
        """Makes a copy whole, by one object, which is there as a whole or not at all."""
        self._manifests.pop(copy.name, None)
        self.put_bytes(_manifest_of(copy), manifest.to_json())

    def remove_manifest(self, copy: StoredCopy) -> None:
        """Makes a copy count no more; its files are still there."""
        self._fs.rm(self._path(_manifest_of(copy)))
        self._manifests.pop(copy.name, None)

    def folders(self) -> list[str]:
        """The folders of files that a mirror has written."""
        return [x for x in self._names(FILES) if _COPY.fullmatch(x) or _CONSTANT.fullmatch(x)]

    def remove_folder(self, folder: str) -> None:
        """Removes one of `folders`."""
        self._fs.rm(self._path(f"{FILES}/{folder}"), recursive=True)

    def constants(self) -> dict[str, StoredFile]:
        """The constant files that the newest copy has."""
        for copy in reversed(self.copies()):
            with suppress(DamagedCopyError):
                manifest = self.manifest(copy)
                return {path: x for path, x in manifest.files.items() if is_constant(path)}
        return {}

    def prune(self, keep: int) -> None:
        """Removes all copies but the newest whole ones, and files that are of no copy."""
        steps: set[int] = set()
        used: set[str] = set()
        for copy in reversed(self.copies()):
            try:
                manifest = self.manifest(copy)
            except DamagedCopyError:
                self.remove_manifest(copy)
                continue
            if copy.step in steps or len(steps) == keep:
                self.remove_manifest(copy)
                continue
            steps.add(copy.step)
            used |= {file.object.split("/")[1] for file in manifest.files.values()}
        for folder in self.folders():
            if folder not in used:
                self.remove_folder(folder)

    def sizes(self, folder: str) -> dict[str, int]:
        """The objects in one of `folders`, and their sizes."""
        try:
            if self._is_of_disk:  # fsspec leaves out what it fails to read.
                return _sizes_on_disk(Path(self._root), f"{FILES}/{folder}")
            self._fs.invalidate_cache()
            found = self._fs.find(self._path(f"{FILES}/{folder}"), detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(self._path("")): x["size"] for path, x in found.items()}

    def put_bytes(self, name: str, data: bytes) -> None:
        """Writes an object."""
        self._fs.pipe_file(self._path(name), data)

    def put_files(self, files: Sequence[tuple[Path, str]], moved: Callable[[], None]) -> None:
        """Copies files to objects. `moved` is called whenever a part or a file has arrived."""
        for some in batches(files):
            names = [self._path(name) for _, name in some]
            self._fs.put(
                [str(path) for path, _ in some], names, callback=telling(lambda _: moved())
            )

    def get_files(self, files: Sequence[tuple[str, Path]]) -> None:
        """Copies objects to files, whose folders are made."""
        for _, path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_of_disk:
            # fsspec takes a file for gone whose disk fails for a moment.
            for name, path in files:
                shutil.copyfile(self._path(name), path)
            return
        for some in batches(files):
            self._fs.get([self._path(name) for name, _ in some], [str(path) for _, path in some])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _names(self, folder: str) -> list[str]:
        try:
            self._fs.invalidate_cache()
            paths = self._fs.ls(self._path(folder).rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        # Some stores list the folder itself, as an object of no bytes.
        return sorted(x for x in names if x and x != (folder or self._root.rpartition("/")[2]))


def _sizes_on_disk(root: Path, folder: str) -> dict[str, int]:
    def fail(error: OSError) -> None:
        raise error

    paths = [
        Path(where, name)
        for where, _, names in os.walk(root / folder, onerror=fail)
        for name in names
    ]
    return {str(path.relative_to(root)): path.stat().st_size for path in paths}


def reading(url: str) -> AbstractContextManager[None]:
    """Turns whatever a store raises into an error for the user: see `reading_store`."""
    return reading_store(url, FLAG)


def _manifest_of(copy: StoredCopy) -> str:
    return f"{MANIFESTS}/{copy.name}.json"

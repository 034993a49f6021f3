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
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError, UserError
from trainer.errors import MissingPackageError, StorageError
from trainer.mirror.contents import (
    FILES,
    DamagedCopyError,
    Manifest,
    StoredFile,
    is_constant,
    read_manifest,
)

OWNER = "owner.json"
MANIFESTS = "manifests"
FILES_AT_A_TIME = 8
_COPY = re.compile(r"(\d{6,})_(\d+)_([0-9a-f]{8})")
_CONSTANT = re.compile(r"constant_[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True, order=True)
class StoredCopy:
    """A copy of a checkpoint, of which later ones are greater."""

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
        self._fs, self._root = _open(self.url)
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
        for some in _batches(files):
            names = [self._path(name) for _, name in some]
            self._fs.put([str(path) for path, _ in some], names, callback=_telling(moved))

    def get_files(self, files: Sequence[tuple[str, Path]]) -> None:
        """Copies objects to files, whose folders are made."""
        for _, path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        for some in _batches(files):
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


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Turns whatever a store raises into an error for the user.

    Raises:
        OSError: if its body raises an error that is not for the user yet.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Each package has errors of its own.
        raise StorageError(
            f"The store of --mirror must be there, and be open to this program; got {url}: "
            f"{short(error)}. Correct the URL, the credentials, the network or the disk; then the "
            "same command goes on."
        ) from error


def short(error: Exception) -> str:
    """The type and the message of an error, without what may be a secret in a URL."""
    text = re.sub(r"//[^/@\s]+@", "//***@", f"{type(error).__name__}: {error}")
    return re.sub(r"(https?://[^\s?]+)\?[^\s'\"]+", r"\1?***", text).rstrip(".")[:500]


def _manifest_of(copy: StoredCopy) -> str:
    return f"{MANIFESTS}/{copy.name}.json"


def _open(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise _missing("fsspec", url) from error
    protocol = url.partition("://")[0]
    options: dict[str, Any] = {"auto_mkdir": True} if protocol in ("file", "local") else {}
    try:
        # What another program has written must be seen.
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        raise _missing(str(error), url) from error
    except ValueError as error:
        raise InputError(
            f"mirror must be a URL of a store that fsspec knows; got {url}: {error}. Use for "
            "example gs://, s3://, or file:// for a folder."
        ) from error
    if options and not Path(root).parent.is_dir():
        # A disk that is not mounted holds nothing: a run would begin anew beside its copies.
        raise StorageError(
            f"The folder above that of a --mirror must exist; got {url}, without "
            f"{Path(root).parent}. Mount the disk, or make that folder."
        )
    return fs, root.rstrip("/")


def _missing(what: str, url: str) -> MissingPackageError:
    return MissingPackageError(
        f"--mirror {url} must have the packages of its store; got none ({what.rstrip('.')}). "
        "Install the extra: pip install -e '.[stores]'. Or leave the flag out."
    )


def _batches(files: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """What is copied at once. Packages take all that they are given, with a buffer for each."""
    for first in range(0, len(files), FILES_AT_A_TIME):
        yield files[first : first + FILES_AT_A_TIME]


def _telling(moved: Callable[[], None]) -> Any:
    from fsspec.callbacks import Callback

    class Telling(Callback):
        def relative_update(self, inc: int = 1) -> None:
            moved()

        def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Callback:
            return Telling()

    return Telling()

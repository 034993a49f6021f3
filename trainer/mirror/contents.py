"""What of a run folder is copied to a store: all that it takes to go on, to sample and to export.

Imports no jax.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.durable import replace_text
from trainer.run.folder import CHECKSUMS_FILE, FROZEN_FOLDER, KEPT_FOLDER, METRICS_FILE
from trainer.run.mesh import MESH_FILE
from trainer.run.settings import CHECKPOINTS_FOLDER, CONFIG_FILE
from trainer.run.trackers import MLFLOW_FILE, WANDB_FILE
from trainer.run.versions import VERSIONS_FILE

PART_BYTES = 1 << 24
"""How much of a file is read at once for its checksum."""
FILES = "files"
"""Where a store has the files of all copies."""
ID_FILE = "mirror.json"
"""Tells whether a folder and a store hold the same run."""
TEXTS = (
    *(CONFIG_FILE, MESH_FILE, VERSIONS_FILE, METRICS_FILE, ID_FILE),
    *(WANDB_FILE, MLFLOW_FILE),
)
"""Files that change while a run trains. Its lock and the errors of its processes stay there."""
CONSTANT_FOLDERS = (FROZEN_FOLDER, KEPT_FOLDER)
"""Folders that stay as they are from the beginning of a run on, and are copied once."""


class DamagedCopyError(RuntimeError):
    """A copy of a checkpoint in a store is not what was copied."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of a run in a store."""

    object: str
    """Where it is, below the URL."""
    bytes: int
    """Its size."""
    sha256: str
    """Its checksum."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All files of a run with one of its checkpoints. The copy is whole where this is."""

    run: str
    """The run, as its `mirror.json` has it."""
    step: int
    """The step of the checkpoint."""
    files: dict[str, StoredFile]
    """The files by their paths in the run folder."""

    def to_json(self) -> bytes:
        """The text of the object."""
        return json.dumps(asdict(self), indent=1).encode()


def read_manifest(text: bytes) -> Manifest:
    """What `Manifest.to_json` wrote.

    Raises:
        DamagedCopyError: if the text is anything else, or names files that a run does not have.
    """
    try:
        values = json.loads(text)
        files = {path: StoredFile(**entry) for path, entry in values["files"].items()}
        manifest = Manifest(run=str(values["run"]), step=int(values["step"]), files=files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCopyError("its manifest cannot be read") from error
    for path, entry in files.items():
        # Whoever can write to the store must not reach other folders of this machine by it.
        if not (_is_of_run(path, manifest.step) and _is_object(str(entry.object))):
            raise DamagedCopyError(f"its manifest names {path!r}, which is no file of a run")
    if not has_checkpoint(files, manifest.step):
        raise DamagedCopyError("its manifest names no file of its checkpoint")
    return manifest


def _is_object(name: str) -> bool:
    return _is_plain(name) and name.startswith(f"{FILES}/") and name.count("/") > 1


def _is_plain(path: str) -> bool:
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)


def _is_of_run(path: str, step: int) -> bool:
    folders = (f"{CHECKPOINTS_FOLDER}/{step}", *CONSTANT_FOLDERS)
    return path in TEXTS or (
        _is_plain(path) and any(path.startswith(f"{folder}/") for folder in folders)
    )


def is_constant(path: str) -> bool:
    """Whether a file stays as it is from the beginning of the run on."""
    return PurePosixPath(path).parts[0] in CONSTANT_FOLDERS


def local_steps(run_dir: Path) -> list[int]:
    """The steps of the whole checkpoints in a run folder, ascending."""
    names = [path.name for path in (run_dir / CHECKPOINTS_FOLDER).glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def texts_of(run_dir: Path) -> dict[str, bytes]:
    """The files that change, as they are now."""
    texts = {name: (run_dir / name).read_bytes() for name in TEXTS if (run_dir / name).is_file()}
    if METRICS_FILE in texts:  # Its last line may just be being written.
        lines = texts[METRICS_FILE]
        texts[METRICS_FILE] = lines[: lines.rfind(b"\n") + 1]
    return texts


def files_of(run_dir: Path, step: int) -> dict[str, int]:
    """All other files that a checkpoint needs: their sizes by their paths in the run folder."""
    sizes = {}
    for folder in (f"{CHECKPOINTS_FOLDER}/{step}", *CONSTANT_FOLDERS):
        for path in sorted((run_dir / folder).rglob("*")):
            with suppress(FileNotFoundError):  # It may be removed meanwhile.
                if path.is_file():
                    sizes[path.relative_to(run_dir).as_posix()] = path.stat().st_size
    return sizes


def has_checkpoint(paths: Iterable[str], step: int) -> bool:
    """Whether there is a file of the checkpoint among those of a run."""
    return any(path.startswith(f"{CHECKPOINTS_FOLDER}/{step}/") for path in paths)


def checksums_of(step: int) -> str:
    """The path of the checksums of a checkpoint in a run folder."""
    return f"{CHECKPOINTS_FOLDER}/{step}/{CHECKSUMS_FILE}"


def digest(path: Path, moved: Callable[[int], None] = lambda _: None) -> tuple[int, str]:
    """The size and the checksum of a file. `moved` is told how much has been read, by parts."""
    checksum, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            checksum.update(part)
            size += len(part)
            moved(size)
    return size, checksum.hexdigest()


def is_set_aside(run_dir: Path, manifest: Manifest) -> bool:
    """Whether a damaged checkpoint, renamed, is the very one that was copied."""
    folder = f"{CHECKPOINTS_FOLDER}/{manifest.step}"
    names = {path: x for path, x in manifest.files.items() if path.startswith(f"{folder}/")}
    for other in (run_dir / CHECKPOINTS_FOLDER).glob(f"{manifest.step}.*"):
        with suppress(OSError):
            if all(
                digest(other / path.removeprefix(f"{folder}/")) == (x.bytes, x.sha256)
                for path, x in names.items()
            ):
                return True
    return False


def read_id(run_dir: Path) -> str | None:
    """The run that a folder holds; None if it has never been copied to a store."""
    try:
        return str(json.loads((run_dir / ID_FILE).read_text())["run"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_id(run_dir: Path, run: str) -> None:
    """Says which run a folder holds."""
    values: dict[str, Any] = {"run": run}
    replace_text(run_dir / ID_FILE, json.dumps(values))

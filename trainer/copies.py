"""Copies of the checkpoints of a run in a store, by fsspec.

    python -m trainer.copies gs://bucket/runs/mine runs/mine           # fetches the newest copy
    python -m trainer.copies gs://bucket/runs/mine runs/mine --step 400

URL is the --mirror of the run, which may still be training. FOLDER is a new folder, which sample.py
and trainer.gpt.export take. train.py fetches by itself, with --mirror.

A store holds, for the copy of step 400,

    400/...                 the files of the run that change, and checkpoints/400
    constant/...            the files that all checkpoints share
    400/files.json          written last: the run, and size and SHA-256 of every file
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated

import tyro

from startrail_jax.errors import InputError
from trainer import durable
from trainer.config import TrainConfig
from trainer.errors import RunError, StorageError
from trainer.places import check_folder, check_mirror, is_of_disk
from trainer.printable import printable, say
from trainer.run.commands import command
from trainer.run.folder import (
    FROZEN_FOLDER,
    KEPT_FOLDER,
    MESH_FILE,
    METRICS_FILE,
    VERSIONS_FILE,
    locked,
    require_writable,
)
from trainer.run.settings import CHECKPOINTS_FOLDER, CONFIG_FILE
from trainer.run.trackers import MLFLOW_FILE, WANDB_FILE
from trainer.sums import sha256_of
from trainer.urls import batches, open_url, reading_store, short

ID_FILE = "mirror.json"
"""Tells whether a folder and a store hold the same run."""
CHANGING_FILES = (
    *(CONFIG_FILE, MESH_FILE, VERSIONS_FILE, METRICS_FILE, ID_FILE, WANDB_FILE, MLFLOW_FILE),
)
CONSTANT_FOLDERS = (FROZEN_FOLDER, KEPT_FOLDER)
"""Folders that stay as they are from the beginning of a run on."""
CONSTANT, MANIFEST = "constant", "files.json"
FETCHED = "fetched.part"
"""Folder of a run for what is being fetched, of which nothing counts yet."""
FLAG = "--mirror"

Files = dict[str, tuple[int, str]]
"""Size and SHA-256 of the files of a run, by their paths in its folder."""


class DamagedCopyError(RuntimeError):
    """A copy of a checkpoint in a store is not what was copied."""


class Store:
    """The folder of a store with the copies of one run."""

    def __init__(self, url: str) -> None:
        """Opens it; nothing is written.

        Raises:
            ImportError: if a package is missing.
            ValueError: if fsspec does not know the kind of store, or the folder holds other files.
            OSError: if the folder above it does not exist on a disk.
        """
        self.url = url.rstrip("/")
        self.fs, self.root = open_url(self.url, FLAG)
        if is_of_disk(self.url) and not Path(self.root).parent.is_dir():
            # A disk that is not mounted holds nothing: a run would begin anew beside its copies.
            raise StorageError(
                f"The folder above that of a --mirror must exist; got {self.url}, without "
                f"{Path(self.root).parent}. Mount the disk, or make that folder."
            )
        others = [x for x in self._names("") if x != CONSTANT and not _is_step(x)]
        if others:
            raise InputError(
                "mirror must name a folder that is empty or holds copies of a run; got "
                f"{self.url}, with {others[0]!r}. Use another."
            )

    def _names(self, folder: str) -> list[str]:
        try:
            paths = self.fs.ls(f"{self.root}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)

    def steps(self) -> list[int]:
        """The steps of the copies that are whole, ascending."""
        names = [name for name in self._names("") if _is_step(name)]
        return sorted(int(name) for name in names if MANIFEST in self._names(name))

    def manifest(self, step: int) -> tuple[str, Files]:
        """The run of a copy, and its files.

        Raises:
            DamagedCopyError: if they cannot be read, or have names that a run does not have.
        """
        try:
            values = json.loads(self.fs.cat_file(f"{self.root}/{step}/{MANIFEST}"))
            files = {str(x): (int(size), str(sha)) for x, (size, sha) in values["files"].items()}
            run = str(values["run"])
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedCopyError(f"its {MANIFEST} cannot be read") from error
        for path in files:
            if not _is_of_run(path, step):
                raise DamagedCopyError(f"its {MANIFEST} names {path!r}, which is no file of a run")
        return run, files

    def place(self, step: int, path: str) -> str:
        """Where a file of a run is in the store."""
        return f"{self.root}/{CONSTANT if _is_constant(path) else step}/{path}"

    def put(self, step: int, run: str, run_dir: Path, known: Files) -> Files:
        """Copies a checkpoint and what it needs; constant files only if the store lacks them.

        Args:
            step: the step of the checkpoint.
            run: the run.
            run_dir: its folder.
            known: its constant files, if this program has copied them or found them in the store.

        Returns:
            Its constant files.
        """
        # Others are added to while they are copied; the last line of one may be half a line.
        texts = {x: (run_dir / x).read_bytes() for x in CHANGING_FILES if (run_dir / x).is_file()}
        if METRICS_FILE in texts:
            texts[METRICS_FILE] = texts[METRICS_FILE][: texts[METRICS_FILE].rfind(b"\n") + 1]
        folders = (f"{CHECKPOINTS_FOLDER}/{step}", *CONSTANT_FOLDERS)
        paths = [x.relative_to(run_dir).as_posix() for x in _files_below(run_dir, folders)]
        files = {x: known.get(x) or _digest(run_dir / x) for x in paths}
        if MANIFEST in self._names(str(step)):  # Of an earlier time at this step.
            self.fs.rm_file(f"{self.root}/{step}/{MANIFEST}")
        there = known or self._constant_files()
        for some in batches([x for x in paths if files[x] != there.get(x)]):
            self.fs.put([str(run_dir / x) for x in some], [self.place(step, x) for x in some])
        for path, data in texts.items():
            self.fs.pipe_file(self.place(step, path), data)
            files[path] = (len(data), hashlib.sha256(data).hexdigest())
        text = json.dumps({"run": run, "files": files}, indent=1)
        self.fs.pipe_file(f"{self.root}/{step}/{MANIFEST}", text.encode())
        return {x: y for x, y in files.items() if _is_constant(x)}

    def _constant_files(self) -> Files:
        """The constant files of the newest copy; none if there is no whole copy."""
        try:
            _, files = self.manifest(self.steps()[-1])
        except (IndexError, DamagedCopyError):
            return {}
        return {x: y for x, y in files.items() if _is_constant(x)}

    def prune(self, step: int, keep: int) -> None:
        """Removes all copies but the newest ones up to a step; of each, first its manifest."""
        whole = self.steps()
        left = [x for x in whole if x <= step][-keep:]
        for name in self._names(""):
            if _is_step(name) and int(name) not in left:
                if int(name) in whole:
                    self.fs.rm_file(f"{self.root}/{name}/{MANIFEST}")
                self.fs.rm(f"{self.root}/{name}", recursive=True)


class Copies:
    """Copies checkpoints to a store while a run trains. A context manager, which waits at its end.

    What fails is said, and left for the next checkpoint: training goes on. One program at a time
    may copy a run.
    """

    def __init__(self, url: str | None, run_dir: Path, *, keep: int) -> None:
        """Opens the store.

        Args:
            url: the store; None to copy nothing.
            run_dir: the folder of the run.
            keep: number of copies to keep.

        Raises:
            OSError: if the store cannot be read.
            RuntimeError: if it holds another run.
        """
        self._url, self._run_dir, self._keep = url, run_dir, keep
        self._newest = self._copied = self._copying = -1
        self._constant: Files = {}
        self._threads = ThreadPoolExecutor(1, "copies")
        self._last: Future[None] | None = None
        self._store: Store | None = None
        if url is None:
            return
        with reading_store(url, FLAG):
            self._store = Store(url)
            require_same_run(self._store, run_dir)
        # Of a folder without checkpoints, the id is that of a run that was removed.
        known = _read_id(run_dir) if _local_steps(run_dir) else None
        self._run = known or secrets.token_hex(8)
        durable.replace_text(run_dir / ID_FILE, json.dumps({"run": self._run}))

    def __enter__(self) -> Copies:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits until the newest checkpoint is copied.

        Raises:
            OSError: if that fails.
        """
        if self._last is not None and not isinstance(error, KeyboardInterrupt):
            if not self._last.done():
                say(f"waiting until {self._url} has the checkpoint of step {self._newest}")
            self._last.result()
            if self._copied != self._newest:  # The store may be back.
                self._copy(self._newest)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._copied != self._newest:
            message = (
                f"The mirror must have the newest checkpoint; got {self._url} without that of step "
                f"{self._newest}. Keep {self._run_dir}, and start the same command again when the "
                "store can be reached: it copies what is missing."
            )
            if error is None:
                raise StorageError(message)
            say(f"WARNING: {message}")

    def begin(self, step: int) -> None:
        """Copies the checkpoint that a run goes on from, if the store lacks it.

        Raises:
            OSError: if the store cannot be read.
        """
        if self._store is not None and step:
            with reading_store(self._store.url, FLAG):
                is_there = step in self._store.steps()
            if not is_there:
                self.add(step)

    def add(self, step: int) -> None:
        """Copies a checkpoint, which is whole, in a thread."""
        if self._store is not None:
            self._newest = step
            self._last = self._threads.submit(self._copy, step)

    def holds(self, step: int) -> bool:
        """Whether a checkpoint is being copied, and must stay where it is."""
        return step == self._copying

    def _copy(self, step: int) -> None:
        assert self._store is not None
        if step != self._newest:  # A newer one waits.
            return
        self._copying = step
        try:
            self._constant = self._store.put(step, self._run, self._run_dir, self._constant)
            self._copied = step
            self._store.prune(step, self._keep)
        except Exception as error:  # Each package of a store has errors of its own.
            say(
                f"WARNING: copying the checkpoint of step {step} to {self._url} failed: "
                f"{short(error)}. The run goes on, and {self._run_dir} has everything"
            )
        finally:
            self._copying = -1


# Fetching ----------------------------------------------------------------------------------------


def preparation(config: TrainConfig) -> Callable[[], None] | None:
    """What brings the checkpoints of a run into its folder before it begins; None if nothing does.

    Raises:
        ValueError: if the run has a mirror and no steps, or one in its data.
    """
    url = config.mirror
    if url is None or config.plan == "show":
        return None
    if not config.steps:
        raise InputError(
            f"mirror copies the checkpoints of a run that trains; got mirror={url}, steps=0. Leave "
            "it out: the run that trains copies what was imported."
        )
    return lambda: fetch_newer(url, config.run_dir)


def fetch_newer(url: str, run_dir: Path) -> None:
    """Fetches the newest whole copy of a store if the run folder has no checkpoint as new.

    Raises:
        ValueError: if the store holds anything but copies.
        RuntimeError: if the folder has checkpoints of another run than the store, or another
            program trains there.
        OSError: if the store cannot be read, the folder cannot be written, or the store has
            copies and none is whole.
    """
    with reading_store(url, FLAG):
        store = Store(url)
        require_same_run(store, run_dir)
        local = max(_local_steps(run_dir), default=-1)
        newer = [step for step in store.steps() if step > local]
        if newer:
            require_writable(run_dir)
            with locked(run_dir):
                if not _fetch_newest(store, newer, run_dir) and local < 0:
                    raise _none_whole(store, newer)


def require_same_run(store: Store, run_dir: Path) -> None:
    """Raises RuntimeError if a folder with checkpoints and a store hold different runs."""
    if not _local_steps(run_dir):
        return
    for step in reversed(store.steps()):
        try:
            run, _ = store.manifest(step)
        except DamagedCopyError:
            continue
        if run != _read_id(run_dir):
            raise RunError(
                f"A run and its --mirror must be the same run; got {run_dir} with checkpoints of "
                f"its own, and {store.url} with another run, of step {step}. Use another --mirror "
                "for this run, or another --run-dir for that one."
            )
        return


def _fetch_newest(store: Store, steps: Sequence[int], run_dir: Path) -> bool:
    """Fetches the newest whole one of some copies; returns whether there is one."""
    for step in sorted(steps, reverse=True):
        try:
            _fetch(store, step, run_dir)
            return True
        except (DamagedCopyError, FileNotFoundError) as error:
            say(f"WARNING: the copy of step {step} in {store.url} is damaged: {error}.")
    return False


def _none_whole(store: Store, steps: Sequence[int]) -> StorageError:
    return StorageError(
        f"A store with copies must have a whole one; got none in {store.url}, of steps "
        f"{', '.join(map(str, steps))}. Use another --mirror to begin anew, or a --run-dir that "
        "has checkpoints."
    )


def _fetch(store: Store, step: int, run_dir: Path) -> None:
    """Copies a checkpoint to a run folder, where it appears last, and whole."""
    _, files = store.manifest(step)
    # The constant files may be here already, and large.
    there = {x for x in CONSTANT_FOLDERS if _local_steps(run_dir) and (run_dir / x).is_dir()}
    files = {path: x for path, x in files.items() if path.partition("/")[0] not in there}
    begun = run_dir / FETCHED
    shutil.rmtree(begun, ignore_errors=True)
    size = sum(size for size, _ in files.values())
    say(f"fetching step {step} from {store.url}: {len(files)} files, {size / 1e9:.3g} GB")
    try:
        for path in files:
            (begun / path).parent.mkdir(parents=True, exist_ok=True)
        for some in batches(list(files)):
            store.fs.get([store.place(step, x) for x in some], [str(begun / x) for x in some])
        for path, listed in files.items():
            if _digest(begun / path) != listed:
                raise DamagedCopyError(f"the checksum of {path} is another")
        for path in [begun, *begun.rglob("*")]:
            durable.flush(path)
        for name in (*CONSTANT_FOLDERS, *CHANGING_FILES):
            if (begun / name).exists():
                if (run_dir / name).is_dir():
                    durable.remove(run_dir / name)
                (begun / name).replace(run_dir / name)
        checkpoints = run_dir / CHECKPOINTS_FOLDER
        checkpoints.mkdir(exist_ok=True)
        durable.flush(run_dir)
        (begun / CHECKPOINTS_FOLDER / str(step)).replace(checkpoints / str(step))
        durable.flush(checkpoints)
    finally:
        shutil.rmtree(begun, ignore_errors=True)


# Files of a run ----------------------------------------------------------------------------------


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _is_constant(path: str) -> bool:
    return path.partition("/")[0] in CONSTANT_FOLDERS


def _local_steps(run_dir: Path) -> list[int]:
    return [int(x.name) for x in (run_dir / CHECKPOINTS_FOLDER).glob("*") if _is_step(x.name)]


def _files_below(run_dir: Path, folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        yield from (x for x in sorted((run_dir / folder).rglob("*")) if x.is_file())


def _is_of_run(path: str, step: int) -> bool:
    folders = (f"{CHECKPOINTS_FOLDER}/{step}/", *(f"{x}/" for x in CONSTANT_FOLDERS))
    is_plain = not {"", ".", ".."} & set(path.split("/")) and "\\" not in path
    return path in CHANGING_FILES or (is_plain and path.startswith(folders))


def _digest(path: Path) -> tuple[int, str]:
    return path.stat().st_size, sha256_of(path)


def _read_id(run_dir: Path) -> str | None:
    try:
        return str(json.loads((run_dir / ID_FILE).read_text())["run"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """What to fetch, and where to."""

    url: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")]
    """The --mirror of a run."""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder for the run, which must not exist or be empty."""
    step: int | None = None
    """Step of the checkpoint. The default is the newest one that is whole."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; on a mistake, exits with status 1 or 2."""
    prog = "python -m trainer.copies"
    options = tyro.cli(FetchOptions, prog=prog, description=__doc__, args=arguments)
    url, folder = options.url, options.folder
    check_mirror(url)
    check_folder("FOLDER", folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"FOLDER must not exist or be empty; got {str(folder)!r}. Use another. train.py with "
            "--mirror fetches into the folder of a run."
        )
    with reading_store(url, FLAG):
        store = Store(url)
        chosen = [x for x in store.steps() if options.step in (None, x)]
        if not chosen:
            raise InputError(
                f"URL must be a mirror with {f'step {options.step}' if options.step else 'copies'};"
                f" got {url}, with {', '.join(map(str, store.steps())) or 'none'}. Use the "
                "--mirror of a run, and one of its steps."
            )
        require_writable(folder)
        if not _fetch_newest(store, chosen, folder):
            raise _none_whole(store, chosen)
    print(printable(f"next: {command('sample.py', folder)}"))
    print(printable(f"next: {command('train.py', folder / CONFIG_FILE)} --run-dir {folder}"))


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        main()

"""Copies the checkpoints of a run to a store, and fetches them again, by fsspec: --mirror URL.

The store holds

    URL/mirror.json         which run it is
    URL/400/...             checkpoints/400, and the files of the run that change
    URL/400.json            written last: the size of every file
    URL/constant/...        the files that all checkpoints share, copied once
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from startrail_jax.errors import InputError, UserError
from trainer import durable
from trainer.checkpoints.checkpoint import UNFLUSHED
from trainer.errors import RunError, StorageError
from trainer.places import is_of_disk, short
from trainer.printable import say
from trainer.run import folder
from trainer.run.settings import CHECKPOINTS_FOLDER

ID_FILE = "mirror.json"
CONSTANT = (f"{folder.FROZEN_FOLDER}/", f"{folder.KEPT_FOLDER}/")


class Mirror:
    """The copies of a run in a store; of none if `url` is None. A context manager. One program at a
    time may copy a run."""

    def __init__(self, url: str | None, run_dir: Path, *, keep: int) -> None:
        """Opens the store of a run, for some number of copies; nothing is written."""
        self._url, self._run_dir, self._keep = url, run_dir, keep
        self._newest = self._copied = self._copying = 0
        self._threads, self._last = ThreadPoolExecutor(1, "mirror"), Future[None]()
        if url is None:
            return
        with self._reading():
            import fsspec

            # Each file at a time has a buffer. What another program has written must be seen.
            options = {"auto_mkdir": True} if is_of_disk(url) else {"batch_size": 8}
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
            self._root = root.rstrip("/")
            if is_of_disk(url) and not Path(root).parent.is_dir():  # A disk that is not mounted.
                raise StorageError(
                    f"The folder above that of a --mirror must exist; got {url}. Mount the disk, "
                    "or make that folder."
                )
            names = self._names()
            there = self._fs.cat_file(f"{self._root}/{ID_FILE}") if ID_FILE in names else b""
        if names and not there:
            raise InputError(
                "mirror must name a folder that is empty or holds copies of a run; got "
                f"{url}, with {names[0]!r}. Use another."
            )
        steps = [x.name for x in (run_dir / CHECKPOINTS_FOLDER).glob("*") if x.name.isdecimal()]
        self._local, ours = max(map(int, steps), default=0), run_dir / ID_FILE
        if self._local and there and not (ours.is_file() and ours.read_bytes() == there):
            raise RunError(
                f"A run and its --mirror must be the same run; got {run_dir} with checkpoints of "
                f"its own, and {url} with another run. Use another --mirror for this run, or "
                "another --run-dir for that one."
            )
        self._id = there or json.dumps({"run": secrets.token_hex(8)}).encode()

    def fetch(self) -> None:
        """Fetches the newest whole copy, if it is newer than the checkpoints of the run folder.
        Raises OSError if a file of it cannot be read, RuntimeError if another program trains there.
        """
        with self._reading():
            step = max(self._steps(), default=0)
            if step <= self._local:
                return
            files, checkpoints = self._marker(step), self._run_dir / CHECKPOINTS_FOLDER
            size = sum(files.values()) / 1e9
            say(f"fetching step {step} from {self._url}: {len(files)} files, {size:.3g} GB")
            # It appears last, and whole.
            last, part = checkpoints / f"{step}", checkpoints / f"{UNFLUSHED}_{step}"
            paths = [str(self._run_dir / x) for x in files]
            here = [Path(x.replace(f"{last}/", f"{part}/")) for x in paths]
            if all(".." not in x.parts and self._run_dir in x.parents for x in here):
                folder.require_writable(self._run_dir)
                with folder.locked(self._run_dir):
                    for path in here:
                        path.parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get([self._path(step, x) for x in files], [str(x) for x in here])
                    if [x.stat().st_size for x in here] == list(files.values()):
                        for path in here:
                            durable.flush(path)
                        durable.rename(part, last)
                        return
        raise StorageError(
            f"A copy of a run must have the files that its {step}.json lists; got others in "
            f"{self._url}. Remove that file from the store to use the copy before."
        )

    def begin(self, step: int) -> None:
        """Copies the checkpoint that a run goes on from, if there is one and the store lacks it."""
        if self._url is not None:
            (self._run_dir / ID_FILE).write_bytes(self._id)
            with self._reading():
                if step and step not in self._steps():
                    self.add(step)

    def add(self, step: int) -> None:
        """Copies a checkpoint, which is whole, in a thread; what fails is said."""
        if self._url is not None:
            self._newest = step
            self._last = self._threads.submit(self._copy, step)

    def holds(self, step: int) -> bool:
        """Whether a checkpoint is being copied, and must stay where it is."""
        return step == self._copying

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Waits until the newest checkpoint is copied; raises OSError if that fails."""
        waits = not isinstance(error, KeyboardInterrupt)
        if waits and self._newest and not self._last.done():
            say(f"waiting until {self._url} has the checkpoint of step {self._newest}")
        self._threads.shutdown(waits, cancel_futures=not waits)
        if self._copied != self._newest and error is None:
            raise StorageError(
                f"The mirror must have the newest checkpoint; got {self._url} without that of step "
                f"{self._newest}. Keep {self._run_dir}, and start the same command again when the "
                "store can be reached: it copies what is missing."
            )

    def _copy(self, step: int) -> None:
        if step != self._newest:  # A newer one waits.
            return
        self._copying = step
        try:
            self._put(step)
            self._copied, whole = step, self._steps()
            kept = [x for x in whole if x <= step][-self._keep :]
            for old in {int(x) for x in self._names() if x.isdecimal()}.difference(kept):
                if old in whole:
                    self._fs.rm_file(f"{self._root}/{old}.json")
                self._fs.rm(f"{self._root}/{old}", recursive=True)
        except Exception as error:  # Each package of a store has errors of its own.
            say(
                f"WARNING: copying the checkpoint of step {step} to {self._url} failed: "
                f"{short(error)}. The run goes on, and {self._run_dir} has everything"
            )
        finally:
            self._copying = 0

    def _put(self, step: int) -> None:
        ours, whole, files = self._run_dir, self._steps(), dict[str, int]()
        for part in (f"{CHECKPOINTS_FOLDER}/{step}", *CONSTANT):
            paths = [x for x in (ours / part).rglob("*") if x.is_file()]
            files |= {x.relative_to(ours).as_posix(): x.stat().st_size for x in paths}
        there = self._marker(whole[-1]) if whole else {}
        if step in whole:  # Of an earlier time at this step.
            self._fs.rm_file(f"{self._root}/{step}.json")
        self._fs.pipe_file(f"{self._root}/{ID_FILE}", self._id)
        new = [x for x in files if x not in there or not x.startswith(CONSTANT)]
        self._fs.put([str(ours / x) for x in new], [self._path(step, x) for x in new])
        for path in [x for x in ours.iterdir() if x.suffix in (".json", ".jsonl")]:
            data = path.read_bytes()  # Of metrics.jsonl there may be more meanwhile.
            self._fs.pipe_file(self._path(step, path.name), data)
            files[path.name] = len(data)
        self._fs.pipe_file(f"{self._root}/{step}.json", json.dumps(files, indent=1).encode())

    def _path(self, step: int, path: str) -> str:
        return f"{self._root}/{'constant' if path.startswith(CONSTANT) else step}/{path}"

    def _marker(self, step: int) -> dict[str, int]:
        return json.loads(self._fs.cat_file(f"{self._root}/{step}.json"))

    def _names(self) -> list[str]:
        try:
            return [Path(x).name for x in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def _steps(self) -> list[int]:
        """The steps of the copies that are whole, ascending."""
        stems = [x.removesuffix(".json") for x in self._names() if x.endswith(".json")]
        return sorted(int(x) for x in stems if x.isdecimal())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns whatever a store raises into an error for the user."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # Each package has errors of its own.
            raise StorageError(
                "The store of --mirror must be open to this program, and its newest copy whole; "
                f"got {self._url}: {short(error)}. Correct the URL, its package (for gs:// and "
                "s3://: pip install -e '.[stores]'), the credentials, the network or the disk."
            ) from error

"""Copies the checkpoints of a run to a store while the run trains, in a thread."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer.checkpoints.background import Copier
from trainer.config import TrainConfig
from trainer.errors import RunError, StorageError
from trainer.mirror.contents import (
    FILES,
    Manifest,
    StoredFile,
    is_constant,
    is_set_aside,
    local_steps,
    read_id,
    write_id,
)
from trainer.mirror.fetch import after, require_same_run
from trainer.mirror.job import Job, LostError, begin_job
from trainer.mirror.store import Store, StoredCopy, reading
from trainer.stores import short

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds between two attempts to copy."""
PATIENCE = 600.0
"""Seconds that the end of a program waits for a copy of which nothing arrives."""
PATIENCE_AFTER_FAILURE = 5.0
"""The same after an error. Other processes hear of it, and end, only then."""
SHOW_SECONDS = 30.0


class TakenError(RunError):
    """Another program copies to the store now."""


def mirroring(
    config: TrainConfig, *, is_first: bool, note: Callable[[str], object]
) -> AbstractContextManager[Copier]:
    """What copies the checkpoints of a run, in its first process; nothing without a mirror."""
    if config.mirror is None or not is_first:
        return nullcontext(Copier())
    return Mirror(config.mirror, config.run_dir, keep=config.checkpoint.keep, note=note)


class Mirror(Copier):
    """Copies checkpoints to a store. A context manager, which owns the store and waits at its end.

    What fails is tried again, or left for the next checkpoint: training goes on.
    """

    extra = 1

    def __init__(
        self,
        url: str,
        run_dir: Path,
        *,
        keep: int,
        note: Callable[[str], object],
        patience: float = PATIENCE,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        """Opens the store; `__enter__` begins.

        Args:
            url: the folder in the store.
            run_dir: the folder of the run, which is locked, and has what the store has.
            keep: number of checkpoints to keep in the store.
            note: is told what the user must know, in the thread that calls `check`.
            patience: seconds that the end waits for a copy of which nothing arrives.
            first_pause: seconds between the first two attempts to copy.

        Raises:
            ImportError, ValueError: as `Store`.
        """
        self._store = Store(url)
        self._run_dir = run_dir
        self._keep = keep
        self._note = note
        self._patience = patience
        self._first_pause = first_pause
        self._run = ""
        self._before: list[int] = []
        self._owner: dict[str, Any] = {
            "program": secrets.token_hex(4),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._constant: dict[str, StoredFile] | None = None
        self.thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        """The thread that copies."""
        # What two threads use, under the lock of `_changed`.
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._next: Job | None = None
        self._newest: int | None = None
        self._copied: int | None = None
        self._lost: int | None = None
        self._keeps_all = False
        self._arrived = 0
        self.is_failing = False
        """Whether the last attempt to copy has failed."""
        self._closes = False
        self._has_ended = False
        self._lines: list[str] = []
        self._taken: TakenError | None = None

    # In the thread of the loop.

    def __enter__(self) -> Mirror:
        """Takes the store.

        Raises:
            OSError: if the store cannot be read or written.
            RuntimeError: if the store holds another run.
        """
        store, url = self._store, self._store.url
        with reading(url):
            copies = store.copies()
            self._before = local_steps(self._run_dir)
            if copies and not self._before:
                raise RunError(
                    f"A run folder must have what its --mirror has; got {self._run_dir} without a "
                    f"checkpoint, and {url} with step {copies[-1].step}, which another program "
                    "has just copied. Use another --mirror, or start again."
                )
            require_same_run(store, copies, self._run_dir)
            # Of a folder without checkpoints, the id is of a run that somebody has removed.
            known = read_id(self._run_dir) if self._before else None
            self._run = known or secrets.token_hex(8)
            write_id(self._run_dir, self._run)
            before = store.owner()
            if before is not None and not before.get("ended"):
                self._note(
                    f"NOTE: {_describe(before)} has copied to {url} and has not said that it ended "
                    "there. This program takes the store; if that one still trains, it ends at "
                    "its next checkpoint."
                )
            self._write_owner(ended=False)
        # The end of the program does not wait for this thread longer than `__exit__`.
        self.thread.start()
        return self

    def begin(self) -> None:
        """Has the newest checkpoint copied if the store lacks it.

        Raises:
            OSError: if the store cannot be read.
            RuntimeError: if newer checkpoints were set aside as damaged, and the store has a copy.
        """
        newest = max(local_steps(self._run_dir), default=None)
        if newest is None:
            return
        with reading(self._store.url):
            copies = self._store.copies()
            self._require_newest(copies, newest)
            is_there = bool(copies) and self._store.is_whole(copies[-1])
        if is_there and copies[-1].step > newest:
            self._note(
                f"WARNING: {self._store.url} has the newer step {copies[-1].step}, while this run "
                f"goes on from step {newest}, whose copy becomes the newest. The other one is kept "
                "as long as --checkpoint.keep lets it: python -m trainer.mirror.fetch, with --step "
                f"{copies[-1].step}, gets it."
            )
        if not is_there or copies[-1].step != newest:
            self.add(newest)

    def _require_newest(self, copies: Sequence[StoredCopy], newest: int) -> None:
        """Raises RunError if the store has what the run set aside as damaged since it began."""
        for copy in reversed(after(newest, copies)):
            if copy.step > max(self._before, default=-1) or not self._store.is_whole(copy):
                continue
            # What is damaged in the store in the same way helps nobody.
            if not is_set_aside(self._run_dir, self._store.manifest(copy)):
                raise RunError(
                    f"A run must go on from its newest whole checkpoint; got step {newest} in "
                    f"{self._run_dir}, where newer ones were damaged and are set aside, and step "
                    f"{copy.step} in {self._store.url}. Start the same command again: it fetches "
                    "that one."
                )
            return

    def check(self) -> None:
        """Says what there is to say.

        Raises:
            RuntimeError: if another program has taken the store.
        """
        self._say_lines()
        if self._taken is not None:
            raise self._taken

    def _say_lines(self) -> None:
        with self._changed:
            lines, self._lines = self._lines, []
        for line in lines:
            self._note(line)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits until the newest checkpoint is copied, as long as anything arrives.

        Raises:
            OSError: if the store lacks it all the same.
            RuntimeError: if another program has taken the store.
        """
        has_failed = error is not None
        patience = min(self._patience, PATIENCE_AFTER_FAILURE) if has_failed else self._patience
        try:
            # After a second Ctrl-C, the user waits no longer.
            self._wait(0.0 if isinstance(error, KeyboardInterrupt) else patience)
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()
        has_newest = self._copied == self._newest
        # It says only that nobody copies any more. A store that hangs would hang here again.
        if self._taken is None and has_newest:
            with suppress(Exception):
                self._require_owner()
                self._write_owner(ended=True)
        self._say_lines()
        if self._taken is not None and not has_failed:
            raise self._taken
        if has_newest or self._taken is not None:
            return
        has = "does not have any more" if self._lost == self._newest else "has"
        message = (
            f"The mirror must have the newest checkpoint; got {self._store.url} without that of "
            f"step {self._newest}, which {self._run_dir} {has}. Keep that folder, and start the "
            "same command again when the store can be reached: it copies what is missing."
        )
        if not has_failed:
            raise StorageError(message)
        self._note(f"WARNING: {message}")

    def _wait(self, patience: float) -> None:
        url, arrived, since = self._store.url, -1, time.monotonic()
        shown = float("-inf")
        with self._changed:
            self._closes = True
            self._changed.notify_all()
            while (self._job or self._next) and self._taken is None:
                now = time.monotonic()
                if self._arrived != arrived:
                    arrived, since = self._arrived, now
                if now - since >= patience:
                    return
                if now - shown > SHOW_SECONDS:
                    shown = now
                    self._note(f"waiting until {url} has the checkpoint of step {self._newest}")
                self._changed.wait(min(patience, 1.0))
                self._say_lines()

    # In any thread.

    def add(self, step: int) -> None:
        job = begin_job(self._run_dir, step)
        with self._changed:
            self._next, self._newest = job, step
            self._changed.notify_all()

    def holds(self, step: int) -> bool:
        with self._changed:
            return any(job is not None and job.step == step for job in (self._job, self._next))

    # In the thread that copies.

    def _work(self) -> None:
        pause = self._first_pause
        while (job := self._take_job()) is not None:
            try:
                self._copy(job)
            except TakenError as error:
                with self._changed:
                    self._taken = error
                    self._changed.notify_all()
                return
            except LostError:
                self._drop(job)
            except Exception as error:  # Each package has errors of its own.
                self._say_failure(job, error)
                with self._changed:
                    self._changed.wait_for(lambda: self._next or self._has_ended, pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                pause = self._first_pause
                with self._changed:
                    if self.is_failing:
                        self._lines.append(f"{self._store.url} has caught up, with step {job.step}")
                    self._job, self.is_failing = None, False
                    self._changed.notify_all()

    def _take_job(self) -> Job | None:
        """The newest checkpoint; else one that failed; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._next or self._job or self._closes)
            if self._has_ended:
                return None
            if self._next is not None:
                self._job, self._next = self._next, None
            return self._job

    def _say_failure(self, job: Job, error: Exception) -> None:
        with self._changed:
            if not self.is_failing:
                self._lines.append(
                    f"WARNING: the upload of the checkpoint of step {job.step} to "
                    f"{self._store.url} failed: {short(error)}. It is tried again while the run "
                    f"goes on; {self._run_dir} has everything"
                )
            self.is_failing = True

    def _drop(self, job: Job) -> None:
        with self._changed:
            self._lines.append(
                f"WARNING: {self._store.url} does not get the checkpoint of step {job.step}: its "
                f"files in {self._run_dir} are gone, or have changed. Earlier copies stay there"
            )
            self._job, self._lost = None, job.step
            self._changed.notify_all()

    def _copy(self, job: Job) -> None:
        """Copies a checkpoint, and removes older ones. It may be called again if it fails.

        Raises:
            TakenError: if another program has taken the store.
            LostError: if files of the checkpoint are gone or have changed.
        """
        store, program = self._store, self._owner["program"]
        job.require_same_files(self._constant or ())
        if job.copy is None:
            number = max((copy.number for copy in store.copies()), default=0) + 1
            job.copy = StoredCopy(number=number, step=job.step, program=program)
        folder = f"{FILES}/{job.copy.name}"
        known = store.constants() if self._constant is None else self._constant
        job.describe_files(known, is_sure=self._constant is not None, moved=self._note_part)
        there: dict[str, int] = {}
        for name in {file.object.split("/")[1] for file in job.files.values()}:
            there |= store.sizes(name)
        missing = [
            (self._run_dir / path, file.object)
            for path, file in job.files.items()
            if there.get(file.object) != file.bytes
        ]
        store.put_files(missing, self._note_part)
        texts = {}
        for path, data in job.texts.items():
            store.put_bytes(f"{folder}/{path}", data)
            checksum = hashlib.sha256(data).hexdigest()
            texts[path] = StoredFile(object=f"{folder}/{path}", bytes=len(data), sha256=checksum)
            job.note_arrival(path, self._note_part)
        job.require_same_files(self._constant or ())
        self._require_owner()
        manifest = Manifest(run=self._run, step=job.step, files={**texts, **job.files})
        store.put_manifest(job.copy, manifest)
        with self._changed:
            self._copied = job.step
        self._constant = {path: x for path, x in job.files.items() if is_constant(path)}
        try:
            self._require_owner()
            store.prune(self._keep)
        except TakenError:
            raise
        except Exception as error:  # The copy is whole all the same. The next one tries again.
            self._say_kept(error)

    def _say_kept(self, error: Exception) -> None:
        with self._changed:
            if not self._keeps_all:
                self._lines.append(
                    f"WARNING: old copies in {self._store.url} could not be removed: "
                    f"{short(error)}. That is tried again after each copy"
                )
            self._keeps_all = True

    def _note_part(self) -> None:
        with self._changed:
            self._arrived += 1

    # The owner of the store.

    def _write_owner(self, *, ended: bool) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._store.write_owner({**self._owner, "run": self._run, "time": now, "ended": ended})

    def _require_owner(self) -> None:
        owner = self._store.owner()
        if owner is None:  # Somebody has removed it.
            self._write_owner(ended=False)
        elif owner.get("program") != self._owner["program"]:
            raise TakenError(
                f"One program at a time may copy to a --mirror; got {self._store.url}, which "
                f"{_describe(owner)} has taken. Let one of the two go on; this one has its "
                f"checkpoints in {self._run_dir}, and may go on with another --mirror."
            )


def _describe(owner: dict[str, Any]) -> str:
    """A program, in words."""
    return f"process {owner.get('pid')} of {owner.get('host')}, since {owner.get('time')},"

"""A checkpoint that is to be copied to a store, and what has been found out of its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trainer.mirror.contents import (
    FILES,
    StoredFile,
    checksums_of,
    digest,
    files_of,
    has_checkpoint,
    is_constant,
    texts_of,
)
from trainer.mirror.store import StoredCopy


class LostError(RuntimeError):
    """A checkpoint is no longer what it was when it was to be copied."""


@dataclass(kw_only=True)
class Job:
    """A checkpoint that is to be copied."""

    run_dir: Path
    """The folder of the run."""
    step: int
    """The step of the checkpoint."""
    texts: dict[str, bytes]
    """The files that change, as they were when the checkpoint became whole."""
    has_checksums: bool
    """Whether it had the file of its checksums then. Checkpoints of old runs have none."""
    copy: StoredCopy | None = None
    """What becomes of it in the store."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The sizes of the other files when they were first looked at."""
    files: dict[str, StoredFile] = field(default_factory=dict)
    """What is known of them."""
    arrived: set[tuple[str, int]] = field(default_factory=set)
    """What has counted as arrival. Each thing counts once, however often it is tried."""

    def require_same_files(self, constant: Iterable[str]) -> None:
        """Looks at the names and the sizes of the files.

        Args:
            constant: files that were there before, and never change.

        Raises:
            LostError: if files of the checkpoint are gone or have changed.
        """
        sizes = files_of(self.run_dir, self.step)
        self.sizes = self.sizes or sizes
        needed = {*constant, *([checksums_of(self.step)] if self.has_checksums else [])}
        if not has_checkpoint(sizes, self.step) or sizes != self.sizes or needed - sizes.keys():
            raise LostError

    def describe_files(
        self, known: Mapping[str, StoredFile], *, is_sure: bool, moved: Callable[[], None]
    ) -> None:
        """Notes size, checksum and object of each file.

        Args:
            known: the constant files that the store has.
            is_sure: whether those are the files of this run folder.
            moved: is called whenever a part of a file has been read for the first time.

        Raises:
            LostError: if a file has changed.
        """
        assert self.copy is not None
        for path, listed in self.sizes.items():
            if path in self.files:
                continue
            there = known.get(path)
            if there is not None and is_sure:
                self.files[path] = there
                continue
            note = partial(self.note_arrival, path, moved)
            size, checksum = digest(self.run_dir / path, note)
            if size != listed:
                raise LostError
            if there is not None and (there.bytes, there.sha256) == (size, checksum):
                self.files[path] = there
                continue
            folder = self.copy.name
            if is_constant(path):
                folder = f"constant_{self.copy.program}"
            name = f"{FILES}/{folder}/{path}"
            self.files[path] = StoredFile(object=name, bytes=size, sha256=checksum)

    def note_arrival(self, path: str, moved: Callable[[], None], amount: int = -1) -> None:
        """Has something count as arrival, once: a file, or what has been read of it."""
        if (path, amount) not in self.arrived:
            self.arrived.add((path, amount))
            moved()


def begin_job(run_dir: Path, step: int) -> Job:
    """Begins to copy a checkpoint, which is whole."""
    has_checksums = (run_dir / checksums_of(step)).is_file()
    texts = texts_of(run_dir)
    return Job(run_dir=run_dir, step=step, texts=texts, has_checksums=has_checksums)

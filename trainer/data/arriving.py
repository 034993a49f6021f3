"""Examples that arrive while a run trains: files that appear in a folder, in the order of their
names."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from startrail_jax.errors import InputError
from trainer.data.dataset import Arriving, Source
from trainer.data.files import RECORD_KINDS, is_gzip, kind_of, list_names
from trainer.data.opening import reading
from trainer.data.order import NO_EXAMPLE, Batch, Collate, changed_order, goes_on
from trainer.sums import sha256_of

LOOK_SECONDS = 0.2
"""Between two looks at the folder."""
SECONDS_TO_SEE = 60.0
"""After the first process has seen a file, the others must see it too."""
SECONDS_TO_SAY = 10.0
"""Before the log says what a run waits for."""


@dataclass(kw_only=True, eq=False)
class _File:
    """The file whose examples are read."""

    name: str
    content: str
    """A hash of it."""
    examples: Source
    batches: int
    """Number of batches that are made of it."""


class ArrivingBatches(Iterator[Batch]):
    """Batches of the files of a folder, each file as often as `Arriving.epochs` says. Files whose
    names come before that of a file that was read are never read."""

    def __init__(
        self,
        data: Arriving,
        *,
        collate: Collate[Batch],
        batch_size: int,
        seed: int,
        rows: Sequence[int],
        gather: Callable[[Any], list[Any]],
        note: Callable[[str], None],
    ) -> None:
        """Opens nothing yet. `gather` gives what each process gives it; the first one looks at the
        folder. `note` is called with warnings. The others are those of `TrainingBatches`."""
        self._data, self._collate, self._note = data, collate, note
        self._batch_size, self._seed, self._rows = batch_size, seed, rows
        self._gather = gather
        self._file: _File | None = None
        # Where the next batch is: in which file, and how many of its batches are done.
        self._name, self._content, self._of, self._done = "", "", 0, 0
        # The files that were there at the last look.
        self._seen: set[str] | None = None

    def wait(self, stops: Callable[[], bool]) -> bool:
        """Waits for the next batch; False if `stops` says so before. All processes must call it."""
        if self._done < self._of:
            self._opened(self._name)
            return True
        said = time.monotonic() + SECONDS_TO_SAY
        while not (name := self._gather(self._next_name())[0]):
            if stops():
                return False
            time.sleep(LOOK_SECONDS)
            if time.monotonic() > said:
                after = f" after {self._name!r}" if self._name else ""
                self._note(f"waiting for a file *.jsonl{after} in {self._data.folder}")
                said = math.inf
        path, until = self._data.folder / name, time.monotonic() + SECONDS_TO_SEE
        while not path.exists() and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        file = self._opened(name)
        self._name, self._content = name, file.content
        self._of, self._done = file.batches, 0
        return True

    def __next__(self) -> Batch:
        """The next batch, which is there after `wait`."""
        file = self._opened(self._name)
        numbers = self._numbers(file, self._done)
        self._done += 1
        own = [numbers[row] for row in self._rows]
        # Rows that only fill up a batch have no examples.
        examples = [self._data.nothing if x == NO_EXAMPLE else file.examples[x] for x in own]
        return self._collate(examples, own)

    def get_state(self) -> dict[str, Any]:
        """Where the next batch is, and what batches depend on, for JSON."""
        return {
            "file": self._name,
            "content": self._content,
            "batches_of_file": self._of,
            "done_of_file": self._done,
            **self._order,
        }

    def set_state(self, state: Mapping[str, Any], *, new_order: bool = False) -> None:
        """As `TrainingBatches.set_state`. A file that was begun in another order is left."""
        changed = changed_order(self._order, state)
        if "file" not in state:
            changed.append("files that appear, where the checkpoint has data that were there")
        is_same = goes_on(changed, new_order=new_order)
        if "file" in state:
            self._name, self._content = state["file"], state["content"]
            self._of = state["batches_of_file"]
            self._done = state["done_of_file"] if is_same else self._of

    def close(self) -> None:
        """Closes the file."""
        self._file = None

    @property
    def _order(self) -> dict[str, int]:
        """What the batches of a file depend on."""
        epochs = self._data.epochs
        return {"batch_size": self._batch_size, "seed": self._seed, "epochs": epochs or 0}

    def _next_name(self) -> str | None:
        """The first file after the last one, as the first process sees it."""
        if jax.process_index():
            return None
        here, last = _names(self._data.folder), _order_of(self._name)
        later = [x for x in here if not self._name or _order_of(x) > last]
        if self._seen is not None and (late := sorted({*here} - self._seen - {*later})):
            self._note(
                "WARNING: files must appear in the order of their names; got "
                f"{list_names(late)} after {self._name!r}, and nothing is trained on them. Rename "
                "them to names that come later."
            )
        self._seen = {*here}
        return min(later, key=_order_of, default=None)

    def _opened(self, name: str) -> _File:
        """The file of this name, in every process; raises if it is another one than before."""
        if self._file is not None and self._file.name == name:
            return self._file
        path = self._data.folder / name
        with reading(path):
            content = sha256_of(path)[:16]
        known = {*self._gather(content)}
        if name == self._name:
            known.add(self._content)
        if len(known) > 1:
            raise InputError(
                "A file must stay as it is until it is trained on, and be the same for all "
                f"processes; got another {str(path)!r} than before. Restore it, or give it a later "
                "name."
            )
        examples = self._data.open(path)
        batches = self._count(path, len(examples))
        self._file = _File(name=name, content=content, examples=examples, batches=batches)
        return self._file

    def _count(self, path: Path, rows: int) -> int:
        """The number of batches of a file with so many rows."""
        if self._data.epochs is not None:
            return self._data.epochs * -(-rows // self._batch_size)
        if rows > self._batch_size:
            raise InputError(
                "A file is one step, and must fit a batch; got "
                f"{rows:,} rows in {str(path)!r} with batch_size={self._batch_size:,}. Use a "
                f"larger --batch-size, or --data.epochs-a-file 1 for {-(-rows // self._batch_size)}"
                " steps."
            )
        return 1

    def _numbers(self, file: _File, batch: int) -> list[int]:
        """The numbers of the examples of a batch of a file; `NO_EXAMPLE` to fill it up."""
        count = len(file.examples)
        order = np.arange(count)
        if self._data.epochs is not None:
            epoch, batch = divmod(batch, -(-count // self._batch_size))
            rng = np.random.default_rng((self._seed, int(file.content, 16), epoch))
            order = rng.permutation(count)
        part = order[batch * self._batch_size : (batch + 1) * self._batch_size].tolist()
        return part + [NO_EXAMPLE] * (self._batch_size - len(part))


def _names(folder: Path) -> list[str]:
    """The files of a folder with records; hidden ones, and folders in it, are left out."""
    with reading(folder):
        return [
            path.name
            for path in folder.iterdir()
            if kind_of(path) in RECORD_KINDS and not path.name.startswith(".") and path.is_file()
        ]


def _order_of(name: str) -> list[str | int]:
    """What names are ordered by: texts and numbers in turn, so that step_9 comes before step_10."""
    path = Path(name)
    stem = (path.with_suffix("") if is_gzip(path) else path).stem
    return [int(x) if x.isdecimal() else x for x in re.split(r"([0-9]+)", stem)]

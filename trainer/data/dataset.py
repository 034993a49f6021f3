"""What a run reads, whatever the model: examples by number, and how a batch is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable


@runtime_checkable
class Source(Protocol):
    """Examples by their number. Several threads may read from it at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Subset:
    """Some of the examples of a source."""

    source: Source
    numbers: Any
    """Their numbers in the source: integers [examples]."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.source[int(self.numbers[index])]


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """Random examples, each made when it is read: a `Source`."""

    make: Callable[[Any], Any]
    """(numpy.random.Generator) -> an example."""
    seed: int
    count: int = 64

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        import numpy as np  # Here: tasks import this module, and `--help` must be fast.

        return self.make(np.random.default_rng((self.seed, index)))


def held_out_of(source: Source, fraction: float) -> tuple[Subset, Subset]:
    """The examples to train on, and a fraction of all that is held out, at least one. Which these
    are depends on the number of examples alone."""
    import numpy as np  # Here: tasks import this module, and `--help` must be fast.

    count = len(source)
    held_out = min(max(1, round(fraction * count)), count - 1)
    order = np.random.default_rng(0).permutation(count)
    parts = np.sort(order[held_out:]), np.sort(order[:held_out])
    train, measured = (Subset(source=source, numbers=part) for part in parts)
    return train, measured


@runtime_checkable
class Documents(Protocol):
    """Whole documents, by their number. Several threads may read from it at once."""

    @property
    def sizes(self) -> Any:
        """Tokens of the documents, as the model reads them: a
        `startrail_jax.tokens.documents.DocumentSizes`."""
        ...

    def epochs(self, seed: int) -> Callable[[int], Any] | None:
        """(number of an epoch) -> the numbers of its documents, in order: as many in each epoch.
        None for all documents, shuffled."""
        ...

    def rows(self, rows: Sequence[Sequence[int]], length: int) -> Any:
        """Rows of documents and padding, in natural order: a tree of arrays [rows, length, ...]."""
        ...


class Groups(NamedTuple):
    """Groups of examples whose arrays differ in shape; a batch has examples of one group."""

    train: Any
    """Number of the group of each example to train on: integers [examples]."""
    held_out: Any
    """The same of the examples to measure with."""
    lengths: Any
    """Tokens of an example of each group: integers [groups]."""
    names: tuple[str, ...]
    """The name of each group, for the log."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Arriving:
    """Examples to train on that are in files which appear in a folder while a run trains."""

    folder: Path
    open: Callable[[Path], Source]
    """Reads a file."""
    epochs: int | None
    """How often each file is read; None if it is one batch, which is read once."""
    nothing: Any
    """What `Dataset.collate` takes for a row that only fills up a batch."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The data of a run, in two parts."""

    train: Source
    """Examples to train on."""
    held_out: Source
    """Examples to measure with, which training never sees; none if nothing is measured."""
    collate: Callable[[list[Any], list[int]], Any]
    """(examples, their numbers in the run) -> those rows of a batch, a tree of numpy arrays
    [rows, ...] in layout order."""
    documents: Documents | None = None
    """What there is in `train` as whole documents, for a run whose batches consist of these."""
    arriving: Arriving | None = None
    """Where examples appear, in place of `train`, which has none then."""
    groups: Groups | None = None
    """Groups of the examples; None if any examples can share a batch."""
    description: str
    """A line for the log, or several."""
    loss_unit: str
    digest: str | None = None
    """A hash of the content of `train`, by which a run that goes on knows its data; None if only
    their number is compared."""
    tokens: str | None = None
    """A hash of the tokens made of that content, in which versions of a tokenizer may differ; None
    if none were made."""

    def keep(self, run_dir: Path) -> None:
        """Writes into the folder of a run what its samples and exports need of the data."""

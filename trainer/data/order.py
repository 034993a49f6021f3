"""The order in which a run reads its examples, and how it goes on at the same place.

The content of batch k depends only on the seed and on k, never on the mesh or the number of hosts.
"""

from __future__ import annotations

import bisect
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import grain
import numpy as np
from jaxtyping import Int64

from startrail_jax.errors import InputError
from trainer.data.dataset import Dataset, Source
from trainer.data.mixture import Mixture
from trainer.data.parts import PartBatch, Parts

# Number of threads that read, and of batches that they read ahead: enough to hide a slow disk
# behind a step, and little memory next to that of a step.
NUM_THREADS, READ_AHEAD = 4, 4
READ_OPTIONS = grain.ReadOptions(num_threads=NUM_THREADS, prefetch_buffer_size=READ_AHEAD)

Batch = TypeVar("Batch")


# (examples, their numbers in the run) -> those rows of a batch, a tree of arrays [rows, ...]. A row
# of the number NO_EXAMPLE only fills up the batch: the loss does not count it.
NO_EXAMPLE = -1
Collate = Callable[[list[Any], list[int]], Batch]


class TrainingBatches(Iterator[Batch]):
    """An endless series of batches: all examples in random order, then in another, and so on.
    Threads read batches ahead; an error in one of them is raised by `next`."""

    def __init__(
        self,
        source: Source,
        *,
        collate: Collate[Batch],
        batch_size: int,
        seed: int,
        rows: Sequence[int] | None = None,
        digest: str | None = None,
        tokens: str | None = None,
        groups: Int64[np.ndarray, " examples"] | None = None,
    ):
        """Starts at the first batch; nothing is read yet.

        `collate` makes rows of a batch from examples and their numbers: row r of batch k has the
        number k * batch_size + r, counted from 0. `rows` are those of each batch to read, as
        `local_rows` returns them (None for all), `digest` is a hash of the content of the source,
        and `groups` the number of the group of each example (see `GroupOrder`).
        """
        rows = range(batch_size) if rows is None else rows
        # Checkpoints hold these names.
        self._order: dict[str, int | str] = {
            "windows": len(source),
            "batch_size": batch_size,
            "seed": seed,
        }
        if digest is not None:
            self._order["content"] = digest
        if tokens is not None:
            self._order["tokens"] = tokens
        if groups is None:
            example = _endless(source, seed)

            def examples(step: int) -> list[Any]:
                return [example(step * batch_size + row) for row in rows]
        else:
            in_groups = GroupOrder(groups, batch_size=batch_size, seed=seed)

            def examples(step: int) -> list[Any]:
                return [source[number] for number in in_groups.numbers(step, rows)]

        def read(step: int) -> Batch:
            return collate(examples(step), [step * batch_size + row for row in rows])

        batches = grain.MapDataset.range(sys.maxsize // batch_size).map(read)
        self._iterator = iter(batches.to_iter_dataset(READ_OPTIONS))

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The number of batches so far, and what their order depends on, for JSON."""
        return {"batches": self._iterator.get_state()["next_index"], **self._order}

    def set_state(self, state: Mapping[str, Any], *, new_order: bool = False) -> None:
        """Goes to a position, so that the next batch is the one that followed it. With `new_order`,
        data or an order that differ from those of `state` start at their first batch."""
        changed = changed_order(self._order, state)
        if goes_on(changed, new_order=new_order):
            self._iterator.set_state({"next_index": state["batches"]})

    def close(self) -> None:
        """Ends the reading threads."""
        self._iterator.close()


def _endless(source: Source, seed: int) -> Callable[[int], Any]:
    """The example of a row of a run, by its number."""
    if not isinstance(source, Mixture):
        return _shuffled(source, seed).__getitem__
    orders = [_shuffled(x, (seed, number)) for number, x in enumerate(source.sources)]

    def example(row: int) -> Any:
        number, before = source.place(row)
        return orders[number][before]

    return example


def _shuffled(source: Any, seed: int | Sequence[int]) -> grain.MapDataset[Any]:
    """All examples in random order, then in another, and so on."""
    # Grain adds the number of the epoch to the seed. Neighbouring seeds must not share orders.
    (shuffle_seed,) = np.random.SeedSequence(seed).generate_state(1)
    return grain.MapDataset.source(source).shuffle(seed=int(shuffle_seed)).repeat()


class GroupOrder:
    """The order of examples in batches that have examples of one group each.

    Each group has its own endless series of batches: its examples in random order, then in another,
    and so on; what is left at the end of an order begins the group's next batch. In epoch e, the
    batches of a group are those that begin in its order e, so each group has its share of the
    batches. The batches of all groups in an epoch are mixed in random order.
    """

    def __init__(
        self, groups: Int64[np.ndarray, " examples"], *, batch_size: int, seed: int
    ) -> None:
        """Reads nothing."""
        self._batch_size, self._seed = batch_size, seed
        members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
        self._sizes = np.array([len(x) for x in members])
        self._orders = [_shuffled(x, (seed, group)) for group, x in enumerate(members)]
        # The threads that read ahead are in one epoch, or at the border of two.
        self._batches_of_epoch = functools.lru_cache(maxsize=2)(self._mixed)

    def numbers(self, step: int, rows: Sequence[int]) -> list[int]:
        """The numbers of the examples in some rows of a batch."""
        most = step * self._batch_size // int(self._sizes.sum()) + 2
        epoch = bisect.bisect_right(range(most), step, key=lambda e: self._before(e).sum()) - 1
        place = step - self._before(epoch).sum()
        group, batch = (int(x[place]) for x in self._batches_of_epoch(epoch))
        order: Any = self._orders[group]
        return [int(order[batch * self._batch_size + row]) for row in rows]

    def _before(self, epoch: int) -> Int64[np.ndarray, " groups"]:
        """Number of batches of each group before an epoch."""
        return -(-epoch * self._sizes // self._batch_size)

    def _mixed(
        self, epoch: int
    ) -> tuple[Int64[np.ndarray, " batches"], Int64[np.ndarray, " batches"]]:
        """The group of each batch of an epoch, and its number among those of the group."""
        before, after = self._before(epoch), self._before(epoch + 1)
        groups = np.repeat(np.arange(len(before)), after - before)
        groups = np.random.default_rng((self._seed, epoch)).permutation(groups)
        batches = np.zeros_like(groups)
        for group, first in enumerate(before):
            own = groups == group
            batches[own] = first + np.arange(own.sum())
        return groups, batches


class PartBatches(Iterator[PartBatch]):
    """An endless series of batches of whole documents, on the host. Threads read batches ahead; an
    error in one of them is raised by `next`."""

    def __init__(self, parts: Parts, data: Dataset, *, seed: int) -> None:
        """Starts at the first batch."""
        assert data.documents is not None, "the task opens them where config.whole_documents"
        self._parts, self._documents = parts, data.documents
        self._stream = parts.stream(data.documents, seed=seed)
        own = {"content": data.digest, "tokens": data.tokens}
        self._order = {name: value for name, value in own.items() if value is not None}
        self._position = self._stream.get_state()
        self._ahead: deque[tuple[Future[PartBatch], dict[str, Any]]] = deque()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "batches")

    def __next__(self) -> PartBatch:
        while len(self._ahead) < READ_AHEAD:
            batch = self._threads.submit(self._parts.read, self._documents, next(self._stream))
            self._ahead.append((batch, self._stream.get_state()))
        batch, self._position = self._ahead.popleft()
        return batch.result()

    def get_state(self) -> dict[str, Any]:
        """Where the next batch is, and what the order depends on, for JSON."""
        return {**self._order, "documents": self._position}

    def set_state(self, state: Mapping[str, Any], *, new_order: bool = False) -> None:
        """As `TrainingBatches.set_state`. Another number of devices, or of parts, is no change:
        what is left of the open draw is divided anew."""
        changed = changed_order(self._order, state)
        if "documents" not in state:
            changed.append("batches of documents, where the checkpoint has batches of rows")
        else:
            changed += changed_order(self._stream.order, state["documents"])
        if goes_on(changed, new_order=new_order):
            self._stream.set_state(state["documents"])
            self._ahead.clear()
            self._position = self._stream.get_state()

    def close(self) -> None:
        """Ends the reading threads."""
        self._threads.shutdown(cancel_futures=True)


def changed_order(order: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """What differs between the data and their order, and those of a checkpoint. Checkpoints of
    earlier versions do not tell the content, or the tokens made of it."""
    return [
        f"{name}={value}, where the checkpoint has {name}={state[name]}"
        for name, value in order.items()
        if state.get(name, value) != value
    ]


def goes_on(changed: list[str], *, new_order: bool) -> bool:
    """Whether batches go on at the position of a checkpoint, rather than begin anew."""
    if changed and not new_order:
        raise InputError(
            f"A run must go on with the data with which it began; got {changed[0]}. Restore "
            "data and config, begin another run (--run-dir), or go on with the other data from "
            "their first batch (--allow-changes)."
        )
    return not changed


def validation_batches(
    source: Source,
    *,
    collate: Collate[Batch],
    batch_size: int,
    count: int,
    rows: Sequence[int] | None = None,
    groups: Int64[np.ndarray, " examples"] | None = None,
) -> list[Batch]:
    """Batches of `count` examples or some more, spread evenly over a source; always the same ones.

    If the source has fewer, each is there once; of a mixture, each source has its share, and small
    ones may be there more often. The last batch of a group is filled up. `rows` are those of each
    batch to read, as `local_rows` returns them; None for all.
    """
    rows = range(batch_size) if rows is None else rows
    used = min(-(-min(count, len(source)) // batch_size) * batch_size, len(source))
    is_mixed = isinstance(source, Mixture)
    chosen = source.spread(used) if is_mixed else np.arange(used) * len(source) // used
    of_chosen = np.zeros_like(chosen) if groups is None else groups[chosen]
    batches = []
    for group in np.unique(of_chosen):
        numbers = np.flatnonzero(of_chosen == group).tolist()
        for first in range(0, len(numbers), batch_size):
            part = numbers[first : first + batch_size]
            filled = part + [NO_EXAMPLE] * (batch_size - len(part))
            examples = [source[int(chosen[part[min(row, len(part) - 1)]])] for row in rows]
            batches.append(collate(examples, [filled[row] for row in rows]))
    return batches

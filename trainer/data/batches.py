"""Batches of examples: in which order they come, and how they get to the devices.

What batch k holds depends on the seed and k alone, never on the mesh or the number of hosts. A
process reads only the rows that its devices hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# Threads that read, and batches that they read ahead: enough to hide a slow disk behind a step, and
# little memory next to a step.
READ_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)

Batch = TypeVar("Batch")


@runtime_checkable
class Source(Protocol):
    """Examples by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


# (examples, their numbers in the run) -> those rows of a batch, a tree of arrays [rows, ...].
Collate = Callable[[list[Any], list[int]], Batch]


class TrainingBatches(Iterator[Batch]):
    """Batches without end: all examples in random order, then all in another, and so on.

    Threads read them ahead; their errors come out of `next`.
    """

    def __init__(
        self,
        source: Source,
        *,
        collate: Collate[Batch],
        batch_size: int,
        seed: int,
        rows: Sequence[int] | None = None,
    ):
        """Begins with the first batch; nothing is read yet.

        Args:
            source: examples to train on.
            collate: makes rows of a batch of examples and of their numbers; the example in row r of
                batch k, from 0, has number k * batch_size + r, and so a number of its own.
            batch_size: rows of a batch, on all hosts together.
            seed: seed of the order.
            rows: rows of each batch to read, as `local_rows` gives them; all by default.
        """
        rows = range(batch_size) if rows is None else rows
        self._order = {"windows": len(source), "batch_size": batch_size, "seed": seed}
        # Grain adds the number of the epoch to the seed: neighbours must not share their orders.
        (shuffle_seed,) = np.random.SeedSequence(seed).generate_state(1)
        order = grain.MapDataset.source(source).shuffle(seed=int(shuffle_seed)).repeat()

        def read(step: int) -> Batch:
            numbers = [step * batch_size + row for row in rows]
            return collate([order[number] for number in numbers], numbers)

        batches = grain.MapDataset.range(len(order) // batch_size).map(read)
        self._iterator = iter(batches.to_iter_dataset(READ_OPTIONS))

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, int]:
        """The batches that were given, and what their order depends on: integers, for JSON."""
        return {"batches": self._iterator.get_state()["next_index"], **self._order}

    def set_state(self, state: Mapping[str, int], *, new_order: bool = False) -> None:
        """Goes to a position: the next batch is the one that would have come there.

        Args:
            state: what `get_state` returned.
            new_order: whether these may be other data, or in another order; they then come from
                their beginning.

        Raises:
            ValueError: if another order is meant, so that some data would come twice.
        """
        for name, value in self._order.items():
            if state[name] != value:
                if new_order:
                    return
                raise ValueError(
                    "A run must go on with the data with which it began; got "
                    f"{name}={value}, where the checkpoint has {name}={state[name]}. Restore data "
                    "and config, or begin another run: --run-dir."
                )
        self._iterator.set_state({"next_index": state["batches"]})

    def close(self) -> None:
        """Ends the threads."""
        self._iterator.close()


def validation_batches(
    source: Source,
    *,
    collate: Collate[Batch],
    batch_size: int,
    count: int,
    rows: Sequence[int] | None = None,
) -> list[Batch]:
    """`count` examples, rounded up to whole batches, spread evenly: the same every time.

    Where there are fewer, each is there several times, as often as the others up to one.

    Args:
        source: examples that were held out.
        collate: as of `TrainingBatches`; numbers count from 0 here too.
        batch_size: rows of a batch, on all hosts together.
        count: examples to measure.
        rows: rows of each batch to read, as `local_rows` gives them; all by default.

    Raises:
        ValueError: if an example cannot be read.
    """
    rows = range(batch_size) if rows is None else rows
    num_batches = -(-count // batch_size)
    total = num_batches * batch_size
    batches = []
    for step in range(num_batches):
        numbers = [step * batch_size + row for row in rows]
        batches.append(collate([source[n * len(source) // total] for n in numbers], numbers))
    return batches


def local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[int, ...]:
    """The rows of a batch that the devices of this process hold, in order.

    Args:
        sharding: of its arrays [B T].
        shape: (B, T), on all hosts together.
    """
    indices = sharding.addressable_devices_indices_map(shape).values()
    slices = [index[0] for index in indices if index is not None]
    return tuple(sorted({row for rows in slices for row in range(shape[0])[rows]}))


def place(
    batch: Batch,
    sharding: NamedSharding,
    *,
    batch_size: int | None = None,
    rows: Sequence[int] | None = None,
) -> Batch:
    """Puts a batch on the devices, each row on those that hold it.

    Args:
        batch: rows of a batch on the host.
        sharding: of arrays [B T]; those without T are sharded over their rows alone.
        batch_size: rows of the batch, on all hosts together; those of `batch` by default.
        rows: which rows of the batch these are, in order; all by default.

    Returns:
        The batch as global arrays.
    """
    given = len(jax.tree.leaves(batch)[0])
    local = tuple(range(given)) if rows is None else tuple(rows)
    size = given if batch_size is None else batch_size
    position = {row: index for index, row in enumerate(local)}

    def place_array(x: np.ndarray) -> jax.Array:
        def read(index: Any) -> np.ndarray:
            held = [position[row] for row in range(size)[index[0]]]
            return x[(held, *index[1:])]

        return jax.make_array_from_callback(
            (size, *x.shape[1:]), sharding_of(sharding, x.ndim), read, dtype=x.dtype
        )

    return jax.tree.map(place_array, batch)


def sharding_of(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """The sharding of arrays [B], [B T] or [B T ...], from that of arrays [B T]."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:ndim]))

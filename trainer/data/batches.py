"""The batches of a run on its devices. A process reads only the rows that its devices hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from trainer.data.arriving import ArrivingBatches
from trainer.data.dataset import Dataset, Groups
from trainer.data.order import Batch, PartBatches, TrainingBatches, validation_batches
from trainer.data.parts import BatchDescription, Parts


class OfRows(NamedTuple):
    """A part of a batch whose arrays [B ...] belong to rows, not tokens, such as a text: every
    device along the sequence has all of them."""

    arrays: Any


class Feed(Generic[Batch]):
    """The batches of a run on its devices: those to train on, and those to evaluate with."""

    def __init__(
        self,
        data: Dataset,
        *,
        sharding: NamedSharding,
        shape: tuple[int, int],
        seed: int,
        num_held_out: int,
        parts: Parts | None = None,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        note: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Reads the batches to evaluate with, and starts to read those to train on.

        `sharding` is that of an array [B T]; `num_held_out` is rounded up to whole batches. `parts`
        divides batches of whole documents; None to train on batches of rows. `gather` and `note`
        are those of `ArrivingBatches`.
        """
        self.loss_unit = data.loss_unit
        self._sharding = sharding
        self._batch_size = shape[0]
        self._rows = local_rows(sharding, shape)
        reading: Any = {"collate": data.collate, "batch_size": shape[0], "rows": self._rows}
        self._parts = parts
        groups = data.groups
        self._training: TrainingBatches[Any] | PartBatches | ArrivingBatches[Any]
        if data.arriving is not None:
            others: Any = {"seed": seed, "gather": gather, "note": note}
            self._training = ArrivingBatches(data.arriving, **others, **reading)
        elif parts is None:
            self._training = TrainingBatches(
                data.train,
                seed=seed,
                digest=data.digest,
                tokens=data.tokens,
                groups=None if groups is None else groups.train,
                **reading,
            )
        else:
            self._training = PartBatches(parts, data, seed=seed)
        self._held_out = validation_batches(
            data.held_out,
            count=num_held_out,
            groups=None if groups is None else groups.held_out,
            **reading,
        )
        # A batch of each structure and shape, to compile with.
        self._kinds = self._held_out[:1]
        if not self._kinds and parts is None:
            example = data.train[0] if data.arriving is None else data.arriving.nothing
            self._kinds = [data.collate([example] * len(self._rows), list(self._rows))]
        self.description: BatchDescription | None = None
        """What batches hold that differ in their tokens; None if they do not differ."""
        if parts is not None and data.documents is not None:
            self.description = parts.describe(data.documents, seed=seed)
        if groups is not None:
            self.description = _describe_groups(groups, shape[0])
            _, firsts = np.unique(groups.train, return_index=True)
            self._kinds = [
                data.collate([data.train[int(first)]] * len(self._rows), list(self._rows))
                for first in firsts
            ]
        self.lines = tuple(
            line
            for line in (self.description and self.description.line, self._repetition(data))
            if line
        )
        """What the log says of the batches."""

    @property
    def arrives(self) -> bool:
        """Whether batches appear while the run trains, so that each is waited for."""
        return isinstance(self._training, ArrivingBatches)

    def wait(self, stops: Callable[[], bool]) -> bool:
        """As `ArrivingBatches.wait`."""
        assert isinstance(self._training, ArrivingBatches), "other batches are there"
        return self._training.wait(stops)

    def next(self) -> Batch:
        """The next batch to train on."""
        batch: Any = next(self._training)
        placed: Any = self._place(batch) if self._parts is None else self._parts.place(batch)
        return placed

    def kinds(self) -> Iterator[Batch]:
        """A batch of each structure and shape that batches of rows to train on have."""
        return map(self._place, self._kinds)

    @property
    def holds_out(self) -> bool:
        """Whether there is something to evaluate with."""
        return bool(self._held_out)

    def held_out(self) -> Iterator[Batch]:
        """The batches to evaluate with, which are always the same."""
        return map(self._place, self._held_out)

    def get_state(self) -> dict[str, Any]:
        """As `TrainingBatches.get_state`."""
        return self._training.get_state()

    def set_state(self, state: Mapping[str, Any], *, new_order: bool) -> None:
        """As `TrainingBatches.set_state`."""
        self._training.set_state(state, new_order=new_order)

    def close(self) -> None:
        """Ends the reading threads."""
        self._training.close()

    def _repetition(self, data: Dataset) -> str | None:
        """What the log says if batches have more rows than there are examples to train on. Those of
        whole documents hold each at most once."""
        few = ""
        if data.groups is not None:
            counts = np.bincount(data.groups.train, minlength=len(data.groups.names))
            found = zip(counts, data.groups.names, strict=True)
            few = ", ".join(f"{n:,} of {name}" for n, name in found if 0 < n < self._batch_size)
        elif self._parts is data.arriving is None and len(data.train) < self._batch_size:
            few = f"{len(data.train):,} examples"
        if not few:
            return None
        return (
            f"NOTE: a batch of {self._batch_size:,} is larger than what is trained on ({few}) "
            "and holds some of it several times; use a smaller --batch-size, or more data"
        )

    def _place(self, batch: Any) -> Any:
        return place(batch, self._sharding, batch_size=self._batch_size, rows=self._rows)


def _describe_groups(groups: Groups, batch_size: int) -> BatchDescription:
    """What the batches of a long run hold."""
    lengths = groups.lengths[groups.train].astype(float)
    counts = np.bincount(groups.train, minlength=len(groups.lengths))
    found = ", ".join(
        f"{count:,} of {name} ({length:,} tokens)"
        for count, name, length in zip(counts, groups.names, groups.lengths, strict=True)
    )
    return BatchDescription(
        line=f"sizes of the examples to train on: {found}",
        tokens_per_batch=batch_size * lengths.mean(),
        mean_length=round((lengths**2).sum() / lengths.sum()),
    )


def local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[int, ...]:
    """The rows of a batch that the devices of this process hold, in order; of arrays [B T]."""
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
    """Copies a batch from the hosts to global arrays on the devices; `sharding` is of arrays [B T].

    `batch_size` counts the rows on all hosts together, and `rows` are the numbers of those in
    `batch`, in order. By default, it has all rows.
    """
    given = len(jax.tree.leaves(batch)[0])
    local = tuple(range(given)) if rows is None else tuple(rows)
    size = given if batch_size is None else batch_size
    position = {row: index for index, row in enumerate(local)}

    def place_array(x: np.ndarray, of_x: NamedSharding) -> jax.Array:
        def read(index: Any) -> np.ndarray:
            held = [position[row] for row in range(size)[index[0]]]
            return x[(held, *index[1:])]

        return jax.make_array_from_callback((size, *x.shape[1:]), of_x, read, dtype=x.dtype)

    return jax.tree.map(place_array, batch, shardings(batch, sharding))


def shardings(batch: Any, sharding: NamedSharding) -> Any:
    """The sharding of every array, or shape, of a batch: [B], [B T] or [B T ...]. `sharding` is of
    [B T]; arrays in `OfRows` have no dimension of tokens."""

    def over(dims: int) -> NamedSharding:
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:dims]))

    def of(x: Any) -> Any:
        return jax.tree.map(lambda _: over(1), x) if isinstance(x, OfRows) else over(x.ndim)

    return jax.tree.map(of, batch, is_leaf=lambda x: isinstance(x, OfRows))

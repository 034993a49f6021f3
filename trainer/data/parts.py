"""Batches of whole documents: several parts, in each of which documents lie on as many devices.

`startrail_jax.tokens.documents` decides which documents share a row, and how many devices a row
has. This module reads the documents, and brings each token to its device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from startrail_jax.tokens.documents import BatchPart, DocumentCost, PartStream, summary
from startrail_jax.tokens.layout import Layout
from trainer.data.dataset import Documents

# Number of batches by which a run describes its data: enough for two digits.
DESCRIBED = 200


class PartBatch(NamedTuple):
    """The parts of a batch, on the host or on devices.

    K is the largest number of parts of a batch, D the number of devices that have tokens of their
    own, and S the share: the tokens of a part that a device holds.
    """

    parts: Any
    """A tree of arrays [K D S ...]: what a batch of rows has as [B T ...]."""
    split: Any
    """int32 [K]: which `DeviceSplit` the devices are in."""
    count: Any
    """int32 []: number of parts; what follows is never read."""


@dataclass(frozen=True)
class DeviceSplit:
    """A split of the devices into sets that share a row."""

    layout: Layout
    """Order of the tokens of a row on its c devices."""
    places: tuple[tuple[int, int], ...]
    """For each device the number of its row, and its rank among the devices of that row."""

    @property
    def c(self) -> int:
        """Context-parallel degree: the number of devices of a row."""
        return self.layout.degree


@dataclass(frozen=True)
class BatchDescription:
    """What batches hold that differ in their tokens, such as those of whole documents."""

    line: str
    """A line for the log."""
    tokens_per_batch: float
    """Mean number of tokens, padding aside."""
    mean_length: int
    """Mean over tokens of the length of their document, or of their image; that of a document is
    twice the number of keys that its tokens see in the mean, less one."""


@dataclass(frozen=True)
class Parts:
    """How batches of a run are divided into parts."""

    splits: tuple[DeviceSplit, ...]
    share: int
    """S: tokens of a part that a device holds."""
    most: int
    """K: most parts of a batch."""
    sharding: NamedSharding
    """Sharding of arrays [K D S]."""
    cost: DocumentCost
    """What tokens and pairs of a query and a key take."""
    draw: int
    """Number of documents, about, from which the parts of successive batches are chosen."""

    @property
    def devices(self) -> int:
        """D: devices that have tokens of their own."""
        return len(self.splits[0].places)

    def describe(self, documents: Documents, *, seed: int) -> BatchDescription:
        """What the first batches of a run hold."""
        sizes, lengths = documents.sizes, documents.sizes.lengths
        steps = list(itertools.islice(self.stream(documents, seed=seed), DESCRIBED))
        pairs = sizes.pairs(self.cost)
        held = summary(steps, lengths, self.devices, share=self.share, cost=self.cost, pairs=pairs)
        read = [x for step in steps for part in step for row in part.rows for x in row]
        seen = sizes.pairs(DocumentCost())[read].sum() / lengths[read].sum()
        total = sum(held.parts.values())
        shares = ", ".join(f"{n / total:.0%} on {c}" for c, n in held.parts.items())
        return BatchDescription(
            line=f"parts: {np.count_nonzero(lengths):,} documents of at most {lengths.max():,} "
            f"tokens; parts by the devices of a row: {shares}; {held.alone / held.tokens:.0%} of "
            f"the tokens are sent nowhere, {held.padding:.1%} of the places are padding, and the "
            f"busiest device works {held.balance:.2f} times the mean",
            tokens_per_batch=held.tokens / len(steps),
            mean_length=round(float(2 * seen - 1)),
        )

    def specs(self, batch: PartBatch) -> PartBatch:
        """The PartitionSpecs of the arrays of a batch."""
        parts = jax.tree.map(lambda _: self.sharding.spec, batch.parts)
        return PartBatch(parts, PartitionSpec(), PartitionSpec())

    def shapes(self, rows: Any) -> PartBatch:
        """Shapes and shardings of a batch, from the shapes [B T ...] of a batch of rows."""
        whole = NamedSharding(self.sharding.mesh, PartitionSpec())

        def part(x: Any) -> Any:
            shape = (self.most, self.devices, self.share, *x.shape[2:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.sharding)

        split = jax.ShapeDtypeStruct((self.most,), np.int32, sharding=whole)
        count = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
        return PartBatch(jax.tree.map(part, rows), split, count)

    def stream(self, documents: Documents, *, seed: int) -> PartStream:
        """The parts of all batches of documents."""
        return PartStream(
            documents.sizes.lengths,
            self.devices,
            epochs=documents.epochs(seed),
            share=self.share,
            parts_per_step=self.most,
            window=self.draw,
            seed=seed,
            cost=self.cost,
            degrees=[split.c for split in self.splits],
            pairs=documents.sizes.pairs,
        )

    def read(self, documents: Documents, parts: Sequence[BatchPart]) -> PartBatch:
        """Reads the tokens of the devices of this process alone, into arrays [K local S ...]."""
        numbers = {split.c: number for number, split in enumerate(self.splits)}
        split = np.zeros(self.most, np.int32)
        read = []
        for k, part in enumerate(parts):
            split[k] = numbers[part.c]
            read.append(self._read(documents, part, self.splits[split[k]]))

        def stacked(*arrays: np.ndarray) -> np.ndarray:
            missing = np.zeros((self.most - len(parts), *arrays[0].shape), arrays[0].dtype)
            return np.concatenate([np.stack(arrays), missing])

        return PartBatch(jax.tree.map(stacked, *read), split, np.int32(len(parts)))

    def _read(self, documents: Documents, part: BatchPart, split: DeviceSplit) -> Any:
        held = [split.places[place] for place in self.local]
        needed = sorted({row for row, _ in held})
        index = [(needed.index(row), rank) for row, rank in held]
        rows = documents.rows([part.rows[row] for row in needed], split.c * self.share)

        def of_devices(x: np.ndarray) -> np.ndarray:
            ordered = split.layout.permute(x)
            shards = ordered.reshape(len(needed), split.c, self.share, *x.shape[2:])
            return shards[tuple(zip(*index, strict=True))]

        return jax.tree.map(of_devices, rows)

    def place(self, batch: PartBatch) -> PartBatch:
        """Copies what `read` returned for the devices of this process to them, as global arrays."""
        position = {place: index for index, place in enumerate(self.local)}

        def split(x: np.ndarray) -> jax.Array:
            def read(index: Any) -> np.ndarray:
                held = [position[place] for place in range(self.devices)[index[1]]]
                return x[index[0]][:, held]

            shape = (x.shape[0], self.devices, *x.shape[2:])
            return jax.make_array_from_callback(shape, self.sharding, read)

        def whole(x: np.ndarray) -> jax.Array:
            everywhere = NamedSharding(self.sharding.mesh, PartitionSpec())
            return jax.make_array_from_callback(x.shape, everywhere, lambda index: x[index])

        counts = (whole(np.asarray(x)) for x in (batch.split, batch.count))
        return PartBatch(jax.tree.map(split, batch.parts), *counts)

    @functools.cached_property
    def local(self) -> tuple[int, ...]:
        """The numbers of the devices of this process, in order."""
        shape = (self.most, self.devices, self.share)
        indices = self.sharding.addressable_devices_indices_map(shape).values()
        slices = [index[1] for index in indices if index is not None]
        return tuple(sorted({place for part in slices for place in range(self.devices)[part]}))

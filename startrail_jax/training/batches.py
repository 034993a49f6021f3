"""Batches of a corpus: windows of its streams, packed documents, in the order of a layout.

A stream is cut into windows of T tokens and the one after; window i of a stream starts at token
i * T, and what is left at its end, up to T tokens, is not used. Where documents are masked, all
that a batch needs to know of them is in its own tokens: each ends with the same one.

What batch k holds depends on the seed and k alone, never on the mesh or the number of hosts. A
process reads only the rows that its devices hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float32, Int32, Integer

from startrail_jax.layout import Layout
from startrail_jax.training.corpus import Stream

# Threads that read, and batches that they read ahead: enough to hide a slow disk behind a step, and
# little memory next to a step.
READ_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)


class Batch(NamedTuple):
    """A batch in layout order, or some of its rows; on the host or on devices."""

    tokens: Int32[np.ndarray | Array, "B T"]
    """Token ids."""
    targets: Int32[np.ndarray | Array, "B T"]
    """The token after each of `tokens`."""
    positions: Int32[np.ndarray | Array, "B T"]
    """Position of each of `tokens` in its document, or in its row where documents are not masked.
    A document that began before the row counts from the start of the row."""
    segment_ids: Int32[np.ndarray | Array, "B T"] | None
    """Number of its document in the row, from 0; None where documents are not masked."""
    weights: Float32[np.ndarray | Array, "B T"]
    """1 where the target is of the same document as the token, its end included; else 0."""


class Sequences:
    """Windows of streams by their number: a source for grain."""

    def __init__(self, streams: Sequence[Stream], seq_len: int):
        """Counts the windows.

        Args:
            streams: tokens; no window holds tokens of two streams.
            seq_len: T; a window holds T + 1 tokens, of which the last begins the next window.

        Raises:
            ValueError: if all streams are shorter than a window.
        """
        self._streams = tuple(streams)
        self._seq_len = seq_len
        counts = [max(len(stream) - 1, 0) // seq_len for stream in self._streams]
        # Windows up to the end of each stream.
        self._ends = np.cumsum(counts, dtype=np.int64)
        if not len(self):
            longest = max(self._streams, key=len, default=None)
            given = "no tokens" if longest is None else f"at most {len(longest)} tokens"
            place = "" if longest is None else f", in {longest.name!r},"
            raise ValueError(
                "Data must have at least seq_len + 1 tokens to train on in one place, and as many "
                f"held out; got {given}{place} for seq_len={seq_len}. Use more data (--data.path), "
                "a shorter --seq-len, or, for the part held out, a larger --data.held-out."
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length"]:
        """Window `index`.

        Raises:
            ValueError: if one of its tokens lies beyond the vocabulary.
        """
        which = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[which - 1]) if which else 0
        start = (index - first) * self._seq_len
        return self._streams[which].read(start, start + self._seq_len + 1)


def next_token_batch(
    windows: Integer[np.ndarray, "B length"],
    *,
    layout: Layout,
    end_of_document: int | None = None,
) -> Batch:
    """Inputs, targets and documents from windows of T + 1 tokens, in layout order.

    Args:
        windows: one for each row.
        layout: the order of the tokens.
        end_of_document: the token that ends a document; None if documents are not masked.

    Raises:
        ValueError: if T tokens cannot be laid out.
    """
    tokens = windows[:, :-1].astype(np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    segment_ids, weights = None, np.ones(tokens.shape, np.float32)
    if end_of_document is not None:
        ends = tokens == end_of_document
        starts = np.zeros_like(ends)
        starts[:, 1:] = ends[:, :-1]
        segment_ids = np.cumsum(starts, axis=1, dtype=np.int32)
        positions = positions - np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
        weights = (~ends).astype(np.float32)
    return Batch(
        tokens=layout.permute(tokens),
        targets=layout.permute(windows[:, 1:].astype(np.int32)),
        positions=layout.permute(positions),
        segment_ids=None if segment_ids is None else layout.permute(segment_ids),
        weights=layout.permute(weights),
    )


class TrainingBatches(Iterator[Batch]):
    """Batches without end: all windows in random order, then all in another, and so on.

    Threads read them ahead; their errors come out of `next`.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        layout: Layout,
        batch_size: int,
        seed: int,
        end_of_document: int | None,
        rows: Sequence[int] | None = None,
    ):
        """Begins with the first batch; nothing is read yet.

        Args:
            sequences: windows to train on.
            layout: the order of the tokens.
            batch_size: rows of a batch, on all hosts together.
            seed: seed of the order.
            end_of_document: the token that ends a document; None if documents are not masked.
            rows: rows of each batch to read, as `local_rows` gives them; all by default.
        """
        rows = range(batch_size) if rows is None else rows
        self._order = {"windows": len(sequences), "batch_size": batch_size, "seed": seed}
        # Grain adds the number of the epoch to the seed: neighbours must not share their orders.
        (shuffle_seed,) = np.random.SeedSequence(seed).generate_state(1)
        order = grain.MapDataset.source(sequences).shuffle(seed=int(shuffle_seed)).repeat()

        def read(step: int) -> Batch:
            windows = np.stack([np.asarray(order[step * batch_size + row]) for row in rows])
            return next_token_batch(windows, layout=layout, end_of_document=end_of_document)

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
    sequences: Sequences,
    *,
    layout: Layout,
    batch_size: int,
    count: int,
    end_of_document: int | None,
    rows: Sequence[int] | None = None,
) -> list[Batch]:
    """`count` windows, rounded up to whole batches, spread evenly: the same every time.

    Where there are fewer windows, each is there several times, as often as the others up to one.

    Args:
        sequences: windows that were held out.
        layout: the order of the tokens.
        batch_size: rows of a batch, on all hosts together.
        count: windows to measure.
        end_of_document: the token that ends a document; None if documents are not masked.
        rows: rows of each batch to read, as `local_rows` gives them; all by default.

    Raises:
        ValueError: if a token lies beyond the vocabulary.
    """
    rows = range(batch_size) if rows is None else rows
    num_batches = -(-count // batch_size)
    total = num_batches * batch_size
    batches = []
    for step in range(num_batches):
        indices = [(step * batch_size + row) * len(sequences) // total for row in rows]
        windows = np.stack([sequences[index] for index in indices])
        batches.append(next_token_batch(windows, layout=layout, end_of_document=end_of_document))
    return batches


def local_rows(sharding: NamedSharding, *, batch_size: int, seq_len: int) -> tuple[int, ...]:
    """The rows of a batch that the devices of this process hold, in order.

    Args:
        sharding: of the arrays of a batch.
        batch_size: rows of a batch, on all hosts together.
        seq_len: tokens of a row.
    """
    indices = sharding.addressable_devices_indices_map((batch_size, seq_len)).values()
    slices = [index[0] for index in indices if index is not None]
    return tuple(sorted({row for rows in slices for row in range(batch_size)[rows]}))


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
        sharding: of the arrays of a batch.
        batch_size: rows of the batch, on all hosts together; those of `batch` by default.
        rows: which rows of the batch these are, in order; all by default.

    Returns:
        The batch as global arrays.
    """
    local = tuple(range(len(batch.tokens))) if rows is None else tuple(rows)
    shape = (len(local) if batch_size is None else batch_size, batch.tokens.shape[1])
    position = {row: index for index, row in enumerate(local)}

    def place_array(x: np.ndarray) -> jax.Array:
        def read(index: Any) -> np.ndarray:
            held = [position[row] for row in range(shape[0])[index[0]]]
            return x[held, index[1]]

        return jax.make_array_from_callback(shape, sharding, read, dtype=x.dtype)

    return jax.tree.map(place_array, batch)

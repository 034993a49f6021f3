"""Sequences of tokens, and batches of them: tokens, targets, positions, documents.

Streams are cut into sequences. A sequence has T tokens and the token after them, which is the
target of the last one. Sequence i of a stream starts at token i * T; up to T tokens at the end of a
stream are not used. If all streams are shorter than a sequence, each is one, which is filled up. If
documents are masked, a batch finds their ends in its own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Int64, Integer, Num

from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from startrail_jax.tokens.trees import branch_positions
from trainer.data.dataset import Dataset
from trainer.data.mixture import locate
from trainer.data.order import NO_EXAMPLE
from trainer.gpt.chat.stops import keep_stops
from trainer.gpt.corpus import Corpus, Stream

PADDING = -1
"""Segment id of padding, as attention takes it; and what a sequence is filled up with."""


class TokenBatch(NamedTuple):
    """A batch in layout order, or some of its rows; T is a length that the layout can hold. Tokens
    after the last one of a sequence have no weight, and the segment id `PADDING`."""

    tokens: Int32[np.ndarray | Array, "B T"]
    targets: Int32[np.ndarray | Array, "B T"]
    """The token after each of `tokens`."""
    positions: Int32[np.ndarray | Array, "B T"]
    """Position of each token in its document, or in its row if documents are not masked. It counts
    from the start of the row, or of a piece, if the document began before."""
    segment_ids: Int32[np.ndarray | Array, "B T"] | None
    """Number of the token's document in the row, from 0; None if documents are not masked."""
    weights: Float32[np.ndarray | Array, "B T"]
    """1 if the target belongs to the same document as the token, or ends it; else 0. Rollouts have
    weights of their own."""
    numbers: dict[str, Num[np.ndarray | Array, "B T *dims"]] | None = None
    """What the objective reads of the targets beside, by name, such as log-probabilities; and
    `experts`, if they are given, which are those of the tokens. Padding has zeros."""
    visible_until: Int32[np.ndarray | Array, "B T"] | None = None
    """If documents share beginnings, the place after the last token that continues each token, and
    `PADDING` for padding: what attention takes in place of `segment_ids`. A shared token then has
    the number of the document that counts it."""


class TokenExample(NamedTuple):
    """Tokens that stay together in a row: a document, or several that belong together."""

    tokens: Int32[np.ndarray, " n"]
    targets: Int32[np.ndarray, " n"]
    weights: Float32[np.ndarray, " n"]
    documents: Int32[np.ndarray, " n"] | None = None
    """Number of the document of each token, from 0 and without gaps; None for a single one."""
    numbers: dict[str, Num[np.ndarray, "n *dims"]] | None = None
    """As in `TokenBatch`."""
    ends: Int32[np.ndarray, " n"] | None = None
    """`visible_until` of documents that share beginnings, counted from the first token of the
    example; None for documents one after another."""

    @classmethod
    def of(cls, tokens: Int32[np.ndarray, " n_and_one"], counted: Any = True) -> TokenExample:
        """A document, whose last token is a target alone; `counted` says of each token whether it
        counts as a target, or True for all."""
        weights = np.ones(len(tokens) - 1) if counted is True else counted[1:]
        return cls(tokens[:-1], tokens[1:], weights.astype(np.float32))


def positions_after(starts: Bool[np.ndarray, "*rows length"]) -> Int32[np.ndarray, "*rows length"]:
    """Position of each token after the last before it, or itself, at which a document starts; in
    its row if there is none."""
    places = np.broadcast_to(np.arange(starts.shape[-1], dtype=np.int32), starts.shape)
    return places - np.maximum.accumulate(np.where(starts, places, 0), axis=-1)


NumbersOf = Mapping[str, tuple[str, tuple[int, ...]]]
"""Names of numbers of tokens -> their type, and the dimensions that they have for each token."""


def rows_of(
    rows: Sequence[Sequence[TokenExample]],
    length: int,
    numbers: NumbersOf | None = None,
    *,
    trees: bool = False,
) -> TokenBatch:
    """Rows of `length` tokens, with padding after their examples, in natural order. All examples
    have these `numbers`; None for none. With `trees`, some may share beginnings."""
    shape = len(rows), length
    batch = TokenBatch(
        tokens=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.full(shape, PADDING, np.int32),
        weights=np.zeros(shape, np.float32),
        numbers=None
        if numbers is None
        else {name: np.zeros((*shape, *dims), kind) for name, (kind, dims) in numbers.items()},
        visible_until=np.full(shape, PADDING, np.int32) if trees else None,
    )
    segment_ids: Any = batch.segment_ids
    for row, examples in enumerate(rows):
        end, before = 0, 0
        for example in examples:
            start, end = end, end + len(example.tokens)
            here = row, slice(start, end)
            batch.tokens[here], batch.weights[here] = example.tokens, example.weights
            batch.targets[here] = np.maximum(example.targets, 0)
            documents = example.documents
            if documents is None:
                documents = np.zeros(end - start, np.int32)
            segment_ids[here] = before + documents
            batch.positions[here], ends = places_of(example)
            if batch.visible_until is not None:
                batch.visible_until[here] = start + ends
            before += int(documents.max(initial=0)) + 1
            for name, x in (batch.numbers or {}).items():
                x[here] = (example.numbers or {})[name]
    return batch


@dataclass(frozen=True, kw_only=True)
class TextDataset(Dataset):
    """The data of a language model."""

    corpus: Corpus

    @classmethod
    def of(cls, corpus: Corpus, **others: Any) -> TextDataset:
        """The data of a corpus, of which the other arguments make examples and batches."""
        same: dict[str, Any] = {x: getattr(corpus, x) for x in ("description", "digest", "tokens")}
        same["loss_unit"] = f"nats/{corpus.unit}"
        return cls(corpus=corpus, **same | others)

    def keep(self, run_dir: Path) -> None:
        keep_stops(run_dir, self.corpus.stops)


class Sequences:
    """The sequences of several streams, by their number: a `trainer.data.dataset.Source`."""

    def __init__(self, streams: Sequence[Stream], seq_len: int):
        """No sequence crosses streams; each has `seq_len` + 1 tokens, the last also in the next."""
        self._streams = tuple(streams)
        self._seq_len = seq_len
        counts = [max(len(stream) - 1, 0) // seq_len for stream in self._streams]
        self.is_filled = not any(counts)
        """Whether all sequences are shorter streams that are filled up."""
        if self.is_filled:
            counts = [int(len(stream) > 1) for stream in self._streams]
        used = np.multiply(counts, seq_len)
        self.left_out = 0 if self.is_filled else sum(map(len, self._streams)) - int(used.sum())
        """Number of tokens that are in no sequence, but for the last target of a stream."""
        # Number of sequences up to the end of each stream.
        self._ends = np.cumsum(counts, dtype=np.int64)
        if not len(self):
            longest = max(self._streams, key=len, default=None)
            given = "no tokens" if longest is None else f"at most {len(longest)} tokens"
            place = "" if longest is None else f", in {longest.name!r}"
            raise InputError(
                "Data must have at least 2 tokens to train on in one place, and as many held out; "
                f"got {given}{place}. Use more data (--data.path), or, for the part held out, a "
                "larger --data.validation-fraction."
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length"]:
        """The T + 1 tokens of sequence `index`; `PADDING` after the last one of a short stream."""
        which, number = locate(self._ends, index)
        start = number * self._seq_len
        tokens = self._streams[which].read(start, start + self._seq_len + 1)
        missing = self._seq_len + 1 - len(tokens)
        return np.pad(tokens, (0, missing), constant_values=PADDING)


def next_token_batch(
    sequences: Integer[np.ndarray, "B length"],
    *,
    layout: Layout,
    end_of_document: int | None = None,
    begins_too: bool = False,
    longest: int | None = None,
) -> TokenBatch:
    """A batch, in layout order, from sequences of T + 1 tokens, which `PADDING` may follow.
    `end_of_document` is None if every row is one document. If it also begins documents, the last of
    several in front of another token is a beginning, and so is one with which a sequence begins.
    Documents of more than `longest` tokens are cut into pieces of that length."""
    tokens, targets = (x.astype(np.int32) for x in (sequences[:, :-1], sequences[:, 1:]))
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    segment_ids, weights = None, (targets != PADDING).astype(np.float32)
    if end_of_document is not None or longest is not None:
        ends = tokens == end_of_document
        if begins_too:
            follows = np.pad(ends[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            ends = ends & ~(follows & (targets != end_of_document) & (targets != PADDING))
        starts = np.zeros_like(ends)
        starts[:, 1:] = ends[:, :-1]
        positions = positions_after(starts)
        if longest is not None:
            positions = positions % longest
            starts[:, 1:] |= positions[:, 1:] == 0
        segment_ids = np.cumsum(starts, axis=1, dtype=np.int32)
        weights = weights * ~ends
        segment_ids = np.where(tokens == PADDING, PADDING, segment_ids)
    tokens, targets = (np.where(x == PADDING, 0, x) for x in (tokens, targets))
    return in_layout_order(TokenBatch(tokens, targets, positions, segment_ids, weights), layout)


def places_of(
    example: TokenExample,
) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """The position of each token in its text, and the `ends` of the example."""
    documents, ends = example.documents, example.ends
    if ends is not None:
        return branch_positions(ends[None])[0], ends
    length = len(example.tokens)
    if documents is None:
        return np.arange(length, dtype=np.int32), np.full(length, length, np.int32)
    starts = np.diff(documents, prepend=-1) != 0
    borders = np.append(np.flatnonzero(starts), length)
    return positions_after(starts), np.repeat(borders[1:], np.diff(borders)).astype(np.int32)


def stretches_of(example: TokenExample) -> Int64[np.ndarray, "stretches 2"]:
    """Where the tokens of an example stand in their texts: the positions of the first and after the
    last one of each stretch of tokens that follow one another."""
    positions = places_of(example)[0].astype(np.int64)
    begins = np.diff(positions, prepend=-2) != 1
    ends = np.append(begins[1:], True)
    return np.stack([positions[begins], positions[ends] + 1], 1)


def in_layout_order(batch: TokenBatch, layout: Layout) -> TokenBatch:
    """A batch in natural order, filled up to a length that the layout can hold, in its order.
    Without segment ids nothing marks the padding for attention: no token before sees it, as the
    model is causal, and what it computes itself has no weight."""
    length = batch.tokens.shape[1]
    missing = ((0, 0), (0, layout.padded_length(length) - length))

    def placed(x: Any, fill: int = 0) -> Any:
        if x is None:
            return None
        margins = (*missing, *((0, 0) for _ in x.shape[2:]))
        return layout.permute(np.pad(x, margins, constant_values=fill))

    return TokenBatch(
        tokens=placed(batch.tokens),
        targets=placed(batch.targets),
        positions=placed(batch.positions),
        segment_ids=placed(batch.segment_ids, PADDING),
        weights=placed(batch.weights),
        numbers=batch.numbers and {name: placed(x) for name, x in batch.numbers.items()},
        visible_until=placed(batch.visible_until, PADDING),
    )


def collate(
    sequences: list[Int32[np.ndarray, " length"]],
    numbers: list[int],
    **others: Any,
) -> TokenBatch:
    """`next_token_batch` of a list of sequences, with their numbers in the run."""
    return counting(next_token_batch(np.stack(sequences), **others), numbers)


def counting(batch: TokenBatch, numbers: Sequence[int]) -> TokenBatch:
    """A batch with weights of 0 in the rows that only fill it up."""
    if NO_EXAMPLE not in numbers:
        return batch
    is_example = np.array(numbers) != NO_EXAMPLE
    return batch._replace(weights=batch.weights * is_example[:, None].astype(np.float32))

"""Whole documents, for batches in which each lies on as few devices as hold it.

A document of n + 1 tokens has n that the model reads, each of which has the next one as its target.
One of more than T is cut into pieces of T, and of what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from jaxtyping import Int64, Integer

from startrail_jax.errors import InputError
from startrail_jax.tokens.documents import DocumentSizes
from startrail_jax.tokens.layout import Layout
from trainer.data.mixture import locate, mixed_epochs
from trainer.gpt.batches import (
    NumbersOf,
    TokenBatch,
    TokenExample,
    rows_of,
    stretches_of,
)
from trainer.gpt.corpus import Stream

# Number of tokens in which ends of documents are looked for at a time.
SCANNED_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenDocuments:
    """Documents of tokens: `trainer.data.dataset.Documents`."""

    sizes: DocumentSizes
    """Tokens of each that the model reads."""
    read: Callable[[int], TokenExample]
    """Returns a document by its number."""
    numbers: NumbersOf | None = None
    """The numbers that documents have beside their tokens; None for none."""
    trees: bool = False
    """Whether documents are trees of texts that share beginnings."""
    mixed: Callable[[int], Callable[[int], Int64[np.ndarray, " drawn"]]] | None = None
    """(seed) -> `Documents.epochs`, if they are of several sources."""

    def epochs(self, seed: int) -> Callable[[int], Int64[np.ndarray, " drawn"]] | None:
        """As `Documents.epochs`."""
        return None if self.mixed is None else self.mixed(seed)

    def rows(self, rows: Sequence[Sequence[int]], length: int) -> TokenBatch:
        """Rows of documents and padding, in natural order."""
        examples = [[*map(self.read, numbers)] for numbers in rows]
        return rows_of(examples, length, self.numbers, trees=self.trees)


def mixed_documents(
    several: Sequence[TokenDocuments], weights: Sequence[Fraction]
) -> TokenDocuments:
    """The documents of several sources, drawn by their weights."""
    lengths = [x.sizes.lengths for x in several]
    ends = np.cumsum([len(x) for x in lengths])

    def read(number: int) -> TokenExample:
        source, own = locate(ends, number)
        return several[source].read(own)

    return TokenDocuments(
        sizes=_joined([x.sizes for x in several]),
        read=read,
        numbers=several[0].numbers,
        trees=several[0].trees,
        mixed=lambda seed: mixed_epochs(lengths, weights, seed),
    )


def _joined(several: Sequence[DocumentSizes]) -> DocumentSizes:
    """The documents of several sources one after another."""
    lengths = np.concatenate([x.lengths for x in several])
    if all(x.stretches is None for x in several):
        return DocumentSizes(lengths=lengths)
    found, before = [], 0
    for sizes in several:
        own = sizes.stretches
        if own is None:
            zeros = np.zeros_like(sizes.lengths)
            own = np.stack([np.arange(len(zeros)), zeros, sizes.lengths], 1)
        found.append(own + np.array([before, 0, 0]))
        before += len(sizes.lengths)
    return DocumentSizes(lengths=lengths, stretches=np.concatenate(found))


def sizes_of(examples: Iterable[TokenExample]) -> DocumentSizes:
    """Those of examples, each of which is a document."""
    lengths, found = [], [np.zeros((0, 3), np.int64)]
    for number, example in enumerate(examples):
        lengths.append(len(example.tokens))
        found.append(np.pad(stretches_of(example), ((0, 0), (1, 0)), constant_values=number))
    return DocumentSizes(lengths=np.array(lengths, np.int64), stretches=np.concatenate(found))


def text_documents(
    streams: Sequence[Stream],
    end_of_document: int | None,
    longest: int,
    *,
    begins_too: bool = False,
) -> TokenDocuments:
    """The documents of streams, which `end_of_document` ends and may also begin; if it is None,
    every stream is one document."""
    found = [
        _pieces(stream, number, _ends(stream, end_of_document, begins_too), longest)
        for number, stream in enumerate(streams)
    ]
    pieces = np.concatenate(found)
    if not len(pieces):
        raise InputError(
            "Documents must have at least 2 tokens to train on; got "
            f"{sum(map(len, streams)):,} tokens that all end a document. Correct "
            "--data.end-of-document, or use --data.batches rows."
        )

    def read(number: int) -> TokenExample:
        stream, start, length = pieces[number].tolist()
        return TokenExample.of(streams[stream].read(start, start + length + 1))

    return TokenDocuments(
        sizes=DocumentSizes(lengths=np.ascontiguousarray(pieces[:, 2])), read=read
    )


def first_lengths(
    stream: Stream, end_of_document: int | None, longest: int, *, begins_too: bool = False
) -> Int64[np.ndarray, " documents"]:
    """Lengths of the documents among the first tokens of a stream; see `text_documents`."""
    first = replace(stream, tokens=stream.tokens[:SCANNED_TOKENS])
    return _pieces(first, 0, _ends(first, end_of_document, begins_too), longest)[:, 2]


def hint(lengths: Integer[np.ndarray, " documents"], seq_len: int, layout: Layout) -> str:
    """What the log says about rows of such documents that devices share; "" for nothing."""
    share = layout.padded_length(seq_len) // layout.degree
    alone = lengths[lengths <= share].sum() / max(lengths.sum(), 1)
    if layout.degree == 1 or alone < 0.01:
        return ""
    return (
        f"; with --data.batches documents, {alone:.0%} of the tokens would not leave their device"
    )


def _pieces(
    stream: Stream, number: int, ends: Int64[np.ndarray, " ends"], longest: int
) -> Int64[np.ndarray, "pieces 3"]:
    """Number of the stream, first token and length of each piece of at most `longest` tokens."""
    last = len(stream) - 1
    ends = np.append(ends, last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = np.maximum(ends - starts, 0)
    counts = -(-lengths // longest)
    # Piece i of a document begins i * longest tokens after it.
    piece = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(starts, counts) + piece * longest
    sizes = np.minimum(np.repeat(lengths, counts) - piece * longest, longest)
    return np.stack([np.full_like(begins, number), begins, sizes], axis=1).astype(np.int64)


def _ends(stream: Stream, end: int | None, begins_too: bool) -> Int64[np.ndarray, " ends"]:
    """The places of the token that ends documents, found some at a time."""
    starts = range(0, len(stream) if end is not None else 0, SCANNED_TOKENS)
    parts = [x + np.flatnonzero(stream.tokens[x : x + SCANNED_TOKENS] == end) for x in starts]
    found = np.concatenate([np.zeros(0, np.int64), *parts])
    if begins_too:
        follows = np.diff(found, prepend=-1) == 1
        stands_before = np.diff(found, append=len(stream)) != 1
        found = found[~(follows & stands_before)]
    return found

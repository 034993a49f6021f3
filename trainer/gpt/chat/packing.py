"""Rows of whole examples, and batches of them, in which only what is counted has a weight.

A row has T + 1 tokens: examples one after another, as many as fit, and padding. An example is in
one row; it loses its end if it is too long. Examples keep their order, so that a row is found by
its number without reading others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Integer

from startrail_jax.errors import InputError
from startrail_jax.tokens.documents import DocumentSizes, first_of_rows
from startrail_jax.tokens.layout import Layout
from trainer.gpt.batches import (
    PADDING,
    TokenBatch,
    TokenExample,
    counting,
    in_layout_order,
    positions_after,
)
from trainer.gpt.documents import TokenDocuments


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedExamples:
    """The tokens of examples, in memory or mapped into it."""

    tokens: Integer[np.ndarray, " tokens"]
    """The tokens of all examples, one after another."""
    counted: Integer[np.ndarray, " tokens"]
    """0 for a token that the loss does not count as a target, else another number."""
    ends: Integer[np.ndarray, " examples"]
    """Where each example ends in `tokens`."""


class Row(NamedTuple):
    """A row of examples."""

    tokens: Int32[np.ndarray, " length"]
    """The tokens, and 0 as padding."""
    counted: Bool[np.ndarray, " length"]
    """Whether the loss counts a token, as a target."""
    examples: Int32[np.ndarray, " length"]
    """Number of the token's example in the row, from 0; `PADDING` after the last."""


class PackedExamples:
    """Rows of examples, by their number: a `trainer.data.dataset.Source`."""

    def __init__(
        self, part: EncodedExamples, seq_len: int, *, name: str, longest: int | None = None
    ) -> None:
        """Decides which examples share a row; one has at most `longest` tokens, T by default."""
        self._part = part
        self._length = seq_len + 1
        most, flag = (self._length, "seq_len") if longest is None else (longest, "longest_document")
        lengths = np.diff(part.ends, prepend=0)
        self._starts = part.ends - lengths
        cut = np.flatnonzero(lengths > most).tolist()
        useless = [i for i in cut if not self._counted(i, most)[1:].any()]
        self.num_cut, self.num_left_out = len(cut) - len(useless), len(useless)
        """Number of examples that lose their end, and of those left out, as nothing before that
        counts."""
        self._examples = np.delete(np.arange(len(lengths)), useless)
        """The numbers of the examples in the rows."""
        self.lengths = np.minimum(lengths, most)[self._examples]
        """Number of tokens of each example in the rows."""
        self._firsts = first_of_rows(np.cumsum(self.lengths), self._length)
        self.share_of_padding = 1 - self.lengths.sum() / max(len(self) * self._length, 1)
        lost = sum(np.count_nonzero(self._counted(i)[most:]) for i in cut)
        lost += sum(np.count_nonzero(self._counted(i, most)) for i in useless)
        self.num_counted = int(np.count_nonzero(part.counted)) - lost
        """Number of tokens in the rows that the loss counts."""
        if not len(self):
            raise InputError(
                f"A row must hold something that the loss counts; got examples of {name!r} of "
                f"{lengths.min(initial=0)} to {lengths.max(initial=0)} tokens whose answers all "
                f"begin after {flag}={longest or seq_len}. Increase it."
            )

    def _counted(self, example: int, length: int | None = None) -> Integer[np.ndarray, " n"]:
        """What counts of the first tokens of an example, or of all of them."""
        start, end = self._starts[example], self._part.ends[example]
        return self._part.counted[start : end if length is None else start + length]

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> Row:
        """The row of a number."""
        row = Row(
            np.zeros(self._length, np.int32),
            np.zeros(self._length, bool),
            np.full(self._length, PADDING, np.int32),
        )
        filled = 0
        for number, which in enumerate(range(self._firsts[index], self._firsts[index + 1])):
            tokens, counted = self.example(which)
            place = slice(filled, filled + len(tokens))
            row.tokens[place] = tokens
            row.counted[place] = counted
            row.examples[place] = number
            filled += len(tokens)
        return row

    @property
    def documents(self) -> TokenDocuments:
        """The examples in the rows, as whole documents."""
        return TokenDocuments(
            sizes=DocumentSizes(lengths=self.lengths.astype(np.int64) - 1),
            read=lambda number: TokenExample.of(*self.example(number)),
        )

    def example(
        self, number: int
    ) -> tuple[Int32[np.ndarray, " length"], Bool[np.ndarray, " length"]]:
        """The tokens of one of the examples in the rows, and whether the loss counts each."""
        start = int(self._starts[self._examples[number]])
        place = slice(start, start + int(self.lengths[number]))
        return self._part.tokens[place].astype(np.int32), self._part.counted[place] != 0


def collate_rows(
    rows: list[Row], numbers: list[int], *, layout: Layout, mask_documents: bool
) -> TokenBatch:
    """A batch in layout order; with `mask_documents`, a token attends only to its own example."""
    tokens, counted, examples = (np.stack(x) for x in zip(*rows, strict=True))
    here, following = examples[:, :-1], examples[:, 1:]
    positions = np.broadcast_to(np.arange(here.shape[1], dtype=np.int32), here.shape)
    if mask_documents:
        starts = np.diff(here, axis=1, prepend=here[:, :1]) != 0
        positions = positions_after(starts)
    weights = (counted[:, 1:] & (here == following)).astype(np.float32)
    batch = TokenBatch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        positions=positions,
        segment_ids=here if mask_documents else None,
        weights=weights,
    )
    return counting(in_layout_order(batch, layout), numbers)

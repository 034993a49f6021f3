"""Windows of token streams, and what a batch of them says: tokens, targets, documents.

A stream is cut into windows of T tokens and the one after; window i of a stream starts at token
i * T, and what is left at its end, up to T tokens, is not used. Where documents are masked, all
that a batch needs to know of them is in its own tokens: each ends with the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float32, Int32, Integer

from startrail_jax.layout import Layout
from trainer.gpt.corpus import Stream


class TokenBatch(NamedTuple):
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
) -> TokenBatch:
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
    return TokenBatch(
        tokens=layout.permute(tokens),
        targets=layout.permute(windows[:, 1:].astype(np.int32)),
        positions=layout.permute(positions),
        segment_ids=None if segment_ids is None else layout.permute(segment_ids),
        weights=layout.permute(weights),
    )

"""Converts dense boolean masks into a mask and segment ids, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.errors import InputError
from startrail_jax.masks.algebra import Full, Mask, band


@dataclass(frozen=True)
class Recognised:
    """A mask and segment ids that show exactly the pairs of a dense mask.

        found = masks.recognise(dense)
        attention = Attention(mesh, mask=found.mask)
        out = attention(query, key, value, segment_ids=found.segment_ids)

    Bring the ids into the order of the layout with `attention.shard`, like all arrays with tokens.
    """

    mask: Mask
    """Which positions see which: `Full()`, `Causal()` or a `Window`."""
    segment_ids: np.ndarray | tuple[np.ndarray, np.ndarray] | None
    """int32 [batch, seq] in natural order, -1 for padding; a pair for queries and keys if these
    differ; None if all tokens are in one document."""


def recognise(mask: Any) -> Recognised:
    """Reads a dense mask as a causal mask or a window, together with documents and padding.

    Args:
        mask: bools [batch, 1, seq, kv_seq], [batch, seq, kv_seq] or [seq, kv_seq] in natural order;
            True where a query sees a key. All heads must have the same mask.

    Returns:
        The mask and the segment ids, which show each query the same keys as `mask` does.

    Raises:
        ValueError: if it is not an array of bools of such a shape, or if it is not a causal mask,
            window or full mask over neighbouring documents and padding. The message names entries
            that do not fit.
    """
    import jax
    from jax.core import Tracer

    if isinstance(mask, Tracer):
        raise InputError(
            f"recognise needs a mask that holds values; got the traced {jax.typeof(mask)}. Call it "
            "outside of jit, grad and vmap."
        )
    dense = np.asarray(mask)
    given = f"{dense.dtype} {list(dense.shape)}"
    if dense.dtype != bool or dense.ndim not in (2, 3, 4) or not dense.size:
        raise InputError(
            "recognise needs bools [batch, 1, seq, kv_seq], [batch, seq, kv_seq] or [seq, kv_seq]; "
            f"got {given}. Compare additive masks with 0 first."
        )
    if dense.ndim == 4:
        if (dense != dense[:, :1]).any():
            raise InputError(
                f"recognise needs one mask for all heads; got {given}, whose heads differ. "
                "Call an attention for each group of heads that has a mask of its own."
            )
        dense = dense[:, 0]
    dense = np.reshape(dense, (-1, *dense.shape[-2:]))
    query_ids, key_ids = _documents(dense)
    one = (query_ids[:, :, None] == key_ids[:, None, :]) & (query_ids >= 0)[:, :, None]
    mask = _mask_of(dense, one)
    rows, columns = (np.arange(n) for n in dense.shape[1:])
    shown = one & np.asarray(mask.visible(rows[:, None], columns[None, :]))
    wrong = np.argwhere(shown != dense)
    if len(wrong):
        row, query, key = map(int, wrong[0])
        sees = "sees" if dense[row, query, key] else "does not see"
        raise InputError(
            "recognise needs a causal mask, a window or neither, with documents of neighbouring "
            f"tokens and padding; got {given}, of which {len(wrong)} entries are not those of "
            f"{mask} with the documents that it seems to have. The first: query {query} of "
            f"row {row} {sees} key {key}. Write it as a mask of startrail_jax.masks, such as "
            "masks.Rule(function)."
        )
    if not query_ids.any() and not key_ids.any():
        return Recognised(mask, None)
    same = np.array_equal(query_ids, key_ids)
    return Recognised(mask, query_ids if same else (query_ids, key_ids))


def _documents(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids of queries and keys: a document ends where neighbours do not see each other."""
    sees, seen = np.any(dense, 2), np.any(dense, 1)
    if dense.shape[1] != dense.shape[2]:
        return (sees - 1).astype(np.int32), (seen - 1).astype(np.int32)
    ids = np.zeros(dense.shape[:2], np.int32)
    for row, pairs in enumerate(dense):
        (tokens,) = np.nonzero(sees[row] & seen[row])
        before, after = tokens[:-1], tokens[1:]
        apart = ~(pairs[after, before] | pairs[before, after])
        starts = tokens[1:][apart]
        # What sees and is not seen, or the other way round, is of the document before it.
        ids[row] = np.searchsorted(starts, np.arange(len(pairs)), side="right")
    return np.where(sees, ids, -1), np.where(seen, ids, -1)


def _mask_of(dense: np.ndarray, one: np.ndarray) -> Mask:
    """The narrowest window that shows all visible pairs; no side that documents alone explain."""
    if dense.shape[1] != dense.shape[2]:
        return Full()
    queries, keys = (np.arange(n) for n in dense.shape[1:])
    behind = queries[:, None] - keys
    sides = []
    for distance in (behind, -behind):
        farthest = np.where(dense, distance, -1).max()
        sides.append(farthest if farthest < np.where(one, distance, -1).max() else None)
    left, right = (None if side is None else max(int(side), 0) for side in sides)
    return band(left, right)

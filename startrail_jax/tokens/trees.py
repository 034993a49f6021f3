"""Rows of trees on the host: texts with shared beginnings, each beginning once."""

from __future__ import annotations

import numpy as np

from startrail_jax.errors import InputError


def branch_positions(visible_until: np.ndarray) -> np.ndarray:
    """The position of each token in the text of its branch, as if that stood in a row of its own.

    It is the number of tokens that the token continues, and what rotary embeddings need.

    Args:
        visible_until: integers [batch, seq] in natural order, as `Attention` takes them.

    Returns:
        int32 [batch, seq]; 0 for padding.

    Raises:
        ValueError: if a row is not a tree.
    """
    ends = np.asarray(visible_until)
    check_ends(ends)
    rows, length = ends.shape
    place = np.arange(length)
    # Padding ends where it stands.
    ended = np.zeros((rows, length + 1), np.int64)
    np.add.at(ended, (np.arange(rows)[:, None], np.where(ends >= 0, ends, place + 1)), 1)
    found = place - np.cumsum(ended, 1)[:, :length]
    return np.where(ends >= 0, found, 0).astype(np.int32)


def branch_levels(visible_until: np.ndarray) -> int:
    """How many states a row of trees needs at a time, at most: the `levels` of `LinearAttention`.

    It is the largest number of beginnings with different ends that are seen at one token: 1 for
    packed documents, and 2 for beginnings and their answers.

    Args:
        visible_until: integers [batch, seq] in natural order, as `Attention` takes them.

    Raises:
        ValueError: if a row is not a tree.
    """
    ends = np.asarray(visible_until)
    check_ends(ends)
    return int(branch_slots(ends)[0].max(initial=0)) + 1


def branch_slots(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slot of each token of rows that are trees, and whether it is the first one of its slot:
    see `linear.forks`. Both are [batch, seq]; for padding, they mean nothing."""
    slots, fresh = np.zeros(ends.shape, np.int64), np.zeros(ends.shape, bool)
    for row, slot, begins in zip(ends, slots, fresh, strict=True):
        places = np.flatnonzero(row >= 0)
        different, first = np.unique(row[places], return_index=True)
        begins[places[first]] = True
        seen = np.zeros(len(row) + 1, np.int64)
        np.add.at(seen, places[first], 1)
        np.add.at(seen, different, -1)
        slot[:] = np.cumsum(seen)[:-1] - 1
    return slots, fresh


def check_ends(ends: np.ndarray) -> None:
    """Raises an InputError unless rows [batch, seq] in natural order are trees, depth first.

    Each number that is not negative lies after its own token and within the row, and no stretch
    reaches beyond one that it began in.
    """
    rows, length = ends.shape
    places = np.arange(length)
    used = ends >= 0
    for wrong, must in (
        (used & (ends <= places), "be larger than the place of its token"),
        (ends > length, f"be at most the {length} tokens of a row"),
    ):
        if wrong.any():
            row, place = np.argwhere(wrong)[0]
            raise InputError(
                f"visible_until must {must}; got {ends[row, place]} at place {place} of row "
                f"{row}. A token that nothing continues has its own place + 1, and padding -1."
            )
    # The largest number of 2^n tokens from each on, for n = 0, 1, ...; a stretch is two of these.
    largest, size = ends.astype(np.int64), 1
    inner = np.where(used, ends - places - 1, 0)
    while (inner >= size).any():
        row, place = np.nonzero((inner >= size) & (inner < 2 * size))
        end = ends[row, place]
        beyond = np.maximum(largest[row, place + 1], largest[row, end - size]) > end
        if beyond.any():
            i = int(np.argmax(beyond))
            raise InputError(
                "visible_until must be nested: no token below another is visible for longer; got "
                f"{end[i]} at place {place[i]} of row {row[i]}, and a larger number below it. "
                "Write the rows depth first."
            )
        later = np.full((rows, min(size, length)), -1)
        largest = np.maximum(largest, np.concatenate([largest[:, size:], later], 1))
        size *= 2

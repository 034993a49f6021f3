"""The interface of all masks, combinations of masks, and the masks for windows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.tokens.layout import Runs, Span
from startrail_jax.values import adopt, is_whole, whole


class Mask:
    """The interface of every mask of this module; `a & b` and `a | b` are masks too.

    The methods are static arithmetic: they take integers, NumPy arrays or traced arrays with shapes
    that broadcast, and compute element by element.
    """

    causal: bool = False
    """True if no query sees a later key."""
    grows: bool = False
    """True if late queries see more keys than early ones, so that zigzag order balances them."""
    per_row: bool = False
    """True if the mask leaves lengths open, which each call gives for each row of the batch."""

    @property
    def reach(self) -> int | None:
        """Distance back to the farthest key that a query sees, if `edge` holds; None if never."""
        return None

    def visible(self, query: Any, key: Any) -> Any:
        """True if the query at one position sees the key at another."""
        raise NotImplementedError

    def some(self, query: Span, key: Span) -> Any:
        """True if some query of one span may see some key of another; False is certain."""
        raise NotImplementedError

    def every(self, query: Span, key: Span) -> Any:
        """True if every query of one span sees every key of another; True is certain."""
        raise NotImplementedError

    def triangle(self, query: Span, key: Span) -> Any:
        """True if a query of one span sees exactly the keys of another up to its own position.

        True is certain. Kernels for causal masks can then compute the two spans.
        """
        return False

    def edge(self, query: Span, key: Span) -> Any:
        """True if a query of one span sees exactly the keys of another within `reach`.

        True is certain. Kernels for causal masks can then compute the two in reverse order.
        """
        return False

    def within(self, seq_len: int) -> Mask:
        """The simplest mask that is the same for sequences of this length."""
        return self

    def given(self, lengths: Any) -> Mask:
        """The mask with the lengths of a call in the place of those that it leaves open.

        Args:
            lengths: int32, of a shape that broadcasts with positions.
        """
        return self

    def check_closed(self, caller: str) -> None:
        """Raises if the mask leaves lengths open that the caller has no argument for.

        Raises:
            ValueError: if it does.
        """
        if self.per_row:
            raise InputError(
                f"{caller} needs a mask whose lengths are known; got mask={self}, the lengths of "
                "which only a call of the attention is given, as prefix_lengths. Name one length "
                "for all rows, such as masks.Prefix(512)."
            )

    def check(self, seq_len: int) -> None:
        """Raises unless the mask makes sense for sequences of this length.

        Raises:
            ValueError: if it uses positions outside the sequence, or hides every key.
        """
        self._check_positions(seq_len)
        whole = Span(0, seq_len - 1)
        if not _concrete(self.some, whole, whole).any():
            raise InputError(
                f"A mask must show some key to some query; got mask={self}, which hides every key "
                f"of seq_len={seq_len}. Correct the mask."
            )

    def _check_positions(self, seq_len: int) -> None:
        pass

    def kind(self, query: Runs, key: Runs) -> str:
        """Says what is visible between two runs of positions.

        Returns:
            "empty", "full" or "partial". The first two are certain. Combined masks may give
            "partial" although they are empty or full.
        """
        if not self.meet(query, key).any():
            return "empty"
        pairs = [(a, b) for a in query.spans for b in key.spans]
        return "full" if all(_concrete(self.every, *pair).all() for pair in pairs) else "partial"

    def meet(self, query: Runs, key: Runs) -> Any:
        """True if some query of one unit may see some key of another; False is certain.

        Args:
            query, key: runs whose starts are integers, or NumPy arrays that broadcast.
        """
        return np.any(np.stack([self.shows(query, span) for span in key.spans]), axis=0)

    def shows(self, query: Runs, key: Span) -> Any:
        """True if some query of one unit may see some key of a span; False is certain.

        Args:
            query: runs whose starts are integers, or NumPy arrays.
            key: the span; its ends are integers, or NumPy arrays that broadcast with the starts.
        """
        return np.any(np.stack([_concrete(self.some, span, key) for span in query.spans]), axis=0)

    # So that `array & mask` asks the mask, and not each value of the array.
    __array_ufunc__ = None

    def __and__(self, other: Mask) -> Mask:
        _check_mask("&", other)
        if self == other or isinstance(other, Full):
            return self
        if isinstance(self, Full):
            return other
        mine, its = _reach(self), _reach(other)
        if mine and its:
            return band(*map(_least, mine, its))
        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        _check_mask("|", other)
        if self == other or isinstance(self, Full):
            return self
        return other if isinstance(other, Full) else Either(self, other)

    # A mask on the left has combined with the other already: these get what is no mask.
    __rand__ = __and__
    __ror__ = __or__

    def __invert__(self) -> Mask:
        raise UnsupportedError(
            "Masks combine by & and | only, as of what a mask hides no kernel knows which tiles to "
            f"skip; got ~{self}. Write the keys that are seen as masks.Rule(function), such as "
            "masks.Rule(lambda query, key: key > query) for ~masks.Causal()."
        )


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key. Only this mask allows queries and keys of different lengths."""

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        return (query == query) & (key == key)

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        return True

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        return True


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys at its own position and before."""

    causal = True
    grows = True

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        return key <= query

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        return key.first <= query.last

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        return key.last <= query.first

    def triangle(self, query: Span, key: Span) -> Any:
        """See `Mask.triangle`."""
        return True


@dataclass(frozen=True)
class Window(Mask):
    """A query sees its own position, `left` keys before it and `right` keys after it.

    `Attention(mesh, window=w)` is `Window(w - 1, 0)`, because `window` also counts the query's own
    position.

    Raises:
        ValueError: if a number is neither None nor an integer of at least 0.
    """

    left: int | None
    """Number of keys before the query that it sees; None for all."""
    right: int | None
    """Number of keys after the query that it sees; None for all."""

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                check_number(self, name, least=0)

    @property
    def causal(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if no query sees a later key."""
        return self.right == 0

    @property
    def grows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True for causal windows, whose first queries see fewer keys, and without a left end."""
        return self.right == 0 or (self.left is None and self.right is not None)

    @property
    def reach(self) -> int | None:
        """See `Mask.reach`."""
        return self.left

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        seen = True if self.right is None else key <= _add(query, self.right)
        return seen if self.left is None else seen & (key > query - (self.left + 1))

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        seen = True if self.right is None else key.first <= _add(query.last, self.right)
        return seen if self.left is None else seen & (key.last > query.first - (self.left + 1))

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        seen = True if self.right is None else key.last <= _add(query.first, self.right)
        return seen if self.left is None else seen & (key.first > query.last - (self.left + 1))

    def triangle(self, query: Span, key: Span) -> Any:
        """See `Mask.triangle`."""
        if self.right != 0 or self.left is None:
            return self.right == 0
        return key.first > query.last - (self.left + 1)

    def edge(self, query: Span, key: Span) -> Any:
        """See `Mask.edge`."""
        return True if self.right is None else key.last <= _add(query.first, self.right)

    def within(self, seq_len: int) -> Mask:
        """See `Mask.within`."""
        sides = (self.left, self.right)
        return band(*(None if x is None or x >= seq_len - 1 else x for x in sides))


@dataclass(frozen=True)
class Both(Mask):
    """The pairs that both masks show: `first & second`."""

    first: Mask
    second: Mask

    @property
    def causal(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if no query sees a later key."""
        return self.first.causal or self.second.causal

    @property
    def grows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if late queries see more keys under one of the two masks."""
        return self.first.grows or self.second.grows

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        return self.first.visible(query, key) & self.second.visible(query, key)

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        return self.first.some(query, key) & self.second.some(query, key)

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        return self.first.every(query, key) & self.second.every(query, key)

    def triangle(self, query: Span, key: Span) -> Any:
        """See `Mask.triangle`."""
        first, second = self.first.triangle(query, key), self.second.triangle(query, key)
        mixed = first & self.second.every(query, key) | second & self.first.every(query, key)
        return mixed | first & second

    def within(self, seq_len: int) -> Mask:
        """See `Mask.within`."""
        return self.first.within(seq_len) & self.second.within(seq_len)

    @property
    def per_row(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if one of the two leaves lengths open."""
        return self.first.per_row or self.second.per_row

    def given(self, lengths: Any) -> Mask:
        """See `Mask.given`."""
        return Both(self.first.given(lengths), self.second.given(lengths))

    def _check_positions(self, seq_len: int) -> None:
        self.first._check_positions(seq_len)
        self.second._check_positions(seq_len)

    def __repr__(self) -> str:
        return f"({self.first!r} & {self.second!r})"


@dataclass(frozen=True)
class Either(Mask):
    """The pairs that at least one of two masks shows: `first | second`."""

    first: Mask
    second: Mask

    @property
    def causal(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if no query sees a later key."""
        return self.first.causal and self.second.causal

    @property
    def grows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if late queries see more keys under one of the two masks."""
        return self.first.grows or self.second.grows

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        return self.first.visible(query, key) | self.second.visible(query, key)

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        return self.first.some(query, key) | self.second.some(query, key)

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        return self.first.every(query, key) | self.second.every(query, key)

    def triangle(self, query: Span, key: Span) -> Any:
        """See `Mask.triangle`."""
        first, second = self.first.triangle(query, key), self.second.triangle(query, key)
        alone = first & (self.second.some(query, key) ^ True)
        return alone | second & (self.first.some(query, key) ^ True) | first & second

    def within(self, seq_len: int) -> Mask:
        """See `Mask.within`."""
        return self.first.within(seq_len) | self.second.within(seq_len)

    @property
    def per_row(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if one of the two leaves lengths open."""
        return self.first.per_row or self.second.per_row

    def given(self, lengths: Any) -> Mask:
        """See `Mask.given`."""
        return Either(self.first.given(lengths), self.second.given(lengths))

    def _check_positions(self, seq_len: int) -> None:
        self.first._check_positions(seq_len)
        self.second._check_positions(seq_len)

    def __repr__(self) -> str:
        return f"({self.first!r} | {self.second!r})"


def _check_mask(sign: str, other: Any) -> None:
    if not isinstance(other, Mask):
        raise InputError(
            f"Both sides of {sign} must be masks of startrail_jax.masks; got {shown(other)}. Write "
            "a rule of your own as masks.Rule(function); documents in a row are segment_ids of a "
            "call."
        )


def shown(value: Any) -> str:
    """The text of a value for errors: an array by its shape."""
    return f"an array {value.shape}" if hasattr(value, "shape") else repr(value)


def _reach(mask: Mask) -> tuple[int | None, int | None] | None:
    """(left, right) of a mask that is a window or is causal; None of others."""
    if isinstance(mask, Causal):
        return None, 0
    return (mask.left, mask.right) if isinstance(mask, Window) else None


def causal_window(mask: Mask) -> int | None:
    """Keys that a query sees under a causal window; None for any other mask."""
    if isinstance(mask, Window) and mask.right == 0 and mask.left is not None:
        return mask.left + 1
    return None


def band(left: int | None, right: int | None) -> Mask:
    """The simplest mask for a window."""
    if left is None and right in (None, 0):
        return Full() if right is None else Causal()
    return Window(left, right)


def _add(position: Any, distance: int) -> Any:
    """The sum; adding 0 would leave an operation in the program."""
    return position + distance if distance else position


def _least(x: int | None, y: int | None) -> int | None:
    return min((n for n in (x, y) if n is not None), default=None)


def _concrete(question: Callable[[Span, Span], Any], query: Span, key: Span) -> np.ndarray:
    """The answer for known spans, also while something is being traced."""
    jax = sys.modules.get("jax")  # Nothing is traced before it is imported.
    with contextlib.nullcontext() if jax is None else jax.ensure_compile_time_eval():
        shape = np.broadcast_shapes(np.shape(query.first), np.shape(key.first))
        return np.broadcast_to(np.asarray(question(query, key), bool), shape)


def check_number(mask: Mask, name: str, least: int = 1) -> None:
    """Raises a ValueError unless an option of a mask is an integer of at least `least`."""
    adopt(mask, whole, name)
    value = getattr(mask, name)
    if is_whole(value, least):
        return
    none = " or None" if least == 0 else ""
    raise InputError(
        f"{name} of masks.{type(mask).__name__} must be an integer of at least {least}{none}; got "
        f"{name}={value!r}. Give a number of tokens."
    )

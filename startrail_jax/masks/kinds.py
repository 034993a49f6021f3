"""Chunks, blocks, prefixes, sinks and your own rules; the masks of `causal` and `window`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from startrail_jax.errors import InputError
from startrail_jax.masks.algebra import Causal, Full, Mask, Window, check_number, shown
from startrail_jax.tokens.layout import Span
from startrail_jax.values import is_whole, truth, whole


@dataclass(frozen=True)
class Chunked(Mask):
    """The sequence is cut into chunks, and a query sees the keys of its own chunk.

    Llama 4 has `Chunked(8192) & Causal()`.

    Raises:
        ValueError: if the size is not a positive integer.
    """

    size: int
    """Tokens in a chunk; the last chunk may be shorter."""

    def __post_init__(self) -> None:
        check_number(self, "size")

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        return key // self.size == query // self.size

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        starts_before_end = key.first // self.size <= query.last // self.size
        return starts_before_end & (query.first // self.size <= key.last // self.size)

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        one = query.first // self.size == key.last // self.size
        return one & (query.last // self.size == key.first // self.size)

    def within(self, seq_len: int) -> Mask:
        """See `Mask.within`."""
        return self if self.size < seq_len else Full()


@dataclass(frozen=True)
class BlockCausal(Mask):
    """A query sees all keys of its own block, and of the blocks before: full inside, else causal.

    Video models generate frame after frame in this way; a block then holds the tokens of a frame.

    Raises:
        ValueError: if the size is not a positive integer.
    """

    size: int
    """Tokens in a block; the last block may be shorter."""

    grows = True

    def __post_init__(self) -> None:
        check_number(self, "size")

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        return key // self.size <= query // self.size

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        return key.first // self.size <= query.last // self.size

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        return key.last // self.size <= query.first // self.size

    def within(self, seq_len: int) -> Mask:
        """See `Mask.within`."""
        if self.size == 1:
            return Causal().within(seq_len)
        return self if self.size < seq_len else Full()


@dataclass(frozen=True)
class Prefix(Mask):
    """Every query sees the first tokens, which also see each other; causal after them (prefix-LM).

    Without a length, `Prefix()`, each row of the batch has its own length, which calls pass as
    `prefix_lengths`. The lengths are not known in advance: no ring round is left out, and counts of
    work and bytes include every pair that may be visible.

    Raises:
        ValueError: if the length is neither None nor a positive integer.
    """

    length: int | None = None
    """Tokens of the prefix, at most those of the sequence; None for a separate length for each
    row."""

    grows = True

    def __post_init__(self) -> None:
        if self.length is not None:
            check_number(self, "length")

    @property
    def per_row(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if calls give the length."""
        return self.length is None

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        if self.length is None:
            raise InputError(
                "masks.Prefix() needs a length for each row; got none. Pass prefix_lengths= to the "
                "call, or name one length for all rows, such as masks.Prefix(512)."
            )
        return (key < self.length) | (key <= query)

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        return self.length is None or (key.first < self.length) | (key.first <= query.last)

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        causal = key.last <= query.first
        return causal if self.length is None else (key.last < self.length) | causal

    def triangle(self, query: Span, key: Span) -> Any:
        """See `Mask.triangle`."""
        return self.length is not None and key.first >= self.length

    def within(self, seq_len: int) -> Mask:
        """See `Mask.within`."""
        return self if self.length is None or self.length < seq_len else Full()

    def given(self, lengths: Any) -> Mask:
        """See `Mask.given`."""
        return _RowPrefix(lengths) if self.length is None else self

    def _check_positions(self, seq_len: int) -> None:
        if self.length is not None and self.length > seq_len:
            raise InputError(
                f"A prefix must be no longer than the sequence; got mask={self}, "
                f"seq_len={seq_len}. Shorten it, or use masks.Full()."
            )


@dataclass(frozen=True)
class _RowPrefix(Mask):
    """`Prefix` of one length for each row, as `Mask.given` makes it; it exists while tracing."""

    lengths: Any
    """int32 [b, 1, 1]."""

    def visible(self, query: Any, key: Any) -> Any:
        return (key < self.lengths) | (key <= query)

    def some(self, query: Span, key: Span) -> Any:
        return (key.first < self.lengths.max()) | (key.first <= query.last)

    def every(self, query: Span, key: Span) -> Any:
        return (key.last < self.lengths.min()) | (key.last <= query.first)

    def triangle(self, query: Span, key: Span) -> Any:
        return key.first >= self.lengths.max()


@dataclass(frozen=True)
class Sinks(Mask):
    """Every query sees the first tokens of the row, and nothing else.

    It is meant for combinations (StreamingLLM, https://arxiv.org/abs/2309.17453): `Causal() &
    (Window(1023, 0) | Sinks(4))`.

    Raises:
        ValueError: if the count is not a positive integer.
    """

    count: int
    """Number of tokens."""

    def __post_init__(self) -> None:
        check_number(self, "count")

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        return (key < self.count) & (query == query)

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        return key.first < self.count

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        return key.last < self.count

    def within(self, seq_len: int) -> Mask:
        """See `Mask.within`."""
        return self if self.count < seq_len else Full()


@dataclass(frozen=True)
class Rule(Mask):
    """A rule of your own, traced for each tile of queries and keys.

    It is exact under every scheme. Without `bounds`, no tile is skipped, and no tile counts as
    full. Define both functions once, at the top of a module: masks are compared by their functions,
    and a new function causes a new compilation.

    Raises:
        ValueError: if `function` does not give bools of the shape that its arguments broadcast to.
    """

    function: Callable[[Any, Any], Any]
    """(query positions, key positions) -> whether each query sees each key: int32 arrays such as
    [b, t, 1] and [b, 1, s] give bools that broadcast to [b, t, s]. It must work element by
    element."""
    bounds: Callable[[Any, Any, Any, Any], tuple[Any, Any]] | None = None
    """(first query, last query, first key, last key) -> whether some pair of the two spans, ends
    included, may be visible; and whether every pair is visible. The arguments are integers, NumPy
    arrays or traced arrays that broadcast. The results are bools, or 0 and 1, or arrays of them
    with the shape to which the arguments broadcast. A wrong bound makes the attention wrong."""

    def __post_init__(self) -> None:
        import jax
        import jax.numpy as jnp

        sizes, whole = ((5, 2, 1), (5, 1, 3)), (5, 2, 3)
        given = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in sizes]
        try:
            found = jax.eval_shape(self.function, *given)
            pairs = zip(found.shape, whole, strict=False)
            fits = len(found.shape) == 3 and all(n in (1, most) for n, most in pairs)
            fits, what = fits and found.dtype == bool, f"{found.dtype} {list(found.shape)}"
        except Exception as error:  # Whatever a function of the user raises.
            fits, what = False, f"{type(error).__name__}: {error}"
        if not fits:
            raise InputError(
                "The function of a Rule must give bools that broadcast to [b, t, s] for query "
                "positions [b, t, 1] and key positions [b, 1, s]; got, for b=5, t=2 and s=3, "
                f"{what}. Compare the two arrays element by element with jax.numpy, as in "
                "lambda query, key: key <= query."
            )

    def visible(self, query: Any, key: Any) -> Any:
        """See `Mask.visible`."""
        return self.function(query, key)

    def some(self, query: Span, key: Span) -> Any:
        """See `Mask.some`."""
        return self._bounds(query, key)[0]

    def every(self, query: Span, key: Span) -> Any:
        """See `Mask.every`."""
        return self._bounds(query, key)[1]

    def _bounds(self, query: Span, key: Span) -> tuple[Any, Any]:
        if self.bounds is None:
            return True, False
        some, every = self.bounds(query.first, query.last, key.first, key.last)
        # Of integers, ~ would not be the opposite.
        return some != 0, every != 0


def resolve(
    mask: Any, *, causal: bool | None, window: Any = None, default: bool | None = None
) -> Mask:
    """The mask that the options of an attention choose.

    Args:
        mask: a mask of this module; None for the mask of the other options.
        causal: True for `Causal()`, or `Window(window - 1, 0)` with a window; False for `Full()`;
            None for True with a window, and for that of the mask with one.
        window: number of keys that a query sees, the one at its own position included; None for
            all.
        default: what `causal` is if nothing is given; None for an error.

    Raises:
        ValueError: if the options contradict each other, or none is given.
    """
    causal, window = truth(causal), whole(window)
    if not (causal is None or isinstance(causal, bool)):
        raise InputError(f"causal must be True or False; got causal={causal!r}.")
    if mask is None:
        if causal is None and window is None:
            causal = default
        if causal is None and window is None:
            raise InputError(
                "An attention needs causal=, window= or mask=; got none of them. Use causal=True "
                "for decoders such as GPT, causal=False if every token sees every other."
            )
        causal = causal is None or causal
        if window is None:
            return Causal() if causal else Full()
        if not (causal and is_whole(window, 1)):
            raise InputError(
                "window needs causal=True and an integer of at least 1 key; got "
                f"window={window!r}, causal={causal}. Use window=None to see every key."
            )
        return Window(window - 1, 0)
    if not isinstance(mask, Mask):
        raise InputError(
            f"mask must be a mask of startrail_jax.masks, such as masks.Causal(); got "
            f"{shown(mask)}. "
            "A rule of your own is masks.Rule(function)."
        )
    if window is not None or causal not in (None, mask.causal):
        raise InputError(
            f"causal and window are short for a mask; got mask={mask}, causal={causal}, "
            f"window={window}. Leave out causal and window, or mask; dataclasses.replace of an "
            "attention needs causal=None beside mask."
        )
    return mask

"""Packed documents on flash kernels: the calls of a set of pieces, cut to documents.

Where documents lie one after another in order of position, two kinds of calls remain of `Pieces`:

* A square, in which queries and keys are the same tokens. Each document in it is a segment. Kernels
  that work `by_segment` have a workspace as large as if each segment had the length of the longest,
  so there is one call for documents of up to t tokens, of up to t / `STEP`, and so on. Each has
  `STEP` times the workspace of a call without documents, the last one up to twice as much.
* A rectangle, or a square at the far end of a window, whose keys all come before its queries. They
  have at most one document in common: its last keys and its first queries. Under a full mask, a
  rectangle is served if a row is one document, and padding behind it.

`serves` says whether documents lie in this way, which only the device knows. A call without a
segment is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

from startrail_jax.blocks.base import Request
from startrail_jax.blocks.cudnn import Segments
from startrail_jax.blocks.shapes import EMPTY, KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.xla.varying import alike

# Ratio of the longest and the shortest document of one call, and the fewest tokens that the longest
# document of a call may have.
STEP, LEAST = 4, 256

# Least mean length of the documents of the last call, the shortest ones, in tokens.
SHORTEST = 128

Ids = tuple[Int32[Array, "_ _"], Int32[Array, "_ _"]]
"""Segment ids [b, t] of the queries and [b, s] of the keys of a call."""


@runtime_checkable
class Kernels(Protocol):
    """The flash kernels of one library: a module with these functions, as `cudnn` explains them."""

    leading: bool
    """Whether they serve `Segments` that are leading."""
    by_segment: bool
    """Whether lse and the workspace of a call with starts are those of each segment by itself, as
    long as the longest; else lse is [b, n, t], as without starts."""

    def refusal(self, request: Request) -> str | None:
        """Why the kernels do not serve a request, whatever its mask; None if they may."""
        ...

    def attend(
        self,
        q: QueryShard,
        k: KeyShard,
        v: ValueShard,
        scale: float,
        causal: bool,
        window: int = 0,
        segments: Segments | None = None,
        edge: bool = False,
    ) -> tuple[OutShard, Array]:
        """Calls the forward kernel."""
        ...

    def gradients(
        self,
        q: QueryShard,
        k: KeyShard,
        v: ValueShard,
        lse: Array,
        out: OutShard,
        dout: OutShard,
        scale: float,
        causal: bool,
        window: int = 0,
        segments: Segments | None = None,
        edge: bool = False,
    ) -> tuple[QueryShard, KeyShard, ValueShard]:
        """Calls the backward kernel."""
        ...


def fits(kernels: Kernels, *shapes: tuple[int, ...]) -> bool:
    """Whether the kernels can count the elements of arrays [b, t, n, h], in 32 bits."""
    return all(_padded(kernels, b, t)[0] * n * h < 2**31 for b, t, n, h in shapes)


def in_order(ids: Int32[Array, "b t"]) -> Bool[Array, ""]:
    """Whether the ids of documents increase in each row, and padding comes last."""
    before, after = ids[:, :-1], ids[:, 1:]
    return ((after < 0) | ((before >= 0) & (before <= after))).all()


def serves(kernels: Kernels, ids: Ids, square: bool, leading: bool = False) -> Bool[Array, ""]:
    """Whether the documents of a call lie as the kernels need it, if all ids are `in_order`. A
    `square` has the same tokens as queries and keys; `leading` is for a full mask."""
    queries, keys = ids
    if leading:
        document = queries[:, :1]
        alone = [(x < 0) | (x == document) | (document < 0) for x in ids]
        return alone[0].all() & alone[1].all()
    if square:
        return (queries == keys).all() & Stretches.of(queries, kernels).fit
    # No key may be of a later document than the first one of the queries. Of that document come
    # the last keys and the first queries.
    first = jnp.where(queries < 0, jnp.iinfo(queries.dtype).max, queries).min(1)
    latest = keys.max(1)
    at_border = (queries[:, 0] == first) & (keys[:, -1] == latest)
    return ((latest < first) | ((latest == first) & at_border)).all()


def attend(
    kernels: Kernels,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    ids: Ids,
    scale: float,
    square: bool,
    window: int,
    edge: bool,
    leading: bool,
) -> tuple[OutShard, LseShard]:
    """Attention of the queries of a call to the keys of their documents, in order of position.

    The call `serves` the ids. A `square` has the same tokens as queries and keys, under a causal
    mask, of which a query sees `window` keys (0: all before it). Without a square, `edge` says that
    query i sees only keys j >= i, and `leading` that the mask is full. Rows that see no key have 0
    in out, which is in the dtype of q, and EMPTY in lse.
    """
    if not square:
        b, t, n, _ = q.shape
        zeros = jnp.zeros((b, t, n, v.shape[-1]), q.dtype), jnp.full((b, n, t), EMPTY, jnp.float32)
        out, lse, *_ = alike(*zeros, q, ids[0])
        common = _Common.of(ids, leading)

        def cross(out: OutShard, lse: LseShard) -> tuple[OutShard, LseShard]:
            here, stats = kernels.attend(q, k, v, scale, False, 0, common.segments, edge)
            return common.of_queries(here, out), common.of_queries(stats, lse)

        return lax.cond(common.any, cross, lambda out, lse: (out, lse), out, lse)
    documents = Stretches.of(ids[0], kernels)
    return attend_each(kernels, q, k, v, documents, scale, causal=True, window=window)


def gradients(
    kernels: Kernels,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: LseShard,
    out: OutShard,
    dout: OutShard,
    ids: Ids,
    scale: float,
    square: bool,
    window: int,
    edge: bool,
    leading: bool,
) -> tuple[Array, ...]:
    """dq, dk and dv of a call in the dtype of q, 0 where it shows nothing, for any lse and out; for
    the other arguments see `attend`."""
    if not square:
        found = tuple(alike(jnp.zeros_like(x), x, q, ids[0])[0] for x in (q, k, v))
        common = _Common.of(ids, leading)

        def cross(*zeros: Array) -> tuple[Array, ...]:
            # Queries of other documents see no key, and their gradients must not count.
            stats = common.of_queries(lse, jnp.full_like(lse, -EMPTY))
            dout_here = common.of_queries(dout, jnp.zeros_like(dout))
            dq, dk, dv = kernels.gradients(
                q, k, v, stats, out, dout_here, scale, False, 0, common.segments, edge
            )
            dq, dk, dv = common.of_queries(dq, zeros[0]), *map(common.of_keys, (dk, dv), zeros[1:])
            return dq, dk, dv

        return lax.cond(common.any, cross, lambda *zeros: zeros, *found)
    documents = Stretches.of(ids[0], kernels)
    # A kernel may read what lies beside a document.
    dout = jnp.where(ids[0][..., None, None] < 0, jnp.zeros_like(dout), dout)
    queries = lse, out, dout
    return gradients_each(kernels, q, k, v, *queries, documents, scale, causal=True, window=window)


def attend_each(
    kernels: Kernels,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    documents: Stretches,
    scale: float,
    *,
    causal: bool,
    window: int = 0,
) -> tuple[OutShard, LseShard]:
    """Attention within each document, as `attend` gives it: one call for each level."""
    b, t, n, _ = q.shape
    zeros = jnp.zeros((b, t, n, v.shape[-1]), q.dtype), jnp.full((b, n, t), EMPTY, jnp.float32)
    out, lse, *_ = alike(*zeros, q, documents.number)
    for level in _levels(kernels, b, t, documents.sides):
        segments, places, _ = documents.segments(level)

        def visit(
            level: _Level = level, segments: Segments = segments, places: _Places = places
        ) -> tuple[Array, ...]:
            rows, keys, values = map(level.shaped, (q, k, v))
            seen = level.window(window)
            here, stats = kernels.attend(rows, keys, values, scale, causal, seen, segments)
            if kernels.by_segment:
                stats = places.to_tokens(stats, b, t)
            return level.restored(here, b, t), stats

        out, lse = _where_any(segments, visit, (places.within,) * 2, (out, lse))
    return out, lse


def gradients_each(
    kernels: Kernels,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: LseShard,
    out: OutShard,
    dout: OutShard,
    documents: Stretches,
    scale: float,
    *,
    causal: bool,
    window: int = 0,
) -> tuple[Array, ...]:
    """dq, dk and dv of `attend_each`, as `gradients` gives them."""
    b, t = q.shape[:2]
    found = tuple(alike(jnp.zeros_like(x), x, q, documents.number)[0] for x in (q, k, v))
    for level in _levels(kernels, b, t, documents.sides):
        segments, places, keys_within = documents.segments(level)

        def visit(
            level: _Level = level, segments: Segments = segments, places: _Places = places
        ) -> tuple[Array, ...]:
            rows, keys, values, out_rows, dout_rows = map(level.shaped, (q, k, v, out, dout))
            stats = places.to_segments(lse) if kernels.by_segment else lse
            seen = level.window(window)
            grads = kernels.gradients(
                rows, keys, values, stats, out_rows, dout_rows, scale, causal, seen, segments
            )
            return tuple(level.restored(dx, b, t) for dx in grads)

        found = _where_any(segments, visit, (places.within, keys_within, keys_within), found)
    return found


class _Level(NamedTuple):
    """The documents of a square whose lengths are in a range: those of one call."""

    shorter: int
    """Their lengths are greater than this."""
    size: int
    """Their lengths are at most this, which is also the length of a row for the kernel."""
    rows: int
    """Number of rows for the kernel, which together hold all tokens of the square."""
    segments: int
    """Number of documents for which there is room."""

    def holds(self, lengths: Int32[Array, " documents"]) -> Bool[Array, " documents"]:
        """Whether each document is one of the level, by its length."""
        return (lengths > self.shorter) & (lengths <= self.size)

    def window(self, window: int) -> int:
        """The window of the call; 0 where no document is longer than that."""
        return window if window < self.size else 0

    def shaped(self, x: Shaped[Array, "b t n h"]) -> Shaped[Array, "_ _ n h"]:
        """An array as the kernel gets it."""
        flat = x.reshape(-1, *x.shape[2:])
        missing = self.rows * self.size - flat.shape[0]
        if missing:
            flat = jnp.pad(flat, ((0, missing), (0, 0), (0, 0)))
        return flat.reshape(self.rows, self.size, *x.shape[2:])

    def restored(self, x: Shaped[Array, "_ _ n h"], b: int, t: int) -> Shaped[Array, "b t n h"]:
        """The inverse of `shaped`."""
        return x.reshape(-1, *x.shape[2:])[: b * t].reshape(b, t, *x.shape[2:])


def _padded(kernels: Kernels, b: int, t: int) -> tuple[int, int, int]:
    """Tokens of all rows of a square together, filled up so that every level cuts them into equal
    rows; tokens of the longest row; and the number of levels."""
    count = 1
    while kernels.by_segment and t >= LEAST * STEP**count:
        count += 1
    unit = STEP ** (count - 1)
    size = -(-t // unit) * unit
    return -(-b * t // size) * size, size, count


def _levels(kernels: Kernels, b: int, t: int, sides: int = 1) -> tuple[_Level, ...]:
    """The levels of a square of b rows of t tokens, the longest documents first; for `sides` see
    `Stretches`."""
    tokens, size, count = _padded(kernels, b, t)
    sizes = [size // STEP**i for i in range(count)]
    *longer, last = (
        _Level(shorter, size, tokens // size, sides * STEP * tokens // size)
        for size, shorter in zip(sizes, [*sizes[1:], 0], strict=True)
    )
    many = max(STEP, -(-last.size // SHORTEST))
    return *longer, last._replace(segments=sides * many * last.rows)


def last_level(kernels: Kernels, b: int, t: int, sides: int = 1) -> _Level:
    """The level of the shortest documents: the one whose room may not do."""
    return _levels(kernels, b, t, sides)[-1]


def _where_any(
    segments: Segments,
    visit: Callable[[], tuple[Array, ...]],
    within: tuple[Bool[Array, " tokens"], ...],
    others: tuple[Array, ...],
) -> tuple[Array, ...]:
    """What a visit gives for the tokens of its segments, which are `within`, and `others`
    elsewhere. Without any segment there is no visit."""
    skip = lambda: tuple(alike(jnp.zeros_like(x), x)[0] for x in others)  # noqa: E731
    found = lax.cond((segments.query_lengths > 0).any(), visit, skip)
    return tuple(map(_where, within, found, others))


def _where(within: Bool[Array, " tokens"], x: Array, other: Array) -> Array:
    """x [b, t, n, h] or [b, n, t] at the tokens within, and `other` elsewhere."""
    if x.ndim == 4:
        return jnp.where(within.reshape(*x.shape[:2], 1, 1), x, other)
    return jnp.where(within.reshape(x.shape[0], 1, x.shape[2]), x, other)


class Stretches(NamedTuple):
    """The documents of a square: stretches of tokens, or stretches of queries that each see one of
    keys."""

    starts: Int32[Array, " documents"]
    """Index of the first query of each, over all rows; padding is a document too."""
    lengths: Int32[Array, " documents"]
    """Queries of each; 0 for padding, and for a document that is not there."""
    key_starts: Int32[Array, " documents"]
    key_lengths: Int32[Array, " documents"]
    number: Int32[Array, " tokens"]
    """Which document each token is of, as a query."""
    key_number: Int32[Array, " tokens"]
    """Which one it is of, as a key."""
    place: Int32[Array, " tokens"]
    """Number of queries before it in its document."""
    fit: Bool[Array, ""] | bool
    """Whether all of them are here, and every level has room for its own."""
    sides: int = 1
    """1 if queries and keys of each are the same tokens, else 2: up to twice as many documents then
    are as long as a level asks for."""

    @classmethod
    def of(cls, ids: Int32[Array, "b t"], kernels: Kernels) -> Stretches:
        """Those with these ids, which are `in_order`."""
        levels = _levels(kernels, *ids.shape)
        room = sum(level.segments for level in levels) + ids.shape[0]
        new_row = alike(jnp.ones_like(ids[:, :1], bool), ids)[0]
        fresh = jnp.concatenate([new_row, ids[:, 1:] != ids[:, :-1]], 1).reshape(-1)
        index, ids = jnp.arange(ids.size, dtype=jnp.int32), ids.reshape(-1)
        number = jnp.cumsum(fresh, dtype=jnp.int32) - 1
        # One more, which begins where all end.
        ends = alike(jnp.full(room + 1, ids.size, jnp.int32), ids)[0]
        ends = ends.at[jnp.where(fresh, number, room + 1)].set(index, mode="drop")
        starts, lengths = ends[:-1], jnp.diff(ends)
        lengths = jnp.where(ids.at[starts].get(mode="fill", fill_value=-1) < 0, 0, lengths)
        of_last = levels[-1].holds(lengths).sum()
        fit = (number[-1] < room) & (of_last <= levels[-1].segments)
        place = index - starts[number]
        return cls(starts, lengths, starts, lengths, number, number, place, fit)

    def segments(self, level: _Level) -> tuple[Segments, _Places, Bool[Array, " tokens"]]:
        """The documents of a level as segments, where their queries lie in these, and which keys
        do."""
        here = level.holds(jnp.maximum(self.lengths, self.key_lengths))
        segment = jnp.where(here, jnp.cumsum(here, dtype=jnp.int32) - 1, level.segments)
        ends = alike(jnp.full(level.segments, level.rows * level.size, jnp.int32), self.starts)[0]
        starts, key_starts = (
            ends.at[segment].set(x, mode="drop") for x in (self.starts, self.key_starts)
        )
        lengths, key_lengths = (
            (ends * 0).at[segment].set(x, mode="drop") for x in (self.lengths, self.key_lengths)
        )
        places = _Places(here[self.number], segment[self.number], self.place, level)
        return Segments(lengths, key_lengths, starts, key_starts), places, here[self.key_number]


class _Places(NamedTuple):
    """Where the queries of a square lie in the segments of a level."""

    within: Bool[Array, " tokens"]
    """Whether each token lies in a segment."""
    number: Int32[Array, " tokens"]
    """The number of its segment."""
    place: Int32[Array, " tokens"]
    """Its place in the segment."""
    level: _Level
    """The level of the segments."""

    def to_tokens(self, lse: Shaped[Array, "segments n _"], b: int, t: int) -> LseShard:
        """lse of the tokens, from that of the segments."""
        number = jnp.where(self.within, self.number, 0)
        place = jnp.where(self.within, self.place, 0)
        return lse[number, :, place].reshape(b, t, -1).swapaxes(1, 2)

    def to_segments(self, lse: LseShard) -> Shaped[Array, "segments n _"]:
        """lse of the segments, from that of the tokens."""
        rows = lse.swapaxes(1, 2).reshape(-1, lse.shape[1])
        zeros = jnp.zeros((self.level.segments, lse.shape[1], self.level.size), lse.dtype)
        number = jnp.where(self.within, self.number, self.level.segments)
        return alike(zeros, rows)[0].at[number, :, self.place].set(rows, mode="drop")


class _Common(NamedTuple):
    """What the keys and the queries of a call have in common, where all keys come before them or
    the mask is full."""

    queries: Int32[Array, " b"]
    """Number of queries of a document that the keys have too: the first ones of each row."""
    keys: Int32[Array, " b"]
    """Number of its keys: the last ones of each row, or the first ones."""
    leading: bool

    @classmethod
    def of(cls, ids: Ids, leading: bool) -> _Common:
        """That of queries and keys with these ids, which `serves` accepts."""
        queries, keys = ids
        document = queries[:, :1]
        there = document[:, 0] >= 0
        count = jnp.where(there, (keys == document).sum(1, dtype=jnp.int32), 0)
        others = (queries == document).sum(1, dtype=jnp.int32)
        return cls(jnp.where(count > 0, others, 0), count, leading)

    @property
    def any(self) -> Bool[Array, ""]:
        """Whether there is anything, in some row."""
        return (self.keys > 0).any()

    @property
    def segments(self) -> Segments:
        """What the kernels are told."""
        return Segments(self.queries, self.keys, leading=self.leading)

    def of_queries(self, x: Array, other: Array) -> Array:
        """x [b, t, n, h] or [b, n, t] for the queries in common, and `other` for the rest."""
        axis = 1 if x.ndim == 4 else 2
        seen = np.arange(x.shape[axis])[None] < self.queries[:, None]
        return jnp.where(seen[:, None] if axis == 2 else seen[..., None, None], x, other)

    def of_keys(self, x: KeyShard, other: KeyShard) -> KeyShard:
        """x for the keys in common, and `other` for the rest."""
        tokens = x.shape[1]
        seen = np.arange(tokens)[None] >= tokens - self.keys[:, None]
        if self.leading:
            seen = np.arange(tokens)[None] < self.keys[:, None]
        return jnp.where(seen[..., None, None], x, other)

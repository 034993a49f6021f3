"""Block attention by flash kernels: NVIDIA GPUs, 16-bit dtypes, full masks, causal ones and causal
windows.

The visible part of a pair of sorted units is a set of full rectangles and causal squares
(`Pieces`), each of which is one kernel call, also for grouped-query heads. Where only the device
knows which of several sets it is, `lax.switch` chooses.

A causal window also has squares with a window: kernels take the number of keys that a query sees,
and as many keys as queries. The far end of a window is a causal square in reverse order of tokens.

Of packed documents, each call sees what `packed` makes of it, and of rows of trees what `trees`
does. Where documents do not lie in order, or trees have too many levels, `tiled` serves the pair.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from startrail_jax.blocks import packed, tiled, trees
from startrail_jax.blocks.base import Pair, Request
from startrail_jax.blocks.cudnn import output_for
from startrail_jax.blocks.packed import Ids, Kernels
from startrail_jax.blocks.pieces import MOST_BLOCKS, Pieces
from startrail_jax.blocks.shapes import EMPTY, KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.blocks.softmax import Partials, merge_partials, merge_precisely
from startrail_jax.blocks.trees import TreeIds
from startrail_jax.blocks.visibility import Cases, Visibility
from startrail_jax.masks import BlockCausal, Causal, Full
from startrail_jax.masks.algebra import causal_window
from startrail_jax.xla.varying import alike

# Number of attentions to merge at a time. More of them take more memory; with fewer of them the
# merged one is read and written more often.
MAX_PARTIALS = 4

# Greatest number of sets of pieces to choose from; each of them is compiled.
MAX_CASES = 128


@dataclass(frozen=True)
class Flash:
    """A block backend that calls the flash kernels of one library."""

    kernels: Kernels

    def refusal(self, request: Request) -> str | None:
        """See `base.Block.refusal`."""
        if (why := self.kernels.refusal(request)) is not None:
            return why
        if request.near is not None:
            return (
                "its windows count the tokens of a row, not of a branch; got visible_until under a "
                f"window of {request.near} tokens"
            )
        full = isinstance(request.mask, Full)
        in_blocks = isinstance(request.mask, BlockCausal)
        if not (
            full or in_blocks or isinstance(request.mask, Causal) or causal_window(request.mask)
        ):
            return (
                "its masks are full, causal, block-causal and causal windows; got "
                f"mask={request.mask}"
            )
        if in_blocks and not request.num_cases:
            return (
                f"a device may have at most {MOST_BLOCKS} blocks of queries under a block-causal "
                f"mask; got more of mask={request.mask}"
            )
        leading = full or in_blocks
        if request.packed and leading and not self.kernels.leading:
            return (
                "its kernels serve documents under causal masks and windows; got "
                f"mask={request.mask}"
            )
        if not full and request.num_cases > MAX_CASES:
            return (
                f"causal units must meet in at most {MAX_CASES} sets of rectangles and squares; "
                f"got {request.num_cases}"
            )
        return None

    def forward(self, pair: Pair, into: Partials = ()) -> Partials:
        """See `base.Block.forward`. Merges `into` once it has `MAX_PARTIALS` attentions."""
        assert pair.scores.plain, "refused"
        if len(into) >= MAX_PARTIALS:
            # Merge before the kernel: XLA would take a merge after it for enough to hide a message.
            into, q = lax.optimization_barrier(((merge_precisely(into),), pair.q))
            pair = pair._replace(q=q)
        if pair.visibility.query_segments is None:
            return (*into, self._attend(pair))

        def tiles() -> tuple[OutShard, LseShard]:
            ((out, lse, _),) = tiled.forward(pair)
            return out.astype(pair.q.dtype), lse

        return (*into, self._if_in_order(pair, lambda ids: self._attend(pair, ids), tiles))

    def backward(
        self,
        pair: Pair,
        lse: LseShard,
        delta: LseShard,
        dout: OutShard,
        into: tuple[Array | None, ...] = (None, None, None),
    ) -> tuple[Array, ...]:
        """See `base.Block.backward`."""
        q, k, _, visibility, *_ = pair
        assert pair.scores.plain, "refused"
        queries = lse, *output_for(delta, dout)
        # Sums, of several calls or with `into`, stay in float32.
        sums = visibility.trees or any(
            len(_calls(pieces)) > 1 for pieces in _cases(visibility, q, k)[1]
        )
        dtypes = [q.dtype if dx is None and not sums else jnp.float32 for dx in into]
        if visibility.query_segments is None:
            return self._gradients(pair, queries, into, dtypes)

        def tiles() -> tuple[Array, ...]:
            # A round of one call gives 16 bits, which the next one is given.
            so_far = tuple(dx if dx is None else dx.astype(jnp.float32) for dx in into)
            grads = tiled.backward(pair, lse, delta, dout, so_far)
            return tuple(dx.astype(dtype) for dx, dtype in zip(grads, dtypes, strict=True))

        calls = functools.partial(self._gradients, pair, queries, into, dtypes)
        return self._if_in_order(pair, calls, tiles)

    def _if_in_order(
        self, pair: Pair, calls: Callable[[Ids | TreeIds], Any], tiles: Callable[[], Any]
    ) -> Any:
        """Runs the calls that `packed` or `trees` makes where they serve, else the tiles."""
        q, k, v, visibility, *_ = pair
        assert visibility.query_segments is not None
        assert visibility.key_segments is not None
        widest = max(q.shape[3], v.shape[3])
        if not packed.fits(self.kernels, *((*x.shape[:3], widest) for x in (q, k))):
            return tiles()
        case, cases = _cases(visibility, q, k)
        checks = [functools.partial(_serves, self.kernels, pieces) for pieces in cases]
        if visibility.trees:
            ids = TreeIds.of(visibility)
            served = _choose(case, checks, ids)
        else:
            of_queries, of_keys = alike(visibility.query_segments, visibility.key_segments)
            ids = of_queries, of_keys
            served = functools.reduce(jnp.logical_and, map(packed.in_order, ids))
            served &= _choose(case, checks, ids)
        return lax.cond(served, lambda: calls(ids), tiles)

    def _attend(self, pair: Pair, ids: Ids | TreeIds | None = None) -> tuple[OutShard, LseShard]:
        """Attention of one pair, to the keys that ids let queries see where there are ids."""
        q, k, v, visibility, scale, _ = pair
        case, cases = _cases(visibility, q, k)
        here, cases = _only(visibility, case, cases)
        branches = [functools.partial(_forward, self.kernels, pieces, scale) for pieces in cases]
        out, lse = _choose(case, branches, q, k, v, ids)
        if here is not None:
            out, lse = jnp.where(here, out, jnp.zeros_like(out)), jnp.where(here, lse, EMPTY)
        return out, lse

    def _gradients(
        self,
        pair: Pair,
        queries: tuple[Array, ...],
        into: Any,
        dtypes: Sequence[Any],
        ids: Ids | TreeIds | None = None,
    ) -> tuple[Array, ...]:
        """Gradients of one pair, added to `into`, from lse, out and dout of the queries."""
        q, k, v, visibility, scale, _ = pair
        case, cases = _cases(visibility, q, k)
        here, cases = _only(visibility, case, cases)
        branches = [
            functools.partial(_backward, self.kernels, pieces, scale, dtypes, here)
            for pieces in cases
        ]
        return _choose(case, branches, (q, *queries), (k, v), into, ids)


def _serves(kernels: Kernels, pieces: Pieces, ids: Ids | TreeIds) -> Array:
    """Whether `packed` serves the documents of every call, or `trees` its trees."""
    served = alike(jnp.asarray(True), ids[0])[0]
    for call in _calls(pieces):
        cut = call.ids(ids)
        if isinstance(cut, TreeIds):
            served &= trees.serves(kernels, cut, call.causal)
        else:
            served &= packed.serves(kernels, cut, call.causal, call.leading)
    return served


def _cases(visibility: Visibility, q: QueryShard, k: KeyShard) -> Cases:
    """The index of the set of pieces that is visible, and the sets to choose from."""
    if visibility.full:
        whole = Pieces.whole(q.shape[1], k.shape[1])
        return 0, (replace(whole, leading=True),)
    return visibility.cases()


def _only(
    visibility: Visibility, case: Any, cases: tuple[Pieces, ...]
) -> tuple[Any, tuple[Pieces, ...]]:
    """If each device sees one set of pieces or none, returns that set for all of them: a GPU would
    wait for its host in front of a branch."""
    seen = [pieces for pieces in cases if pieces != Pieces()]
    if visibility.by_runs is None or len(cases) != 2 or len(seen) != 1:
        return None, cases
    return case == cases.index(seen[0]), tuple(seen)


def _choose(case: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Runs the branch of the case on the operands."""
    if len(branches) == 1:
        return branches[0](*operands)
    return lax.switch(case, branches, *operands)


@dataclass(frozen=True)
class _Call:
    """One kernel call: it reads and writes its part of arrays [b, t, n, h] or [b, n, t]."""

    rows: slice
    """Its queries."""
    columns: slice
    """Its keys."""
    causal: bool = False
    window: int = 0
    """Keys that a query sees; 0 for all that the causal mask shows."""
    edge: bool = False
    """Whether a query sees only the keys from its own index on."""
    leading: bool = False
    """Whether the keys of a document are the first ones: see `Pieces`."""
    squares: int = 1
    """Equal squares that lie one after another: the kernel takes them for rows of a batch."""

    def cut(self, x: Array, where: slice) -> Array:
        """What the call gets of x [b, t, ...] or [b, n, t], at the rows or at the columns."""
        axis = 2 if x.ndim == 3 else 1
        x = lax.slice_in_dim(x, where.start, where.stop, axis=axis)
        if self.squares == 1:
            return x
        b, t = x.shape[0] * self.squares, x.shape[axis] // self.squares
        if axis == 1:
            return x.reshape(b, t, *x.shape[2:])
        return x.reshape(*x.shape[:2], self.squares, t).swapaxes(1, 2).reshape(b, -1, t)

    def put(self, x: Array) -> Array:
        """The inverse of `cut`."""
        if self.squares == 1:
            return x
        b = x.shape[0] // self.squares
        if x.ndim == 4:
            return x.reshape(b, -1, *x.shape[2:])
        n, t = x.shape[1:]
        return x.reshape(b, self.squares, n, t).swapaxes(1, 2).reshape(b, n, -1)

    def ids(self, ids: Ids | TreeIds) -> Ids | TreeIds:
        """What the call gets of the ids of its units."""
        of_queries, of_keys = self.cut(ids[0], self.rows), self.cut(ids[1], self.columns)
        return TreeIds(of_queries, of_keys) if isinstance(ids, TreeIds) else (of_queries, of_keys)

    def attend(
        self,
        kernels: Kernels,
        q: QueryShard,
        k: KeyShard,
        v: ValueShard,
        ids: Ids | TreeIds | None,
        scale: float,
    ) -> tuple[OutShard, LseShard]:
        """Calls the forward kernel on what was `cut`."""
        if isinstance(ids, TreeIds):
            return trees.attend(kernels, q, k, v, ids, scale, self.causal)
        if ids is not None:
            shape = self.causal, self.window, self.edge, self.leading
            return packed.attend(kernels, q, k, v, ids, scale, *shape)
        return kernels.attend(q, k, v, scale, self.causal, self.window, None, self.edge)

    def gradients(
        self,
        kernels: Kernels,
        q: QueryShard,
        k: KeyShard,
        v: ValueShard,
        lse: LseShard,
        out: OutShard,
        dout: OutShard,
        ids: Ids | TreeIds | None,
        scale: float,
    ) -> tuple[Array, ...]:
        """Calls the backward kernel on what was `cut`."""
        queries = lse, out, dout
        if isinstance(ids, TreeIds):
            return trees.gradients(kernels, q, k, v, *queries, ids, scale, self.causal)
        if ids is not None:
            shape = self.causal, self.window, self.edge, self.leading
            return packed.gradients(kernels, q, k, v, *queries, ids, scale, *shape)
        shape = self.causal, self.window, None, self.edge
        return kernels.gradients(q, k, v, *queries, scale, *shape)


def _calls(pieces: Pieces) -> list[_Call]:
    """The kernel calls of a set of pieces."""
    leading = pieces.leading
    calls = [_Call(slice(a, b), slice(c, d), leading=leading) for a, b, c, d in pieces.rectangles]
    masks: tuple[tuple[Any, dict[str, Any]], ...] = (
        (pieces.squares, dict(causal=True)),
        (pieces.windows, dict(causal=True, window=pieces.window)),
        (pieces.edges, dict(edge=True)),
    )
    for squares, mask in masks:
        in_line = itertools.groupby(
            enumerate(squares), lambda x: (*(at - x[0] * x[1][2] for at in x[1][:2]), x[1][2])
        )
        for _, line in in_line:
            (_, (i, j, size)), *more = line
            count = 1 + len(more)
            rows, columns = slice(i, i + count * size), slice(j, j + count * size)
            calls.append(_Call(rows, columns, squares=count, **mask))
    return calls


def _forward(
    kernels: Kernels,
    pieces: Pieces,
    scale: float,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    ids: Ids | TreeIds | None,
) -> tuple[OutShard, LseShard]:
    """Attention to the visible keys, in the dtype of q so that all cases return the same types."""
    parts = []
    for call in _calls(pieces):
        operands = call.cut(q, call.rows), call.cut(k, call.columns), call.cut(v, call.columns)
        found = call.attend(kernels, *operands, ids and call.ids(ids), scale)
        parts.append((call.rows, tuple(map(call.put, found))))

    def join(rows: slice, parts: list[Any]) -> Any:
        if len(parts) > 1:
            out, lse = merge_partials(parts)
            return out.astype(q.dtype), lse
        if parts:
            return parts[0]
        b, t, n, _ = q[:, rows].shape
        out, lse = (
            jnp.zeros((b, t, n, v.shape[-1]), q.dtype),
            jnp.full((b, n, t), EMPTY, jnp.float32),
        )
        return alike(out, lse, q)[:2]

    return _by_rows(q.shape[1], parts, join)


def _backward(
    kernels: Kernels,
    pieces: Pieces,
    scale: float,
    dtypes: Sequence[Any],
    here: Any,
    queries: tuple[Array, ...],
    keys: tuple[Array, ...],
    into: Any,
    ids: Ids | TreeIds | None,
) -> tuple[Array, ...]:
    """The contributions of the visible pairs to dq, dk and dv, added to `into`; none of them where
    `here` is False."""
    sums = [[] if dx is None else [(slice(0, dx.shape[1]), dx)] for dx in into]
    for call in _calls(pieces):
        q, lse, out, dout = (call.cut(x, call.rows) for x in queries)
        k, v = (call.cut(x, call.columns) for x in keys)
        grads = call.gradients(kernels, q, k, v, lse, out, dout, ids and call.ids(ids), scale)
        where = call.rows, call.columns, call.columns
        for parts, rows, dx in zip(sums, where, map(call.put, grads), strict=True):
            dx = dx if here is None else jnp.where(here, dx, jnp.zeros_like(dx))
            parts.append((rows, dx))

    def join(like: Array, dtype: Any, rows: slice, parts: list[Array]) -> Array:
        if parts:
            total = functools.reduce(jnp.add, (x.astype(jnp.float32) for x in parts))
            return total.astype(dtype)
        return alike(jnp.zeros_like(like[:, rows], dtype), like)[0]

    return tuple(
        _by_rows(x.shape[1], parts, functools.partial(join, x, dtype))
        for x, dtype, parts in zip((queries[0], *keys), dtypes, sums, strict=True)
    )


def _by_rows(
    length: int, parts: list[tuple[slice, Any]], join: Callable[[slice, list[Any]], Any]
) -> Any:
    """Joins parts of an array that cover overlapping ranges of rows: `join` gets each interval
    between their ends and the rows of the parts that cover it, and its results are concatenated."""
    ends = sorted({0, length}.union(*({rows.start, rows.stop} for rows, _ in parts)))
    joined = []
    for start, stop in itertools.pairwise(ends):
        there = [
            jax.tree.map(functools.partial(_rows, start=start - rows.start, size=stop - start), x)
            for rows, x in parts
            if rows.start <= start and stop <= rows.stop
        ]
        joined.append(join(slice(start, stop), there))
    if len(joined) == 1:
        return joined[0]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, 1 if xs[0].ndim == 4 else 2), *joined)


def _rows(x: Array, start: int, size: int) -> Array:
    """Some tokens of an array [b, t, n, h] or [b, n, t]."""
    return lax.slice_in_dim(x, start, start + size, axis=1 if x.ndim == 4 else 2)

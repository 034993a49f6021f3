"""Trees of shared beginnings on flash kernels: the calls of a set of pieces, by depth.

Neighbouring keys whose stretches end at one query are a *run*. All later queries before that end
see the whole run, and those in the run itself see it causally. So:

* A rectangle, whose keys all come before its queries: the runs that its first query sees contain
  each other, so there is one full call for the first of them, one for the second, and so on. A
  beginning and its answers are one call, and two where one answer begins among the keys.
* A square, in which queries and keys are the same tokens: each run is a document of `packed`. Then
  there is one round of full calls for the runs that lie in no other, one for those in one other,
  and so on, of what is below a run to the run. For a beginning and its answers this is one round.

Runs are those of the tokens of a call, so that nothing of other devices need be known. `serves`
says whether they fit, which only the device knows; if there are too many rounds, tiles are faster.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from startrail_jax.blocks import cudnn, packed
from startrail_jax.blocks.cudnn import Segments
from startrail_jax.blocks.packed import Kernels, Stretches
from startrail_jax.blocks.shapes import EMPTY, KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.blocks.softmax import merge_partials
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.xla.varying import alike

ROUNDS = 16
"""Rounds of a call, at most. A round reads and writes the outputs once, 10 bytes for each channel.
Tiles compute the logits of at least one fine tile in each row of fine tiles in memory, and pass
over them six times: with 1024 keys and 128 channels that is 24 * 1024 / 1280 = 19 rounds."""


class TreeIds(NamedTuple):
    """What a call knows of trees."""

    places: Int32[Array, "b t"]
    """Index of each query in its unit; -1 for padding."""
    ends: Int32[Array, "b s"]
    """Number of queries of the unit that lie before the end of the stretch of each key."""

    @classmethod
    def of(cls, visibility: Visibility) -> TreeIds:
        """Those of a pair of units, in order of position."""
        runs, ids = visibility.query_runs, visibility.query_segments
        assert runs is not None
        assert ids is not None
        assert visibility.key_segments is not None
        until = visibility.key_segments
        ends = sum(jnp.clip(until - start, 0, runs.length) for start in runs.starts)
        index = np.arange(ids.shape[1], dtype=np.int32)[None]
        places, ends = alike(jnp.where(ids < 0, -1, index), jnp.where(until < 0, 0, ends))
        return cls(places, ends)

    @property
    def seen(self) -> Int32[Array, "b s"]:
        """How many of the queries of the call see each key, or come before one that does. Padding
        comes last."""
        return jnp.clip(self.ends - self.places[:, :1], 0, self.real[:, None])

    @property
    def real(self) -> Int32[Array, " b"]:
        """Queries that are no padding, of each row."""
        return (self.places >= 0).sum(1, dtype=jnp.int32)


def serves(kernels: Kernels, trees: TreeIds, square: bool) -> Bool[Array, ""]:
    """Whether the trees of a call are as the kernels need them. A `square` has the same tokens as
    queries and keys."""
    padding = trees.places < 0
    last = (~padding[:, :-1] | padding[:, 1:]).all()
    if not square:
        return last & (_Chain.of(trees).rounds <= ROUNDS)
    runs = _Runs.of(trees)
    return last & runs.fit(kernels) & (runs.rounds <= ROUNDS)


def attend(
    kernels: Kernels,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    trees: TreeIds,
    scale: float,
    square: bool,
) -> tuple[OutShard, LseShard]:
    """Attention of the queries of a call, as `packed.attend` gives it for documents."""
    if square:
        runs = _Runs.of(trees)
        ids = runs.ids, runs.ids
        so_far = packed.attend(kernels, q, k, v, ids, scale, True, 0, False, False)
        rounds = runs.rounds
    else:
        chain = _Chain.of(trees)
        b, t, n, _ = q.shape
        nothing = jnp.zeros((b, t, n, v.shape[3]), q.dtype), jnp.full((b, n, t), EMPTY, jnp.float32)
        so_far, rounds = nothing, chain.rounds

    def visit(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        if square:
            here = packed.attend_each(kernels, q, k, v, runs.above(i), scale, causal=False)
        else:
            here = chain.run(i).attend(kernels, q, k, v, scale)
        out, lse = merge_partials((so_far, here))
        return alike(out, lse, q, trees.places)[:2]

    out, lse = so_far
    out, lse, *_ = alike(out.astype(jnp.float32), lse, q, trees.places)
    out, lse = lax.fori_loop(0, rounds, visit, (out, lse))
    return out.astype(q.dtype), lse


def gradients(
    kernels: Kernels,
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: LseShard,
    out: OutShard,
    dout: OutShard,
    trees: TreeIds,
    scale: float,
    square: bool,
) -> tuple[Array, ...]:
    """dq, dk and dv of a call in float32, for any lse and out."""
    queries = lse, out, dout
    if square:
        runs = _Runs.of(trees)
        ids = runs.ids, runs.ids
        so_far = packed.gradients(kernels, q, k, v, *queries, ids, scale, True, 0, False, False)
        rounds = runs.rounds
        # A kernel may read what lies beside a run.
        dout = jnp.where(trees.places[..., None, None] < 0, jnp.zeros_like(dout), dout)
        queries = lse, out, dout
    else:
        chain = _Chain.of(trees)
        so_far, rounds = tuple(map(jnp.zeros_like, (q, k, v))), chain.rounds

    def visit(i: Array, so_far: tuple[Array, ...]) -> tuple[Array, ...]:
        if square:
            above = runs.above(i)
            here = packed.gradients_each(kernels, q, k, v, *queries, above, scale, causal=False)
        else:
            here = chain.run(i).gradients(kernels, q, k, v, *queries, scale)
        found = (x + y.astype(jnp.float32) for x, y in zip(so_far, here, strict=True))
        return alike(*found, q, trees.places)[:3]

    begun = alike(*(x.astype(jnp.float32) for x in so_far), q, trees.places)[:3]
    return lax.fori_loop(0, rounds, visit, begun)


class _Chain(NamedTuple):
    """The runs of a rectangle, of each row, of which each lies in the stretch of the one before."""

    seen: Int32[Array, "b s"]
    number: Int32[Array, "b s"]
    """Which run each key is of; -1 if no query sees it."""
    queries: int

    @classmethod
    def of(cls, trees: TreeIds) -> _Chain:
        seen = trees.seen
        before = jnp.concatenate([jnp.zeros_like(seen[:, :1]), seen[:, :-1]], 1)
        number = jnp.cumsum((seen > 0) & (seen != before), 1, dtype=jnp.int32) - 1
        return cls(seen, jnp.where(seen > 0, number, -1), trees.places.shape[1])

    @property
    def rounds(self) -> Int32[Array, ""]:
        """Number of runs, of the row that has most."""
        return self.number.max() + 1

    def run(self, i: Array) -> _Run:
        """Run i of each row."""
        keys = self.number == i
        lengths = jnp.where(keys, self.seen, 0).max(1), keys.sum(1, dtype=jnp.int32)
        rows = jnp.arange(len(keys), dtype=jnp.int32)
        # As many keys as `filled` makes them.
        stored = -(-keys.shape[1] // cudnn.TILE) * cudnn.TILE
        starts = rows * self.queries, rows * stored + keys.argmax(1).astype(jnp.int32)
        starts = alike(*starts, *lengths)[:2]
        queries = lengths[0][:, None] > np.arange(self.queries)[None]
        return _Run(Segments(*lengths, *starts), queries, keys)


class _Run(NamedTuple):
    """One run of each row, which the first queries see."""

    segments: Segments
    queries: Bool[Array, "b t"]
    """Which queries see it."""
    keys: Bool[Array, "b s"]
    """Which keys are of it."""

    def attend(
        self, kernels: Kernels, q: QueryShard, k: KeyShard, v: ValueShard, scale: float
    ) -> tuple[OutShard, LseShard]:
        keys, values = cudnn.filled(k), cudnn.filled(v)
        out, lse = kernels.attend(q, keys, values, scale, False, 0, self.segments)
        seen = self.queries
        out = jnp.where(seen[..., None, None], out, jnp.zeros_like(out))
        return out, jnp.where(seen[:, None], lse, EMPTY)

    def gradients(
        self,
        kernels: Kernels,
        q: QueryShard,
        k: KeyShard,
        v: ValueShard,
        lse: LseShard,
        out: OutShard,
        dout: OutShard,
        scale: float,
    ) -> tuple[Array, ...]:
        # Queries beside them see no key, and their gradients must not count.
        stats = jnp.where(self.queries[:, None], lse, -EMPTY)
        dout = jnp.where(self.queries[..., None, None], dout, jnp.zeros_like(dout))
        keys, values = cudnn.filled(k), cudnn.filled(v)
        dq, dk, dv = kernels.gradients(
            q, keys, values, stats, out, dout, scale, False, 0, self.segments
        )
        tokens = k.shape[1]
        found = (dq, self.queries), (dk[:, :tokens], self.keys), (dv[:, :tokens], self.keys)
        return tuple(
            jnp.where(there[..., None, None], dx, jnp.zeros_like(dx)) for dx, there in found
        )


class _Runs(NamedTuple):
    """The runs of a square. Places count the tokens of all rows."""

    number: Int32[Array, " tokens"]
    """Which run each token is of; as many as tokens for padding, which is no run."""
    starts: Int32[Array, " runs"]
    """Place of the first token of each, and one more number than tokens."""
    lengths: Int32[Array, " runs"]
    ends: Int32[Array, " runs"]
    """Place of the first token after its stretch."""
    depths: Int32[Array, " runs"]
    """In how many others it lies; -1 if there is no such run."""
    nested: Bool[Array, ""]
    """Whether no stretch goes beyond the end of one that it begins in."""
    rows: tuple[int, int]

    @classmethod
    def of(cls, trees: TreeIds) -> _Runs:
        b, t = trees.places.shape
        tokens, seen = b * t, trees.seen
        index = jnp.arange(tokens, dtype=jnp.int32)
        real = (trees.places >= 0).reshape(-1)
        before = jnp.concatenate([jnp.full_like(seen[:, :1], -1), seen[:, :-1]], 1)
        fresh = real & (seen != before).reshape(-1)
        ends = jnp.where(real, index // t * t + seen.reshape(-1), index + 1)
        begun = jnp.cumsum(fresh, dtype=jnp.int32)
        none, *_ = alike(jnp.zeros(tokens + 1, jnp.int32), seen)
        ended = none.at[jnp.where(fresh, ends, tokens + 1)].add(1, mode="drop")
        depth = begun - 1 - jnp.cumsum(ended, dtype=jnp.int32)[:-1]
        first = jnp.where(fresh, begun - 1, tokens + 1)
        number = jnp.where(real, begun - 1, tokens)

        def of_runs(x: Array, other: int) -> Array:
            return (none + other).at[first].set(x, mode="drop")

        lengths = none.at[number].add(1).at[-1].set(0)
        runs = of_runs(index, 0), lengths, of_runs(ends, 0), of_runs(depth, -1)
        return cls(number, *runs, _nested(index, ends, t), (b, t))

    @property
    def ids(self) -> Int32[Array, "b t"]:
        """Segment ids of the runs."""
        padding = self.number == self.number.size
        return jnp.where(padding, -1, self.number).reshape(self.rows)

    @property
    def below(self) -> Int32[Array, " runs"]:
        """Number of queries behind each run that see it."""
        return self.ends - self.starts - self.lengths

    @property
    def rounds(self) -> Int32[Array, ""]:
        """In how many rounds queries see runs before their own."""
        return jnp.where(self.below > 0, self.depths + 1, 0).max()

    def fit(self, kernels: Kernels) -> Bool[Array, ""]:
        """Whether the runs are those of trees, and each level has room for its own."""
        last = packed.last_level(kernels, *self.rows, sides=2)
        short = (self.below > 0) & last.holds(jnp.maximum(self.below, self.lengths))
        counts = jnp.zeros(ROUNDS, jnp.int32)
        counts, short = alike(counts, short)
        counts = counts.at[jnp.where(short, self.depths, ROUNDS)].add(1, mode="drop")
        room = (counts <= last.segments).all()
        return self.nested & room & Stretches.of(self.ids, kernels).fit

    def above(self, depth: Array) -> Stretches:
        """The runs of a depth as keys, and what is below them as queries."""
        here = (self.depths == depth) & (self.below > 0)
        starts = self.starts + self.lengths
        lengths, key_lengths = (jnp.where(here, x, 0) for x in (self.below, self.lengths))
        tokens = self.number.size
        which = jnp.arange(tokens + 1, dtype=jnp.int32)
        latest, index = jnp.zeros_like(self.number), which[:-1]
        latest = latest.at[jnp.where(here, starts, tokens)].set(which, mode="drop")
        latest = lax.cummax(latest)
        number = jnp.where(here[latest] & (index < self.ends[latest]), latest, tokens)
        number = jnp.where(index < starts[latest], tokens, number)
        place = index - starts[number]
        return Stretches(
            starts, lengths, self.starts, key_lengths, number, self.number, place, True, sides=2
        )


def _nested(index: Array, ends: Array, longest: int) -> Bool[Array, ""]:
    """Whether no stretch goes beyond one that it begins in. `longest` is that of a row."""
    # The greatest end of 2^n tokens from each on; the tokens below one are two such stretches.
    greatest, size, inner = ends, 1, ends - index - 1
    nested = jnp.asarray(True)
    while size < longest:
        here = (inner >= size) & (inner < 2 * size)
        two = greatest.at[index + 1].get(mode="clip"), greatest.at[ends - size].get(mode="clip")
        nested &= ~(here & (jnp.maximum(*two) > ends)).any()
        later = jnp.concatenate([greatest[size:], jnp.zeros_like(greatest[:size])])
        greatest, size = jnp.maximum(greatest, later), 2 * size
    return nested

"""A pair of units cut into tiles: which tiles hold anything visible, and what is masked in each.

A block backend skips the pairs of tiles in which nothing is visible, and needs no mask in those
that are visible as a whole.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from startrail_jax.blocks.visibility import Visibility
from startrail_jax.tokens.layout import Span

_NO_SEGMENT = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Tiling:
    """The tokens of a unit cut into tiles of one size; all of it is static.

    No tile straddles two runs. Where the size does not divide a run, the last tile of the run
    starts early and overlaps the tile before it; `fresh` says where its own tokens begin.
    """

    starts: np.ndarray
    """Index in the unit of the first token of each tile: int32 [tiles]."""
    fresh: np.ndarray
    """Index of the first token of each tile that is in no tile before: int32 [tiles]."""
    size: int
    """Tokens in a tile."""

    @classmethod
    def of(cls, length: int, num_runs: int, target: int) -> Tiling:
        """Cuts `length` tokens, which are `num_runs` equal runs, into tiles of at most `target`."""
        run = length // num_runs
        per_run = -(-run // target)
        size = -(-run // per_run)
        fresh = np.arange(per_run) * size
        starts = np.minimum(fresh, run - size)
        base = np.arange(num_runs)[:, None] * run
        flat = lambda x: (base + x).reshape(-1).astype(np.int32)  # noqa: E731
        return cls(flat(starts), flat(fresh), size)

    @property
    def overlaps(self) -> bool:
        """Whether some tile repeats tokens of another."""
        return bool((self.starts != self.fresh).any())

    def take(self, x: Array) -> Array:
        """The tiles of the last dimension of `x`: [..., tokens] -> [..., tiles, size]."""
        return x[..., self.starts[:, None] + np.arange(self.size)]

    def cut(self, x: Array, i: Array, axis: int) -> Array:
        """Tile i of the tokens along `axis`."""
        return lax.dynamic_slice_in_dim(x, jnp.asarray(self.starts)[i], self.size, axis)

    def paste(self, x: Array, tile: Array, i: Array, axis: int) -> Array:
        """`x` with `tile` in place of its tile i, the inverse of `cut`."""
        return lax.dynamic_update_slice_in_dim(x, tile, jnp.asarray(self.starts)[i], axis)

    def is_fresh(self, i: Array) -> Bool[Array, " tokens"]:
        """Which tokens of tile i are in no tile before."""
        return jnp.asarray(self.starts)[i] + np.arange(self.size) >= jnp.asarray(self.fresh)[i]


def visible_tiles(visibility: Visibility, query: Tiling, key: Tiling) -> Bool[Array, "i j"]:
    """Pairs of tiles that may hold a visible (query, key) pair.

    For positions it is as exact as the mask is for spans. Segment ids are compared as ranges, so
    that a listed pair may have nothing visible.
    """
    visible = jnp.ones((len(query.starts), len(key.starts)), bool)
    if not visibility.full:
        queries = _spans(visibility.query_positions, query, query.fresh, slice(None), None)
        visible &= visibility.mask.some(
            queries, _spans(visibility.key_positions, key, key.fresh, None)
        )
    if visibility.query_segments is not None and visibility.key_segments is not None:
        query_low, query_high = _segment_range(query.take(visibility.query_segments))
        key_low, key_high = _segment_range(key.take(visibility.key_segments))
        if visibility.trees:
            query_low = visibility.query_positions[query.fresh][None]
            meet = (query_low[:, :, None] < key_high[:, None]) & (query_high >= 0)[:, :, None]
        else:
            meet = query_low[:, :, None] <= key_high[:, None]
            meet &= key_low[:, None] <= query_high[:, :, None]
        if visibility.query_places is not None and visibility.key_places is not None:
            first = query.take(visibility.query_places).min(-1)
            last = key.take(visibility.key_places).max(-1)
            meet &= visibility.is_near(first[:, :, None], last[:, None])
        visible &= meet.any(0)
    return visible


def _spans(positions: Int32[Array, " t"], tiling: Tiling, first: np.ndarray, *index: Any) -> Span:
    """First and last position of each tile, indexed for a comparison with other tiles."""
    last = tiling.starts + tiling.size - 1
    return Span(positions[first][index], positions[last][index])


def _segment_range(tiles: Int32[Array, "b i n"]) -> tuple[Int32[Array, "b i"], Int32[Array, "b i"]]:
    """Least and greatest segment id of each tile; padding does not count."""
    return jnp.where(tiles < 0, _NO_SEGMENT, tiles).min(-1), tiles.max(-1)


def split_tiles(tiling: Tiling, target: int) -> tuple[Tiling, np.ndarray]:
    """Cuts tiles into ones of at most `target` tokens, each with the index of its large tile."""
    part = Tiling.of(tiling.size, 1, target)
    starts = tiling.starts[:, None] + part.starts
    fresh = np.maximum(tiling.starts[:, None] + part.fresh, tiling.fresh[:, None])
    # Where a large tile overlaps the one before, some of its parts may hold nothing of their own.
    own = fresh < starts + part.size
    return Tiling(starts[own], fresh[own], part.size), np.nonzero(own)[0]


def tile_kinds(visibility: Visibility, query: Tiling, key: Tiling) -> dict[str, Bool[Array, "i j"]]:
    """Which visible pairs of tiles are of each kind: what an attention kernel has to mask in them.

    * "full": every query sees every key, and nothing is masked.
    * "causal": a triangle is visible; query m of the tile sees keys 0 .. m.
    * "edge", "strict edge": the same from the other side, where a window ends; query m sees all
      keys from m on, or from m + 1 on. They are looked for where tiles divide the runs.
    * "mixed": anything else, even a pair in which nothing is visible (see `visible_tiles`).

    A pair is of another kind than "mixed" only if it is of that kind in every row of the batch and
    neither of its tiles overlaps another. Kinds that cannot occur are left out.
    """
    visible = visible_tiles(visibility, query, key)
    whole = (query.starts == query.fresh)[:, None] & (key.starts == key.fresh)
    packed = visibility.query_segments is not None and visibility.key_segments is not None
    always_full = visibility.full and not packed and whole.all()
    whole = visible & whole
    if visibility.query_segments is not None and visibility.key_segments is not None:
        ids, key_ids = query.take(visibility.query_segments), key.take(visibility.key_segments)
        last = None
        if visibility.trees:
            ids, key_ids = ids.min(-1), key_ids.min(-1)
            last = visibility.query_positions[query.starts + query.size - 1][None, :, None]
        else:
            ids, key_ids = _only_segment(ids), _only_segment(key_ids)
        whole &= visibility.by_ids(ids[:, :, None], key_ids[:, None], last).all(0)
    if visibility.query_places is not None and visibility.key_places is not None:
        far = query.take(visibility.query_places).max(-1)
        near = key.take(visibility.key_places).min(-1)
        whole &= visibility.is_near(far[:, :, None], near[:, None]).all(0)
    kinds = {"full": whole} if visibility.full else _kinds_of_mask(visibility, query, key, whole)
    if not always_full:
        kinds["mixed"] = visible & ~functools.reduce(jnp.logical_or, kinds.values())
    return kinds


def _kinds_of_mask(
    visibility: Visibility, query: Tiling, key: Tiling, whole: Bool[Array, "i j"]
) -> dict[str, Bool[Array, "i j"]]:
    """The kinds of `tile_kinds` but "mixed", among pairs that only positions can mask."""
    assert visibility.query_runs is not None
    assert visibility.key_runs is not None
    queries = _spans(visibility.query_positions, query, query.starts, slice(None), None)
    keys = _spans(visibility.key_positions, key, key.starts, None)
    first, key_first = queries.first, keys.first
    full = whole & visibility.mask.every(queries, keys)
    triangle = whole & visibility.mask.triangle(queries, keys)
    if query.size != key.size or query.size == 1:
        return {"full": full}
    kinds = {"full": full, "causal": triangle & (first == key_first)}
    reach, aligned = visibility.mask.reach, visibility.query_runs.length % query.size == 0
    if reach is None or not aligned or visibility.key_runs.length % key.size:
        return kinds
    behind = whole & visibility.mask.edge(queries, keys)
    # Positions of tiles are multiples of their size, so most windows have no such tile.
    if reach % query.size == 0:
        kinds["edge"] = behind & (first - reach == key_first)
    if (reach + 1) % query.size == 0:
        kinds["strict edge"] = behind & (first - reach == key_first + 1)
    return kinds


def _only_segment(tiles: Int32[Array, "b i n"]) -> Int32[Array, "b i"]:
    """The segment id of each tile; -1 if the tile has several."""
    return jnp.where(tiles.min(-1) == tiles.max(-1), tiles[..., 0], -1)


def visible_in_tiles(
    visibility: Visibility, query: Tiling, key: Tiling, i: Array, j: Array
) -> Bool[Array, "#b #m #n"] | None:
    """Which keys of key tile j the queries of query tile i see; None if no tile has a mask. Tokens
    that the tile before holds too count as masked, or they would count twice."""
    tests = []
    if not visibility.full:
        positions = query.cut(visibility.query_positions, i, 0)[None, :, None]
        key_positions = key.cut(visibility.key_positions, j, 0)[None, None, :]
        tests.append(visibility.mask.visible(positions, key_positions))
    if visibility.query_segments is not None and visibility.key_segments is not None:
        ids = query.cut(visibility.query_segments, i, 1)[:, :, None]
        key_ids = key.cut(visibility.key_segments, j, 1)[:, None, :]
        positions = None
        if visibility.trees:
            positions = query.cut(visibility.query_positions, i, 0)[None, :, None]
        tests.append(visibility.by_ids(ids, key_ids, positions))
    if visibility.query_places is not None and visibility.key_places is not None:
        places = query.cut(visibility.query_places, i, 1)[:, :, None]
        key_places = key.cut(visibility.key_places, j, 1)[:, None, :]
        tests.append(visibility.is_near(places, key_places))
    if key.overlaps:
        tests.append(key.is_fresh(j)[None, None, :])
    if query.overlaps:
        tests.append(query.is_fresh(i)[None, :, None])
    return functools.reduce(jnp.logical_and, tests) if tests else None


def mask_logits(
    logits: Float32[Array, "... _ _"],
    visible: Bool[Array, "#b #t #s"] | None,
    *,
    heads: int,
    queries: int,
    keys_first: bool = False,
) -> Float32[Array, "... _ _"]:
    """The logits of a pair of tiles, -inf where the query does not see the key.

    Logits are [b, k, g * t, s] or [b * k, g * t, s] for k key `heads`, each of which g query heads
    share, t `queries` and s keys. The last two dimensions are swapped if `keys_first`.
    """
    if visible is None:
        return logits
    *_, rows, columns = logits.shape
    if keys_first:
        split = logits.reshape(-1, heads, rows, columns // queries, queries)
        visible = visible.swapaxes(1, 2)[:, None, :, None]
    else:
        split = logits.reshape(-1, heads, rows // queries, queries, columns)
        visible = visible[:, None, None]
    return jnp.where(visible, split, -jnp.inf).reshape(logits.shape)

"""A pair of units cut into tiles: which of them hold anything visible, and what is masked in each.

A tile of which nothing is visible costs nothing; one that is visible as a whole needs no mask.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from startrail_jax.layout import Runs
from startrail_jax.mask import Mask

_NO_SEGMENT = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Tiling:
    """A unit's tokens cut into tiles of one size; static.

    Tiles never straddle two runs. Where the size does not divide a run, its last tile starts
    early and overlaps the tile before; `fresh` is where its own tokens begin.
    """

    starts: np.ndarray
    """First token of each tile, int32 [tiles]."""
    fresh: np.ndarray
    """First token of each tile that no tile before holds, int32 [tiles]."""
    size: int
    """Tokens in a tile."""

    @classmethod
    def of(cls, length: int, num_runs: int, target: int) -> Tiling:
        """Tiles of at most `target` tokens over `num_runs` equal runs of `length` tokens in all."""
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
        """Which tokens of tile i no tile before holds."""
        return jnp.asarray(self.starts)[i] + np.arange(self.size) >= jnp.asarray(self.fresh)[i]


def visible_tiles(mask: Mask, query: Tiling, key: Tiling) -> Bool[Array, "i j"]:
    """Tiles that may hold a visible pair: exact for positions, a range test for segments."""
    visible = jnp.ones((len(query.starts), len(key.starts)), bool)
    if mask.causal:
        query_positions, key_positions = mask.query_positions, mask.key_positions
        query_last = query_positions[query.starts + query.size - 1]
        visible &= key_positions[key.fresh][None] <= query_last[:, None]
        if mask.window is not None:
            query_first = query_positions[query.fresh]
            key_last = key_positions[key.starts + key.size - 1]
            visible &= key_last[None] > query_first[:, None] - mask.window
    if mask.query_segments is not None and mask.key_segments is not None:
        query_low, query_high = _segment_range(query.take(mask.query_segments))
        key_low, key_high = _segment_range(key.take(mask.key_segments))
        meet = query_low[:, :, None] <= key_high[:, None]
        meet &= key_low[:, None] <= query_high[:, :, None]
        visible &= meet.any(0)
    return visible


def _segment_range(tiles: Int32[Array, "b i n"]) -> tuple[Int32[Array, "b i"], Int32[Array, "b i"]]:
    """Least and greatest segment id of each tile, padding left out."""
    return jnp.where(tiles < 0, _NO_SEGMENT, tiles).min(-1), tiles.max(-1)


def split_tiles(tiling: Tiling, target: int) -> tuple[Tiling, np.ndarray]:
    """Cuts the tiles of a unit into tiles of at most `target` tokens.

    Returns:
        The small tiles, and the large tile that each of them is part of.
    """
    part = Tiling.of(tiling.size, 1, target)
    starts = tiling.starts[:, None] + part.starts
    fresh = np.maximum(tiling.starts[:, None] + part.fresh, tiling.fresh[:, None])
    # Where a large tile overlaps the one before, some of its parts may hold nothing of their own.
    own = fresh < starts + part.size
    return Tiling(starts[own], fresh[own], part.size), np.nonzero(own)[0]


def tile_kinds(mask: Mask, query: Tiling, key: Tiling) -> dict[str, Bool[Array, "i j"]]:
    """Sorts the visible pairs of tiles by what an attention kernel has to mask in them.

    * "full": nothing, every query sees every key.
    * "causal": a triangle; query m of the tile sees its keys 0 .. m.
    * "strict": a triangle without its diagonal; query m sees keys 0 .. m - 1.
    * "mixed": anything else; it may be that nothing is visible (see `visible_tiles`).

    A pair is of one of the first three kinds if it is so in every row of the batch, and neither of
    its tiles repeats tokens. Kinds that cannot occur are left out.
    """
    visible = visible_tiles(mask, query, key)
    whole = (query.starts == query.fresh)[:, None] & (key.starts == key.fresh)
    packed = mask.query_segments is not None and mask.key_segments is not None
    always_full = not mask.causal and not packed and whole.all()
    whole = visible & whole
    if mask.query_segments is not None and mask.key_segments is not None:
        ids = _only_segment(query.take(mask.query_segments))[:, :, None]
        key_ids = _only_segment(key.take(mask.key_segments))[:, None]
        whole &= ((ids == key_ids) & (ids >= 0)).all(0)
    kinds = _causal_kinds(mask, query, key, whole) if mask.causal else {"full": whole}
    if not always_full:
        kinds["mixed"] = visible & ~functools.reduce(jnp.logical_or, kinds.values())
    return kinds


def _causal_kinds(
    mask: Mask, query: Tiling, key: Tiling, whole: Bool[Array, "i j"]
) -> dict[str, Bool[Array, "i j"]]:
    """Those of `tile_kinds` that are not "mixed", among pairs of which only positions may mask."""
    assert mask.query_runs is not None
    assert mask.key_runs is not None
    queries, keys = mask.query_positions, mask.key_positions
    first, last = queries[query.starts][:, None], queries[query.starts + query.size - 1][:, None]
    key_first, key_last = keys[key.starts][None], keys[key.starts + key.size - 1][None]
    if mask.window is not None:
        whole &= key_first > last - mask.window
    full = whole & (key_last <= first)
    # From one token to the next, the positions of both tiles grow alike, and by `step` at least.
    block, stride = _pattern(mask.query_runs)
    if query.size != key.size or query.size == 1 or (block, stride) != _pattern(mask.key_runs):
        return {"full": full}
    alike = whole & ((query.starts % block)[:, None] == key.starts % block)
    step = stride if block == 1 else 1
    kinds = {"full": full, "causal": alike & (first - step < key_first) & (key_first <= first)}
    if step > 1:
        kinds["strict"] = alike & (first < key_first) & (key_first <= first + step)
    return kinds


def _pattern(runs: Runs) -> tuple[int, int]:
    """(block, stride) of positions; (1, 1) if they are consecutive."""
    return (1, 1) if runs.contiguous else (runs.block, runs.stride)


def _only_segment(tiles: Int32[Array, "b i n"]) -> Int32[Array, "b i"]:
    """The segment id of each tile, -1 if it has several."""
    return jnp.where(tiles.min(-1) == tiles.max(-1), tiles[..., 0], -1)


def visible_in_tiles(
    mask: Mask, query: Tiling, key: Tiling, i: Array, j: Array
) -> Bool[Array, "#b #m #n"] | None:
    """What queries of tile i see of keys of tile j; None if nothing in any tile is masked.

    What the tile before holds too is not seen, or it would count twice.
    """
    tests = []
    if mask.causal:
        positions = query.cut(mask.query_positions, i, 0)[None, :, None]
        key_positions = key.cut(mask.key_positions, j, 0)[None, None, :]
        tests.append(key_positions <= positions)
        if mask.window is not None:
            tests.append(key_positions > positions - mask.window)
    if mask.query_segments is not None and mask.key_segments is not None:
        ids = query.cut(mask.query_segments, i, 1)[:, :, None]
        key_ids = key.cut(mask.key_segments, j, 1)[:, None, :]
        tests += [ids == key_ids, ids >= 0]
    if key.overlaps:
        tests.append(key.is_fresh(j)[None, None, :])
    if query.overlaps:
        tests.append(query.is_fresh(i)[None, :, None])
    return functools.reduce(jnp.logical_and, tests) if tests else None

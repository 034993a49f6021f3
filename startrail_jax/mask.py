"""Which part of a pair of units is visible. Never an array over the whole sequence squared.

A `Mask` describes one (query unit, key unit) pair; `visible_tiles` finds the tiles that hold any
visible pair, so that the others cost nothing, and `Mask.allowed` is the mask inside one tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from startrail_jax.layout import Runs

_NO_SEGMENT = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Mask:
    """Visibility of the keys of one unit to the queries of another.

    Query i sees key j if all that apply hold: j <= i (`causal`), j > i - window (`window`, which
    counts i itself), and equal segment ids that are not negative (`query_segments`).
    """

    causal: bool = False
    window: int | None = None
    query_runs: Runs | None = None
    """Positions of the queries; needed if causal."""
    key_runs: Runs | None = None
    """Positions of the keys; needed if causal."""
    query_segments: Int32[Array, "b t"] | None = None
    key_segments: Int32[Array, "b s"] | None = None

    @property
    def query_positions(self) -> Int32[Array, " t"]:
        """Natural positions of the queries; causal masks only."""
        assert self.query_runs is not None
        return self.query_runs.vector()

    @property
    def key_positions(self) -> Int32[Array, " s"]:
        """Natural positions of the keys; causal masks only."""
        assert self.key_runs is not None
        return self.key_runs.vector()


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


def runs_meet(query: Runs, key: Runs, window: int) -> bool:
    """Whether any query may see any key under a causal window; exact but for striped units."""
    return any(
        key_start <= query_start + _extent(query)
        and key_start + _extent(key) > query_start - window
        for query_start in query.starts
        for key_start in key.starts
    )


def _extent(runs: Runs) -> int:
    """Distance from the first to the last position of a run."""
    return (runs.length // runs.block - 1) * runs.stride + runs.block - 1

"""Which part of a pair of units is visible. Never an array over the whole sequence squared.

A `Mask` describes one (query unit, key unit) pair. Blocks turn it into kernel calls: by `pieces.py`
if it is causal and no more, by `tiles.py` in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int32

from startrail_jax.layout import Runs
from startrail_jax.pieces import Pieces, pieces_by_offset


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
    offsets: tuple[int, ...] = ()
    """All values that the start of `key_runs` less that of `query_runs` can take, where the starts
    are traced: what `cases` needs."""

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

    def cases(self) -> tuple[Int32[Array, ""] | int, tuple[Pieces, ...]]:
        """The sets of pieces that may be visible, and which of them is; causal masks only.

        Segments and windows are left out of account.
        """
        assert self.query_runs is not None
        assert self.key_runs is not None
        offset = self.key_runs.starts[0] - self.query_runs.starts[0]
        offsets = self.offsets or (int(offset),)
        first, cases = pieces_by_offset(self.query_runs.shape, self.key_runs.shape, offsets)
        if len(cases) == 1:
            return 0, cases
        return (jnp.asarray(first[1:]) <= offset).sum(dtype=jnp.int32), cases


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

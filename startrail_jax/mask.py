"""Which keys of one unit the queries of another see.

A `Mask` describes the pair by positions and segment ids; no array over the whole sequence squared
exists. Blocks turn it into kernel calls: `pieces.py` cuts a plain causal mask into rectangles and
squares, `tiles.py` cuts any mask into tiles.
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

    The query at position i sees the key at position j if all of these hold that apply: j <= i (if
    `causal`); j > i - window (if there is a `window`, which counts i itself); both have the same
    segment id, and it is not negative (if there are segment ids).
    """

    causal: bool = False
    """Whether a query sees only keys at its own position or before."""
    window: int | None = None
    """Number of keys that a query sees, itself included; None for all."""
    query_runs: Runs | None = None
    """Positions of the queries; a causal mask needs them."""
    key_runs: Runs | None = None
    """Positions of the keys; a causal mask needs them."""
    query_segments: Int32[Array, "b t"] | None = None
    """Segment ids of the queries, if there are any."""
    key_segments: Int32[Array, "b s"] | None = None
    """Segment ids of the keys, if there are any."""
    offsets: tuple[int, ...] = ()
    """All possible distances from the start of `query_runs` to that of `key_runs`, in
    tokens; `cases` needs them where the starts are traced."""

    @property
    def num_query_runs(self) -> int:
        """Runs of the query unit; 1 if their positions do not matter."""
        return len(self.query_runs.starts) if self.query_runs else 1

    @property
    def num_key_runs(self) -> int:
        """Runs of the key unit; 1 if their positions do not matter."""
        return len(self.key_runs.starts) if self.key_runs else 1

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
        """The index of the set of pieces that is visible, and all sets; causal masks only.

        Windows and segment ids are ignored.
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
    """Whether some query of one unit may see some key of another under a causal window.

    The answer is exact, except that for striped units it may be true where it could be false.
    """
    return any(
        key_start <= query_start + _extent(query)
        and key_start + _extent(key) > query_start - window
        for query_start in query.starts
        for key_start in key.starts
    )


def _extent(runs: Runs) -> int:
    """Distance from the first to the last position of a run."""
    return (runs.length // runs.block - 1) * runs.stride + runs.block - 1

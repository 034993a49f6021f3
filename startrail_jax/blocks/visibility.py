"""Which keys of one unit the queries of another see.

A `Visibility` describes the pair by positions and segment ids; no array over the whole sequence
squared exists. Blocks turn it into kernel calls: `pieces.py` cuts some masks into rectangles and
squares, `tiles.py` cuts any mask into tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from startrail_jax.blocks.pieces import Pieces, pieces_by_offset
from startrail_jax.masks import Causal, Full, Mask
from startrail_jax.tokens.layout import Runs

_FULL = Full()

Cases = tuple[Int32[Array, ""] | int, tuple[Pieces, ...]]
"""The index of the set of pieces that is visible on this device, and all sets."""


@dataclass(frozen=True)
class Visibility:
    """Visibility of the keys of one unit to the queries of another.

    A query sees a key if the mask shows it at their positions and, where there are segment ids,
    both have the same one and it is not negative. In trees, ids are the ends of stretches instead:
    the query also lies before the end of the key.
    """

    mask: Mask = _FULL
    query_runs: Runs | None = None
    """Positions of the queries, as `key_runs` of the keys; every mask but a full one needs them."""
    key_runs: Runs | None = None
    query_segments: Int32[Array, "b t"] | None = None
    key_segments: Int32[Array, "b s"] | None = None
    trees: bool = False
    """Whether ids say, for each key, the position from which on queries do not see it."""
    near: int | None = None
    """In trees, a window: queries see only keys fewer than so many places before them."""
    query_places: Int32[Array, "b t"] | None = None
    """With `near`, the place of each query in its branch, as `key_places` of the keys."""
    key_places: Int32[Array, "b s"] | None = None
    offsets: tuple[int, ...] = ()
    """All possible distances, in tokens, from the start of `query_runs` to that of `key_runs`;
    `cases` needs them where the starts are traced."""
    by_runs: Callable[[], Cases] | None = None
    """What `cases` gives for a mask that has a `pieces.period`; None for others."""

    @property
    def full(self) -> bool:
        """Whether positions do not matter."""
        return isinstance(self.mask, Full)

    @property
    def causal(self) -> bool:
        """Whether the mask is plain causal, so that it falls into `Pieces`."""
        return isinstance(self.mask, Causal)

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
        """Natural positions of the queries, if they matter."""
        assert self.query_runs is not None
        return self.query_runs.vector()

    @property
    def key_positions(self) -> Int32[Array, " s"]:
        """Natural positions of the keys, if they matter."""
        assert self.key_runs is not None
        return self.key_runs.vector()

    @property
    def dense(self) -> Bool[Array, "_ t s"]:
        """Whether each query sees each key, for kernels that hold all pairs.

        The first dimension is the batch, or 1 where all rows are alike. A full mask without segment
        ids has no pairs to tell apart: see `full`.
        """
        seen = jnp.ones((1, 1, 1), bool)
        if not self.full:
            seen = self.mask.visible(
                self.query_positions[None, :, None], self.key_positions[None, None, :]
            )
        if self.query_segments is not None and self.key_segments is not None:
            ids, others = self.query_segments[:, :, None], self.key_segments[:, None, :]
            positions = self.query_positions[None, :, None] if self.trees else None
            seen = seen & self.by_ids(ids, others, positions)
        if self.query_places is not None and self.key_places is not None:
            seen = seen & self.is_near(self.query_places[:, :, None], self.key_places[:, None, :])
        return seen

    def is_near(
        self, places: Int32[Array, "b t _"], key_places: Int32[Array, "b _ s"]
    ) -> Bool[Array, "b t s"]:
        """Whether keys at places of their branches are in the window of queries."""
        assert self.near is not None
        return places - key_places < self.near

    def by_ids(
        self,
        ids: Int32[Array, "b t _"],
        key_ids: Int32[Array, "b _ s"],
        positions: Int32[Array, "_ t _"] | None,
    ) -> Bool[Array, "b t s"]:
        """Whether queries see keys by their ids alone; trees need the positions of the queries."""
        same = ids == key_ids if positions is None else positions < key_ids
        return same & (ids >= 0)

    def cases(self) -> Cases:
        """The sets of pieces of a mask that falls into them; segment ids are ignored."""
        if self.by_runs is not None:
            return self.by_runs()
        assert self.causal
        assert self.query_runs is not None
        assert self.key_runs is not None
        offset = self.key_runs.starts[0] - self.query_runs.starts[0]
        offsets = self.offsets or (int(offset),)
        first, cases = pieces_by_offset(self.query_runs.shape, self.key_runs.shape, offsets)
        if len(cases) == 1:
            return 0, cases
        return (jnp.asarray(first[1:], jnp.int32) <= offset).sum(dtype=jnp.int32), cases

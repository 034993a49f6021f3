"""Tiles and visibility, against brute force."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from startrail_jax.blocks.tiles import Tiling, visible_tiles
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.masks import resolve
from startrail_jax.tokens.layout import KINDS, Layout

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("length", "runs", "target"), [(12, 1, 5), (46, 2, 7), (7, 1, 100), (8, 2, 1)]
)
def test_tiling_covers_every_token_once_and_stays_in_its_run(length, runs, target):
    tiling = Tiling.of(length, runs, target)
    assert tiling.size <= target
    fresh = [range(f, s + tiling.size) for f, s in zip(tiling.fresh, tiling.starts, strict=True)]
    assert sorted(itertools.chain(*fresh)) == list(range(length))
    run = length // runs
    assert all(s // run == (s + tiling.size - 1) // run for s in tiling.starts)


def unit_pairs(layout, seq_len, sizes):
    """Every (query runs, key runs) of units of the given ranks, with their positions."""
    query_ranks, key_ranks = sizes
    for i, j in itertools.product(
        range(layout.degree // query_ranks), range(layout.degree // key_ranks)
    ):
        query = layout.unit_positions(seq_len, i * query_ranks, query_ranks)
        key = layout.unit_positions(seq_len, j * key_ranks, key_ranks)
        yield query, key, np.asarray(query.vector()), np.asarray(key.vector())


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_visible_tiles_are_exactly_those_with_a_visible_pair(kind, window):
    layout, seq_len = Layout(kind, 6), 6 * 14
    for query, key, query_positions, key_positions in unit_pairs(layout, seq_len, (2, 3)):
        pattern = resolve(None, causal=True, window=window)
        mask = Visibility(pattern, query_runs=query, key_runs=key)
        rows = Tiling.of(len(query_positions), len(query.starts), 5)
        columns = Tiling.of(len(key_positions), len(key.starts), 4)
        seen = key_positions <= query_positions[:, None]
        if window is not None:
            seen &= key_positions > query_positions[:, None] - window
        expected = [
            [
                seen[f : s + rows.size, g : u + columns.size].any()
                for g, u in zip(columns.fresh, columns.starts, strict=True)
            ]
            for f, s in zip(rows.fresh, rows.starts, strict=True)
        ]
        visible = np.asarray(visible_tiles(mask, rows, columns))
        np.testing.assert_array_equal(visible, expected)


def test_visible_tiles_of_packed_documents_leave_out_other_documents_and_padding():
    ids = jnp.array([[0, 0, 1, 1, 2, 2, -1, -1]], jnp.int32)
    mask = Visibility(query_segments=ids, key_segments=ids)
    tiling = Tiling.of(8, 1, 2)
    np.testing.assert_array_equal(visible_tiles(mask, tiling, tiling), np.diag([1, 1, 1, 0]))

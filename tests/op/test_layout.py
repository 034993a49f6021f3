"""Token layouts: which rank holds which tokens, and the positions of gathered units."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from refusals import refused
from startrail_jax.device_mesh import make_mesh
from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import KINDS, Layout

pytestmark = pytest.mark.quick

layouts = st.builds(Layout, st.sampled_from(KINDS), st.integers(1, 12))


def test_indices_by_hand():
    assert Layout("contiguous", 3).indices(12, 1).tolist() == [4, 5, 6, 7]
    assert Layout("zigzag", 3).indices(12, 0).tolist() == [0, 1, 10, 11]
    assert Layout("zigzag", 3).indices(12, 2).tolist() == [4, 5, 6, 7]


@given(layouts, st.integers(1, 5))
def test_positions_are_a_permutation_in_rank_order(layout, count):
    seq_len = layout.multiple * count
    positions = layout.positions(seq_len)
    assert positions.dtype == np.int32
    assert sorted(positions) == list(range(seq_len))
    ranks = [layout.indices(seq_len, rank) for rank in range(layout.degree)]
    np.testing.assert_array_equal(np.concatenate(ranks), positions)
    assert len({len(rank) for rank in ranks}) == 1


@given(layouts, st.integers(1, 5), st.integers(0, 2))
def test_permute_round_trips_on_any_axis(layout, count, axis):
    shape = [2, 3]
    shape.insert(axis, layout.multiple * count)
    x = np.arange(np.prod(shape)).reshape(shape)
    permuted = layout.permute(x, axis=axis)
    np.testing.assert_array_equal(permuted, np.take(x, layout.positions(shape[axis]), axis))
    np.testing.assert_array_equal(layout.unpermute(permuted, axis=axis), x)
    np.testing.assert_array_equal(layout.permute(layout.unpermute(x, axis=axis), axis=axis), x)


def test_permute_gives_what_it_was_given():
    layout = Layout("zigzag", 2)
    x = np.arange(16, dtype=np.int16).reshape(2, 8)
    assert type(layout.permute(x)) is np.ndarray
    assert layout.permute(x).dtype == x.dtype
    assert isinstance(layout.permute(jnp.asarray(x)), jax.Array)
    np.testing.assert_array_equal(layout.permute(jnp.asarray(x)), layout.permute(x))


def test_permute_runs_under_jit():
    layout, x = Layout("zigzag", 3), jnp.arange(24).reshape(2, 12)
    np.testing.assert_array_equal(jax.jit(layout.permute)(x), layout.permute(x))
    np.testing.assert_array_equal(jax.jit(layout.unpermute)(layout.permute(x)), x)


@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
@pytest.mark.parametrize("direction", ["permute", "unpermute"])
def test_permute_refuses_a_sharded_array(direction, axis_type):
    mesh = make_mesh(Degrees(ring=2), axis_type, devices=jax.devices()[:2])
    x = jax.device_put(jnp.zeros((3, 8)), NamedSharding(mesh, P(None, "ring")))
    reorder = getattr(Layout("zigzag", 2), direction)
    # Under jit, only Explicit axes tell.
    for call in (reorder, jax.jit(reorder))[: 1 + (axis_type == "explicit")]:
        with refused(InputError, "Reordering tokens needs"):
            call(x)


def test_permute_takes_a_replicated_array():
    mesh = make_mesh(Degrees(ring=2), devices=jax.devices()[:2])
    x = jax.device_put(jnp.arange(8.0).reshape(1, 8), NamedSharding(mesh, P()))
    layout = Layout("zigzag", 2)
    np.testing.assert_array_equal(layout.unpermute(layout.permute(x)), x)


@given(layouts, st.integers(1, 300))
def test_padded_length_is_the_least_valid_one(layout, seq_len):
    padded = layout.padded_length(seq_len)
    assert seq_len <= padded < seq_len + layout.multiple
    layout.check_length(padded)


@pytest.mark.parametrize(
    ("kind", "seq_len", "named"),
    [
        ("zigzag", 1000, "got seq_len=1000, degree=16. Pad to 1024 or cut to 992, and"),
        ("zigzag", 8, "Pad to 32, and"),
        ("contiguous", 1000, "layout='contiguous'"),
        ("contiguous", 0, "Pad to 16, and"),
    ],
)
def test_length_that_does_not_divide_is_refused_with_the_nearest(kind, seq_len, named):
    layout = Layout(kind, 16)
    for call in (layout.positions, lambda n: layout.indices(n, 0), layout.check_length):
        with refused(InputError, named):
            call(seq_len)


def test_other_sizes_ranks_and_kinds_are_refused():
    with refused(InputError, degree=4):
        Layout("contiguous", 4).permute(np.zeros((2, 6)))
    for rank in (-1, 4):
        with refused(InputError, f"rank must be in [0, 4); got rank={rank}"):
            Layout("zigzag", 4).indices(16, rank)
    with refused(InputError, "'contiguous'"):
        Layout("spiral", 2)


@given(st.sampled_from(KINDS), *[st.integers(1, 4) for _ in range(3)], st.integers(1, 3), st.data())
def test_unit_of_blocks_apart_is_sorted_as_its_ranks_come(kind, size, blocks, more, count, data):
    """Ranks first + i * apart + j, as the group gathers them."""
    apart = size + data.draw(st.integers(0, 3))
    first = data.draw(st.integers(0, more))
    layout = Layout(kind, first + blocks * apart + more)
    seq_len = layout.multiple * count
    ranks = [first + i * apart + j for i in range(blocks) for j in range(size)]
    gathered = jnp.concatenate([jnp.asarray(layout.indices(seq_len, r)) for r in ranks])[None]
    in_order = layout.sort_unit(gathered, len(ranks), axis=1)
    np.testing.assert_array_equal(in_order[0], np.sort(gathered[0]))
    runs = layout.unit_positions(seq_len, first, size, blocks, apart)
    np.testing.assert_array_equal(runs.vector(), in_order[0])
    assert runs.tokens == in_order.size
    ends = [(span.first, span.last) for span in runs.spans]
    parts = np.split(np.asarray(in_order[0]), len(ends))
    assert ends == [(part[0], part[-1]) for part in parts]
    np.testing.assert_array_equal(layout.unsort_unit(in_order, len(ranks), axis=1), gathered)

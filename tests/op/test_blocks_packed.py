"""Packed documents on cuDNN's kernels, which are emulated: what they compute, and when."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fake_cudnn
from attention_cases import FLOAT32_ERROR, Case, check, forward_and_backward, listed, place
from startrail_jax import Degrees
from startrail_jax.blocks import cudnn, packed, tiled

CASES = listed(
    [
        (Degrees(), "packed", "grouped", "contiguous", "auto", 61),
        (Degrees(), "packed_window", "single", "contiguous", "auto", 48),
        (Degrees(data=2, head=2), "packed", "equal", "contiguous", "auto", 29),
        (Degrees.ring_attention(4), "packed", "single", "zigzag", "kv", 14),
        (Degrees.ring_attention(4), "packed", "grouped", "contiguous", "query", 13),
        (Degrees.ring_attention(3), "packed_window", "equal", "zigzag", "query", 14),
        (Degrees.ring_attention(2), "packed wide window", "equal", "contiguous", "kv", 23),
        (Degrees.startrail(8, c=2), "packed", "grouped", "zigzag", "query", 6),
        (Degrees.startrail(8, c=2), "packed_window", "single", "contiguous", "kv", 9),
        (Degrees(group=3, ring=2, team=2), "packed", "equal", "zigzag", "query", 8),
        (Degrees(team=4, ring=2), "packed own_window", "grouped", "zigzag", "kv", 6),
    ],
    backend="cudnn",
)


@pytest.fixture
def emulated(monkeypatch):
    """Emulated kernels, and several short levels."""
    fake_cudnn.install(monkeypatch)
    fake_cudnn.short_levels(monkeypatch)
    yield
    jax.clear_caches()


def each_pass_of_tiles(monkeypatch, wrap):
    for visit in (tiled.forward, tiled.backward):
        monkeypatch.setattr(tiled, visit.__name__, functools.partial(wrap, visit))


@pytest.fixture
def spoilt_tiles(emulated, monkeypatch):
    """What tiles compute is NaN: a result that is exact has nothing of it."""

    def spoilt(visit, *operands):
        return jax.tree.map(lambda x: x * jnp.nan, visit(*operands))

    each_pass_of_tiles(monkeypatch, spoilt)


@pytest.fixture
def visits(emulated, monkeypatch):
    """A list that grows with each pass of tiles; programs that call back are not kept."""
    visits = []

    def counted(visit, *operands):
        jax.debug.callback(lambda: visits.append(visit.__name__))
        return visit(*operands)

    each_pass_of_tiles(monkeypatch, counted)
    return visits


@pytest.mark.slow_except_every(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_documents_match_the_oracle_without_tiles(case, spoilt_tiles):
    check(case)


def of_one_document(problem):
    """Rows of one document, of another length in each, and padding; the first row has none."""
    tokens = problem.query_ids.shape[1]
    lengths = np.array([tokens, tokens - 1, tokens // 3])[np.arange(len(problem.query)) % 3]
    ids = np.where(np.arange(tokens) < lengths[:, None], 5, -1).astype(np.int32)
    return dataclasses.replace(problem, query_ids=ids, key_ids=ids)


PADDED = listed(
    [
        (Degrees(), "padding_full", "grouped", "contiguous", "auto", 61),
        (Degrees(data=2, head=2), "padding_full", "equal", "contiguous", "auto", 29),
        (Degrees.ring_attention(4), "padding_full", "single", "contiguous", "kv", 14),
        (Degrees.ring_attention(3), "padding_full", "equal", "contiguous", "query", 13),
        (Degrees.startrail(8, c=2), "padding_full", "grouped", "contiguous", "query", 6),
        (Degrees(group=3, ring=2, team=2), "padding_full", "equal", "contiguous", "kv", 8),
    ],
    backend="cudnn",
)


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("case", PADDED, ids=str)
def test_padding_under_a_full_mask_matches_the_oracle_without_tiles(case, spoilt_tiles):
    case.__dict__["problem"] = of_one_document(case.problem)
    check(case)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.slow_except_every(2)
def test_documents_under_a_full_mask_are_left_to_tiles(layout, visits):
    degrees = Degrees.ring_attention(2)
    check(Case(degrees=degrees, mask="padding_full", layout=layout, backend="cudnn", tokens=20))
    jax.effects_barrier()
    assert {"forward", "backward"} == set(visits)


def check_in_16_bits(change=lambda problem: problem):
    case = Case(
        degrees=Degrees.ring_attention(2), mask="packed", heads="grouped", layout="zigzag",
        backend="cudnn", tokens=16, dtype="bfloat16",
    )  # fmt: skip
    case.__dict__["problem"] = change(case.problem)
    check(case, dict.fromkeys(("out", "dq", "dk", "dv"), 1e-2) | {"lse": FLOAT32_ERROR})


def test_documents_in_16_bits(spoilt_tiles):
    check_in_16_bits()


@pytest.mark.slow
def test_documents_out_of_order_in_16_bits(visits):
    check_in_16_bits(falling)
    jax.effects_barrier()
    assert visits


def test_documents_no_longer_than_the_window_are_called_without_one(monkeypatch):
    calls = []
    fake_cudnn.install(monkeypatch, calls)
    fake_cudnn.short_levels(monkeypatch)
    check(Case(degrees=Degrees(), mask="packed_window", backend="cudnn", tokens=48))
    jax.effects_barrier()
    jax.clear_caches()
    seen = {tokens: window for _, (tokens, _, window) in calls}
    assert min(seen) < 11 < max(seen)
    assert seen == {tokens: tokens <= 11 or 11 for tokens in seen}


def padded_inside(problem):
    ids = np.zeros_like(problem.query_ids)
    ids[0, 15] = -1
    return dataclasses.replace(problem, query_ids=ids, key_ids=ids)


def falling(problem):
    ids = problem.query_ids.max() - problem.query_ids
    return dataclasses.replace(problem, query_ids=ids, key_ids=ids)


def of_one_token(problem):
    ids = np.broadcast_to(np.arange(problem.query_ids.shape[1], dtype=np.int32), (3, 40))
    return dataclasses.replace(problem, query_ids=ids, key_ids=ids)


@pytest.mark.parametrize("changed", [padded_inside, falling, of_one_token])
@pytest.mark.slow_except_every(3)
def test_other_ids_are_left_to_tiles(changed, visits, monkeypatch):
    monkeypatch.setattr(packed, "SHORTEST", 4)
    case = Case(degrees=Degrees.ring_attention(2), mask="packed", backend="cudnn", tokens=20)
    case.__dict__["problem"] = changed(case.problem)
    check(case)
    jax.effects_barrier()
    assert {"forward", "backward"} == set(visits)


def test_gradients_of_rows_that_see_no_key_are_not_read(spoilt_tiles):
    case = Case(degrees=Degrees(), mask="packed", backend="cudnn", tokens=30)
    ids = np.where(np.arange(30) < 22, case.problem.query_ids, -1).astype(np.int32)
    problem = dataclasses.replace(case.problem, query_ids=ids, key_ids=ids)
    dout = problem.dout.copy()
    dout[ids < 0] = np.nan
    spoilt = dataclasses.replace(problem, dout=dout)
    found, expected = (
        forward_and_backward(case.attention, *place(case.attention, x)) for x in (spoilt, problem)
    )
    chex.assert_tree_all_finite([expected.dq, expected.dk, expected.dv])
    chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize("tokens", [1, 63, 256, 1000, 1024, 4096, 5003, 131072])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_document_has_one_level_with_room_for_it(rows, tokens):
    levels = packed._levels(cudnn, rows, tokens)
    lengths = jnp.arange(1, tokens + 1, dtype=jnp.int32)
    of_level = [x.holds(lengths) for x in levels]
    assert (np.sum(of_level, axis=0) == 1).all()
    for level in levels:
        assert level.rows * level.size >= rows * tokens
        assert level.segments % level.rows == 0
        # A kernel has room for the longest of them, as many as the tokens can be.
        shortest = max(level.shorter + 1, packed.SHORTEST if level is levels[-1] else 1)
        assert level.segments >= rows * tokens // shortest
    assert levels[-1].size < packed.STEP * max(packed.LEAST, packed.STEP)


def test_arrays_of_more_elements_than_offsets_count_are_left_to_tiles():
    assert packed.fits(cudnn, (1, 2**19, 31, 128), (1, 2**19, 8, 128))
    assert not packed.fits(cudnn, (1, 2**19, 32, 128), (1, 2**19, 8, 128))

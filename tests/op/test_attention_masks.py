"""Edges of the masks: rows that see nothing, windows of every length, one-sided documents."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import startrail_jax as st
from attention_cases import (
    Case,
    assert_close,
    draw_problem,
    error_bounds,
    forward_and_backward,
    natural,
    place,
    reference,
)

STARTRAIL = st.Degrees.startrail(8, c=2)


def solve(attention, problem):
    return natural(attention, forward_and_backward(attention, *place(attention, problem)))


def packed_problem(query_ids, key_ids=None):
    key_ids = query_ids if key_ids is None else key_ids
    lengths = query_ids.shape[1], key_ids.shape[1]
    sizes = dict(batch=len(query_ids), lengths=lengths, heads=(4, 2))
    problem = draw_problem(np.random.default_rng(1), **sizes)
    return dataclasses.replace(problem, query_ids=query_ids, key_ids=key_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", ["padding", "padding_full"])
@pytest.mark.slow_except_every(4)
def test_padding_is_exactly_zero(mask, dtype):
    case = Case(degrees=STARTRAIL, mask=mask, dtype=dtype, heads="grouped")
    result, padding = solve(case.attention, case.problem), case.problem.query_ids < 0
    assert padding.any()
    for name in ("out", "dq", "dk", "dv"):
        assert (getattr(result, name)[padding] == 0).all(), name
    lse = result.lse.transpose(0, 2, 1)
    assert (lse[padding] == oracle.EMPTY).all()
    assert (lse[~padding] > oracle.EMPTY).all()


@pytest.mark.parametrize(("backward", "published"), [("query", False), ("kv", True)])
@pytest.mark.slow
def test_batch_of_padding_only_is_zero_and_finite(backward, published):
    case = Case(degrees=STARTRAIL, mask="packed", backward=backward, published=published)
    problem = packed_problem(np.full((2, case.seq_len), -1, np.int32))
    result = solve(case.attention, problem)
    assert (result.lse == oracle.EMPTY).all()
    for name in ("out", "dq", "dk", "dv"):
        assert (getattr(result, name) == 0).all(), name


def test_queries_of_a_document_without_keys_see_nothing():
    case = Case(degrees=STARTRAIL, mask="cross")
    query_ids = np.repeat(np.array([[0, 1], [2, 3]], np.int32), case.seq_len // 2, axis=1)
    key_ids = np.repeat(np.array([[1, 4], [3, -1]], np.int32), case.key_len // 2, axis=1)
    problem = packed_problem(query_ids, key_ids)
    result, expected = solve(case.attention, problem), reference(problem)
    assert (expected.lse == oracle.EMPTY).any()
    assert_close(result, expected, error_bounds(problem, expected))


@pytest.mark.slow
def test_segment_ids_of_any_integer_dtype():
    case = Case(degrees=STARTRAIL, mask="padding")
    *arrays, ids = place(case.attention, case.problem)
    attend = jax.jit(case.attention)
    wide = attend(*arrays[:3], segment_ids=ids)
    narrow = attend(*arrays[:3], segment_ids=tuple(x.astype(jnp.int8) for x in ids))
    np.testing.assert_array_equal(narrow, wide)


def test_large_logits_do_not_overflow():
    case = Case(degrees=STARTRAIL)
    attention = dataclasses.replace(case.attention, scale=300.0)
    result, expected = (
        solve(attention, case.problem),
        reference(case.problem, causal=True, scale=300.0),
    )
    for name, x in result.items():
        assert np.isfinite(x).all(), name
    # Logits of thousands have float32 spacings of 1e-4 and more, and so have the weights.
    np.testing.assert_allclose(result.out, expected.out, atol=2e-3)


def test_gradients_at_large_logits_are_as_exact_as_at_small_ones():
    """Logits of 9600 and a little, which float32 represents exactly: only lse is rounded."""
    case = Case(degrees=STARTRAIL)
    attention = dataclasses.replace(case.attention, scale=300.0)
    rng = np.random.default_rng(3)
    query, key = (
        rng.integers(-2, 3, x.shape).astype(np.float32)
        for x in (case.problem.query, case.problem.key)
    )
    query[..., 0], key = 1, key / 1024
    key[..., 0] = 32
    problem = dataclasses.replace(case.problem, query=query, key=key)
    result, expected = solve(attention, problem), reference(problem, causal=True, scale=300.0)
    # The first channel of dq is a sum of terms near 1e4 that is 0.
    result, expected = (dataclasses.replace(x, dq=x.dq[..., 1:]) for x in (result, expected))
    assert_close(result, expected, error_bounds(problem, expected))


def test_values_near_the_greatest_float32_do_not_overflow():
    case = Case(degrees=STARTRAIL)
    problem = case.problem
    value, dout = 2.0**125 * abs(problem.value), 2.0**-60 * problem.dout
    problem = dataclasses.replace(problem, value=np.float32(value), dout=np.float32(dout))
    expected = reference(problem, causal=True)
    assert_close(solve(case.attention, problem), expected, error_bounds(problem, expected))

"""What users of context parallelism complain of, each in its setting: ours against the oracle.

Each of these was silent: the run went on with wrong attention. So each test also shows that the
wrong answer of the complaint would have been far off. `docs/attention.md` lists them.
"""

import dataclasses

import jax
import numpy as np
import pytest

import oracle
import startrail_jax as st
from attention_cases import (
    FLOAT32_ERROR,
    Case,
    assert_close,
    forward_and_backward,
    natural,
    place,
    reference,
    relative_error,
)
from score_cases import factors_of, of_oracle, put_learnt, solve

RING = st.Degrees(ring=4)
ERRORS = dict.fromkeys(("out", "lse", "dq", "dk", "dv"), FLOAT32_ERROR)
FAR = 0.1
"""Relative error of what a complaint saw."""


def solved(case):
    attention = case.attention
    return natural(attention, forward_and_backward(attention, *place(attention, case.problem)))


@pytest.mark.slow
def test_accelerate_4177_a_sliding_window_does_not_become_causal():
    """A layer with a window was trained as a causal one."""
    case = Case(degrees=RING, mask="own_window", layout="contiguous")
    found, wrong = solved(case), reference(case.problem, causal=True)
    assert_close(found, reference(case.problem, **case.mask_arguments), ERRORS)
    assert relative_error(found.out, wrong.out) > FAR


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [RING, st.Degrees(head=3)], ids=["ring", "ulysses"])
def test_prime_rl_3397_sinks_are_not_dropped(degrees):
    """Sinks came under another name, `s_aux`, which was swallowed: here no name is."""
    case = Case(degrees=degrees)
    attention, arguments = case.attention, place(case.attention, case.problem)
    sinks = {"sinks": np.linspace(0, 2, case.num_heads[0], dtype=np.float32)}
    result, gradients = solve(attention, False, *arguments, put_learnt(attention, sinks), None)
    wanted, of_wanted = of_oracle(case.problem, sinks, causal=True)
    assert_close(natural(attention, result), wanted, ERRORS)
    assert relative_error(gradients["sinks"], of_wanted["sinks"]) <= FLOAT32_ERROR
    wrong, _ = of_oracle(case.problem, {}, causal=True)
    assert relative_error(wrong.out, wanted.out) > FAR
    with pytest.raises(TypeError, match="s_aux"):
        attention(*arguments[:3], s_aux=sinks["sinks"])


@pytest.mark.slow
def test_trl_6843_packed_documents_stay_apart():
    """The mask that kept them apart was dropped: tokens saw the documents before theirs."""
    case = Case(degrees=RING, mask="packed", layout="zigzag")
    found, wrong = solved(case), dataclasses.replace(case.problem, query_ids=None, key_ids=None)
    assert_close(found, reference(case.problem, causal=True), ERRORS)
    assert relative_error(found.out, reference(wrong, causal=True).out) > FAR


@pytest.mark.parametrize("backward", ["query", "kv"])
@pytest.mark.slow_except_every(2)
def test_diffusers_14265_the_backward_pass_uses_the_keys_of_each_round(backward):
    """Every round of it used the keys of round 0; the forward pass was right."""
    case = Case(degrees=RING, mask="full", backward=backward)
    found, wanted = solved(case), reference(case.problem)
    assert_close(found, wanted, ERRORS)
    own = slice(0, case.tokens)
    tiled = dict(key=4 * [case.problem.key[:, own]], value=4 * [case.problem.value[:, own]])
    stale = {name: np.concatenate(parts, 1) for name, parts in tiled.items()}
    wrong = reference(dataclasses.replace(case.problem, **stale))
    assert relative_error(wrong.dq[:, own], wanted.dq[:, own]) > FAR


@pytest.mark.slow
def test_ring_flash_attention_42_errors_do_not_grow_with_the_ring(compile_well):
    """Every round rounded its results to bfloat16 before they were added."""
    errors = {}
    for ring in (1, 8):
        case = Case(
            degrees=st.Degrees(ring=ring), tokens=64 // ring, dtype="bfloat16", layout="zigzag"
        )
        found, wanted = solved(case), reference(case.problem, causal=True)
        errors[ring] = [relative_error(x, getattr(wanted, name)) for name, x in found.items()]
    ratios = dict(zip(ERRORS, np.divide(errors[8], errors[1]), strict=True))
    del ratios["lse"]
    assert max(ratios.values()) <= 1.1, ratios


@pytest.mark.slow
def test_transformer_engine_2541_large_sinks_count_and_have_gradients():
    """Point to point, sinks were refused, and beneath that ignored with a gradient of 0.

    Sinks of 0 would not show it: they are lost in the sum of long rows.
    """
    case = Case(degrees=st.Degrees(ring=4), mask="full", backward="kv", heads="grouped")
    attention, sinks = case.attention, {"sinks": np.full(case.num_heads[0], 6.0, np.float32)}
    arguments = place(attention, case.problem)
    result, gradients = solve(attention, False, *arguments, put_learnt(attention, sinks), None)
    wanted, of_wanted = of_oracle(case.problem, sinks)
    assert_close(natural(attention, result), wanted, ERRORS)
    assert relative_error(gradients["sinks"], of_wanted["sinks"]) <= FLOAT32_ERROR
    assert np.abs(of_wanted["sinks"]).min() > FAR


@pytest.mark.slow
def test_ring_flash_attention_36_both_passes_drop_the_same_entries():
    """The backward pass did not know what the forward pass had dropped."""
    case, rng = Case(degrees=RING, backward="query"), jax.random.key(3)
    attention, arguments = case.attention, place(case.attention, case.problem)
    result, _ = solve(attention, False, *arguments, {}, rng)
    inputs = {"causal": True, "factors": factors_of(case.problem, rng, False)}
    wanted, _ = of_oracle(case.problem, {}, **inputs)
    assert_close(natural(attention, result), wanted, ERRORS)
    problem, other = case.problem, factors_of(case.problem, jax.random.key(4), False)
    arrays = problem.query, problem.key, problem.value, problem.dout, problem.dlse
    wrong = oracle.gradients(*arrays, causal=True, factors=other)
    assert relative_error(wrong.query, wanted.dq) > FAR

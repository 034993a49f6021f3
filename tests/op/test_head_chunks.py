"""Heads that are attended in parts: the same numbers, in less memory."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import pytest

import startrail_jax as st
from attention_cases import Case, check, make_attention
from startrail_jax import Degrees
from startrail_jax.xla.ordering import in_turn

CASES = [
    Case(degrees=Degrees(ring=2, team=2), heads="grouped", head_chunks=4, backward="query"),
    Case(
        degrees=Degrees(group=2, team=2, head=2),
        mask="packed",
        heads="grouped",
        head_chunks=3,
        backward="kv",
        keep_gathered=True,
    ),
    Case(degrees=Degrees(ring=4), mask="full", head_chunks=2, backward="kv", inner=2),
    Case(degrees=Degrees(), heads="single", head_chunks=3),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_of_the_heads_match_the_oracle(case):
    check(case)


def attention_over(degrees, head_chunks):
    return make_attention(degrees, causal=False, head_chunks=head_chunks)


def both(attention, *inputs):
    out, transpose = jax.vjp(lambda *x: attention(*x, return_lse=True), *inputs)
    return transpose(jax.tree.map(jnp.ones_like, out))


@pytest.mark.quick
def test_a_part_waits_for_the_last_but_one_in_both_passes():
    """Four parts: two begin late in the forward pass, and two in the backward pass."""
    inputs = [jnp.zeros((1, 8, heads, 8)) for heads in (16, 4, 4)]
    one, four = (
        str(jax.make_jaxpr(functools.partial(both, attention_over(Degrees(team=2), n)))(*inputs))
        for n in (1, 4)
    )
    count = lambda text: len(re.findall("optimization_barrier", text))  # noqa: E731
    # Each part gathers its queries before its keys, once.
    assert count(four) == 4 * count(one) + 2 + 2


def test_values_and_gradients_pass_unchanged():
    done, then = (jnp.arange(2.0), jnp.arange(3.0)), jnp.arange(4.0)
    out, transpose = jax.vjp(in_turn, done, then)
    chex.assert_trees_all_equal(out, (done, then))
    chex.assert_trees_all_equal(transpose(out), (done, then))


@pytest.mark.parametrize(
    ("degrees", "kv_heads", "has"),
    [
        (Degrees(), 4, 4),
        (Degrees(head=2), 8, 4),
        (Degrees(tensor=2), 2, 1),
        (Degrees(head=4), 2, 1),
    ],
)
def test_parts_that_do_not_divide_the_key_heads_are_refused(degrees, kv_heads, has):
    """In a call, by explain, and by the count of bytes."""
    attention = attention_over(degrees, 3)
    message = rf"head_chunks must divide the key heads .*got head_chunks=3, key heads .*={has}\."
    inputs = [jnp.zeros((1, 8, heads, 8)) for heads in (8, kv_heads, kv_heads)]
    sizes = dict(seq_len=8, heads=8, kv_heads=kv_heads, head_dim=8)
    with pytest.raises(ValueError, match=message):
        attention(*inputs)
    with pytest.raises(ValueError, match=message):
        attention.explain(**sizes)
    with pytest.raises(ValueError, match=message):
        st.communication(degrees, batch=1, head_chunks=3, **sizes)


def test_parts_are_explained():
    explanation = attention_over(Degrees(ring=2), 2).explain(seq_len=4, heads=4, head_dim=8)
    assert "by 2 keys, for each of 2 parts of the heads" in str(explanation)

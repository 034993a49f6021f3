"""Warnings of tokens that are, or may be, in another order than the layout."""

import warnings

import jax
import numpy as np
import pytest

import startrail_jax as st
from startrail_jax.errors import OrderWarning
from startrail_jax.tokens import layout

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("unchecked")]

X = np.zeros((1, 16, 2, 4), "f4")
HEADS_FIRST = np.zeros((1, 8, 16, 4), "f4")


def attention(**options):
    return st.Attention(st.make_mesh(st.Degrees(ring=4), "auto", jax.devices()[:4]), **options)


@pytest.fixture(autouse=True)
def warn_always(monkeypatch):
    """Shows warnings, and forgets which layouts other tests have used."""
    monkeypatch.setattr(layout, "_USED", set())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(x.message) for x in caught if x.category is OrderWarning]


@pytest.mark.slow
def test_order_that_nothing_was_brought_into_is_warned_of():
    with pytest.warns(OrderWarning, match=r"zigzag order over 4 devices.*attention\.shard"):
        attention()(X, X, X)
    with pytest.warns(OrderWarning):
        jax.eval_shape(attention(), X, X, X)


@pytest.mark.parametrize("way", ["shard", "permute", "positions"])
def test_order_that_was_asked_for_is_not_warned_of(way):
    ours = attention()
    if way == "shard":
        ours.shard(X)
    elif way == "permute":
        ours.layout.permute(X)
    else:
        ours.layout.positions(16)
    assert not warned(lambda: jax.eval_shape(ours, X, X, X))


@pytest.mark.parametrize("options", [{"layout": "contiguous"}, {"causal": False}])
def test_attention_without_an_order_of_its_own_is_not_warned_of(options):
    assert not warned(lambda: jax.eval_shape(attention(**options), X, X, X))


def test_segment_ids_in_natural_order_are_warned_of():
    ours = attention()
    ids = np.repeat(np.arange(2, dtype="i4"), (5, 11))[None]
    in_order = ours.layout.permute(ids)

    def call(given):
        # The ids have values, although what is computed with them is not.
        jax.eval_shape(lambda x: ours(x, x, x, segment_ids=given), X)

    for given in (ids, (ids, ids), jax.numpy.asarray(ids)):
        with pytest.warns(OrderWarning, match=r"segment ids are in natural order.*zigzag"):
            call(given)
    for given in (in_order, ours.shard(ids), np.zeros((1, 16), "i4")):
        assert not warned(lambda given=given: call(given))


def test_positions_in_natural_order_are_warned_of():
    ours = attention()
    natural = np.arange(16, dtype="i4")[None]
    with pytest.warns(OrderWarning, match=r"0, 1, 2.*layout\.positions\(seq_len\)"):
        ours.check_positions(natural)
    assert not warned(lambda: ours.check_positions(ours.layout.positions(16)[None]))
    assert not warned(lambda: jax.jit(ours.check_positions)(natural))
    assert not warned(lambda: attention(layout="contiguous").check_positions(natural))


@pytest.mark.slow
def test_heads_where_tokens_belong_are_warned_of():
    """Arrays [batch, heads, seq, head_dim] run where the numbers happen to divide."""
    ours = attention(causal=False)
    few_keys = HEADS_FIRST[:, :, :4]
    for call in (ours, jax.jit(ours)):
        with pytest.warns(OrderWarning, match=r"query \[1, 8, 16, 4\].*swapaxes\(1, 2\)"):
            call(HEADS_FIRST, HEADS_FIRST, HEADS_FIRST)
    turned = HEADS_FIRST.swapaxes(1, 2)
    # As many heads as tokens, and short queries of long keys, are what they seem to be.
    for query, key in (
        (turned, turned),
        (X, X),
        (HEADS_FIRST, few_keys),
        (HEADS_FIRST, np.zeros((1, 32, 16, 4), "f4")),
        (turned[:, :8], turned[:, :8]),
    ):
        assert not warned(lambda q=query, k=key: jax.eval_shape(ours, q, k, k))

"""NaN in unused slots and padding changes nothing; nor do x64, strict types, transfer guards."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import startrail_jax as st
from attention_cases import Case, forward_and_backward, make_attention, place
from startrail_jax import masks

D = st.Degrees
SETTINGS = [
    Case(degrees=D(ring=4), segments="padding"),
    Case(degrees=D(group=2, ring=2, team=2), segments="padding", heads="grouped", backward="query"),
    Case(degrees=D(head=2, team=2, tensor=2), segments="padding", heads="grouped"),
    Case(degrees=D(ring=3), mask="own_window", segments="padding", exchange="sparse"),
    Case(degrees=D(ring=4), segments="padding", one_axis=True, balance="exchange"),
    Case(degrees=D(team=2), mask="full", segments="padding"),
]


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_padding_may_hold_anything(case):
    """flash-attention#1395, sglang#32477: real tokens got NaN, forward and backward."""
    attention, problem = case.attention, case.problem
    hole = problem.query_ids < 0

    def with_padding(value):
        fill = lambda x: np.where(hole[..., None, None], np.float32(value), x)  # noqa: E731
        names = ("query", "key", "value", "dout")
        filled = {name: fill(getattr(problem, name)) for name in names}
        dlse = np.where(hole[:, None], np.float32(value), problem.dlse)
        filled = dataclasses.replace(problem, **filled, dlse=dlse)
        return forward_and_backward(attention, *place(attention, filled))

    for (name, found), (_, wanted) in zip(
        with_padding(np.nan).items(), with_padding(0).items(), strict=True
    ):
        np.testing.assert_array_equal(found, wanted, err_msg=name)


@pytest.mark.parametrize("degrees", [D(), D(group=2, ring=2, team=2)], ids=["one", "many"])
def test_slots_that_were_never_written_may_hold_anything(degrees):
    """flash-attention#1745, #2374: fresh memory is not zero."""
    attention = make_attention(degrees, layout="contiguous")
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 3, 8, 7)).astype("f4")
    keys, values = (rng.normal(size=(2, 64, 2, width)).astype("f4") for width in (7, 11))
    positions = np.array([[17, 18, 19], [3, 4, 5]], np.int32)
    used = np.arange(64) <= positions.max(1, keepdims=True)

    def decode(fill):
        cache = (np.where(used[..., None, None], x, np.float32(fill)) for x in (keys, values))
        return attention.decode(query, *attention.shard(*cache), positions)

    np.testing.assert_array_equal(decode(np.nan), decode(0))


def strict_cases():
    names = (None, masks.Window(9, 0), masks.Window(4, 4), masks.Chunked(8), masks.Prefix(5))
    schemes = (D(ring=4), D(group=2, ring=2, team=2), D(team=2, head=2), D(ring=2, tensor=2))
    for (mask, exchange), degrees in zip(
        itertools.product(names, ("rings", "auto")), itertools.cycle(schemes)
    ):
        yield pytest.param(degrees, mask, exchange, id=f"{mask}-{exchange}")


@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize(("degrees", "mask", "exchange"), [*strict_cases()])
def test_x64_and_strict_promotion(degrees, mask, exchange, packed):
    """jax#6059, jax#11186: int64 met int32. The gradient is traced, which finds all of these."""
    attention = make_attention(degrees, exchange=exchange, mask=mask)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        query = jax.ShapeDtypeStruct((2, 64, 4, 8), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((2, 64), jnp.int32) if packed else None

        def loss(query, ids):
            return attention(query, query, query, segment_ids=ids).astype(jnp.float32).sum()

        assert jax.eval_shape(jax.grad(loss), query, ids) == query


def test_arrays_come_and_go_under_a_transfer_guard():
    """jax#25325: `shard` was an implicit transfer."""
    attention = make_attention(D(team=2, ring=2))
    x = np.arange(2 * 15, dtype=np.int32).reshape(2, 15)
    with jax.transfer_guard("disallow"):
        np.testing.assert_array_equal(attention.unshard(attention.shard(x[:, :8])), x[:, :8])
        padded, _ = attention.pad(x)
        np.testing.assert_array_equal(attention.unpad(padded, seq_len=15), x)

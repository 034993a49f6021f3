"""Tokens in contiguous order that are attended in zigzag order: exact, even, if worth it."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import startrail_jax as st
from attention_cases import Case, check, host_mesh, make_attention, one_axis, or_causal, place
from refusals import refused
from startrail_jax.errors import BalanceWarning, InputError, UnsupportedError
from startrail_jax.rings.balance import from_zigzag, in_zigzag, slice_pairs, to_zigzag
from startrail_jax.rings.work import shares

D = st.Degrees


@pytest.mark.parametrize("ranks", range(1, 13))
def test_slices_come_to_their_zigzag_places_and_back(ranks):
    even, odd = slice_pairs(ranks)
    for pairs in (even, odd):
        assert [sorted(side) for side in zip(*pairs, strict=True)] == [list(range(ranks))] * 2
    attention = make_attention(D(ring=ranks), layout="zigzag")
    axis, spec = attention.axes["ring"], jax.P(None, attention.sequence_spec[1])

    def both(x):
        moved = to_zigzag(axis, x)
        return moved, from_zigzag(axis, moved)

    tokens = np.arange(6 * ranks)[None]
    shard = jax.shard_map(both, mesh=attention.mesh, in_specs=spec, out_specs=spec)
    moved, back = jax.jit(shard)(tokens)
    np.testing.assert_array_equal(moved, attention.layout.permute(tokens))
    np.testing.assert_array_equal(back, tokens)


CASES = [
    Case(degrees=D(ring=3), backward="query"),
    Case(degrees=D.startrail(8, c=2), mask="packed", heads="grouped", backward="kv"),
    Case(degrees=D(head=4), heads="single", axis_type="auto"),
    Case(degrees=D(group=5), mask="padding", keep_gathered=True, heads="grouped"),
    Case(degrees=D(data=2, ring=2, head=2, tensor=2), heads="single", mask="packed"),
    Case(degrees=D(team=2, group=2, head=2), one_axis=True, axis_type="auto", heads="grouped"),
    Case(degrees=D(ring=4), inner=2, mask="prefix", one_axis=True),
    Case(degrees=D(ring=3, team=2), mask="packed_window"),
    Case(degrees=D(ring=2, team=2), head_chunks=2, heads="grouped", mask="packed block_causal"),
    Case(degrees=D.startrail(4, c=2), dtype="bfloat16", tokens=14, gradient_dtype="bfloat16"),
]


@pytest.mark.slow_except_every(10)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exchange_of_tokens_is_exact(case):
    case = dataclasses.replace(case, layout="contiguous", balance="exchange")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BalanceWarning)
        assert case.attention.explain(**sizes(case)).balance == "exchange"
    check(case)


def sizes(case):
    heads, kv_heads = case.num_heads
    return {"seq_len": case.seq_len, "heads": heads, "kv_heads": kv_heads, "head_dim": 8}


RING = D(ring=8)


def attention(degrees=RING, **options):
    return st.Attention(host_mesh(degrees, "auto"), **one_axis(degrees), **or_causal(options))


@pytest.mark.slow
def test_exchange_shares_the_work_evenly():
    ours = attention()
    assert ours.layout.kind == "contiguous"
    assert round(shares(ours.schedule, 8192).max(), 2) == 1.88
    assert round(shares(in_zigzag(ours.schedule), 8192).max(), 2) == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dataclasses.replace(ours, balance="exchange").explain(
            seq_len=8192, heads=8, head_dim=64
        )
    assert round(found.busiest, 2) == 1.0
    assert "tokens are exchanged" in str(found)
    with pytest.warns(
        BalanceWarning, match="1.88 times the mean.*Use balance='exchange', or layout"
    ):
        dataclasses.replace(ours, balance="layout").explain(seq_len=8192, heads=8, head_dim=64)


@pytest.mark.slow
def test_auto_exchanges_where_arithmetic_outweighs_bytes():
    """On 8 devices of 32 heads with 8 key heads of 128, from 16,384 tokens on."""
    ours = attention()
    for seq_len, expected in ((8192, "layout"), (16384, "exchange"), (131072, "exchange")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BalanceWarning)
            found = ours.explain(seq_len=seq_len, heads=32, kv_heads=8, head_dim=128)
        assert found.balance == expected, found.why_balance


def test_calls_that_leave_devices_waiting_say_so():
    x = jax.ShapeDtypeStruct((1, 2048, 8, 4), jnp.float32)
    said = r"mask Causal\(\): the busiest device has 1\.88 .*'zigzag' for .*shard .* it has 1\.00"
    with pytest.warns(BalanceWarning, match=said):
        jax.eval_shape(attention(), x, x, x)
    # Warnings are errors here. Toys have no time to lose, and who asks for a balance knows it.
    toy = jax.ShapeDtypeStruct((1, 512, 8, 4), jnp.float32)
    jax.eval_shape(attention(), toy, toy, toy)
    for options in (
        {"balance": "layout"},
        {"balance": "exchange"},
        {"layout": "zigzag"},
        {"causal": False},
        {"window": 64},
        {"degrees": D.ulysses(8)},
    ):
        jax.eval_shape(attention(**options), x, x, x)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "zigzag"},
        {"causal": False},
        {"window": 64},
        {"degrees": D()},
    ],
    ids=str,
)
def test_auto_leaves_tokens_where_they_are(options):
    ours = attention(**options)
    assert ours.explain(seq_len=2**17, heads=32, head_dim=128).balance == "layout"


def test_program_has_an_exchange_only_if_it_is_wanted():
    case = Case(degrees=D(group=4), mask="causal", layout="contiguous", axis_type="auto")
    inputs = place(case.attention, case.problem)[:3]
    for balance, permutes in (("layout", 0), ("auto", 0), ("exchange", 8)):
        ours = dataclasses.replace(case.attention, balance=balance)
        text = jax.jit(ours).lower(*inputs).as_text()
        assert text.count("stablehlo.collective_permute") == permutes, balance


@pytest.mark.usefixtures("unchecked")  # The error of the package, not of the type checker.
def test_exchange_that_cannot_be_is_refused():
    x = [np.zeros((1, 24, 8, 4), "f4")] * 3
    with refused(UnsupportedError, "zigzag"):
        attention(layout="zigzag", balance="exchange")(*[np.zeros((1, 16, 8, 4), "f4")] * 3)
    with refused(UnsupportedError, "16 slices do not divide 24 tokens"):
        attention(balance="exchange")(*x)
    with refused(UnsupportedError, "bias"):
        longer = [np.zeros((1, 32, 8, 4), "f4")] * 3
        attention(balance="exchange")(*longer, bias=jnp.zeros((1, 1, 32, 32)))
    with refused(InputError, balance="always"):
        attention(balance="always")
    with refused(UnsupportedError, "needs tokens in contiguous order, of which"):
        attention(causal=False, balance="exchange").explain(seq_len=32, heads=8, head_dim=4)


# The silent errors of foreign code ------------------------------------------------------------


def dense(query, key, value, window=None):
    """As code that others wrote has it: causal, by place in memory."""
    seen = jnp.tri(query.shape[1], dtype=bool)
    if window is not None:
        seen &= ~jnp.tri(query.shape[1], k=-window, dtype=bool)
    return jax.nn.dot_product_attention(query, key, value, mask=seen[None, None])


@pytest.mark.parametrize("by_memory", ["shift", "positions", "window", "order"])
@pytest.mark.slow_except_every(4)
def test_what_code_of_others_does_by_memory_is_right_on_one_axis(by_memory):
    """Targets are shifted late, positions counted, windows by place, tokens never sharded."""
    ours = attention(D(team=4, ring=2), balance="exchange")
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 19, (2, 32))
    # Large ones would make the loss a small difference of large logits.
    table = rng.standard_normal((19, 4, 8), np.float32) / 4

    def loss(table, tokens, attend):
        x = table[tokens]
        if by_memory == "positions":
            x = x * jnp.cos(jnp.arange(32.0) / 5)[None, :, None, None]
        x = x + attend(x, x, x)
        if by_memory == "window":
            x = x + dense(x, x, x, window=7)
        log_p = jax.nn.log_softmax(jnp.einsum("btnh,vnh->btv", x, table, precision="highest"))
        targets = tokens
        if by_memory == "shift":
            log_p, targets = log_p[:, :-1], tokens[:, 1:]
        return -jnp.take_along_axis(log_p, targets[..., None], 2).mean()

    here = ours.shard(tokens) if by_memory != "order" else jnp.asarray(tokens)
    found = jax.jit(jax.value_and_grad(lambda table: loss(table, here, ours)))(table)
    expected = jax.jit(jax.value_and_grad(lambda table: loss(table, tokens, dense)))(table)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * np.abs(y).max())

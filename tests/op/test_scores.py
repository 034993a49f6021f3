"""Scores (caps, sinks, slopes, biases, dropout) and prefixes, on every kind of scheme."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fake_cudnn
import oracle
import startrail_jax as st
from attention_cases import (
    FLOAT32_ERROR,
    NARROW_ERROR_RATIO,
    Case,
    Result,
    assert_close,
    draw_problem,
    natural,
    place,
    relative_error,
)
from score_cases import draw_learnt, factors_of, of_oracle, put_learnt, solve
from startrail_jax.blocks import tiled, xla
from startrail_jax.scores import Dropout

SOFTCAP = 1.5
EVERYTHING = frozenset({"softcap", "sinks", "slopes", "bias", "dropout"})
NO_BIAS, NO_SLOPES = EVERYTHING - {"bias"}, EVERYTHING - {"slopes"}
D = st.Degrees
ERRORS = dict.fromkeys(("out", "lse", "dq", "dk", "dv"), FLOAT32_ERROR)
# What is given, whether each row and each head has its own bias, and on which setting.
CASES = [
    (EVERYTHING, (True, True), Case(degrees=D(ring=4), mask="own_window", heads="grouped")),
    (
        EVERYTHING,
        (False, True),
        Case(
            degrees=D.startrail(8, c=2, head=2),
            mask="packed",
            backward="kv",
            layout="zigzag",
            head_chunks=2,
        ),
    ),
    (
        EVERYTHING,
        (True, False),
        Case(degrees=D(team=2, tensor=2), mask="sinks", axis_type="auto", backward="query"),
    ),
    (
        EVERYTHING,
        (False, False),
        Case(degrees=D(ring=2), mask="padding", backend="tiled", tokens=14, heads="single"),
    ),
    (
        NO_BIAS,
        (),
        Case(degrees=D(ring=4, tensor=2), mask="packed", layout="striped", backward="query"),
    ),
    (
        EVERYTHING,
        (False, False),
        Case(
            degrees=D(data=2, ring=2, head=2),
            mask="full",
            layout="striped",
            heads="grouped",
            head_chunks=2,
        ),
    ),
    (
        NO_SLOPES,
        (True, True),
        Case(degrees=D(group=2, team=2), mask="cross", layout="zigzag", keep_gathered=True),
    ),
    (
        EVERYTHING,
        (True, True),
        Case(
            degrees=D.startrail(16, c=2, head=2),
            placement="gather_permute",
            combine="reduce_scatter",
            inner=2,
        ),
    ),
    (frozenset({"slopes"}), (), Case(degrees=D(group=2, ring=2, team=2), mask="full")),
    (frozenset({"bias"}), (True, True), Case(degrees=D(ring=5), mask="block_causal")),
]


def case_id(value):
    if callable(value):
        return "rule"  # Not where in memory it is: all processes must give the test one name.
    return "-".join(sorted(value)) if isinstance(value, frozenset) else str(value)


@pytest.mark.parametrize(("names", "own", "case"), CASES, ids=case_id)
def test_scores_match_the_oracle(names, own, case, monkeypatch):
    if case.backend == "tiled":
        fake_cudnn.install(monkeypatch)
    softcap = SOFTCAP if "softcap" in names else None
    attention, problem = dataclasses.replace(case.attention, softcap=softcap), case.problem
    learnt = draw_learnt(names, own, problem)
    placed = put_learnt(attention, learnt)
    told, shared = dict(case.mask_arguments, softcap=softcap), own == (False, False)
    rng = jax.random.key(5) if "dropout" in names else None
    if rng is not None:
        told["factors"] = factors_of(problem, rng, shared)
    with mock.patch.multiple(tiled, COARSE=8, FINE=4), mock.patch.multiple(xla, TILE_COLUMNS=5):
        result, of_learnt = solve(attention, shared, *place(attention, problem), placed, rng)
    wanted, of_wanted = of_oracle(problem, learnt, **told)
    assert_close(natural(attention, result), wanted, ERRORS)
    for name, expected in of_wanted.items():
        found = of_learnt[name]
        if case.axis_type == "explicit":
            assert found.sharding.is_equivalent_to(placed[name].sharding, found.ndim), name
        if name == "bias":
            for axis in (2, 3):
                found = attention.layout.unpermute(np.asarray(found), axis=axis)
        assert relative_error(found, expected) <= FLOAT32_ERROR, name


def test_scores_in_bfloat16_are_as_exact_as_jax_nn():
    """Slopes and bias, which are one bias to jax.nn."""
    case = Case(degrees=D(group=2, ring=2), dtype="bfloat16", tokens=14, backend="xla")
    attention, problem = case.attention, case.problem
    learnt = draw_learnt({"slopes", "bias"}, (False, True), problem)
    result, _ = solve(
        attention, False, *place(attention, problem), put_learnt(attention, learnt), None
    )
    wanted, _ = of_oracle(problem, learnt, causal=True)
    tokens = np.arange(case.seq_len)
    far = np.abs(tokens[:, None] - tokens)
    bias = learnt["bias"] - learnt["slopes"][:, None, None] * far
    attend = functools.partial(jax.nn.dot_product_attention, bias=jnp.asarray(bias), is_causal=True)
    inputs = problem.query, problem.key, problem.value
    out, *gradients = jax.jit(lambda x, d: (attend(*x), *jax.vjp(attend, *x)[1](d)))(
        inputs, problem.dout
    )
    theirs = Result(out, wanted.lse, *gradients)
    bounds = {
        name: NARROW_ERROR_RATIO * relative_error(x, getattr(wanted, name))
        for name, x in theirs.items()
    }
    assert_close(natural(attention, result), wanted, bounds | {"lse": FLOAT32_ERROR})


PREFIX = st.masks.Prefix()
PREFIXES = [
    (PREFIX, lambda i, j, n: (j < n) | (j <= i), Case(degrees=D(ring=4), backward="query")),
    (
        PREFIX & st.masks.Chunked(10),
        lambda i, j, n: ((j < n) | (j <= i)) & (i // 10 == j // 10),
        Case(degrees=D(data=2, group=2, team=2), mask="packed", layout="striped"),
    ),
    (PREFIX, lambda i, j, n: (j < n) | (j <= i), Case(degrees=D(team=2), backend="tiled")),
]


@pytest.mark.parametrize(("mask", "rule", "case"), PREFIXES, ids=case_id)
def test_prefixes_of_each_row_match_the_oracle(mask, rule, case, monkeypatch):
    if case.backend == "tiled":
        fake_cudnn.install(monkeypatch)
    attention = dataclasses.replace(case.attention, mask=mask, causal=None, layout=case.layout)
    problem = case.problem
    lengths = np.arange(len(problem.query)) * 5
    prefix = jax.device_put(
        np.int32(lengths), NamedSharding(attention.mesh, P(attention.sequence_spec[0]))
    )
    with mock.patch.multiple(tiled, COARSE=8, FINE=4), mock.patch.multiple(xla, TILE_COLUMNS=5):
        result, _ = solve(attention, False, *place(attention, problem), {}, None, prefix)
    told = {"rule": lambda i, j: rule(i[None], j[None], lengths[:, None, None])}
    wanted, _ = of_oracle(problem, {}, **told)
    assert_close(natural(attention, result), wanted, ERRORS)


def test_dropout_is_the_same_everywhere_and_of_the_rate_that_is_asked_for():
    """Each entry is a hash of its own: of parts of the batch, the heads and the positions too."""
    entries, words = (4, 8, 125, 250), jax.random.bits(jax.random.key(7), (2,), jnp.uint32)
    dropout = Dropout(words=words, first_row=0, first_head=0, rate=0.1, shared=False)
    keeps = jax.jit(Dropout.keeps, static_argnums=(1, 2))
    query, key = jnp.arange(entries[2]), jnp.arange(entries[3])
    kept = np.asarray(keeps(dropout, *entries[:2], query, key))
    assert kept.shape == entries
    assert abs(kept.mean() - 0.9) <= 4 * (0.1 * 0.9 / kept.size) ** 0.5
    # Neighbours in no direction know of each other: 4 sigma of a product of two that are apart.
    for axis in range(4):
        ahead, behind = np.split(np.moveaxis(kept - 0.9, axis, 0), [1])[1], kept - 0.9
        behind = np.moveaxis(behind, axis, 0)[:-1]
        assert abs((ahead * behind).mean()) <= 4 * 0.1 * 0.9 / ahead.size**0.5, axis
    part = dataclasses.replace(dropout, first_row=1, first_head=3)
    found = keeps(part, 2, 4, query[7:90:3], key[::-1])
    np.testing.assert_array_equal(found, kept[1:3, 3:7, 7:90:3, ::-1])
    shared = keeps(dataclasses.replace(dropout, shared=True), *entries[:2], query, key)
    assert shared.shape == (1, 1, *entries[2:])
    other = dataclasses.replace(dropout, words=words + jnp.uint32(1))
    assert np.asarray(keeps(other, *entries[:2], query, key) == kept).mean() < 0.83


def test_a_dropout_rate_of_0_changes_no_bit():
    case = CASES[0][2]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in
              place(case.attention, case.problem)[:3]]  # fmt: skip
    options = dict(dropout_rng=jax.random.key(0), dropout_rate=0.0)
    programs = [
        jax.jit(functools.partial(case.attention, **given)).lower(*shapes).as_text()
        for given in ({}, options, options | dict(dropout_rate=0.5, deterministic=True))
    ]
    assert programs[0] == programs[1] == programs[2]


def test_cudnn_leaves_soft_caps_to_others():
    mesh = jax.sharding.AbstractMesh((2,), ("ring",))
    attention = st.Attention(mesh, softcap=50.0)
    sizes = dict(seq_len=4096, heads=8, head_dim=64, platform="cuda", capability=(9, 0))
    explanation = attention.explain(**sizes)
    assert explanation.backend == "tiled"
    assert "softcap=50.0" in explanation.refusals["cudnn"]
    assert "softcap=50.0" in explanation.dense


def test_decode_has_masks_soft_caps_slopes_and_sinks():
    rng, slots = np.random.default_rng(0), 24
    problem = draw_problem(
        rng, batch=2, lengths=(slots, slots), heads=(4, 2), dtype="float32", segments=None
    )
    case = Case(degrees=st.Degrees(team=2, ring=2, tensor=2), mask="sinks", layout="zigzag")
    attention = dataclasses.replace(case.attention, softcap=SOFTCAP)
    sinks, positions = np.float32([0.5, -1, 2, 0]), np.int32([[3, 20], [11, 0]])
    rows = np.arange(2)[:, None]

    def put(x, spec):
        return jax.device_put(x, NamedSharding(attention.mesh, spec))

    key_spec = attention.key_spec(2)
    key, value = (put(attention.layout.permute(x), key_spec) for x in (problem.key, problem.value))
    query = put(problem.query[rows, positions], attention.decode_spec(4))
    slopes = np.float32([0.5, 0.25, 0.125, 1])
    out = attention.decode(query, key, value, put(positions, P()), sinks=sinks, slopes=slopes)
    expected, _ = oracle.attention(
        problem.query, problem.key, problem.value, **case.mask_arguments, sinks=sinks,
        softcap=SOFTCAP, slopes=slopes,
    )  # fmt: skip
    assert relative_error(out, expected[rows, positions]) <= FLOAT32_ERROR


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("softcap", [0, -2.0, float("inf"), True, "50"])
def test_soft_caps_of_nonsense_are_refused(softcap):
    mesh = jax.sharding.AbstractMesh((2,), ("ring",))
    with pytest.raises(ValueError, match=f"softcap must be a positive number .*{softcap}"):
        st.Attention(mesh, softcap=softcap)


@pytest.mark.parametrize("sinks", [jnp.zeros(3), jnp.zeros((2, 1)), jnp.zeros(2, jnp.int32)])
def test_sinks_of_another_shape_are_refused(sinks):
    x = jnp.zeros((1, 8, 2, 4))
    mesh = st.make_mesh(st.Degrees(ring=2), devices=jax.devices()[:2])
    attend = functools.partial(st.Attention(mesh, layout="contiguous"), sinks=sinks)
    with pytest.raises(ValueError, match=r"sinks must be floats \[heads\] = \[2\]; got"):
        jax.eval_shape(attend, x, x, x)


def test_decode_refuses_masks_that_look_ahead():
    mesh = jax.sharding.AbstractMesh((2,), ("ring",))
    attention = st.Attention(mesh, mask=st.masks.BlockCausal(4))
    x = jnp.zeros((1, 8, 2, 4))
    with pytest.raises(ValueError, match=r"got an instance with mask=BlockCausal.*masks.Causal"):
        attention.decode(x[:, :1], x, x, jnp.zeros((1, 1), jnp.int32))

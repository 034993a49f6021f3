"""Soft caps and sinks, on every kind of scheme and on both backends that serve them."""

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
    QUICK,
    Case,
    Result,
    assert_close,
    draw_problem,
    natural,
    place,
    relative_error,
)
from startrail_jax.blocks import tiled

SOFTCAP = 1.5
CASES = [
    Case(degrees=st.Degrees(ring=4), mask="own_window", backward="query", heads="grouped"),
    Case(degrees=st.Degrees.startrail(8, c=2, head=2), mask="packed", backward="kv"),
    Case(degrees=st.Degrees(team=2, tensor=2), mask="sinks", axis_type="auto", heads="single"),
    Case(degrees=st.Degrees(ring=2), mask="padding", backend="tiled", tokens=14),
]


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def solve(attention, query, key, value, dout, dlse, segment_ids, sinks):
    attend = functools.partial(attention, segment_ids=segment_ids, return_lse=True)
    (out, lse), vjp = jax.vjp(lambda *x: attend(*x[:3], sinks=x[3]), query, key, value, sinks)
    *gradients, dsinks = vjp((dout, dlse))
    return Result(out, lse, *gradients), dsinks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_softcap_and_sinks_match_the_oracle(case, monkeypatch):
    if case.backend == "tiled":
        fake_cudnn.install(monkeypatch)
    attention, problem = dataclasses.replace(case.attention, softcap=SOFTCAP), case.problem
    heads = problem.query.shape[2]
    sinks = np.linspace(-1, 2, heads, dtype=np.float32)
    placed = jax.device_put(sinks, NamedSharding(attention.mesh, P()))
    with mock.patch.multiple(tiled, COARSE=8, FINE=4):
        result, dsinks = solve(attention, *place(attention, problem), placed)
    inputs = problem.query, problem.key, problem.value
    told = dict(case.mask_arguments, softcap=SOFTCAP, sinks=sinks, segment_ids=problem.segment_ids)
    expected = oracle.gradients(*inputs, problem.dout, problem.dlse, **told)
    wanted = Result(*oracle.attention(*inputs, **told), *expected)
    assert_close(natural(attention, result), wanted, dict.fromkeys(vars(wanted), FLOAT32_ERROR))
    of_sinks = oracle.sink_gradient(*inputs, problem.dout, problem.dlse, **told)
    assert relative_error(dsinks, of_sinks) <= FLOAT32_ERROR


def test_cudnn_leaves_soft_caps_to_others():
    mesh = jax.sharding.AbstractMesh((2,), ("ring",))
    attention = st.Attention(mesh, softcap=50.0)
    sizes = dict(seq_len=4096, heads=8, head_dim=64, platform="cuda", capability=(9, 0))
    explanation = attention.explain(**sizes)
    assert explanation.backend == "tiled"
    assert "softcap=50.0" in explanation.refusals["cudnn"]
    assert "softcap=50.0" in explanation.dense


def test_decode_has_masks_soft_caps_and_sinks():
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
    out = attention.decode(query, key, value, put(positions, P()), sinks=jnp.asarray(sinks))
    expected, _ = oracle.attention(
        problem.query, problem.key, problem.value, **case.mask_arguments, sinks=sinks,
        softcap=SOFTCAP,
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

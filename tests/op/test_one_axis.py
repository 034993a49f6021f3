"""One axis of a mesh that others made plays all sequence roles: what it gives, and refuses."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import startrail_jax as st
from attention_cases import (
    Case,
    check,
    forward_and_backward,
    host_mesh,
    make_attention,
    natural,
    one_axis,
    place,
    reference,
    relative_error,
)
from refusals import refused
from startrail_jax.errors import InputError

SCHEMES = {
    "ring": st.Degrees(ring=8),
    "all-gather": st.Degrees(group=8),
    "Ulysses": st.Degrees(head=8),
    "StarTrail": st.Degrees.startrail(8, c=2),
    "teams": st.Degrees(team=4, ring=2),
    "StarTrail x Ulysses": st.Degrees.startrail(8, c=2, head=2),
    "LoongTrain": st.Degrees(ring=2, group=2, head=2, data=2),
}
OPTIONS = {
    "plain": {},
    "published": {"published": True},
    "kv": {"backward": "kv", "gradient_dtype": "bfloat16"},
    "kept": {"backward": "query", "keep_gathered": True},
    "sparse": {"mask": "packed_window", "exchange": "sparse"},
}


PAIRS = [
    (scheme, options)
    for scheme, options in itertools.product(SCHEMES, OPTIONS)
    if options != "published" or SCHEMES[scheme].team == SCHEMES[scheme].group
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "options"), PAIRS)
def test_one_axis_gives_the_bits_of_several(scheme, options):
    degrees, options = SCHEMES[scheme], OPTIONS[options]
    several = Case(degrees=degrees, heads="grouped", layout="zigzag", axis_type="auto", **options)
    one = dataclasses.replace(several, one_axis=True)
    found = [
        forward_and_backward(case.attention, *place(case.attention, case.problem))
        for case in (several, one)
    ]
    for (name, first), (_, second) in zip(*(x.items() for x in found), strict=True):
        np.testing.assert_array_equal(np.asarray(second), np.asarray(first), err_msg=name)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.slow
def test_one_axis_works_under_set_mesh(kind):
    case = Case(degrees=st.Degrees.startrail(8, c=2), one_axis=True, axis_type=kind.name.lower())
    with jax.set_mesh(case.mesh):
        check(case)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["teams", "Ulysses", "StarTrail x Ulysses", "ring"])
def test_one_axis_under_vmap(scheme):
    """Models that are written for one sequence; jax cannot map a grouped all_to_all by itself."""
    case = Case(degrees=SCHEMES[scheme], heads="grouped", one_axis=True, axis_type="auto")
    attention, arguments = case.attention, place(case.attention, case.problem)[:4]
    two = [jax.numpy.stack([x, -x]) for x in arguments]

    @jax.jit
    def both(query, key, value, dout):
        out, vjp = jax.vjp(attention, query, key, value)
        return out, *vjp(dout)

    found = jax.jit(jax.vmap(jax.vmap(both)))(*(x[None] for x in two))
    for i, sign in enumerate((1, -1)):
        for x, y in zip(found, both(*(sign * z for z in arguments)), strict=True):
            assert relative_error(x[0, i], y) < 2e-6


def test_several_axes_count_as_one():
    """Those of a tuple, in its own order, which need not be that of the mesh."""
    mesh = jax.make_mesh((2, 4), ("y", "x"), (AxisType.Auto,) * 2)
    degrees = st.Degrees(ring=2, team=2, head=2)
    attention = st.Attention(mesh, axis=["x", "y"], degrees=degrees, causal=True)
    assert attention.sequence_spec == jax.P(None, ("x", "y"))
    case = Case(degrees=degrees)
    found = forward_and_backward(attention, *place(attention, case.problem))
    expected = reference(case.problem, causal=True)
    for name, x in natural(attention, found).items():
        assert relative_error(x, getattr(expected, name)) < 2e-6


def test_one_axis_alone_is_ring_attention():
    attention = st.Attention(
        host_mesh(st.Degrees(data=2, ring=2, tensor=2)), axis="context", causal=True
    )
    assert attention.degrees == st.Degrees(ring=2)
    names = {"data": "fsdp", "tensor": "model"}
    attention = dataclasses.replace(attention, axis_names=names)
    assert attention.degrees == st.Degrees(data=2, ring=2, tensor=2)
    assert dataclasses.replace(attention, causal=False).degrees == attention.degrees


def test_one_axis_decodes():
    degrees = st.Degrees(group=2, ring=2, head=2)
    attention = st.Attention(host_mesh(degrees, "auto"), causal=True, **one_axis(degrees))
    several = make_attention(degrees, layout=attention.layout)
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, n, 4, 8), np.float32) for n in (1, 32, 32))
    at = np.array([[20]], np.int32)
    found = [np.asarray(x.decode(query, *x.shard(key, value), at)) for x in (attention, several)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "degrees", [st.Degrees(data=4, team=2), st.Degrees(data=2, ring=2, head=2)]
)
@pytest.mark.slow
def test_rows_are_split_along_the_axis_too(degrees):
    """Neighbours share a row. No spec can say so: each device is given its own tokens."""
    mesh = jax.make_mesh((8,), ("context",), (AxisType.Auto,))
    options = {"causal": True, "layout": "zigzag"}
    attention = st.Attention(mesh, axis="context", degrees=degrees, **options)
    with refused(InputError, axis="context"):
        attention.sequence_spec  # noqa: B018
    several = make_attention(degrees, **options)
    rng = np.random.default_rng(0)
    query, key, value, dout = (
        rng.standard_normal((degrees.data, 24, n, 8), np.float32) for n in (4, 2, 2, 4)
    )
    shards = [
        several.layout.permute(x).reshape(8, -1, *x.shape[2:]) for x in (query, key, value, dout)
    ]
    local = jax.shard_map(
        lambda *x: attention.local(*x)[0],
        mesh=mesh,
        in_specs=jax.P("context"),
        out_specs=jax.P("context"),
    )
    out, pullback = jax.vjp(jax.jit(local), *shards[:3])
    found = [out, *pullback(jax.numpy.asarray(shards[3]))]
    wanted, pullback = jax.vjp(jax.jit(several), *several.shard(query, key, value))
    expected = [wanted, *pullback(several.shard(dout))]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x).reshape(y.shape), np.asarray(y))


def test_one_axis_explains_its_nodes():
    degrees = st.Degrees(ring=2, team=4)
    attention = st.Attention(host_mesh(degrees), causal=False, **one_axis(degrees))
    found = attention.explain(seq_len=64, heads=4, head_dim=8, devices_per_node=4)
    assert (found.across, found.inside) == (("ring",), ("team",))


@pytest.mark.usefixtures("unchecked")
def test_one_axis_refuses_what_does_not_fit():
    mesh = host_mesh(st.Degrees(data=2, ring=4))
    data = {"data": "fsdp"}
    with refused(InputError, axis="sequence"):
        st.Attention(mesh, axis="sequence")
    for none in ((), 0, ("context", "context")):
        with refused(InputError, axis=none):
            st.Attention(mesh, axis=none)
    with refused(InputError, axis="context"):
        st.Attention(mesh, axis="context", degrees=st.Degrees(ring=8))
    with refused(InputError, data=4):
        st.Attention(mesh, axis="context", degrees=st.Degrees(ring=4, data=4), axis_names=data)
    with refused(InputError, axis="fsdp"):
        st.Attention(mesh, axis="fsdp", axis_names=data)
    eight = jax.devices()[:8]
    with refused(InputError, axis="data"):
        st.Attention(st.make_mesh(st.Degrees(data=4, ring=2), devices=eight), axis="data")
    with refused(InputError, axis="ring"):
        st.Attention(st.make_mesh(st.Degrees(team=4, ring=2), devices=eight), axis="ring")
    with refused(InputError, "degrees go with axis=, the axis of"):
        st.Attention(st.make_mesh(st.Degrees(ring=8), devices=eight), degrees=st.Degrees(team=8))
    several = make_attention(st.Degrees(ring=8))
    teams = st.make_mesh(st.Degrees(team=4, ring=2), devices=eight)
    with refused(InputError, "degrees=None"):
        dataclasses.replace(several, mesh=teams)
    assert dataclasses.replace(several, mesh=teams, degrees=None).degrees.team == 4
    with refused(InputError, "got 8"):
        st.Attention(mesh, axis="context", degrees=8)

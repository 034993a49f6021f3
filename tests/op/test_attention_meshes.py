"""Meshes of the user's own: other axes, other names, other axis types, other ways in."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import startrail_jax as st
from attention_cases import (
    FLOAT32_ERROR,
    Case,
    assert_close,
    draw_problem,
    error_bounds,
    forward_and_backward,
    natural,
    place,
    reference,
    relative_error,
)
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError

AXIS_TYPES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def make_mesh(axis_type="explicit", **sizes):
    count = int(np.prod(list(sizes.values())))
    kinds = (AXIS_TYPES[axis_type],) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), kinds, devices=jax.devices()[:count])


def problem_for(seq_len, heads=(4, 2)):
    return draw_problem(np.random.default_rng(8), batch=4, lengths=(seq_len, seq_len), heads=heads)


def assert_exact(attention, problem=None):
    problem = problem or problem_for(12 * attention.degrees.sequence)
    expected = reference(problem, causal=True)
    result = forward_and_backward(attention, *place(attention, problem))
    assert_close(natural(attention, result), expected, error_bounds(problem, expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis_type", "sizes", "axis_names", "degrees"),
    [
        ("explicit", {"ring": 4}, None, st.Degrees(ring=4)),
        # An axis that is none of ours, and another order.
        *(
            (axis_type, {"team": 2, "expert": 3, "ring": 2}, None, st.Degrees(ring=2, team=2))
            for axis_type in AXIS_TYPES
        ),
        (
            "auto",
            {"batch": 2, "context": 4, "model": 2},
            {"data": "batch", "ring": "context", "tensor": "model"},
            st.Degrees(data=2, ring=4, tensor=2),
        ),
        # Two axes for one role.
        ("explicit", {"node": 2, "local": 3}, {"ring": ("node", "local")}, st.Degrees(ring=6)),
        # The team is slower than the group.
        (
            "auto",
            {"outer": 2, "inner": 4},
            {"team": "outer", "group": "inner"},
            st.Degrees(team=2, group=4),
        ),
        ("explicit", {"other": 3}, st.AxisNames(), st.Degrees()),
    ],
)
def test_mesh_of_the_user(axis_type, sizes, axis_names, degrees):
    mesh = make_mesh(axis_type, **sizes)
    attention = st.Attention(mesh, causal=True, axis_names=axis_names)
    assert attention.degrees == degrees
    assert_exact(attention)


def test_axis_names_as_a_dataclass():
    mesh = make_mesh(context=4)
    named = st.Attention(mesh, axis_names=st.AxisNames(ring="context"), causal=True)
    assert named == st.Attention(mesh, axis_names={"ring": "context"}, causal=True)
    assert hash(named) == hash(st.Attention(mesh, axis_names={"ring": "context"}, causal=True))
    assert named.sequence_spec == P(None, "context")


def test_specs_leave_out_axes_of_degree_one():
    mesh = Case(degrees=st.Degrees(data=2, ring=2, team=2, tensor=2)).mesh
    attention = st.Attention(mesh, causal=True)
    assert attention.sequence_spec == P("data", ("ring", "team"))
    assert attention.query_spec(4) == P("data", ("ring", "team"), "tensor", None)
    assert attention.key_spec(2) == P("data", ("ring", "team"), "tensor", None)
    # One key head cannot be split over two tensor ranks: both hold it.
    assert attention.key_spec(1) == P("data", ("ring", "team"), None, None)
    assert st.Attention(make_mesh(ring=1), causal=True).query_spec(4) == P(None, None, None, None)


@pytest.mark.slow
def test_set_mesh_is_allowed():
    attention = st.Attention(make_mesh(ring=2, team=2), causal=True)
    with jax.set_mesh(attention.mesh):
        assert_exact(attention)


@pytest.mark.slow
def test_mesh_of_both_axis_types():
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=kinds, devices=jax.devices()[:8])
    assert_exact(st.Attention(mesh, causal=True))


@pytest.mark.slow
def test_abstract_mesh_under_jit():
    """A model built from an abstract mesh runs on any concrete mesh of that shape."""
    mesh = make_mesh(ring=2, team=2)
    attention, concrete = (st.Attention(x, causal=True) for x in (mesh.abstract_mesh, mesh))
    problem = problem_for(48)
    query, key, value, *_ = place(concrete, problem)
    out = jax.jit(attention)(query, key, value)
    np.testing.assert_array_equal(out, jax.jit(concrete)(query, key, value))


def test_auto_mesh_reshards_what_it_is_given():
    attention = st.Attention(make_mesh("auto", data=2, ring=4), causal=True)
    problem = problem_for(48)
    laid_out = (attention.layout.permute(x) for x in (problem.query, problem.key, problem.value))
    query, key, value = laid_out
    wrong = NamedSharding(attention.mesh, P(("data", "ring")[0]))
    out = jax.jit(attention)(jax.device_put(query, wrong), key, value)
    expected = reference(problem, causal=True).out
    assert relative_error(attention.layout.unpermute(np.asarray(out)), expected) <= FLOAT32_ERROR
    assert out.sharding.is_equivalent_to(NamedSharding(attention.mesh, attention.query_spec(4)), 4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.slow_except_every(3)
def test_local_inside_a_shard_map_of_the_user(packed):
    """`Attention.local` takes one device's shards, so that a fused layer can share a shard_map."""
    mesh = make_mesh(data=2, group=2, ring=2, team=2)
    attention, problem = st.Attention(mesh, causal=True), problem_for(48)
    segments = np.repeat(np.arange(3, dtype=np.int32), 16)[None] * np.ones((4, 1), np.int32)
    spec = attention.query_spec(4)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec, spec, spec, attention.sequence_spec),
        out_specs=spec,
    )
    def layer(query, key, value, ids):
        out, _ = attention.local(2 * query, key, value, *((ids, ids) if packed else ()))
        return -out

    def put(x, spec):
        return jax.device_put(attention.layout.permute(x), NamedSharding(mesh, spec))

    arrays = [put(x, spec) for x in (problem.query, problem.key, problem.value)]
    found = jax.jit(layer)(*arrays, put(segments, attention.sequence_spec))
    doubled = problem.query * 2
    mask = {"causal": True, "segment_ids": segments if packed else None}
    expected, _ = oracle.attention(doubled, problem.key, problem.value, **mask)
    assert relative_error(attention.layout.unpermute(np.asarray(found)), -expected) <= FLOAT32_ERROR


@pytest.mark.slow_except_every(9)
@pytest.mark.parametrize(
    ("degrees", "kv_heads"),
    [
        (st.Degrees(ring=2, tensor=4), 1),
        (st.Degrees(ring=2, tensor=4), 2),
        (st.Degrees(head=2, tensor=2), 1),
        (st.Degrees(head=2, tensor=2), 2),
        # Key heads and tensor degree that do not divide one another: head * tensor and they do.
        (st.Degrees(head=2, tensor=3), 2),
        (st.Degrees(head=3, tensor=2), 3),
        (st.Degrees(head=3, tensor=4), 6),
    ],
    ids=str,
)
def test_key_heads_are_replicated_and_their_gradients_summed(degrees, kv_heads):
    attention = Case(degrees=degrees).attention
    heads = 12 if degrees.num_devices % 3 == 0 else 8
    assert_exact(attention, problem_for(6 * degrees.sequence, heads=(heads, kv_heads)))


@pytest.mark.parametrize("device_kind", ["numpy", "committed"])
def test_one_device_takes_plain_arrays(device_kind):
    attention = Case(degrees=st.Degrees()).attention
    problem = problem_for(24)
    arrays = problem.query, problem.key, problem.value
    if device_kind == "committed":
        arrays = (jax.device_put(x, jax.devices()[0]) for x in arrays)
    out = attention(*arrays)
    expected = reference(problem, causal=True).out
    assert relative_error(attention.layout.unpermute(np.asarray(out)), expected) <= FLOAT32_ERROR


# Axis names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "axis_names", "named"),
    [
        ({"context": 2}, {"rings": "context"}, ["'rings'"]),
        ({"context": 2}, {"ring": "cp"}, ["ring='cp'"]),
        ({"x": 2}, {"ring": "x", "group": "x"}, ["'x'"]),
        # No axis of the sequence.
        (
            {"dp": 2, "context": 4},
            None,
            ["{'dp': 2, 'context': 4}", "axis_names={'ring': 'context'}"],
        ),
    ],
)
def test_axis_names_that_do_not_fit_are_refused(sizes, axis_names, named):
    with refused(InputError, *named):
        st.Attention(make_mesh("auto", **sizes), axis_names=axis_names)


def test_mesh_of_one_device_needs_no_sequence_axis():
    assert st.Attention(make_mesh(batch=1), causal=True).degrees == st.Degrees()


@pytest.mark.slow
def test_gradient_inside_a_shard_map_over_all_axes():
    """The stages of a pipeline: each has its own weights, and sequences are sharded inside it."""
    mesh = make_mesh("auto", stage=2, ring=2, team=2)
    one = make_mesh("auto", ring=1)
    attention, plain = (st.Attention(x, causal=True) for x in (mesh, one))
    x = np.random.default_rng(3).normal(size=(1, 24, 2, 4)).astype("f4")
    spec = attention.query_spec(2)

    def loss(x, weights):
        def stage(x, weight):
            return jax.lax.psum(attention.local(x, weight[0] * x, x)[0], "stage")

        specs = spec, P("stage")
        return jax.shard_map(stage, mesh=mesh, in_specs=specs, out_specs=spec)(x, weights).sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(attention.shard(x), np.array([0.5, 2.0], "f4"))

    def plain_loss(x, weights):
        return sum(plain(x, weight * x, x).sum() for weight in weights)

    expected = jax.jit(jax.grad(plain_loss, argnums=(0, 1)))(x, np.array([0.5, 2.0], "f4"))
    assert relative_error(attention.unshard(found[0]), expected[0]) <= FLOAT32_ERROR
    assert relative_error(np.asarray(found[1]), expected[1]) <= 2 * FLOAT32_ERROR


@pytest.mark.parametrize("manual", ["stage", "ring"])
def test_call_inside_a_shard_map_is_refused(manual):
    mesh = make_mesh("auto", stage=2, ring=2, team=2)
    attention, spec = st.Attention(mesh, causal=True), P(manual)
    x = np.zeros((2, 24, 2, 4), "f4")
    for call in (
        lambda x: attention(x, x, x),
        lambda x: attention.decode(x, x, x, jax.numpy.zeros(x.shape[:2], "i4")),
        lambda x: attention.update_cache(x, x, jax.numpy.zeros(x.shape[:2], "i4")),
    ):
        inside = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={manual})
        with refused(InputError, f"got one inside a shard_map over ('{manual}',)"):
            jax.eval_shape(inside, x)


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_gradient_of_a_gradient_is_refused(axis_type):
    attention = st.Attention(make_mesh(axis_type, ring=2), causal=True)
    x = attention.shard(np.zeros((1, 24, 2, 4), "f4"))

    def first(x):
        return jax.grad(lambda x: attention(x, x, x).sum())(x)

    with refused(UnsupportedError, "jax.nn"):
        jax.jit(jax.grad(lambda x: first(x).sum()))(x)

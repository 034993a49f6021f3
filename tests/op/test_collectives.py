"""Placement of key units and its transpose, by sending ranks instead of keys."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from startrail_jax import collectives
from startrail_jax.collectives import KeyPlacement
from startrail_jax.mesh import AxisNames, Cycle, flat_axis, resolve_axes

SEQUENCE = P(None, ("group", "ring", "team"))


def placement(kind, degrees, causal):
    mesh = st.make_mesh(degrees, devices=jax.devices()[: degrees.num_devices])
    axes = resolve_axes(mesh, AxisNames())
    rank = flat_axis(axes, ("group", "ring", "team"))
    return mesh, KeyPlacement(kind, axes["group"], axes["team"], rank, causal)


def run(mesh, function, x):
    names = [name for name in ("group", "ring", "team") if mesh.shape[name] > 1]
    spec = P(None, tuple(names))
    x = jax.device_put(x, jax.NamedSharding(mesh, spec))
    return np.asarray(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)(x))


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("gather", (2, 2, 2)),
        ("gather", (3, 2, 2)),
        ("gather", (2, 1, 4)),
        ("gather", (4, 3, 1)),
        ("gather", (8, 1, 1)),
        ("gather", (1, 2, 4)),
        ("gather_permute", (2, 2, 2)),
        ("gather_permute", (2, 3, 2)),
        ("gather_permute", (3, 1, 3)),
    ],
)
def test_device_holds_key_unit_p_team_plus_a(kind, degrees):
    group, ring, team = degrees
    mesh, keys = placement(kind, st.Degrees(group=group, ring=ring, team=team), causal=True)
    ranks = np.arange(group * ring * team, dtype=np.int32)[None]
    held = run(mesh, keys.place, ranks).reshape(group, ring, team, group)
    for g, p, a in itertools.product(range(group), range(ring), range(team)):
        unit = p * team + a
        assert held[g, p, a].tolist() == list(range(unit * group, (unit + 1) * group))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["gather", "gather_permute"])
def test_scatter_is_the_transpose_of_place(kind, causal):
    mesh, keys = placement(kind, st.Degrees(group=2, ring=3, team=2), causal)

    def transposed(x):
        out, transpose = jax.vjp(keys.place, x)
        weight = 1.0 + collectives.index(keys.rank)
        (expected,) = transpose(out * weight)
        return keys.scatter(out * weight, x.dtype) - expected

    x = np.random.default_rng(0).normal(size=(2, 24)).astype(np.float32)
    np.testing.assert_allclose(run(mesh, transposed, x), 0, atol=1e-6)


def test_partials_brings_every_members_version_of_the_own_part():
    mesh, keys = placement("gather", st.Degrees(ring=2, team=3), causal=True)

    def sent(x):
        whole = collectives.gather(x, keys.team, 1) + 100 * collectives.index(keys.team)
        return collectives.partials(whole, keys.team, 1).sum(0)

    x = np.arange(6, dtype=np.int32)[None]
    np.testing.assert_array_equal(run(mesh, sent, x), 3 * x + 300)


def test_an_axis_of_degree_one_moves_nothing():
    one = collectives.Axis((), 1)
    x = jnp.arange(6).reshape(2, 3)
    for same in (
        collectives.shift(x, Cycle(one, 1), 1),
        collectives.gather(x, one, 1),
        collectives.scatter_sum(x, one, 1),
        collectives.exchange(x, one, 0, 1),
        collectives.partials(x, one, 1)[0],
    ):
        assert same is x or (same == x).all()
    assert collectives.index(one) == 0

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

RANKS = ("ring", "group", "team")


def placement(kind, degrees):
    mesh = st.make_mesh(degrees, devices=jax.devices()[: degrees.num_devices])
    axes = resolve_axes(mesh, AxisNames())
    return mesh, KeyPlacement(kind, axes["group"], axes["team"]), flat_axis(axes, RANKS)


def run(mesh, function, x):
    names = [name for name in RANKS if mesh.shape[name] > 1]
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
def test_device_holds_the_ranks_of_its_key_unit(kind, degrees):
    group, ring, team = degrees
    mesh, keys, _ = placement(kind, st.Degrees(group=group, ring=ring, team=team))
    ranks = np.arange(group * ring * team, dtype=np.int32)[None]
    held = run(mesh, keys.place, ranks).reshape(ring, group, team, group)
    for p, g, a in itertools.product(range(ring), range(group), range(team)):
        block = p * group * team
        own = range(block + a, block + group * team, team)
        # In the way of the paper, the unit that team a of the block has gathered.
        paper = range(block + a * team, block + (a + 1) * team)
        assert held[p, g, a].tolist() == list(own if kind == "gather" else paper)


@pytest.mark.parametrize("kind", ["gather", "gather_permute"])
def test_scatter_is_the_transpose_of_place(kind):
    mesh, keys, rank = placement(kind, st.Degrees(group=2, ring=3, team=2))

    def transposed(x):
        out, transpose = jax.vjp(keys.place, x)
        weight = 1.0 + collectives.index(rank)
        (expected,) = transpose(out * weight)
        return keys.scatter(out * weight, x.dtype) - expected

    x = np.random.default_rng(0).normal(size=(2, 24)).astype(np.float32)
    np.testing.assert_allclose(run(mesh, transposed, x), 0, atol=1e-6)


def test_partials_brings_every_members_version_of_the_own_part():
    mesh, keys, _ = placement("gather", st.Degrees(ring=2, team=3))

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

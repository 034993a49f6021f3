"""Movement between devices, by sending ranks instead of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from startrail_jax.devices.axes import AxisNames, resolve_axes
from startrail_jax.devices.degrees import Cycle
from startrail_jax.rings import collectives

RANKS = ("ring", "group", "team")


def placed(degrees):
    mesh = st.make_mesh(degrees, devices=jax.devices()[: degrees.num_devices])
    return mesh, resolve_axes(mesh, AxisNames())


def run(mesh, function, x):
    names = [name for name in RANKS if mesh.shape[name] > 1]
    spec = P(None, tuple(names))
    x = jax.device_put(x, jax.NamedSharding(mesh, spec))
    return np.asarray(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)(x))


@pytest.mark.parametrize(("degree", "ring"), [(2, 2), (2, 3), (3, 1), (1, 4)])
def test_group_and_team_trade_places(degree, ring):
    mesh, axes = placed(st.Degrees(group=degree, ring=ring, team=degree))
    ranks = np.arange(ring * degree**2, dtype=np.int32)[None]
    traded = run(mesh, lambda x: collectives.trade_places(x, axes["group"], axes["team"]), ranks)
    blocks = ranks.reshape(ring, degree, degree)
    np.testing.assert_array_equal(traded.reshape(blocks.shape), blocks.swapaxes(1, 2))


def test_partials_brings_every_members_version_of_the_own_part():
    mesh, axes = placed(st.Degrees(ring=2, team=3))

    def sent(x):
        whole = collectives.gather(x, axes["team"], 1) + 100 * collectives.index(axes["team"])
        return collectives.partials(whole, axes["team"], 1).sum(0)

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

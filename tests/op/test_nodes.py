"""Which devices share a node, in which order they make a mesh, and which axes go across."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import startrail_jax as st
from refusals import refused
from startrail_jax.device_mesh import place_devices
from startrail_jax.devices.degrees import ROLES
from startrail_jax.devices.nodes import (
    ORDERS,
    crossing,
    node_grid,
    nodes_of,
    resolve_order,
    slowest_first,
)
from startrail_jax.errors import InputError

pytestmark = pytest.mark.quick

HEADS = dict(heads=16, kv_heads=16, causal=True)
CALL = dict(HEADS, batch=1, seq_len=64, head_dim=4)


class Fake(SimpleNamespace):
    """A device with some attributes."""

    __hash__ = object.__hash__


def fake(**attributes):
    return Fake(platform="gpu", **attributes)


def test_devices_of_one_slice_share_a_node_however_many_processes_drive_them():
    """GPUs have a slice index too: that of their machine, or of their NVLink domain."""
    gpus = [fake(process_index=i, slice_index=i // 2) for i in range(4)]
    assert nodes_of(gpus) == (0, 0, 1, 1)
    tpus = [fake(process_index=i, slice_index=0) for i in range(4)]
    assert nodes_of(tpus) == (0, 0, 0, 0)


def test_devices_without_a_slice_share_the_node_of_their_process():
    assert nodes_of([fake(process_index=i) for i in (3, 3, 1, 1, 3)]) == (0, 0, 1, 1, 0)
    assert nodes_of(jax.devices()) == (0,) * jax.device_count()


def test_devices_per_node_overrides_what_the_devices_say():
    assert nodes_of([fake(process_index=0)] * 6, 3) == (0, 0, 0, 1, 1, 1)


@pytest.mark.parametrize("size", [0, 5, -4, 2.0, True, "4"])
@pytest.mark.usefixtures("unchecked")
def test_devices_per_node_must_make_whole_nodes(size):
    message = rf"divides the number of devices; got devices_per_node={size!r} for 8.*1, 2, 4, 8"
    with pytest.raises(ValueError, match=message):
        st.make_mesh(st.Degrees(ring=8), devices=jax.devices()[:8], devices_per_node=size)
    with pytest.raises(ValueError, match=message):
        st.communication(st.Degrees(ring=8), devices_per_node=size, **CALL)


@pytest.mark.parametrize(
    ("order", "named"),
    [
        ("inside_out", "order='inside_out'"),
        (("ring", "team"), "'tensor'"),
        ((*ROLES, "ring"), "'ring'"),
        ((*ROLES[:5], "inner"), "'tensor'"),
    ],
)
def test_an_order_has_each_axis_once(order, named):
    with refused(InputError, named):
        st.make_mesh(st.Degrees(ring=2), devices=jax.devices()[:2], order=order)
    with refused(InputError, named):
        st.communication(st.Degrees(ring=8), devices_per_node=2, order=order, **CALL)


def test_an_order_without_nodes_says_nothing_about_ports():
    with refused(InputError, "devices_per_node=None"):
        st.communication(st.Degrees(ring=8), order="head_first", **CALL)


def test_a_call_gives_its_heads_and_nothing_unknown():
    for call in ({"heads": 16}, HEADS | {"widht": 3}, HEADS | {"order": ROLES}):
        with refused(InputError, "kv_heads"):
            st.make_mesh(st.Degrees(ring=2), devices=jax.devices()[:2], call=call)


def test_named_orders_have_each_axis_once_and_data_slowest_tensor_fastest():
    for name, order in ORDERS.items():
        assert resolve_order(name) == resolve_order(order) == order
        assert sorted(order) == sorted(ROLES)
        assert (order[0], order[-1]) == ("data", "tensor")


@pytest.mark.parametrize(
    ("order", "degrees", "across"),
    [
        ("rings_inside", st.Degrees.startrail(16, c=2), ("group", "team")),
        ("collectives_inside", st.Degrees.startrail(16, c=2), ("ring",)),
        ("head_first", st.Degrees.loongtrain(16, head=4), ("ring",)),
        ("context_first", st.Degrees.loongtrain(16, head=4), ("head",)),
        (("data", "ring", "group", "head", "team", "tensor"), st.Degrees(ring=16), ("ring",)),
        ("context_first", st.Degrees(ring=2, tensor=4, data=2), ("data", "ring")),
    ],
)
def test_the_last_axes_of_an_order_lie_inside_a_node(order, degrees, across):
    grid = node_grid(degrees, resolve_order(order), nodes_of(range(16), 4))
    assert grid.shape == tuple(getattr(degrees, role) for role in ROLES)
    assert sorted(grid.ravel()) == sorted([*range(4)] * 4)
    assert crossing(grid) == across
    mesh = st.make_mesh(degrees, devices=jax.devices()[:16], order=order, devices_per_node=4)
    np.testing.assert_array_equal([device.id // 4 for device in mesh.devices.flat], grid.ravel())


def test_on_one_node_the_order_is_that_of_the_axes():
    devices = jax.devices()[:24]
    degrees = st.Degrees(data=2, ring=3, team=2, tensor=2)
    for options in ({}, {"devices_per_node": 24}, {"call": HEADS}):
        mesh = st.make_mesh(degrees, devices=devices, **options)
        assert list(mesh.devices.flat) == devices
        assert mesh == jax.make_mesh(mesh.devices.shape, ROLES, mesh.axis_types, devices=devices)


def test_devices_are_sorted_node_by_node():
    """Whatever the order in which they are given: every node then has one place of the ring."""
    devices = [fake(slice_index=i % 2, id=i) for i in range(4)]
    placed = place_devices(st.Degrees(ring=2, team=2), ROLES, devices, nodes_of(devices))
    assert [device.id for device in placed.flat] == [0, 2, 1, 3]


def test_unequal_nodes_and_nodes_that_end_within_a_place_are_served():
    degrees, nodes = st.Degrees(ring=2, team=3), [0, 0, 0, 0, 1, 1]
    assert crossing(node_grid(degrees, ROLES, nodes)) == ("ring", "team")


class TPU:
    """A chip of a TPU v4, as far as jax asks for it: four make a square, and a slice."""

    platform, device_kind, process_index, core_on_chip = "tpu", "TPU v4", 0, 0

    def __init__(self, number):
        self.id, self.slice_index = number, number // 4
        self.coords = (number % 2, number // 2 % 2, 0)


def test_tpus_of_a_slice_are_sorted_by_their_links():
    devices = [TPU(number) for number in range(8)]
    shape = (1, 1, 4, 1, 1, 1)
    axis_types = (jax.sharding.AxisType.Auto,) * 6
    of_jax = jax.make_mesh(shape, ROLES, axis_types, devices=devices[:4]).devices
    placed = place_devices(st.Degrees(data=2, ring=4), ROLES, devices, nodes_of(devices))
    ids = [device.id for device in placed.flat]
    assert ids[:4] == [device.id for device in of_jax.flat] != [0, 1, 2, 3]
    assert ids[4:] == [number + 4 for number in ids[:4]]
    # Where nodes end within a place of an axis, their devices are sorted as one row.
    devices = [TPU(number) for number in range(12)]
    placed = place_devices(st.Degrees(ring=4, team=3), ROLES, devices, nodes_of(devices))
    assert [device.id for device in placed.flat] == [*ids, *(number + 8 for number in ids[:4])]


@pytest.mark.parametrize(
    ("kv_heads", "line"), [(16, "team across, ring"), (4, "ring across, team")]
)
def test_a_mesh_takes_the_order_of_fewest_bytes_for_its_call(kv_heads, line):
    """Rings carry keys, teams carry queries: what there is less of goes across the nodes."""
    sizes = dict(heads=16, kv_heads=kv_heads, head_dim=8)
    degrees, devices = st.Degrees(ring=8, team=2), jax.devices()[:16]
    mesh = st.make_mesh(degrees, devices=devices, devices_per_node=8, call=sizes)
    explanation = st.Attention(mesh, causal=True).explain(seq_len=512, **sizes, devices_per_node=8)
    assert f"2 nodes: {line} inside" in str(explanation)


@pytest.mark.slow
def test_explain_knows_meshes_of_other_names_and_abstract_ones():
    sizes = dict(seq_len=512, heads=16, head_dim=8)
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("replica", "context"), types, devices=jax.devices()[:8])
    own = st.Attention(
        mesh, causal=True, layout="zigzag", axis_names={"data": "replica", "ring": "context"}
    )
    explanation = own.explain(**sizes, devices_per_node=4)
    assert (explanation.across, explanation.inside) == (("data",), ("ring",))
    abstract = dataclasses.replace(own, mesh=mesh.abstract_mesh, degrees=None)
    assert abstract.explain(**sizes, platform="cpu").num_nodes is None
    with refused(InputError, devices_per_node=4):
        abstract.explain(**sizes, platform="cpu", devices_per_node=4)


def test_axes_of_a_mesh_are_known_by_the_places_of_their_devices():
    """Whether processes or slices are the nodes, and whatever the numbers of the devices."""
    degrees, order = st.Degrees(data=2, ring=2, team=4), resolve_order("rings_inside")
    for count, make in ((16, lambda i: fake(process_index=i // 4, id=i)), (16, TPU)):
        devices = [make(number) for number in range(count)]
        placed = place_devices(degrees, order, devices, nodes_of(devices))
        mesh = jax.sharding.Mesh(placed, ROLES)
        assert slowest_first(mesh)[:3] == ("data", "team", "ring")
    assert slowest_first(mesh.abstract_mesh) == ROLES

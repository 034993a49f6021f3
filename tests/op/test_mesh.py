"""Degrees, the named schemes, and the mesh."""

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType

import startrail_jax as st
from refusals import refused
from startrail_jax.device_mesh import make_mesh
from startrail_jax.devices.degrees import ROLES, Degrees
from startrail_jax.errors import InputError

pytestmark = pytest.mark.quick


def sizes(degrees):
    return degrees.group, degrees.ring, degrees.team, degrees.head


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (Degrees.ring_attention(8), (1, 8, 1, 1)),
        (Degrees.all_gather(8), (8, 1, 1, 1)),
        (Degrees.ulysses(8), (1, 1, 1, 8)),
        (Degrees.loongtrain(12, head=3), (1, 4, 1, 3)),
        (Degrees.startrail(12, c=2), (2, 3, 2, 1)),
        (Degrees.startrail(16, c=4), (4, 1, 4, 1)),
        (Degrees.startrail(8, c=1), (1, 8, 1, 1)),
        (Degrees.startrail(18, c=3, head=2), (3, 1, 3, 2)),
    ],
)
def test_named_schemes_are_degrees(degrees, expected):
    assert sizes(degrees) == expected


EIGHT = dict(heads=32, kv_heads=8, devices_per_node=8)
RECOMMENDED = [
    (2, dict(heads=4), Degrees(head=2)),
    (8, dict(heads=32, kv_heads=8), Degrees(head=8)),
    (8, dict(heads=8, kv_heads=1), Degrees(ring=8)),
    (6, dict(heads=32, kv_heads=8), Degrees(head=2, ring=3)),
    # Two nodes: a ring of 8 is left.
    (16, EIGHT, Degrees(head=2, ring=8)),
    (16, EIGHT | dict(fast_ports=True), Degrees(head=8, ring=2)),
    (64, EIGHT, Degrees(head=8, ring=8)),
    (64, EIGHT | dict(kv_heads=1), Degrees(team=2, ring=32)),
    (64, EIGHT | dict(kv_heads=1, fast_ports=True), Degrees(head=8, ring=8)),
    (128, EIGHT | dict(kv_heads=32), Degrees(head=16, ring=8)),
    (256, EIGHT, Degrees(head=8, team=2, ring=16)),
    (256, EIGHT | dict(kv_heads=1), Degrees.startrail(256, c=2)),
    (33, dict(heads=4, kv_heads=1), Degrees(ring=33)),
    # Those of a sequence share heads that tensor parallelism leaves, in a node of 4.
    (64, EIGHT | dict(data=2, tensor=2), Degrees(data=2, tensor=2, head=4, ring=4)),
    (8, dict(heads=4, kv_heads=1, tensor=2, fast_ports=True), Degrees(tensor=2, ring=4)),
]


@pytest.mark.parametrize(("num_devices", "options", "expected"), RECOMMENDED, ids=str)
def test_recommended_degrees_are_those_of_the_rule(num_devices, options, expected):
    degrees = Degrees.recommended(num_devices, **options)
    assert degrees == expected
    assert degrees.num_devices == num_devices


def test_recommended_degrees_use_all_devices():
    for num_devices in range(1, 300):
        for kv_heads, per_node, fast in ((1, None, False), (6, 4, True), (8, 8, False)):
            options = dict(heads=24, kv_heads=kv_heads, devices_per_node=per_node, fast_ports=fast)
            degrees = Degrees.recommended(num_devices, **options)
            assert degrees.num_devices == num_devices
            assert 24 % degrees.head == 0


def test_named_schemes_take_data_and_tensor():
    more = dict(data=5, tensor=7)
    for degrees in (
        *(
            make(4, **more)
            for make in (Degrees.ring_attention, Degrees.all_gather, Degrees.ulysses)
        ),
        Degrees.startrail(4, c=2, **more),
        Degrees.loongtrain(4, head=2, **more),
    ):
        assert (degrees.data, degrees.tensor, degrees.sequence) == (5, 7, 4)


@pytest.mark.parametrize("value", [0, -2, 2.0, True, None, "2"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.usefixtures("unchecked")
def test_degree_that_is_no_positive_integer_is_refused(role, value):
    with refused(InputError, **{role: value}):
        Degrees(**{role: value})


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Degrees.startrail(12, c=3), "c=3, sequence degree=12. Use one of [1, 2],"),
        (lambda: Degrees.recommended(8, heads=4, data=3), "data=3, tensor=1, num_devices=8"),
        (lambda: Degrees.recommended(8, heads=0), "heads must be an integer of at least 1; got 0"),
        (lambda: Degrees.startrail(8, c=0), "c=0, sequence degree=8. Use one of [1, 2],"),
        # What is left of 16 devices with head 2.
        (lambda: Degrees.startrail(16, c=4, head=2), "c=4, sequence degree=8."),
        (lambda: Degrees.startrail(12, c=1, head=5), "head=5, sequence degree=12."),
        (lambda: Degrees.loongtrain(12, head=5), "Use one of [1, 2, 3, 4, 6, 12],"),
    ],
)
def test_what_does_not_divide_the_sequence_degree_is_refused(make, named):
    with refused(InputError, named):
        make()


@pytest.mark.parametrize(
    ("axis_type", "expected"),
    [
        ("explicit", AxisType.Explicit),
        ("auto", AxisType.Auto),
        (AxisType.Explicit, AxisType.Explicit),
    ],
)
def test_make_mesh_names_six_axes(axis_type, expected):
    degrees = Degrees(data=2, group=1, ring=3, team=2, head=1, tensor=2)
    mesh = make_mesh(degrees, axis_type, devices=jax.devices()[:24])
    assert mesh.axis_names == ROLES
    assert dict(mesh.shape) == {role: getattr(degrees, role) for role in ROLES}
    assert set(mesh.axis_types) == {expected}


def test_make_mesh_is_auto_and_of_all_devices_by_default():
    mesh = make_mesh(Degrees(ring=jax.device_count()))
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.size == jax.device_count()


def test_make_mesh_on_a_subset_uses_just_those():
    devices = jax.devices()[3:9]
    mesh = make_mesh(Degrees(ring=3, team=2), devices=devices)
    assert set(mesh.devices.flat) == set(devices)


def test_make_mesh_refuses_a_product_that_misses_the_devices():
    given = "ring=3 * group=1 * team=2 * head=1 * tensor=1 = 6 for 8 devices"
    with refused(InputError, given):
        make_mesh(Degrees(ring=3, team=2), devices=jax.devices()[:8])


@pytest.mark.parametrize(
    ("platform", "advice"),
    [("cpu", 'jax.config.update("jax_num_cpu_devices", 6)'), ("gpu", "or use 6 devices")],
)
def test_too_few_devices_are_no_reason_to_pass_them(platform, advice, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform=platform)] * 4)
    with refused(InputError, "= 6 for 4 devices", advice):
        make_mesh(Degrees(ring=3, team=2))


@pytest.mark.usefixtures("unchecked")
def test_what_is_mistaken_for_degrees_or_a_mesh_is_refused():
    sizes = dict(batch=1, seq_len=64, heads=4, kv_heads=4, head_dim=8)
    for call in (make_mesh, lambda degrees: st.communication(degrees, **sizes)):
        for given in (8, None, {"ring": 8}):
            with refused(InputError, f"got {given!r}"):
                call(given)
    with refused(InputError, "got Degrees", "make_mesh(Degrees(data=1"):
        st.Attention(Degrees.startrail(8, c=2))
    with refused(InputError, "mesh", "got 8"):
        st.Attention(8)


@pytest.mark.parametrize(("kind", "given"), [("manual", "'manual'"), (AxisType.Manual, "Manual")])
def test_make_mesh_refuses_an_unknown_axis_type(kind, given):
    with refused(InputError, "axis_type", f"got {given}"):
        make_mesh(Degrees(), kind, devices=jax.devices()[:1])

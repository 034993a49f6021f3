"""Which degrees a number of devices allows: the same answer as that of the public callable."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import startrail_jax as st
from refusals import refused
from startrail_jax.calls.validation import check_arrays
from startrail_jax.devices.degrees import ROLES
from startrail_jax.errors import InputError
from startrail_jax.traffic.settings import all_degrees, legal_degrees, refusal

pytestmark = pytest.mark.quick


def test_all_degrees_are_all_factorisations():
    found = list(all_degrees(8))
    # Four roles share three factors of two.
    assert len(found) == len(set(found)) == 20
    assert all(x.num_devices == x.sequence == 8 for x in found)
    assert {st.Degrees.startrail(8, c=2), st.Degrees(team=2, ring=2, head=2)} < set(found)
    assert list(all_degrees(1)) == [st.Degrees()]
    assert len(list(all_degrees(12, roles=ROLES))) == 126


def test_given_degrees_stay():
    found = list(all_degrees(16, given={"tensor": 2, "head": 4}))
    assert {(x.tensor, x.head, x.sequence) for x in found} == {(2, 4, 8)}
    assert len(found) == 3
    assert list(all_degrees(16, given={"tensor": 3})) == []
    with refused(InputError, "'rung'"):
        list(all_degrees(8, given={"rung": 2}))


@pytest.mark.parametrize(
    ("causal", "sizes"),
    [
        (True, dict(batch=2, seq_len=32, heads=8, kv_heads=2)),
        (True, dict(batch=1, seq_len=24, heads=6, kv_heads=6)),
        (False, dict(batch=3, seq_len=8, heads=4, kv_heads=4)),
    ],
)
def test_legal_degrees_are_those_that_attention_takes(causal, sizes):
    """By the check of its call, for every setting of all six degrees."""
    taken = []
    for degrees in all_degrees(8, roles=ROLES):
        shape = tuple(vars(degrees)[role] for role in ROLES)
        attention = st.Attention(AbstractMesh(shape, ROLES, (AxisType.Auto,) * 6), causal=causal)
        query, key = (
            jax.ShapeDtypeStruct((sizes["batch"], sizes["seq_len"], heads, 8), jnp.float32)
            for heads in (sizes["heads"], sizes["kv_heads"])
        )
        try:
            check_arrays(
                *(query, key, key),
                degrees=attention.degrees,
                layout=attention.layout,
                mask=attention.resolved_mask,
            )
        except ValueError:
            continue
        taken.append(degrees)
    assert 0 < len(taken) < 56
    assert legal_degrees(8, roles=ROLES, causal=causal, **sizes) == taken


def test_refusal_is_the_message_of_attention():
    sizes = {"batch": 1, "seq_len": 24, "heads": 4, "kv_heads": 4}
    assert refusal(st.Degrees(ring=8), **sizes | {"seq_len": 32}) is None
    assert refusal(st.Degrees(ring=8), **sizes) is None
    said = str(refusal(st.Degrees(ring=8), layout="zigzag", **sizes))
    assert "must be divisible by 2 * sequence degree" in said
    with refused(InputError, "layout must"):
        refusal(st.Degrees(ring=8), layout="zig", **sizes)


@pytest.mark.parametrize("causal", [True, False])
def test_group_1_has_the_fewest_bytes_forward_without_head(causal):
    """What the scheme table of README and `Degrees` says."""
    for devices in (2, 6, 8, 16, 36, 64):
        for kv_heads in (2, 8, 32):
            sizes = dict(batch=1, seq_len=4 * devices, heads=32, kv_heads=kv_heads, head_dim=128)
            received = {
                degrees: st.communication(degrees, causal=causal, **sizes).forward.received_bytes
                for degrees in all_degrees(devices, given={"head": 1})
            }
            fewest = min(received.values())
            assert any(x.group == 1 and n == fewest for x, n in received.items())

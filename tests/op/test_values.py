"""Numbers of NumPy in public arguments, and values that are none."""

import jax
import numpy as np
import pytest

import startrail_jax as st
from refusals import refused
from startrail_jax import masks
from startrail_jax.errors import InputError
from startrail_jax.tokens.documents import DocumentCost

pytestmark = pytest.mark.usefixtures("unchecked")
MESH = jax.sharding.AbstractMesh((2,), ("ring",))


def attention(**options):
    seen = {} if {"window", "causal"} & options.keys() else {"causal": True}
    return st.Attention(MESH, **seen, **options)


@pytest.mark.parametrize(
    ("make", "name", "given", "usual"),
    [
        (attention, "window", np.int64(4), 4),
        (attention, "causal", np.bool_(False), False),
        (attention, "scale", np.float32(0.5), 0.5),
        (attention, "scale", 1, 1.0),
        (attention, "softcap", np.float32(50), 50.0),
        (attention, "padding_id", np.uint8(7), 7),
        (attention, "head_chunks", np.int64(1), 1),
        (attention, "inner", np.int32(2), 2),
        (attention, "keep_gathered", np.bool_(True), True),
        (lambda **x: masks.Window(right=0, **x), "left", np.int64(4), 4),
        (masks.Chunked, "size", np.int16(4), 4),
        (masks.BlockCausal, "size", np.int64(4), 4),
        (masks.Prefix, "length", np.int64(4), 4),
        (masks.Sinks, "count", np.int64(4), 4),
        (st.Degrees, "ring", np.int64(2), 2),
        (lambda **x: st.Layout("zigzag", **x), "degree", np.int64(2), 2),
    ],
)
def test_numbers_of_numpy_are_those_of_python(make, name, given, usual):
    found, expected = make(**{name: given}), make(**{name: usual})
    assert found == expected
    assert hash(found) == hash(expected)
    assert type(getattr(found, name)) is type(usual)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        *[(attention, {"window": x}) for x in (0, -1, 4.0, True, "4", np.float32(4))],
        *[(attention, {"causal": x}) for x in ("yes", 1, 0.0)],
        *[(attention, {"scale": x}) for x in ("0.5", np.nan, np.inf, True, 1j)],
        *[(attention, {"softcap": x}) for x in ("5", np.nan, np.inf, -2.0, 0, True)],
        *[(attention, {"head_chunks": x}) for x in (1.0, True, 0, -1, "2")],
        *[(attention, {"padding_id": x}) for x in (1.0, False, 2**40)],
        *[(attention, {"keep_gathered": x}) for x in ("no", 2)],
        *[(masks.Chunked, {"size": x}) for x in (4.0, True)],
        *[(lambda **x: st.Layout("zigzag", **x), {"degree": x}) for x in (0, 2.0, "2")],
    ],
)
def test_other_values_are_refused_by_name(make, given):
    with refused(InputError, **given):
        make(**given)


def test_parts_take_numbers_of_numpy():
    plain = st.parts([3, 1], 8, share=4, degrees=[1, 2], cost=DocumentCost())
    found = st.parts([3, 1], np.int64(8), share=np.int32(4), degrees=np.array([1, 2]))
    for ours, theirs in zip(found, plain, strict=True):
        assert str(ours) == str(theirs)

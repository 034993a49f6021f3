"""One device's share of the sizes of an attention, and its bytes."""

import jax.numpy as jnp
import numpy as np
import pytest

import startrail_jax as st
from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.rings.sizes import Sizes, dtype_name

pytestmark = pytest.mark.quick

WHOLE = Sizes(
    batch=6,
    query_tokens=48,
    key_tokens=96,
    heads=24,
    kv_heads=12,
    head_dim=5,
    value_head_dim=7,
    dtype="bfloat16",
    packed=True,
)


def test_share_trades_tokens_for_heads():
    share = WHOLE.share(st.Degrees(data=3, group=2, ring=4, head=2, tensor=3))
    sizes = (share.batch, share.query_tokens, share.key_tokens, share.heads, share.kv_heads)
    assert sizes == (2, 48 // 8, 96 // 8, 24 // 6, 12 // 6)
    assert (share.head_dim, share.value_head_dim, share.packed) == (5, 7, True)


def test_share_copies_key_heads_that_are_fewer_than_its_parts():
    assert WHOLE.share(st.Degrees(head=12, tensor=2)).kv_heads == 1


def test_bytes_are_those_of_the_arrays():
    query = np.zeros((6, 48, 24, 5), jnp.bfloat16)
    key, value = (np.zeros((6, 96, 12, n), jnp.bfloat16) for n in (5, 7))
    assert Sizes.of(query, key, value, packed=True) == WHOLE
    assert WHOLE.query_bytes == query.nbytes
    assert WHOLE.in_dtype(WHOLE.query_bytes, "float32") == query.astype("float32").nbytes
    assert WHOLE.key_value_bytes == key.nbytes + value.nbytes
    assert WHOLE.out_bytes == 6 * 48 * 24 * 7 * 2
    assert WHOLE.lse_bytes == 6 * 48 * 24 * 4
    assert (WHOLE.query_id_bytes, WHOLE.key_id_bytes) == (6 * 48 * 4, 6 * 96 * 4)


def test_dtypes_are_read_from_names_and_types():
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype("bfloat16")):
        assert dtype_name(dtype) == "bfloat16"
    with refused(InputError, dtype="spam"):
        dtype_name("spam")

"""`shard` and `unshard`: from host arrays in natural order to the devices and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import startrail_jax as st

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("unchecked")]

DEGREES = st.Degrees(data=2, ring=2, tensor=2)


def attention(degrees=DEGREES, axis_type="auto", **options):
    mesh = st.make_mesh(degrees, axis_type, jax.devices()[: degrees.num_devices])
    return st.Attention(mesh, **options)


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_shard_orders_and_places_and_unshard_undoes_it(axis_type, layout):
    ours = attention(axis_type=axis_type, layout=layout)
    ids = np.arange(2 * 13).reshape(2, 13)
    tokens, targets = ours.shard(ids[:, :-1], ids[:, 1:])
    assert tokens.sharding == jax.NamedSharding(ours.mesh, ours.sequence_spec)
    positions = ours.layout.positions(12)
    np.testing.assert_array_equal(tokens, ids[:, positions])
    np.testing.assert_array_equal(targets, ids[:, positions + 1])
    found = ours.unshard(tokens, targets)
    np.testing.assert_array_equal(found, (ids[:, :-1], ids[:, 1:]))


def test_shard_of_heads_splits_them_over_tensor():
    ours = attention()
    query, key = ours.shard(np.zeros((2, 8, 4, 3), "f4"), np.zeros((2, 8, 1, 3), "f4"))
    assert query.sharding.spec == P("data", "ring", "tensor", None)
    assert key.sharding.spec == P("data", "ring", None, None)


def test_shard_takes_trees_and_arrays_of_jax():
    ours = attention()
    batch = {"tokens": jnp.arange(16).reshape(2, 8), "weights": np.ones((2, 8), np.float16)}
    sharded = ours.shard(batch)
    assert sharded["weights"].dtype == jnp.float16
    np.testing.assert_array_equal(ours.unshard(sharded)["tokens"], batch["tokens"])


def test_results_come_back_in_natural_order():
    ours, plain = attention(), attention(st.Degrees())
    x = np.random.default_rng(0).normal(size=(2, 8, 4, 3)).astype("f4")
    query = ours.shard(x)
    out, lse = ours(query, query, query, return_lse=True)
    expected, expected_lse = plain(x, x, x, return_lse=True)
    np.testing.assert_allclose(ours.unshard(out), expected, atol=1e-6)
    np.testing.assert_allclose(ours.unshard(lse, axis=2), expected_lse, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(8), r"\[batch, seq, \.\.\.\]; got one of shape \[8\].*x\[None\]"),
        (np.zeros((3, 8)), r"got batch=3, data=2\. Pad"),
        (np.zeros((2, 9)), r"9, degree=2\. Pad to 12.*shift on the host.*attention\.shard\(ids"),
    ],
)
def test_array_that_cannot_be_sharded_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        attention().shard(x)


def test_what_is_sharded_already_is_refused():
    ours = attention()
    with pytest.raises(ValueError, match="host or unsharded array"):
        ours.shard(ours.shard(np.zeros((2, 8))))


@pytest.mark.parametrize("method", ["shard", "unshard"])
def test_traced_array_is_refused(method):
    ours = attention()
    with pytest.raises(ValueError, match=rf"{method} needs arrays that hold.*outside of jit"):
        jax.jit(getattr(ours, method))(np.zeros((2, 8)))


def test_shard_on_an_abstract_mesh_is_refused():
    ours = st.Attention(attention().mesh.abstract_mesh)
    with pytest.raises(ValueError, match="AbstractMesh"):
        ours.shard(np.zeros((2, 8)))

"""`shard` and `unshard`: from host arrays in natural order to the devices and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from attention_cases import make_attention
from refusals import refused
from startrail_jax.errors import InputError

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("unchecked")]

DEGREES = st.Degrees(data=2, ring=2, tensor=2)


def attention(degrees=DEGREES, axis_type="auto", **options):
    return make_attention(degrees, axis_type, **{"layout": "zigzag", **options})


def on_mesh(ours, x):
    return jax.device_put(x, jax.NamedSharding(ours.mesh, P()))


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.slow_except_every(2)
def test_sequences_of_any_length_are_filled_up_and_cut_again(causal):
    ours = attention(causal=causal)
    plain = attention(st.Degrees(), causal=causal, layout="contiguous")
    x = np.random.default_rng(0).normal(size=(2, 11, 4, 3)).astype("f4")
    query, key, ids = ours.pad(x, x[:, :, ::2])
    assert query.shape == (2, 12, 4, 3)
    np.testing.assert_array_equal(ours.unshard(ids)[0], [0] * 11 + [-1])
    out, lse = ours(query, key, key, segment_ids=ids, return_lse=True)
    expected, expected_lse = plain(x, x[:, :, ::2], x[:, :, ::2], return_lse=True)
    np.testing.assert_allclose(ours.unpad(out, seq_len=11), expected, atol=1e-6)
    np.testing.assert_allclose(ours.unpad(lse, seq_len=11, axis=2), expected_lse, atol=1e-6)


def test_padding_keeps_documents_and_marks_nothing_where_nothing_is_filled_up():
    ours = attention()
    documents = np.array([[0, 0, 1, 1, 1]] * 2)
    tokens, ids = ours.pad({"tokens": documents + 7}, segment_ids=documents)
    np.testing.assert_array_equal(ours.unshard(ids)[1], [0, 0, 1, 1, 1, -1, -1, -1])
    np.testing.assert_array_equal(ours.unpad(tokens, seq_len=5)["tokens"], documents + 7)
    assert ours.pad(np.zeros((2, 8)))[1] is None
    assert ours.pad(np.zeros((2, 8)), segment_ids=np.zeros((2, 8), int))[1].shape == (2, 8)


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.slow_except_every(2)
def test_of_queries_and_keys_only_one_side_may_need_padding(axis_type):
    ours = attention(causal=False, axis_type=axis_type)
    plain = attention(st.Degrees(), causal=False)
    x = np.random.default_rng(0).normal(size=(2, 8, 2, 3)).astype("f4")
    (query, of_query), (key, of_key) = ours.pad(x), ours.pad(x[:, :5])
    assert of_query is None
    out = ours(query, key, key, segment_ids=(of_query, of_key))
    expected = plain(x, x[:, :5], x[:, :5])
    np.testing.assert_allclose(ours.unpad(out, seq_len=8), expected, atol=1e-6)
    whole = ours(query, query, query, segment_ids=(None, None))
    np.testing.assert_array_equal(whole, ours(query, query, query))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int64])
def test_padding_is_minus_one_beside_ids_of_any_integers(kind):
    ours = attention(causal=False)
    documents = np.array([[254, 254, 255]] * 2, kind)
    _, ids = ours.pad(np.zeros((2, 3)), segment_ids=documents)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ours.unshard(ids)[0], [254, 254, 255, -1])


def test_a_token_axis_may_be_counted_from_the_end():
    ours = attention()
    lse = on_mesh(ours, np.arange(2 * 3 * 8).reshape(2, 3, 8))
    found = ours.unpad(lse, seq_len=6, axis=-1)
    np.testing.assert_array_equal(found, ours.unpad(lse, seq_len=6, axis=2))
    assert found.shape == (2, 3, 6)


def test_a_bias_is_ordered_along_queries_and_keys():
    ours = attention()
    bias = np.random.default_rng(0).normal(size=(1, 4, 8, 8)).astype("f4")
    placed = ours.shard_bias(bias)
    assert placed.sharding == jax.NamedSharding(ours.mesh, P(None, "tensor", "ring", None))
    order = ours.layout.positions(8)
    np.testing.assert_array_equal(placed, bias[:, :, order][..., order])


@pytest.mark.parametrize(
    ("method", "shape", "named"),
    [
        ("shard_bias", (4, 8, 8), "kv_seq"),
        ("shard_bias", (3, 1, 8, 8), "batch=3"),
        ("shard_bias", (1, 3, 8, 8), "heads"),
        ("shard_bias", (1, 1, 8, 9), "degree=2"),
        ("shard", (8,), "seq, ...]; got one of shape"),
        ("shard", (3, 8), "batch=3"),
        ("shard", (2, 9), "degree=2"),
    ],
)
def test_array_that_cannot_be_sharded_is_refused(method, shape, named):
    with refused(InputError, named):
        getattr(attention(), method)(np.zeros(shape))


def test_what_cannot_be_filled_up_or_cut_raises():
    ours = attention()
    with refused(InputError, "segment_ids of pad must"):
        ours.pad(np.zeros((2, 5)), segment_ids=(np.zeros((2, 5), int),) * 2)
    with refused(InputError, "bool"):
        ours.pad(np.zeros((2, 5)), segment_ids=np.zeros((2, 5), bool))
    for method in (ours.unshard, functools.partial(ours.unpad, seq_len=8)):
        with refused(InputError, axis=1):
            method(on_mesh(ours, np.zeros(8)))
    with refused(InputError, "(2, 7)"):
        ours.pad(np.zeros((2, 5)), np.zeros((2, 7)))
    with refused(InputError, "got none"):
        ours.pad()
    with refused(InputError, axis=1):
        ours.unpad(np.zeros((2, 12)), seq_len=5)
    with refused(InputError, "outside of jit"):
        jax.eval_shape(ours.pad, np.zeros((2, 8)))


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


def test_what_is_sharded_already_is_refused():
    ours = attention()
    x = np.zeros((2, 8, 4, 4))
    for method in (ours.shard, ours.pad, ours.shard_bias):
        with refused(InputError, "Reordering tokens needs"):
            method(ours.shard(x))
    with refused(InputError, "Reordering tokens needs"):
        ours.pad(x, segment_ids=ours.shard(np.zeros((2, 8), int)))


@pytest.mark.parametrize("degrees", [DEGREES, st.Degrees(ring=2, team=2), st.Degrees()])
def test_what_was_brought_back_already_is_refused(degrees):
    """A cell of a notebook that runs twice must not permute twice."""
    ours = attention(degrees)
    out = ours.shard(np.arange(16).reshape(2, 8))
    result = ours.unshard(out)
    for x in (result, jnp.asarray(result))[: ours.mesh.size]:
        for method in (ours.unshard, functools.partial(ours.unpad, seq_len=8)):
            with refused(InputError, "layout.unpermute"):
                method(x)
    with refused(InputError, "unshard needs"):
        ours.unshard({"out": out, "result": result})
    np.testing.assert_array_equal(ours.unshard(on_mesh(ours, jax.device_get(out))), result)


@pytest.mark.parametrize("method", ["shard", "unshard", "shard_bias"])
def test_traced_array_is_refused(method):
    ours = attention()
    with pytest.raises(ValueError, match=rf"{method} needs arrays that hold.*outside of jit"):
        jax.jit(getattr(ours, method))(np.zeros((2, 8)))


def test_shard_on_an_abstract_mesh_is_refused():
    ours = st.Attention(attention().mesh.abstract_mesh, causal=True)
    with refused(InputError, "AbstractMesh"):
        ours.shard(np.zeros((2, 8)))
    with refused(InputError, "shard_bias"):
        ours.shard_bias(np.zeros((1, 1, 8, 8)))

"""Bad input: what must hold, what was given, by name and value, and the way out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from attention_cases import Case
from refusals import refused
from startrail_jax.errors import InputError, ShapeWarning, UnsupportedError
from startrail_jax.testing import assert_exact

# The errors of the package, not of the type checker that tests run it under.
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("unchecked")]

STARTRAIL = st.Degrees.startrail(8, c=2)
BATCH, SEQ_LEN, HEADS, HEAD_DIM = 2, 32, 4, 5


def attention(degrees=STARTRAIL, *, axis_type="auto", mask="causal", **options):
    mesh = Case(degrees=degrees, axis_type=axis_type).mesh
    return st.Attention(mesh, causal=mask == "causal", **options)


def array(batch=BATCH, seq_len=SEQ_LEN, heads=HEADS, head_dim=HEAD_DIM, dtype="float32"):
    return jnp.zeros((batch, seq_len, heads, head_dim), dtype)


@pytest.fixture
def refuses():
    """A call, also under jit, that raises an error which names these words."""

    def check(named, attention, query=None, key=None, value=None, error=InputError, **options):
        query = array() if query is None else query
        key = query if key is None else key
        value = key if value is None else value
        with refused(error, named):
            attention(query, key, value, **options)
        with refused(error, named):
            jax.jit(lambda q, k, v: attention(q, k, v, **options))(query, key, value)

    return check


# Options of an instance ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    ["backend", "backward", "published", "gradient_dtype", "keep_gathered", "exchange"],
)
def test_unknown_option_is_refused(option):
    with refused(InputError, **{option: "best"}):
        attention(**{option: "best"})


@pytest.mark.parametrize("inner", [0, 3, 2.0])
def test_inner_cycles_must_make_up_the_ring(inner):
    with refused(InputError, "ring=2", inner=inner):
        attention(inner=inner)


def test_unknown_layout_is_refused():
    with refused(InputError, "layout", "got 'spiral'"):
        attention(layout="spiral")


def test_layout_of_another_degree_is_refused():
    with refused(InputError, "layout.degree=4, sequence degree=8"):
        attention(layout=st.Layout("zigzag", 4))


def test_window_without_causal_is_refused():
    with refused(InputError, window=3, causal=False):
        attention(mask="full", window=3)


@pytest.mark.parametrize("window", [0, -1, 2.5, True])
def test_window_below_one_is_refused(window):
    with refused(InputError, window=window):
        attention(window=window)


@pytest.mark.parametrize("degrees", [st.Degrees(team=2, ring=4), st.Degrees(group=2, ring=4)])
def test_schedule_of_the_paper_needs_equal_teams_and_groups(degrees):
    with refused(InputError, team=degrees.team, group=degrees.group):
        attention(degrees, published=True)


# Shapes --------------------------------------------------------------------------------------


def test_arrays_of_three_dimensions_are_refused(refuses):
    x = jnp.zeros((SEQ_LEN, HEADS, HEAD_DIM))
    refuses("query (32, 4, 5)", attention(), x)


def test_other_batch_is_refused(refuses):
    refuses("query (2, 32, 4, 5), key (3, 32, 4, 5)", attention(), array(), array(batch=3))


def test_other_length_of_values_is_refused(refuses):
    refuses("key (2, 32, 4, 5), value (2, 48, 4, 5)", attention(), value=array(seq_len=48))


def test_other_head_count_of_values_is_refused(refuses):
    refuses("value (2, 32, 2, 5)", attention(), value=array(heads=2))


def test_other_head_dim_of_keys_is_refused(refuses):
    refuses("key (2, 32, 4, 7)", attention(), key=array(head_dim=7))


@pytest.mark.parametrize("empty", ["batch", "seq_len", "heads", "head_dim"])
def test_empty_dimension_is_refused(empty, refuses):
    given = array(**{empty: 0})
    refuses(str(given.shape), attention(), given)


@pytest.mark.filterwarnings("error::startrail_jax.errors.ShapeWarning")
def test_heads_where_tokens_belong_are_warned_of():
    """Arrays [batch, heads, seq, head_dim] run where the numbers happen to divide."""
    ours = attention(st.Degrees(ring=4), mask="full")
    swapped = np.zeros((1, 8, 16, 4), "f4")
    with pytest.warns(ShapeWarning, match=r"query \[1, 8, 16, 4\].*swapaxes\(1, 2\)"):
        ours(swapped, swapped, swapped)
    right = swapped.swapaxes(1, 2)
    # As many heads as tokens, and short queries of long keys, are what they seem to be.
    for query, key in (
        (right, right),
        (right[:, :8], right[:, :8]),
        (swapped, right[:, :, :4]),
        (swapped, np.zeros((1, 32, 16, 4), "f4")),
    ):
        jax.eval_shape(ours, query, key, key)


@pytest.mark.parametrize(("layout", "seq_len"), [("zigzag", 40), (None, 36)])
def test_length_that_does_not_divide_is_refused(layout, seq_len, refuses):
    refuses(f"seq_len={seq_len}, degree=8", attention(layout=layout), array(seq_len=seq_len))


def test_key_length_that_does_not_divide_is_refused(refuses):
    bias = np.zeros((1, 1, 32, 36), "f4")  # Without one, the keys are filled up.
    refuses("key seq_len=36, degree=8", attention(mask="full"), key=array(seq_len=36), bias=bias)


def test_causal_of_two_lengths_is_refused(refuses):
    refuses("32 queries and 48 keys", attention(), key=array(seq_len=48))


def test_batch_that_does_not_divide_is_refused(refuses):
    degrees = st.Degrees(data=2, ring=2)
    refuses("batch=3, data=2", attention(degrees), array(batch=3))


# Heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "given"),
    [
        (st.Degrees.ulysses(8), "heads=4, kv_heads=4, head=8, tensor=1"),
        (st.Degrees(head=2, tensor=4), "head=2, tensor=4"),
        (st.Degrees(ring=2, tensor=3), "head=1, tensor=3"),
    ],
)
def test_heads_that_do_not_divide_are_refused(degrees, given, refuses):
    refuses(given, attention(degrees))


def test_query_spec_of_heads_that_do_not_divide_is_refused():
    with refused(InputError, "heads=4"):
        attention(st.Degrees.ulysses(8)).query_spec(4)


def test_heads_that_are_no_multiple_of_key_heads_are_refused(refuses):
    refuses("heads=4, kv_heads=3", attention(), key=array(heads=3))


def test_key_heads_that_neither_divide_nor_are_divided_are_refused(refuses):
    refuses(
        "heads=12, kv_heads=6, head=4, tensor=1",
        attention(st.Degrees(head=4)),
        array(heads=12),
        array(heads=6),
    )


# Dtypes --------------------------------------------------------------------------------------


def test_two_dtypes_are_refused(refuses):
    refuses("float32, bfloat16, bfloat16", attention(), key=array(dtype="bfloat16"))


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn", "complex64"])
def test_dtype_that_is_not_served_is_refused(dtype, refuses):
    refuses(f"got {dtype}", attention(), array(dtype=dtype))


# Segment ids ---------------------------------------------------------------------------------


def ids(seq_len=SEQ_LEN, dtype="int32"):
    return jnp.zeros((BATCH, seq_len), dtype)


@pytest.mark.parametrize(
    ("segment_ids", "message"),
    [
        (ids(16), "= [2, 32]; got int32 [2, 16]"),
        (ids(dtype="float32"), "got float32 [2, 32]"),
        (ids(dtype="bool"), "got bool [2, 32]"),
        ((ids(), ids(16)), "= [2, 32]; got int32 [2, 16]"),
        ((ids(), ids(), ids()), "got 3"),
        (jnp.zeros((SEQ_LEN,), "int32"), "got int32 [32]"),
    ],
)
def test_segment_ids_that_do_not_fit_are_refused(segment_ids, message, refuses):
    refuses(message, attention(), segment_ids=segment_ids)


def test_one_array_of_segment_ids_for_two_lengths_is_refused(refuses):
    refuses(
        "got 1 for 32 queries and 48 keys",
        attention(mask="full"),
        key=array(seq_len=48),
        segment_ids=ids(),
    )


def test_list_of_segment_ids_is_refused(refuses):
    """It must not be read as one array [2, batch, seq]."""
    refuses("segment_ids", attention(), segment_ids=[ids(), ids()])


# Shardings -----------------------------------------------------------------------------------


def put(attention, x, *spec):
    return jax.device_put(x, NamedSharding(attention.mesh, P(*spec)))


@pytest.mark.parametrize("wrong", ["query", "key", "value", "segment_ids"])
def test_wrong_sharding_on_an_explicit_mesh_is_refused(wrong):
    attend = attention(st.Degrees(ring=2, team=2), axis_type="explicit")
    arrays = {
        name: put(attend, array(), None, ("ring", "team")) for name in ("query", "key", "value")
    }
    arrays["segment_ids"] = put(attend, ids(), None, ("ring", "team"))
    arrays[wrong] = put(attend, np.asarray(arrays[wrong]), None, "ring")
    arguments = [arrays[name] for name in ("query", "key", "value")]
    with refused(InputError, f"{wrong} must", "('ring', 'team')"):
        attend(*arguments, segment_ids=arrays["segment_ids"])
    with refused(InputError, f"{wrong} must", "('ring', 'team')"):
        jax.jit(attend)(*arguments, segment_ids=arrays["segment_ids"])


def test_array_of_another_mesh_is_refused():
    attend = attention(st.Degrees(ring=4), axis_type="explicit")
    other = st.make_mesh(st.Degrees(ring=2), devices=jax.devices()[:2])
    x = jax.device_put(array(), NamedSharding(other, P(None, "ring")))
    with refused(InputError, "query"):
        attend(x, x, x)


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("query", array(head_dim=4), "attention.shard,"),
        ("bias", jnp.zeros((1, 1, 32, 32)), "attention.shard_bias,"),
        ("slopes", jnp.zeros(4), str(P())),
        ("prefix_lengths", jnp.zeros(2, int), str(P(None))),
        ("dropout_rng", jax.random.key(0), str(P())),
    ],
)
def test_the_way_to_the_mesh_is_that_of_the_array(name, value, way_out):
    mask = st.masks.Prefix() if name == "prefix_lengths" else st.masks.Causal()
    attend = st.Attention(attention(st.Degrees(ring=4)).mesh, mask=mask)
    arrays = dict.fromkeys(("query", "key", "value"), attend.shard(np.zeros((2, 32, 4, 4), "f4")))
    rate = dict(dropout_rate=0.1) if name == "dropout_rng" else {}
    arrays[name] = jax.device_put(value, jax.devices()[0])
    with refused(InputError, f"{name} must be on the 4 devices", "on 1", way_out):
        attend(**arrays, **rate)


@pytest.mark.parametrize("name", ["sinks", "slopes"])
def test_numbers_of_each_head_are_replicated_on_an_explicit_mesh(name):
    attend = attention(st.Degrees(ring=2, tensor=2), axis_type="explicit")
    x = attend.shard(np.zeros((2, 32, 4, 4), "f4"))
    numbers = put(attend, jnp.zeros(4), "tensor")
    with refused(InputError, name, f"got {P('tensor')}"):
        attend(x, x, x, **{name: numbers})


def test_permuted_order_of_axes_is_refused():
    """The same axes in another order put the shards on other devices."""
    attend = attention(st.Degrees(ring=2, team=2), axis_type="explicit")
    x = put(attend, array(), None, ("team", "ring"))
    with refused(InputError, "query", "('team', 'ring')"):
        attend(x, x, x)


def test_permute_refuses_an_array_that_is_sharded():
    attend = attention(st.Degrees(ring=2))
    with refused(InputError, "got one sharded as"):
        attend.layout.permute(put(attend, array(), None, "ring"))


# Meshes --------------------------------------------------------------------------------------


def test_degree_product_that_misses_the_devices_is_refused():
    with refused(InputError, "= 8 for 6 devices"):
        st.make_mesh(STARTRAIL, devices=jax.devices()[:6])


def test_c_whose_square_does_not_divide_is_refused():
    with refused(InputError, "sequence degree=8", c=3):
        st.Degrees.startrail(8, c=3)


# Inside a shard_map of the user's own -----------------------------------------------------------


@pytest.mark.parametrize(
    ("key_len", "ids", "message"),
    [
        (6, "query", "got only one"),
        (4, None, "got 12 queries and 8 keys"),
        (5, "none", "got 12 queries and 10 keys"),
    ],
)
def test_local_refuses_shards_that_do_not_fit(key_len, ids, message):
    op = attention(st.Degrees(ring=2))
    query, key = jnp.zeros((1, 6, 2, 4)), jnp.zeros((1, key_len, 2, 4))
    query_ids = jnp.zeros((1, 6), jnp.int32) if ids == "query" else None
    with refused(InputError, message):
        op.local(query, key, key, query_ids)


def test_local_refuses_a_shard_of_odd_length_under_zigzag():
    op = attention(st.Degrees(ring=2), layout="zigzag")
    x = jnp.zeros((1, 33, 2, 4))
    with refused(InputError, seq_len=66):
        op.local(x, x, x)


# Segment ids that would change when cut to 32 bits -----------------------------------------------


@pytest.mark.parametrize("ids", [[[2**32 + 1, 1]], [[2**31, 1]], [[0.5, 1.0]], [[True, False]]])
def test_segment_ids_that_do_not_fit_int32_raise(ids):
    op = attention(st.Degrees())
    x = jnp.zeros((1, 2, 1, 4))
    with refused(InputError, "segment_ids"):
        op(x, x, x, segment_ids=np.array(ids))


def test_segment_ids_of_64_bits_that_fit_are_taken():
    op = attention(st.Degrees())
    x = jnp.ones((1, 2, 1, 4))
    out = op(x, x, x, segment_ids=np.array([[0, -1]], np.int64))
    np.testing.assert_array_equal(out[0, :, 0, 0], [1, 0])


# Scores ----------------------------------------------------------------------------------------

RNG = jax.random.key(0)
SCORES = {
    "slopes": (dict(slopes=jnp.zeros(3)), "slopes must be floats [heads] = [4]; got float32 [3]"),
    "bias": (
        dict(bias=jnp.zeros((2, 1, 32, 31))),
        "[1 or 2, 1 or 4, 32, 32]; got float32 [2, 1, 32, 31]",
    ),
    "integer bias": (
        dict(bias=jnp.zeros((2, 1, 32, 32), int)),
        "got int32",
    ),
    "rate of 1": (dict(dropout_rng=RNG, dropout_rate=1.0), "dropout_rate=1.0"),
    "no rate": (dict(dropout_rate=None), "dropout_rate=None"),
    "rate of text": (dict(dropout_rate="0.1"), "dropout_rate='0.1'"),
    "negative rate": (dict(dropout_rng=RNG, dropout_rate=-0.1), "dropout_rate=-0.1"),
    "no key": (dict(dropout_rate=0.1), "dropout_rng=None"),
    "no real key": (dict(dropout_rng="seed", dropout_rate=0.1), "got 'seed'"),
    "prefixes": (dict(prefix_lengths=jnp.zeros(2, int)), "got prefix_lengths and mask=Causal()"),
}


@pytest.mark.parametrize(("options", "message"), SCORES.values(), ids=SCORES)
def test_scores_of_nonsense_are_refused(options, message, refuses):
    refuses(message, attention(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "got no prefix_lengths and mask=Prefix"),
        (dict(prefix_lengths=jnp.zeros(3, int)), "[batch] = [2]; got int32 [3]"),
        (dict(prefix_lengths=jnp.zeros(2)), "[batch] = [2]; got float32 [2]"),
        (dict(prefix_lengths=jnp.array([0, -1])), "got -1 for row 1"),
        (dict(prefix_lengths=[33, 5]), "got 33 for row 0"),
        (dict(prefix_lengths=np.array([7, 2**40])), "got 1099511627776 for row 1"),
    ],
)
def test_prefixes_of_nonsense_are_refused(options, message, refuses):
    refuses(message, st.Attention(attention().mesh, mask=st.masks.Prefix()), **options)


def test_traced_prefixes_count_as_if_clipped():
    attend = st.Attention(attention().mesh, mask=st.masks.Prefix())
    x = np.random.default_rng(0).normal(size=(2, 32, 4, 4)).astype("f4")

    @jax.jit
    def found(lengths):
        return attend(x, x, x, prefix_lengths=lengths)

    np.testing.assert_array_equal(found(np.array([-5, 99])), found(np.array([0, 32])))


def test_scores_are_named_in_a_tuple():
    with refused(InputError, scores="bias"):
        attention().explain(seq_len=32, heads=4, head_dim=5, scores="bias")


def test_what_no_scheme_can_serve_is_refused(refuses):
    bias = dict(bias=jnp.zeros((1, 1, 32, 32)))
    message = "got backward='query' and ring=2"
    ours = attention(backward="query")
    refuses(message, ours, error=UnsupportedError, **bias)
    with refused(UnsupportedError, message):
        ours.explain(seq_len=32, heads=4, head_dim=5, scores=("bias",))
    message = "got 32 queries and 64 keys"
    key, full = array(seq_len=64), attention(mask="full")
    refuses(message, full, key=key, error=UnsupportedError, slopes=jnp.zeros(4))
    with refused(UnsupportedError, message):
        full.explain(seq_len=32, kv_seq_len=64, heads=4, head_dim=5, scores=("slopes",))


def keyed(axes, backward="query"):
    """The types of the outputs of `local` where indices along mesh axes are folded into the key."""
    ours = attention(dataclasses.replace(STARTRAIL, data=2), backward=backward)
    spec = ours.query_spec(HEADS)

    def local(x):
        rng = RNG
        for name in axes:
            rng = jax.random.fold_in(rng, jax.lax.axis_index(name))
        return ours.local(x, x, x, dropout_rng=rng, dropout_rate=0.1)[0]

    return jax.eval_shape(
        jax.shard_map(local, mesh=ours.mesh, in_specs=spec, out_specs=spec), array()
    )


@pytest.mark.parametrize("backward", ["query", "kv"])
def test_devices_of_a_sequence_share_a_key_of_dropout(backward):
    """Each would drop entries of its own, and the backward pass others than the forward pass."""
    with refused(InputError, "got one that varies over ['ring', 'team']"):
        keyed(("data", "team", "ring"), backward)
    # Other rows may have another key.
    assert keyed(("data",), backward).shape == array().shape


def test_a_dropout_rate_is_no_array():
    ours, x = attention(), array()
    run = jax.jit(lambda x, rate: ours(x, x, x, dropout_rng=RNG, dropout_rate=rate))
    with refused(UnsupportedError, "dropout_rate"):
        run(x, 0.1)


def test_who_cannot_be_given_prefixes_refuses_masks_that_need_them():
    mesh = attention(st.Degrees(ring=2)).mesh
    op = st.Attention(mesh, mask=st.masks.Prefix())
    x, positions = jnp.zeros((1, 4, 2, 4)), jnp.zeros((1, 4), jnp.int32)
    with refused(InputError, "got no prefix_lengths and mask=Prefix"):
        op.local(x, x, x)
    for name in ("slopes", "sinks"):
        with refused(InputError, f"{name} must be floats [heads] = [2]; got float32 [8]"):
            st.Attention(mesh).local(x, x, x, **{name: jnp.ones(8)})
    with pytest.raises(TypeError, match="slope_of_heads"):
        st.Attention(mesh).local(x, x, x, slope_of_heads=jnp.ones(2))
    with refused(InputError, "assert_exact", "got mask=Prefix"):
        assert_exact(op, seq_len=8, heads=2)
    causal = st.Attention(mesh, mask=st.masks.Prefix() & st.masks.Causal())
    with refused(InputError, "decode", "got mask=(Prefix"):
        causal.decode(x, x, x, positions)

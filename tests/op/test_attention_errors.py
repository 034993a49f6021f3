"""Bad input: what must hold, what was given, by name and value, and the way out."""

import dataclasses
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from attention_cases import Case
from refusals import refused
from startrail_jax.errors import InputError, ShapeWarning, UnsupportedError
from startrail_jax.testing import assert_exact

# The errors of the package, not of the type checker that tests run it under.
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("unchecked")]

D = st.Degrees
STARTRAIL = D.startrail(8, c=2)
BATCH, SEQ_LEN, HEADS, HEAD_DIM = 2, 32, 4, 5
FULL, PREFIX = {"causal": False}, {"mask": st.masks.Prefix(), "causal": None}
RNG = jax.random.key(0)


def attention(degrees=STARTRAIL, *, axis_type="auto", **options):
    mesh = Case(degrees=degrees, axis_type=axis_type).mesh
    return st.Attention(mesh, **{"causal": True, **options})


def array(batch=BATCH, seq_len=SEQ_LEN, heads=HEADS, head_dim=HEAD_DIM, dtype="float32"):
    return jnp.zeros((batch, seq_len, heads, head_dim), dtype)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(
            ({name: "best"}, f"{name}='best'")
            for name in ("backend", "backward", "published", "gradient_dtype", "keep_gathered")
        ),
        ({"exchange": "best"}, "exchange='best'"),
        *(({"inner": inner}, f"inner={inner}, ring=2") for inner in (0, 3, 2.0)),
        ({"layout": st.Layout("zigzag", 4)}, "layout.degree=4, sequence degree=8"),
        ({"window": 3, **FULL}, "window=3, causal=False"),
    ],
    ids=str,
)
def test_option_that_is_none_is_refused(options, named):
    with refused(InputError, named):
        attention(**options)


# Calls -----------------------------------------------------------------------------------------


def ids(seq_len=SEQ_LEN, dtype="int32"):
    return jnp.zeros((BATCH, seq_len), dtype)


def row(named, query=None, key=None, value=None, *, on=STARTRAIL, given=None, **options):
    """An attention, the arrays and other arguments of a call, and what the error names."""
    query = array() if query is None else query
    key = query if key is None else key
    value = key if value is None else value
    return named, on, options, (query, key, value), given or {}


OF_SHAPES = [
    row("query (32, 4, 5)", jnp.zeros((SEQ_LEN, HEADS, HEAD_DIM))),
    row("query (2, 32, 4, 5), key (3, 32, 4, 5)", key=array(batch=3)),
    row("key (2, 32, 4, 5), value (2, 48, 4, 5)", value=array(seq_len=48)),
    row("value (2, 32, 2, 5)", value=array(heads=2)),
    row("key (2, 32, 4, 7)", key=array(head_dim=7)),
    *(row(str(x.shape), x) for x in (array(0), array(2, 0), array(heads=0), array(head_dim=0))),
    row("seq_len=40, degree=8", array(seq_len=40), layout="zigzag"),
    row("seq_len=36, degree=8", array(seq_len=36)),
    # Without a bias, the keys are filled up.
    row(
        "key seq_len=36, degree=8",
        key=array(seq_len=36),
        given={"bias": np.zeros((1, 1, 32, 36), "f4")},
        **FULL,
    ),
    row("32 queries and 48 keys", key=array(seq_len=48)),
    row("batch=3, data=2", array(batch=3), on=D(data=2, ring=2)),
    # Heads.
    row("heads=4, kv_heads=4, head=8, tensor=1", on=D.ulysses(8)),
    row("head=2, tensor=4", on=D(head=2, tensor=4)),
    row("head=1, tensor=3", on=D(ring=2, tensor=3)),
    row("heads=4, kv_heads=3", key=array(heads=3)),
    row("heads=12, kv_heads=6, head=4", array(heads=12), array(heads=6), on=D(head=4)),
    # Dtypes.
    row("float32, bfloat16, bfloat16", key=array(dtype="bfloat16")),
    *(row(f"got {x}", array(dtype=x)) for x in ("int32", "float8_e4m3fn", "complex64")),
]
OF_SEGMENTS = [
    *(
        row(named, given={"segment_ids": given})
        for named, given in (
            ("= [2, 32]; got int32 [2, 16]", ids(16)),
            ("got float32 [2, 32]", ids(dtype="float32")),
            ("got bool [2, 32]", ids(dtype="bool")),
            ("= [2, 32]; got int32 [2, 16]", (ids(), ids(16))),
            ("got 3", (ids(), ids(), ids())),
            ("got int32 [32]", jnp.zeros((SEQ_LEN,), "int32")),
            # It must not be read as one array [2, batch, seq].
            ("segment_ids", [ids(), ids()]),
        )
    ),
    row(
        "got 1 for 32 queries and 48 keys",
        key=array(seq_len=48),
        given={"segment_ids": ids()},
        **FULL,
    ),
]
OF_SCORES = [
    row(named, given=given)
    for named, given in (
        ("slopes must be floats [heads] = [4]; got float32 [3]", dict(slopes=jnp.zeros(3))),
        ("[1 or 2, 1 or 4, 32, 32]; got float32 [2, 1, 32, 31]",
         dict(bias=jnp.zeros((2, 1, 32, 31)))),
        ("got int32", dict(bias=jnp.zeros((2, 1, 32, 32), int))),
        *(("sinks must be floats [heads] = [4]", dict(sinks=x))
          for x in (jnp.zeros(3), jnp.zeros((4, 1)), jnp.zeros(4, int))),
        ("dropout_rate=1.0", dict(dropout_rng=RNG, dropout_rate=1.0)),
        ("dropout_rate=None", dict(dropout_rate=None)),
        ("[1 or 2, 1 or 4, 32, 32]; got int32 [2, 32]. The fourth argument is a bias",
            dict(bias=np.zeros((2, 32), "i4"))),
        ("dropout_rate='0.1'", dict(dropout_rate="0.1")),
        ("dropout_rate=-0.1", dict(dropout_rng=RNG, dropout_rate=-0.1)),
        ("dropout_rng=None", dict(dropout_rate=0.1)),
        ("got 'seed'", dict(dropout_rng="seed", dropout_rate=0.1)),
        ("got prefix_lengths and mask=Causal()", dict(prefix_lengths=jnp.zeros(2, int))),
    )
]  # fmt: skip
OF_PREFIXES = [
    row("got no prefix_lengths and mask=Prefix", **PREFIX),
    *(
        row(named, given={"prefix_lengths": given}, **PREFIX)
        for named, given in (
            ("[batch] = [2]; got int32 [3]", jnp.zeros(3, int)),
            ("[batch] = [2]; got float32 [2]", jnp.zeros(2)),
            ("got -1 for row 1", jnp.array([0, -1])),
            ("got 33 for row 0", [33, 5]),
            ("got 1099511627776 for row 1", np.array([7, 2**40])),
        )
    ),
]
CALLS = [*OF_SHAPES, *OF_SEGMENTS, *OF_SCORES, *OF_PREFIXES]


def refuses(named, on, options, arrays, given, error=InputError):
    """By itself, and under jit."""
    ours = attention(on, **options)
    with refused(error, named):
        ours(*arrays, **given)
    with refused(error, named):
        jax.jit(lambda *x: ours(*x, **given))(*arrays)
    return ours


@pytest.mark.parametrize("call", CALLS, ids=[x[0] for x in CALLS])
def test_call_that_does_not_fit_is_refused(call):
    refuses(*call)


def test_what_no_scheme_can_serve_is_refused():
    """By `explain`, too."""
    bias = row(
        "got backward='query' and ring=2",
        given={"bias": jnp.zeros((1, 1, 32, 32))},
        backward="query",
    )
    slopes = row(
        "got 32 queries and 64 keys",
        key=array(seq_len=64),
        given={"slopes": jnp.zeros(4)},
        **FULL,
    )
    for call, keys in ((bias, 32), (slopes, 64)):
        ours = refuses(*call, error=UnsupportedError)
        sizes = dict(seq_len=32, kv_seq_len=keys, heads=4, head_dim=5)
        with refused(UnsupportedError, call[0]):
            ours.explain(**sizes, scores=tuple(call[-1]))
    with refused(InputError, scores="bias"):
        attention().explain(seq_len=32, heads=4, head_dim=5, scores="bias")


def test_query_spec_of_heads_that_do_not_divide_is_refused():
    with refused(InputError, "heads=4"):
        attention(D.ulysses(8)).query_spec(4)


@pytest.mark.filterwarnings("error::startrail_jax.errors.ShapeWarning")
def test_heads_where_tokens_belong_are_warned_of():
    """Arrays [batch, heads, seq, head_dim] run where the numbers happen to divide."""
    ours = attention(D(ring=4), **FULL)
    swapped = np.zeros((1, 8, 16, 4), "f4")
    with pytest.warns(ShapeWarning, match=r"query \[1, 8, 16, 4\].*swapaxes\(1, 2\)"):
        ours(swapped, swapped, swapped)
    right = swapped.swapaxes(1, 2)
    # The same of grouped heads, which have other "lengths", whatever error comes then.
    with suppress(InputError), pytest.warns(ShapeWarning, match=r"key \[1, 2, 16, 4\].*swapaxes"):
        attention(D(ring=2))(swapped, swapped[:, :2], swapped[:, :2])
    # As many heads as tokens, and short queries of long keys, are what they seem to be.
    for query, key in (
        (right, right),
        (right[:, :8], right[:, :8]),
        (swapped, right[:, :, :4]),
        (swapped, np.zeros((1, 32, 16, 4), "f4")),
    ):
        jax.eval_shape(ours, query, key, key)


# Shardings -----------------------------------------------------------------------------------


def put(attention, x, *spec):
    return jax.device_put(x, NamedSharding(attention.mesh, P(*spec)))


@pytest.mark.parametrize("axes", ["ring", ("team", "ring"), None])
@pytest.mark.parametrize("wrong", ["query", "key", "value", "segment_ids"])
def test_wrong_sharding_on_an_explicit_mesh_is_refused(wrong, axes):
    """Too few axes, the same ones in another order, and an array on no mesh."""
    attend = attention(D(ring=2, team=2), axis_type="explicit")
    arrays = dict.fromkeys(("query", "key", "value"), array()) | {"segment_ids": ids()}
    for name, x in arrays.items():
        if name != wrong or axes:
            arrays[name] = put(attend, x, None, axes if name == wrong else ("ring", "team"))
    for call in (attend, jax.jit(attend)):
        with refused(InputError, f"{wrong} must", "('ring', 'team')", str(axes or "device_put")):
            call(**arrays)


def test_array_of_another_mesh_is_refused():
    attend = attention(D(ring=4), axis_type="explicit")
    other = st.make_mesh(D(ring=2), devices=jax.devices()[:2])
    x = jax.device_put(array(), NamedSharding(other, P(None, "ring")))
    with refused(InputError, "query"):
        attend(x, x, x)


@pytest.mark.parametrize(
    ("name", "value", "spec"),
    [
        ("query", array(head_dim=4), P(None, "ring", None, None)),
        ("bias", jnp.zeros((1, 1, 32, 32)), P(None, None, "ring", None)),
        ("slopes", jnp.zeros(4), P()),
        ("prefix_lengths", jnp.zeros(2, int), P(None)),
        ("dropout_rng", RNG, P()),
    ],
)
def test_array_on_other_devices_is_refused_with_its_spec(name, value, spec):
    attend = attention(D(ring=4), **(PREFIX if name == "prefix_lengths" else {}))
    arrays = dict.fromkeys(("query", "key", "value"), attend.shard(np.zeros((2, 32, 4, 4), "f4")))
    rate = dict(dropout_rate=0.1) if name == "dropout_rng" else {}
    arrays[name] = jax.device_put(value, jax.devices()[0])
    with refused(InputError, f"{name} must be sharded as {spec} over the 4 devices", "on 1"):
        attend(**arrays, **rate)


@pytest.mark.parametrize("name", ["sinks", "slopes"])
def test_numbers_of_each_head_are_replicated_on_an_explicit_mesh(name):
    attend = attention(D(ring=2, tensor=2), axis_type="explicit")
    x = attend.shard(np.zeros((2, 32, 4, 4), "f4"))
    numbers = put(attend, jnp.zeros(4), "tensor")
    with refused(InputError, name, f"got {P('tensor')}"):
        attend(x, x, x, **{name: numbers})


# Inside a shard_map of the user's own -----------------------------------------------------------


def test_local_refuses_shards_that_do_not_fit():
    op, query, key = attention(D(ring=2)), jnp.zeros((1, 6, 2, 4)), jnp.zeros((1, 4, 2, 4))
    with refused(InputError, "got only one"):
        op.local(query, query, query, jnp.zeros((1, 6), jnp.int32))
    with refused(InputError, "got 12 queries and 8 keys"):
        op.local(query, key, key)
    odd = jnp.zeros((1, 33, 2, 4))
    with refused(InputError, seq_len=66):
        attention(D(ring=2), layout="zigzag").local(odd, odd, odd)


# Segment ids that would change when cut to 32 bits -----------------------------------------------


@pytest.mark.parametrize("ids", [[[2**32 + 1, 1]], [[2**31, 1]], [[0.5, 1.0]], [[True, False]]])
def test_segment_ids_that_do_not_fit_int32_raise(ids):
    op = attention(D())
    x = jnp.zeros((1, 2, 1, 4))
    with refused(InputError, "segment_ids"):
        op(x, x, x, segment_ids=np.array(ids))


def test_segment_ids_of_64_bits_that_fit_are_taken():
    op = attention(D())
    x = jnp.ones((1, 2, 1, 4))
    out = op(x, x, x, segment_ids=np.array([[0, -1]], np.int64))
    np.testing.assert_array_equal(out[0, :, 0, 0], [1, 0])


# Scores ----------------------------------------------------------------------------------------


def test_traced_prefixes_count_as_if_clipped():
    attend = attention(**PREFIX)
    x = np.random.default_rng(0).normal(size=(2, 32, 4, 4)).astype("f4")

    @jax.jit
    def found(lengths):
        return attend(x, x, x, prefix_lengths=lengths)

    np.testing.assert_array_equal(found(np.array([-5, 99])), found(np.array([0, 32])))


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
    mesh = attention(D(ring=2)).mesh
    op = st.Attention(mesh, mask=st.masks.Prefix())
    x, positions = jnp.zeros((1, 4, 2, 4)), jnp.zeros((1, 4), jnp.int32)
    with refused(InputError, "got no prefix_lengths and mask=Prefix"):
        op.local(x, x, x)
    for name in ("slopes", "sinks"):
        with refused(InputError, f"{name} must be floats [heads] = [2]; got float32 [8]"):
            st.Attention(mesh, causal=True).local(x, x, x, **{name: jnp.ones(8)})
    with pytest.raises(TypeError, match="slope_of_heads"):
        st.Attention(mesh, causal=True).local(x, x, x, slope_of_heads=jnp.ones(2))
    with refused(InputError, "assert_exact", "got mask=Prefix"):
        assert_exact(op, seq_len=8, heads=2)
    causal = st.Attention(mesh, mask=st.masks.Prefix() & st.masks.Causal())
    with refused(InputError, "decode", "got mask=(Prefix"):
        causal.decode(x, x, x, positions)


@pytest.mark.parametrize("name", ["is_causal", "return_lse", "deterministic", "broadcast_dropout"])
def test_truth_values_of_a_call_are_no_arrays(name):
    ours, x = attention(D(ring=2), causal=True), np.zeros((2, 32, 4, 8), "f4")
    with refused(UnsupportedError, f"{name} must be True or False", "static argument"):
        jax.jit(lambda value: ours(x, x, x, **{name: value}))(True)


@pytest.mark.parametrize("method", ["shard", "pad", "shard_bias"])
def test_host_arrays_are_not_placed_inside_a_jit(method):
    ours, x = attention(D(ring=2), causal=True), np.zeros((2, 32, 32, 32), "f4")
    with refused(InputError, "under jit", "shard, pad and shard_bias outside"):
        jax.jit(lambda y: (getattr(ours, method)(x), y))(1.0)


def test_another_mesh_around_a_call_is_refused():
    ours, x = attention(D(ring=2), causal=True), np.zeros((2, 32, 4, 8), "f4")
    other = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("a", "b"))
    for call in (ours, jax.jit(ours)):
        with jax.set_mesh(other), refused(InputError, "jax.set_mesh", "{'a': 2, 'b': 2}"):
            call(x, x, x)
    with jax.set_mesh(ours.mesh):
        jax.eval_shape(ours, x, x, x)

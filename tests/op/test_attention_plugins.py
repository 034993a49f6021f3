"""`Attention` as the attention function of Flax's own modules, against Flax's own attention."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from attention_cases import FLOAT32_ERROR, Case, make_attention, relative_error
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError

STARTRAIL = st.Degrees.startrail(8, c=2)
HEADS, WIDTH, BATCH, SEQ_LEN = 4, 20, 3, 48


def attention(axis_type="auto", causal=True):
    mask = "causal" if causal else "full"
    return Case(degrees=STARTRAIL, axis_type=axis_type, mask=mask).attention


@functools.cache
def arrays():
    rng = np.random.default_rng(6)
    return rng.normal(size=(2, BATCH, SEQ_LEN, WIDTH)).astype("f4")


def sharded(attention, x):
    """[batch, seq, features] in layout order."""
    sharding = NamedSharding(attention.mesh, P(*attention.sequence_spec, None))
    return jax.device_put(attention.layout.permute(x), sharding)


def replicated(attention, tree):
    """Parameters on the mesh: on Explicit axes, their gradients' shardings follow from theirs."""
    return jax.device_put(tree, NamedSharding(attention.mesh, P()))


def nnx_module(**options):
    return nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=WIDTH, decode=False, rngs=nnx.Rngs(0), **options
    )


def linen_module(**options):
    return linen.MultiHeadDotProductAttention(num_heads=HEADS, **options)


def run_module(module, x, **options):
    """The output of a module of either kind."""
    if isinstance(module, nnx.Module):
        return module(x, **options)
    return module.init_with_output(jax.random.key(0), x, **options)[0]


def assert_same(found, expected):
    """Outputs and gradients, by name."""
    found, expected = (dict(jax.tree.leaves_with_path(x)) for x in (found, expected))
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        scale = float(np.linalg.norm(x))
        if "key" in jax.tree_util.keystr(path) and "bias" in jax.tree_util.keystr(path):
            # The softmax does not see a bias of the keys: both gradients are rounding about 0.
            assert np.linalg.norm(found[path]) <= 1e-4 >= scale
        else:
            # Projections before and after round too.
            assert relative_error(found[path], x) <= 2 * FLOAT32_ERROR, jax.tree_util.keystr(path)


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
def test_nnx_module_matches_flax(axis_type, causal):
    ours, (x, dout) = attention(axis_type, causal), arrays()
    mask = jnp.tril(jnp.ones((1, 1, SEQ_LEN, SEQ_LEN), bool)) if causal else None

    def step(module, x, dout, **options):
        def loss(module, x):
            out = module(x, **options)
            return (out * dout).sum(), out

        (_, out), grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(module, x)
        return out, nnx.to_pure_dict(nnx.state(grads[0])), grads[1]

    with jax.default_matmul_precision("highest"):
        expected = nnx.jit(functools.partial(step, mask=mask))(nnx_module(), x, dout)
        module = nnx_module(attention_fn=ours)
        nnx.update(module, replicated(ours, nnx.state(module)))
        # NNX passes is_causal=False unless told: that must not undo a causal instance.
        found = nnx.jit(step)(module, sharded(ours, x), sharded(ours, dout))
    found = (ours.layout.unpermute(np.asarray(found[0])), found[1],
             ours.layout.unpermute(np.asarray(found[2])))  # fmt: skip
    assert_same(found, expected)


def test_equal_instances_do_not_retrace():
    """Flax passes the function on as a static value: an equal instance must be the same one."""
    traces = 0

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, x):
        nonlocal traces
        traces += 1
        return attention(x, x, x)

    case = Case(degrees=STARTRAIL)
    x = jnp.zeros((BATCH, SEQ_LEN, HEADS, 5))
    x = jax.device_put(x, NamedSharding(case.mesh, case.attention.query_spec(HEADS)))
    run(st.Attention(case.mesh, causal=True), x)
    run(st.Attention(case.mesh, causal=True, layout="contiguous"), x)
    assert traces == 1


# What is not served --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [nnx_module, linen_module])
def test_weights_are_not_sown(make):
    module, x = make(attention_fn=attention()), arrays()[0]
    with refused(UnsupportedError, "module", "Leave sow_weights off"):
        run_module(module, x, sow_weights=True)


@pytest.mark.parametrize("make", [nnx_module, linen_module])
def test_precision_of_a_module_changes_nothing_in_the_attention(make):
    ours = attention()
    # On a CPU the projections are the same, too.
    found = [
        run_module(make(attention_fn=ours, precision=precision), arrays()[0])
        for precision in (None, "highest", jax.lax.Precision.DEFAULT)
    ]
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
    with refused(UnsupportedError, precision="exact"):
        ours(*HEADS_OF_ZEROS, precision="exact")


@pytest.mark.parametrize("make", [nnx_module, linen_module])
@pytest.mark.slow_except_every(2)
def test_masks_of_keys_and_segment_ids_reach_a_module(make):
    """A mask of padding as Flax writes it; documents by functools.partial."""
    rng = np.random.default_rng(2)
    valid, ids = rng.random((BATCH, SEQ_LEN)) < 0.7, np.sort(rng.integers(0, 3, (BATCH, SEQ_LEN)))
    valid[:, 0] = True
    ours = make_attention(STARTRAIL, causal=False)
    x, same = arrays()[0], ids[:, None, :, None] == ids[:, None, None, :]
    for ours_of, mask, dense in (
        (ours, valid[:, None, None, :], valid[:, None, None, :]),
        (functools.partial(ours, segment_ids=ids), None, same),
    ):
        found, expected = (
            run_module(module, x, mask=m)
            for module, m in ((make(attention_fn=ours_of), mask), (make(), dense))
        )
        assert relative_error(found, expected) < FLOAT32_ERROR


def program(module, **options):
    """What a call lowers to."""
    return jax.jit(lambda x: module(x, **options)).lower(arrays()[0]).as_text()


def nnx_with_dropout(ours, shared, x):
    module = nnx_module(attention_fn=ours, dropout_rate=0.3, broadcast_dropout=shared)
    return nnx.jit(lambda m, x: m(x, deterministic=False, rngs=nnx.Rngs(7)))(module, x)


def linen_with_dropout(ours, shared, x):
    module = linen_module(attention_fn=ours, dropout_rate=0.3, broadcast_dropout=shared)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(7)}
    return jax.jit(lambda x: module.init_with_output(keys, x, deterministic=False)[0])(x)


@pytest.mark.parametrize(("run", "shared"), [(nnx_with_dropout, True), (linen_with_dropout, False)])
@pytest.mark.slow
def test_dropout_of_a_flax_module_is_that_of_one_device(run, shared):
    alone, ours = (Case(degrees=degrees).attention for degrees in (st.Degrees(), STARTRAIL))
    expected, found = (run(x, shared, sharded(x, arrays()[0])) for x in (alone, ours))
    assert relative_error(ours.unshard(found), alone.unshard(expected)) <= 2 * FLOAT32_ERROR
    kept = np.asarray(expected)
    assert relative_error(kept[::-1], kept) > 0.1


def test_dropout_that_is_switched_off_is_served():
    module = nnx_module(attention_fn=attention(), dropout_rate=0.1)
    expected = nnx_module(attention_fn=attention())
    assert program(module, deterministic=True) == program(expected)


# Flax before 0.12.7 has no such argument.
has_is_causal = pytest.mark.skipif(
    "is_causal" not in inspect.signature(nnx.MultiHeadAttention.__call__).parameters,
    reason="this Flax has no is_causal",
)


@has_is_causal
def test_nnx_is_causal_serves_causal_instances_alone():
    module = nnx_module(attention_fn=attention())
    assert program(module, is_causal=True) == program(module)
    with refused(InputError, is_causal=True):
        nnx_module(attention_fn=attention(causal=False))(arrays()[0], is_causal=True)


def test_nnx_decoding_raises():
    module = nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=WIDTH, decode=True, rngs=nnx.Rngs(0), attention_fn=attention()
    )
    module.init_cache((BATCH, SEQ_LEN, WIDTH))
    with refused(InputError, "Attention.decode"):
        module(arrays()[0][:, :1])


HEADS_OF_ZEROS = [np.zeros((BATCH, SEQ_LEN, HEADS, 5), "f4")] * 3


@pytest.mark.parametrize(
    ("option", "value", "way_out"),
    [
        ("input_positions", np.arange(SEQ_LEN), "does not serve input_positions; got"),
        ("einsum_dot_general", jax.lax.dot_general, "does not serve einsum_dot_general; got"),
        ("qk_attn_weights_einsum", jnp.einsum, "does not serve qk_attn_weights_einsum; got"),
        ("attn_weights_value_einsum", jnp.einsum, "does not serve attn_weights_value_einsum; got"),
        ("query_seq_lengths", np.full(BATCH, 7), "negative segment_ids"),
        ("key_value_seq_lengths", np.full(BATCH, 7), "negative segment_ids"),
        ("return_residual", True, r"return_lse=True.*\[batch, heads, seq\]"),
        ("scale", jnp.float32(2), r"Python number.*Multiply the query"),
    ],
)
def test_option_of_flax_or_jax_nn_that_is_not_served_raises(option, value, way_out):
    with pytest.raises(NotImplementedError, match=way_out) as raised:
        attention()(*HEADS_OF_ZEROS, **{option: value})
    assert option in str(raised.value)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"local_window_size": 6}, {"window": 7}),
        ({"local_window_size": (4, 0), "implementation": "xla"}, {"window": 5, "backend": "xla"}),
    ],
)
@pytest.mark.slow_except_every(3)
def test_option_of_jax_nn_means_what_it_means_there(options, same):
    ours, (x, _) = attention(), arrays()
    x = x.reshape(BATCH, SEQ_LEN, HEADS, -1)
    placed = ours.shard(x)
    found = ours(placed, placed, placed, **options)
    expected = jax.nn.dot_product_attention(x, x, x, is_causal=True, **options)
    assert relative_error(ours.unshard(found), expected) <= 2 * FLOAT32_ERROR
    instance = dataclasses.replace(ours, **same)
    np.testing.assert_array_equal(found, instance(placed, placed, placed, **options))


@pytest.mark.parametrize(
    ("instance", "options", "named"),
    [
        ({"scale": 0.5}, {"scale": 0.3}, "scale=0.3"),
        ({"window": 5}, {"local_window_size": 5}, "window=6"),
        ({"backend": "xla"}, {"implementation": "cudnn"}, "backend='cudnn'"),
        ({}, {"implementation": "triton"}, "'cudnn'"),
        ({}, {"local_window_size": -3}, "window=-2"),
    ],
)
def test_option_of_jax_nn_that_does_not_fit_is_refused(instance, options, named):
    ours = dataclasses.replace(attention(), **instance)
    with refused(InputError, named):
        ours(*HEADS_OF_ZEROS, **options)


def test_local_window_size_of_an_attention_that_is_not_causal_raises():
    with refused(UnsupportedError, local_window_size=3):
        attention(causal=False)(*HEADS_OF_ZEROS, local_window_size=3)


def test_unknown_option_raises():
    with pytest.raises(TypeError, match="sliding"):
        attention()(*HEADS_OF_ZEROS, sliding=3)


@pytest.mark.slow
def test_dtype_casts_the_inputs_as_flax_does():
    x = np.random.default_rng(7).normal(size=(BATCH, SEQ_LEN, HEADS, 5)).astype("f4")
    narrow = x.astype(jnp.bfloat16)
    attend = jax.jit(attention(), static_argnames="dtype")
    found = attend(x, x, x, dtype=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, attend(narrow, narrow, narrow))

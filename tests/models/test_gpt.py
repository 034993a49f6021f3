"""The GPT alone, with dense attention, and with sharded attention in its place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import startrail_jax as st
from models import gpt
from models.config import GPTConfig
from programs import noted_hooks

BATCH, SEQ_LEN, VOCAB = 2, 23, 19
SIZES = {
    "vocab_size": VOCAB, "width": 10, "layers": 2,
    "heads": 6, "kv_heads": 3, "head_dim": 4, "mlp_width": 7,
}  # fmt: skip


def dense_attention(positions, query, key, value, *, segment_ids=None):
    """Attention of each token to those at its own or earlier positions, in its own segment."""
    mask = positions[:, None, :, None] >= positions[:, None, None, :]
    if segment_ids is not None:
        mask &= segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


def make_model(attention_fn=jax.nn.dot_product_attention, **options):
    own = {name: options.pop(name) for name in ("hooks",) if name in options}
    config = GPTConfig(**SIZES | options)
    return gpt.GPT(config, attention_fn=attention_fn, rngs=nnx.Rngs(0), **own)


@functools.cache
def make_weights(**options):
    return jax.jit(lambda: nnx.state(make_model(**options)))()


@functools.partial(jax.jit, static_argnames=["attention_fn", "options"])
def logits_of(weights, tokens, positions, segment_ids, attention_fn=None, options=()):
    attention_fn = attention_fn or functools.partial(dense_attention, positions)
    abstract = nnx.eval_shape(lambda: make_model(attention_fn, **dict(options)))
    return nnx.merge(nnx.graphdef(abstract), weights)(tokens, positions, segment_ids)


def dense_logits(tokens, positions, segment_ids=None):
    return logits_of(make_weights(), tokens, positions, segment_ids)


def make_tokens(seq_len=SEQ_LEN, seed=0):
    tokens = np.random.default_rng(seed).integers(VOCAB, size=(BATCH, seq_len))
    positions = np.tile(np.arange(seq_len), (BATCH, 1))
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32)


@pytest.mark.slow
def test_gpt_in_bfloat16_has_float32_weights_and_logits_of_variance_1():
    options = {"width": 96, "mlp_width": 256, "head_dim": 24, "dtype": "bfloat16"}
    weights = make_weights(**options)
    logits = logits_of(weights, *make_tokens(), None, options=tuple(options.items()))
    assert {x.dtype for x in jax.tree.leaves(weights)} == {jnp.dtype("float32")}
    assert logits.dtype == jnp.float32
    assert 0.7 < logits.std() < 1.4


def test_gpt_sees_its_own_segment_only():
    tokens, positions = make_tokens()
    segment_ids = (positions >= 11).astype(jnp.int32)
    changed = tokens.at[:, :11].set((tokens[:, :11] + 1) % VOCAB)
    before = dense_logits(tokens, positions, segment_ids)
    after = dense_logits(changed, positions, segment_ids)
    np.testing.assert_array_equal(before[:, 11:], after[:, 11:])
    assert (before[:, :11] != after[:, :11]).any()


def test_gpt_output_follows_the_order_of_its_input():
    tokens, positions = make_tokens()
    order = np.random.default_rng(1).permutation(SEQ_LEN)
    expected = dense_logits(tokens, positions)[:, order]
    actual = dense_logits(tokens[:, order], positions[:, order])
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_gpt_with_sharded_attention_equals_dense():
    degrees = st.Degrees(data=2, group=2, ring=1, team=2, tensor=3)
    mesh = st.make_mesh(degrees, axis_type="auto", devices=jax.devices()[: degrees.num_devices])
    attention = st.Attention(mesh, causal=True)
    tokens, positions = make_tokens(seq_len=24)
    expected = dense_logits(tokens, positions)
    inputs = [np.asarray(attention.layout.permute(x)) for x in (tokens, positions)]
    inputs = jax.device_put(inputs, NamedSharding(mesh, attention.sequence_spec))
    logits = logits_of(make_weights(), *inputs, None, attention_fn=attention)
    actual = attention.layout.unpermute(jax.device_get(logits))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
def test_gpt_of_other_parts_has_their_weights_and_gradients():
    options = {"mlp": "gelu", "tied_head": True}
    weights = make_weights(**options)
    assert set(weights) == {"embedding", "blocks", "norm"}
    assert set(weights["blocks"]["mlp"]) == {"up", "down"}
    tokens, positions = make_tokens()

    @jax.jit
    def loss(weights):
        logits = logits_of(weights, tokens, positions, None, options=tuple(options.items()))
        return -jax.nn.log_softmax(logits)[:, :, 0].mean()

    # The embedding's gradient is that of both of its uses: checked along a random direction.
    @jax.jit
    def along(step):
        return loss(jax.tree.map(lambda x, y: x + step * y, weights, direction))

    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), weights)
    np.testing.assert_allclose(
        (along(1e-3) - along(-1e-3)) / 2e-3, jax.jit(jax.grad(along))(0.0), rtol=2e-2
    )


def test_hooks_wrap_each_layer_and_the_functions_of_tokens():
    hooks, calls = noted_hooks()
    tokens, positions = make_tokens()
    attention_fn = functools.partial(dense_attention, positions)
    jax.eval_shape(lambda: make_model(attention_fn, hooks=hooks)(tokens, positions))
    # The scan over layers traces one of them.
    assert calls.count("wrap_layer") == calls.count("tiled") == 1
    assert calls.count("copy_to_tensor") == calls.count("reduce_from_tensor") == 2


def test_gpt_with_a_cache_equals_the_whole_forward_pass():
    """The prompt at once, then token by token; a cache of all layers goes through the loop."""
    tokens, positions = make_tokens()
    prompt = SEQ_LEN - 4

    def attend(cache, layer, query, key, value):
        """Dense, at the next slots of a cache [2 layers B SEQ_LEN K H]."""
        cache = jax.lax.dynamic_update_slice(
            cache, jnp.stack([key, value])[:, None], (0, layer, 0, start, 0, 0)
        )
        slots = jnp.arange(SEQ_LEN)
        mask = (start + jnp.arange(query.shape[1]))[:, None] >= slots[None]
        out = jax.nn.dot_product_attention(query, *cache[:, layer], mask=mask[None, None])
        return out, cache

    abstract = nnx.eval_shape(make_model)
    model = nnx.merge(nnx.graphdef(abstract), make_weights())
    cache = jnp.zeros((2, 2, BATCH, SEQ_LEN, SIZES["kv_heads"], SIZES["head_dim"]))
    found = []
    for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, SEQ_LEN))]:
        part = tokens[:, start:stop], positions[:, start:stop]
        hidden, caches = model.hidden_with_cache(*part, {"blocks": cache}, {"blocks": attend})
        cache = caches["blocks"]
        found.append(model.logits(hidden))
    np.testing.assert_allclose(
        jnp.concatenate(found, axis=1), dense_logits(tokens, positions), atol=1e-5
    )

"""Complete language models in NNX and in Linen, written as for one device, and made parallel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from attention_cases import make_attention, relative_error

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 17, 24, 2, 6, 2, 4
BATCH, SEQ_LEN = 4, 48
# One float32 rounding for each of a few dozen operations in a row.
MOST_ERROR = 5e-6


def dense_attention(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def rotate(x, positions):
    frequencies = 100.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angles = (positions[:, None] * frequencies[None, :])[None, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class NNXBlock(nnx.Module):
    def __init__(self, attention_fn, *, rngs):
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.query = linear(WIDTH, (HEADS, HEAD_DIM))
        self.key = linear(WIDTH, (KV_HEADS, HEAD_DIM))
        self.value = linear(WIDTH, (KV_HEADS, HEAD_DIM))
        self.out = linear((HEADS, HEAD_DIM), WIDTH, axis=(-2, -1))
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)
        self.attention_fn = attention_fn

    def __call__(self, x, positions):
        y = self.attention_norm(x)
        query, key = (rotate(project(y), positions) for project in (self.query, self.key))
        x = x + self.out(self.attention_fn(query, key, self.value(y)))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class NNXModel(nnx.Module):
    def __init__(self, attention_fn, *, embedding_spec=None, rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        make = nnx.vmap(lambda rngs: NNXBlock(attention_fn, rngs=rngs), in_axes=0, out_axes=0)
        self.blocks = make(rngs.split(LAYERS))
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.embedding_spec = embedding_spec

    def __call__(self, tokens, positions):
        x = self.embedding(tokens, out_sharding=self.embedding_spec)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def layers(block, x):
            return block(x, positions)

        return self.head(layers(self.blocks, x))


class LinenBlock(linen.Module):
    attention_fn: object

    @linen.compact
    def __call__(self, x, positions):
        dense = functools.partial(linen.DenseGeneral, use_bias=False)
        y = linen.RMSNorm()(x)
        query = rotate(dense((HEADS, HEAD_DIM), name="query")(y), positions)
        key = rotate(dense((KV_HEADS, HEAD_DIM), name="key")(y), positions)
        value = dense((KV_HEADS, HEAD_DIM), name="value")(y)
        out = self.attention_fn(query, key, value)
        x = x + dense(WIDTH, axis=(-2, -1), name="out")(out)
        y = linen.gelu(dense(2 * WIDTH, name="up")(linen.RMSNorm()(x)))
        return x + dense(WIDTH, name="down")(y), None


class LinenModel(linen.Module):
    attention_fn: object
    embedding_spec: object = None

    @linen.compact
    def __call__(self, tokens, positions):
        embed = linen.Embed(VOCABULARY, WIDTH)
        if self.embedding_spec is None:
            x = embed(tokens)
        else:  # On Explicit axes, a lookup must say how its result is sharded.
            x = embed.embedding.at[tokens].get(out_sharding=self.embedding_spec)
        layers = linen.scan(
            linen.remat(LinenBlock),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=linen.broadcast,
            length=LAYERS,
        )
        x, _ = layers(self.attention_fn)(x, positions)
        return linen.Dense(VOCABULARY)(x)


def mean_loss(logits, targets):
    """Cross-entropy; the labels are chosen by a product, which any sharding allows."""
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, VOCABULARY)).mean()


def nnx_step(attention_fn, tokens, targets, positions, **options):
    model = NNXModel(attention_fn, rngs=nnx.Rngs(0), **options)

    @nnx.jit
    def step(model, tokens, targets):
        def loss(model):
            logits = model(tokens, positions)
            return mean_loss(logits, targets), logits

        (loss, logits), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        return loss, logits, nnx.to_pure_dict(nnx.state(grads))

    return step(model, tokens, targets)


def linen_step(attention_fn, tokens, targets, positions, **options):
    plain = LinenModel(dense_attention)
    variables = plain.init(jax.random.key(0), np.zeros((1, SEQ_LEN), "i4"), positions)
    model = LinenModel(attention_fn, **options)

    @jax.jit
    def step(variables, tokens, targets):
        def loss(variables):
            logits = model.apply(variables, tokens, positions)
            return mean_loss(logits, targets), logits

        (loss, logits), grads = jax.value_and_grad(loss, has_aux=True)(variables)
        return loss, logits, grads

    return step(variables, tokens, targets)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("step", [nnx_step, linen_step], ids=["nnx", "linen"])
def test_complete_model_matches_its_dense_self(step, axis_type):
    ids = np.random.default_rng(0).integers(VOCABULARY, size=(BATCH, SEQ_LEN + 1)).astype("i4")
    with jax.default_matmul_precision("highest"):
        expected = step(dense_attention, ids[:, :-1], ids[:, 1:], np.arange(SEQ_LEN))

        attention = make_attention(st.Degrees(data=2, team=2, ring=2), axis_type)
        tokens, targets = attention.shard(ids[:, :-1], ids[:, 1:])
        positions = attention.layout.positions(SEQ_LEN)
        if axis_type == "auto":
            found = step(attention, tokens, targets, positions)
        else:
            with jax.set_mesh(attention.mesh):
                spec = P(*attention.sequence_spec, None)
                found = step(attention, tokens, targets, positions, embedding_spec=spec)

    loss, logits, grads = found
    assert relative_error(np.asarray(loss), expected[0]) <= MOST_ERROR
    assert relative_error(attention.unshard(logits), expected[1]) <= MOST_ERROR
    found, wanted = (dict(jax.tree.leaves_with_path(x)) for x in (grads, expected[2]))
    assert found.keys() == wanted.keys()
    for path, gradient in wanted.items():
        assert relative_error(found[path], gradient) <= MOST_ERROR, jax.tree_util.keystr(path)

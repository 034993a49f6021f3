"""Layers of latent attention beside an oracle that computes them from the formulas alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mixers import beside_oracle
from models import gpt
from models.config import GPTConfig, RopeConfig
from models.hooks import Hooks
from models.parts.attention import Keys, keys_of
from models.parts.latent import LatentConfig
from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.rings.latents import Expansion

EPSILON, BASE, VOCAB = 1e-3, 50.0, 19
CONFIG = GPTConfig(
    vocab_size=VOCAB,
    width=10,
    layers=3,
    heads=3,
    kv_heads=3,
    head_dim=6,
    mlp_width=7,
    mixers=("latent",),
    latent=LatentConfig(
        rank=6, query_rank=8, key_dim=5, rotary_dim=4, value_dim=7, norm_eps=EPSILON
    ),
    rope=RopeConfig(bases=(BASE,), interleaved=True),
)


def replaced(config=CONFIG, **changes):
    return dataclasses.replace(config, latent=dataclasses.replace(config.latent, **changes))


def attend(query, latent, rotated, key_kernel, value_kernel, *, segment_ids=None):
    assert segment_ids is None
    parts = [latent] if rotated is None else [latent, rotated]
    latents = jnp.concatenate(parts, -1)[:, :, None]
    key, value = Expansion(key_kernel, value_kernel).keys_and_values(latents)
    logits = jnp.einsum("btnd,bsnd->bnts", query, key) * query.shape[3] ** -0.5
    seen = jnp.tri(query.shape[1], dtype=bool)[None, None]
    shares = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1)
    return jnp.einsum("bnts,bsnv->btnv", shares, value)


def normalised(x, scale, epsilon):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * scale


def turned(x, interleaved):
    """Pairs of channels as complex numbers that turn with positions; x [batch, seq, channels]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * BASE ** (-jnp.arange(half) / half)
    if interleaved:
        z = (x[..., ::2] + 1j * x[..., 1::2]) * jnp.exp(1j * angles)
        return jnp.stack([z.real, z.imag], -1).reshape(x.shape)
    z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles)
    return jnp.concatenate([z.real, z.imag], -1)


def oracle(weights, tokens, config):
    """Logits of the model, layer by layer and head by head, with keys and values written out."""
    own = config.latent.of_model(config)
    x = weights["embedding/embedding"][tokens]
    length = tokens.shape[1]
    for layer in range(config.layers):
        prefix = "latent_blocks/"
        w = {k.removeprefix(prefix): y[layer] for k, y in weights.items() if k.startswith(prefix)}
        a = {k.removeprefix("attention/"): y for k, y in w.items()}
        y = normalised(x, w["attention_norm/scale"], config.norm_eps)
        down = y
        if own.query_rank:
            down = normalised(y @ a["query_down/kernel"], a["query_norm/scale"], own.norm_eps)
        latent = normalised(y @ a["latent/kernel"], a["latent_norm/scale"], own.norm_eps)
        shared = jnp.zeros((*y.shape[:2], 0))
        if own.rotary_dim:
            shared = y @ a["rotated/kernel"]
        turns = config.rope.bases != ("none",)
        if own.rotary_dim and turns:
            shared = turned(shared, config.rope.interleaved)
        out = 0
        for head in range(config.heads):
            query = down @ a["query/kernel"][:, head]
            still, moving = query[..., : own.key_dim], query[..., own.key_dim :]
            if own.rotary_dim and turns:
                moving = turned(moving, config.rope.interleaved)
            logits = still @ (latent @ a["key/kernel"][:, head]).swapaxes(1, 2)
            logits += moving @ shared.swapaxes(1, 2)
            logits *= (own.key_dim + own.rotary_dim) ** -0.5
            logits = jnp.where(jnp.tri(length, dtype=bool), logits, -jnp.inf)
            found = jax.nn.softmax(logits, -1) @ (latent @ a["value/kernel"][:, head])
            out += found @ a["out/kernel"][head]
        x += out
        y = normalised(x, w["mlp_norm/scale"], config.norm_eps)
        hidden = jax.nn.silu(y @ w["mlp/gate/kernel"]) * (y @ w["mlp/up/kernel"])
        x += hidden @ w["mlp/down/kernel"]
    return normalised(x, weights["norm/scale"], config.norm_eps) @ weights["head/kernel"]


def make(config):
    options = dict(attention_fn=jax.nn.dot_product_attention)
    hooks = Hooks(latent_attention=attend)
    return gpt.GPT(config, **options, hooks=hooks, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replaced(query_rank=None),
        replaced(rotary_dim=0),
        replaced(key_dim=None, value_dim=None, norm_eps=None),
        dataclasses.replace(CONFIG, rope=RopeConfig(bases=("none",))),
        dataclasses.replace(CONFIG, rope=RopeConfig(bases=(BASE,))),
    ],
)
def test_layers_are_those_of_the_formulas(config):
    (logits, gradients), (expected, slopes) = beside_oracle(make(config), config, oracle)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * float(jnp.abs(logits).max()))
    for name, x in gradients.items():
        size = float(jnp.abs(slopes[name]).max())
        assert size > 0
        np.testing.assert_allclose(x, slopes[name], rtol=0, atol=2e-5 * size, err_msg=name)


def test_what_a_layer_keeps_is_known():
    keys = Keys(heads=1, head_dim=9, value_dim=7, latent_dim=10)
    assert keys_of(CONFIG) == {"latent": keys}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(latent=LatentConfig(rotary_dim=2), mixers=("attention",)), "needs layers of latent"),
        (dict(qk_norm=True), "Latent attention has none of qkv_bias, out_bias, qk_norm"),
        (dict(windows=(4,)), "layers of global_attention or latent; got windows=(4,)"),
        (dict(mixers=("linear",)), "one layer or more attention"),
    ],
)
def test_options_that_do_not_fit(changes, words):
    with refused(InputError, words):
        dataclasses.replace(CONFIG, **changes)


def test_sizes_that_do_not_fit():
    with refused(InputError, "rotary_dim must be even", "rotary_dim=3", "Use 4"):
        LatentConfig(rotary_dim=3)
    with refused(InputError, "model.latent.rank"):
        LatentConfig(rank=0)


def test_a_model_without_the_hook_says_so():
    with refused(InputError, "Hooks(latent_attention=attention.latent)"):
        model = gpt.GPT(CONFIG, attention_fn=jax.nn.dot_product_attention, rngs=nnx.Rngs(0))
        model(jnp.zeros((1, 4), jnp.int32), jnp.arange(4)[None])

"""A layer of Kimi Delta Attention beside an oracle that takes token after token."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import startrail_jax as st
from models.config import GPTConfig
from models.hooks import Hooks
from models.kda import KimiDeltaAttention
from models.parts.kda import KDAConfig
from refusals import refused
from startrail_jax.errors import InputError

WIDTH, HEADS, CHANNELS, RANK, CONV, EPSILON = 10, 3, 5, 4, 3, 1e-3
CONFIG = GPTConfig(
    **dict(width=WIDTH, layers=2, heads=4, kv_heads=2, head_dim=6, mlp_width=7),
    mixers=("kda", "attention"),
    kda=KDAConfig(heads=HEADS, head_dim=CHANNELS, rank=RANK, conv=CONV, norm_eps=EPSILON),
)


def oracle(w, x):
    """Section 4 of the paper, token by token; x [batch, seq, width]."""
    channels = {"query": [], "key": [], "value": []}
    for name, seen in channels.items():
        projected = jnp.einsum("btw,whc->bthc", x, w[name])
        for t in range(x.shape[1]):
            taken = [(t - i, w[f"{name}_conv"][None, CONV - 1 - i]) for i in range(CONV) if t >= i]
            seen.append(jax.nn.silu(sum(projected[:, s] * kernel for s, kernel in taken)))
    state = jnp.zeros((x.shape[0], HEADS, CHANNELS, CHANNELS))
    outs = []
    for t in range(x.shape[1]):
        query, key, value = (channels[name][t] for name in ("query", "key", "value"))
        query, key = (y / jnp.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (query, key))
        token = x[:, t]
        steps = jnp.einsum("bw,wr,rhc->bhc", token, w["decay_down"], w["decay"])
        steps = jnp.log(1 + jnp.exp(steps + w["decay_bias"][None]))
        state = state * jnp.exp(-jnp.exp(w["decay_rate"])[None, :, None] * steps)[..., None]
        beta = 1 / (1 + jnp.exp(-jnp.einsum("bw,wh->bh", token, w["beta"])))
        held = jnp.einsum("bhkv,bhk->bhv", state, key)
        state += jnp.einsum("bh,bhk,bhv->bhkv", beta, key, value - held)
        out = jnp.einsum("bhkv,bhk->bhv", state, query) * CHANNELS**-0.5
        out = out / jnp.sqrt((out**2).mean(-1, keepdims=True) + EPSILON) * w["out_norm"][None, None]
        gate = jnp.einsum("bw,wr,rhc->bhc", token, w["out_gate_down"], w["out_gate"])
        outs.append(jnp.einsum("bhc,hcw->bw", out / (1 + jnp.exp(-gate)), w["out"]))
    return jnp.stack(outs, 1)


@pytest.mark.parametrize("layout", ["one device", "contiguous", "zigzag"])
def test_a_layer_is_that_of_the_paper(layout):
    devices = 1 if layout == "one device" else 8
    mesh = st.make_mesh(st.Degrees(ring=devices), "auto", jax.devices()[:devices])
    order = "zigzag" if layout == "one device" else layout
    attention = st.LinearAttention(mesh, rule="kda", layout=order)
    hooks = Hooks(linear_attention=lambda rule: {"kda": attention}[rule])
    options = dict(attention_fn=None, hooks=hooks, out_gain=1.0)
    layer = KimiDeltaAttention(CONFIG, **options, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer)
    rng = np.random.default_rng(1)
    # Steps and scales that differ between channels, which all start alike or nearly so.
    weights = jax.tree.map(lambda y: y + (rng.normal(size=y.shape) / 4).astype(y.dtype), weights)
    named = {name: jax.tree.leaves(y)[0] for name, y in nnx.to_pure_dict(weights).items()}
    x, dout = rng.normal(size=(2, 2, 32, WIDTH)).astype("f4")

    def run(weights, x):
        layer = nnx.merge(graph, weights)
        return layer(x, None, None, layer.uncached({}))[0]

    permuted = [attention.layout.permute(y, axis=1) for y in (x, dout)]
    out, pull = jax.vjp(jax.jit(run), weights, permuted[0])
    of_weights, of_x = pull(permuted[1])
    expected, pull_expected = jax.vjp(jax.jit(oracle), named, x)
    expected_of_weights, expected_of_x = pull_expected(dout)

    def close(found, expected, limit, name):
        scale = np.abs(expected).max()
        assert scale > 1e-3, name
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit * scale, err_msg=name)

    for name, found, by_token, limit in (
        ("out", out, expected, 1e-5), ("dx", of_x, expected_of_x, 1e-4)
    ):  # fmt: skip
        close(attention.layout.unpermute(np.asarray(found), axis=1), by_token, limit, name)
    for name, found in nnx.to_pure_dict(of_weights).items():
        close(jax.tree.leaves(found)[0], expected_of_weights[name], 1e-4, name)
    assert len(expected_of_weights) == 15


def test_wrong_settings_raise():
    for options, told in ((dict(rank=0), "model.kda.rank"), (dict(norm_eps=0.0), "norm_eps=0.0")):
        with refused(InputError, told):
            KDAConfig(**options)
    with refused(InputError, "model.kda.rank needs layers of Kimi Delta Attention"):
        replace(CONFIG, mixers=("attention",), kda=KDAConfig(rank=3))

"""Layers of attention of two sizes beside an oracle that computes them from the formulas alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mixers import beside_oracle
from models import gpt
from models.config import GPTConfig, RopeConfig
from models.parts.attention import GlobalConfig, Keys, keys_of
from models.rope import Rope
from refusals import refused
from startrail_jax.errors import InputError
from trainer.planner.gpt import sizes_of_gpt

WINDOW, EPSILON = 3, 1e-3
MIXERS = ("attention", "attention", "global_attention", "attention", "global_attention")
CONFIG = GPTConfig(
    vocab_size=19,
    width=10,
    layers=5,
    heads=6,
    kv_heads=3,
    head_dim=4,
    mlp_width=7,
    mixers=MIXERS,
    windows=tuple(WINDOW if x == "attention" else "none" for x in MIXERS),
    global_attention=GlobalConfig(head_dim=10, kv_heads=2, values_from_keys=True, rotary_pairs=2),
    rope=RopeConfig(bases=tuple(50.0 if x == "attention" else 300.0 for x in MIXERS)),
    qk_norm=True,
    value_norm=True,
    layer_scalar=True,
    norms="both",
    norm_eps=EPSILON,
    scale_dim=1,
)


def replaced(config=CONFIG, **changes):
    """The config with other options of its global layers."""
    return dataclasses.replace(
        config, global_attention=dataclasses.replace(config.global_attention, **changes)
    )


def attend(query, key, value, *, segment_ids=None, local_window_size=None):
    assert segment_ids is None
    return jax.nn.dot_product_attention(
        query, key, value, scale=1.0, is_causal=True, local_window_size=local_window_size
    )


def normalised(x, scale=1.0):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + EPSILON) * scale


def turned(x, base, pairs):
    """Channels (i, i + half) as complex numbers, of which the first pairs turn with positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    angles = jnp.where(jnp.arange(half) < pairs, angles, 0)[:, None]
    z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles)
    return jnp.concatenate([z.real, z.imag], -1)


def oracle(weights, tokens, config):
    """Logits of the model, layer by layer and head by head."""
    own, numbers = config.global_attention, {"blocks": 0, "global_blocks": 0}
    x = weights["embedding/embedding"][tokens]
    length = tokens.shape[1]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    for mixer in config.mixers:
        is_global = mixer == "global_attention"
        stack = "global_blocks" if is_global else "blocks"
        w = {
            path.removeprefix(f"{stack}/"): y[numbers[stack]]
            for path, y in weights.items()
            if path.startswith(f"{stack}/")
        }
        numbers[stack] += 1
        y = normalised(x, w["attention_norm/scale"])
        q, k, v = (
            jnp.einsum("btw,wnh->btnh", y, w[f"attention/{name}/kernel"])
            for name in ("query", "key", "key" if is_global and own.values_from_keys else "value")
        )
        half = q.shape[-1] // 2
        pairs = own.rotary_pairs if is_global and own.rotary_pairs else half
        base = 300.0 if is_global else 50.0
        q = turned(normalised(q, w["attention/query_norm/scale"]), base, pairs)
        k = turned(normalised(k, w["attention/key_norm/scale"]), base, pairs)
        v = normalised(v)
        seen = (distance >= 0) & (is_global | (distance < WINDOW))
        group, outs = q.shape[2] // k.shape[2], []
        for head in range(q.shape[2]):
            logits = jnp.einsum("bqh,bkh->bqk", q[:, :, head], k[:, :, head // group])
            shares = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1)
            outs.append(jnp.einsum("bqk,bkh->bqh", shares, v[:, :, head // group]))
        out = jnp.einsum("nbth,nhw->btw", jnp.stack(outs), w["attention/out/kernel"])
        x = x + normalised(out, w["attention_out_norm/scale"])
        y = normalised(x, w["mlp_norm/scale"])
        hidden = jax.nn.silu(y @ w["mlp/gate/kernel"]) * (y @ w["mlp/up/kernel"])
        x = x + normalised(hidden @ w["mlp/down/kernel"], w["mlp_out_norm/scale"])
        x = x * jax.lax.stop_gradient(w["layer_scalar"])
    return normalised(x, weights["norm/scale"]) @ weights["head/kernel"]


def make(config):
    return gpt.GPT(config, attention_fn=attend, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replaced(values_from_keys=False),
        replaced(rotary_pairs=None, head_dim=None),
        replaced(kv_heads=None),
        dataclasses.replace(
            CONFIG, mixers=("global_attention", "attention"), windows=("none", WINDOW), layers=2,
            rope=RopeConfig(bases=(300.0, 50.0)),
        ),
    ],
)  # fmt: skip
def test_layers_of_two_sizes_are_those_of_the_formulas(config):
    (logits, gradients), (expected, slopes) = beside_oracle(make(config), config, oracle)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)
    for name, x in gradients.items():
        size = float(jnp.abs(slopes[name]).max())
        np.testing.assert_allclose(x, slopes[name], rtol=0, atol=2e-4 * size + 1e-9, err_msg=name)
        assert (size == 0) == name.endswith("layer_scalar")


def test_pairs_that_turn_keep_their_angles():
    every, some = Rope(head_dim=8, base=100.0), Rope(head_dim=8, base=100.0, pairs=3)
    np.testing.assert_array_equal(some.frequencies()[:3], every.frequencies()[:3])
    np.testing.assert_array_equal(some.frequencies()[3:], 0)
    cos, sin = some.rotation(jnp.arange(7)[None])
    np.testing.assert_array_equal([cos[..., 3], sin[..., 3]], [[[1] * 7], [[0] * 7]])


def test_the_heads_of_each_mixer_are_known():
    assert keys_of(CONFIG) == {"attention": Keys(3, 4), "global_attention": Keys(2, 10)}
    assert keys_of(replaced(head_dim=None, kv_heads=None))["global_attention"] == Keys(3, 4)
    plain = dataclasses.replace(CONFIG, mixers=("attention",), global_attention=GlobalConfig())
    assert keys_of(plain) == {"attention": Keys(3, 4)}


def test_the_planner_counts_the_heads_of_each_layer():
    sizes, length = sizes_of_gpt(CONFIG, name="of two sizes"), 16
    weights = sum(x.size for x in jax.tree.leaves(nnx.state(make(CONFIG))))
    assert sizes.elements == weights
    of_window = WINDOW * (WINDOW + 1) // 2 + (length - WINDOW) * WINDOW
    pairs = 3 * 4 * of_window + 2 * 10 * length * (length + 1) // 2
    matrices = 3 * 10 * (2 * 6 * 4 + 2 * 3 * 4 + 3 * 7) + 2 * 10 * (2 * 6 * 10 + 2 * 10 + 3 * 7)
    flops = 3 * (2 * (matrices + 10 * 19) + 4 * 6 * pairs / length)
    assert sizes.flops_per_token(length) == pytest.approx(flops, rel=1e-12)
    heads = {mixer: (x.kv_heads, x.head_dim) for mixer, x in sizes.attentions.items()}
    assert heads == {"attention": (3, 4), "global_attention": (2, 10)}
    assert [x.layer_windows for x in sizes.attentions.values()] == [(WINDOW,) * 3, (None,) * 2]
    # 10 channels of a global head cost 2.5 times those of another head.
    assert sorted(map(str, sizes.document_cost.windows)) == sorted(["3"] * 6 + ["None"] * 10)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(windows=(WINDOW,)), ("model.windows must be `none`", "windows=(3,)")),
        (dict(mixers=("attention",)), ("global_attention.head_dim needs layers of global",)),
        (dict(mixers=("global_attention",), windows=("none",)), ("one layer or more attention",)),
        (dict(global_attention=GlobalConfig(kv_heads=4)), ("kv_heads must divide", "kv_heads=4")),
        (dict(global_attention=GlobalConfig(head_dim=9)), ("head_dim must be even", "Use 10")),
        (dict(global_attention=GlobalConfig(head_dim=2), rope=RopeConfig(channels=4)),
         ("model.rope.channels must be at most", "channels=4, head_dim=2")),
        (dict(global_attention=GlobalConfig(head_dim=8, rotary_pairs=5)),
         ("rotary_pairs must be at most half", "rotary_pairs=5 for 8")),
        (dict(global_attention=GlobalConfig(head_dim=8, rotary_pairs=3),
              rope=RopeConfig(channels=4)), ("rotary_pairs=3 for 4 channels",)),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(changes, named):
    with refused(InputError, *named):
        dataclasses.replace(CONFIG, **changes)


def test_sizes_below_1_are_refused():
    for name in ("head_dim", "kv_heads", "rotary_pairs"):
        with refused(InputError, f"model.global_attention.{name}", f"{name}=0"):
            GlobalConfig(**{name: 0})

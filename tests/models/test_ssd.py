"""Mamba-2 beside `NemotronHMamba2Mixer` of transformers: see `tests/parity/make_layers.py`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import startrail_jax as st
from models.config import GPTConfig
from models.hooks import Hooks
from models.parts.ssd import SSDConfig
from models.ssd import Mamba2

LAYERS = Path(__file__).parents[1] / "parity" / "layers"
HEADS, CHANNELS, STATE, CONV = 8, 6, 5, 4


def config_of(name):
    groups = {"mamba2": 2, "mamba2_one_group": 1, "mamba2_eight_groups": 8}[name]
    least = 0.5 if name == "mamba2_one_group" else 0.001
    options = dict(groups=groups, state_dim=STATE, conv_bias=groups > 1, least_step=least)
    sizes = dict(heads=HEADS, kv_heads=HEADS, head_dim=CHANNELS, width=16, mlp_width=8)
    return GPTConfig(
        **sizes, layers=2, mixers=("ssd", "attention"), norm_eps=1e-5, ssd=SSDConfig(**options)
    )


def weights_of(config, arrays, prefix=""):
    """Weights, or their gradients, by name: transformers joins projections, and convolutions."""
    groups = config.ssd.groups
    shapes = {"out_gate": (HEADS, CHANNELS), "value": (HEADS, CHANNELS)}
    shapes |= {"key": (groups, STATE), "query": (groups, STATE), "step": (HEADS,)}

    def pieces(joined, names):
        ends = np.cumsum([np.prod(shapes[name]) for name in names])[:-1]
        return zip(names, np.split(joined, ends), strict=True)

    found = {
        "decay_rate": arrays[f"{prefix}A_log"],
        "step_bias": arrays[f"{prefix}dt_bias"],
        "skip": arrays[f"{prefix}D"],
        "out_scale": arrays[f"{prefix}norm.weight"].reshape(HEADS, CHANNELS),
        "out": arrays[f"{prefix}out_proj.weight"].T.reshape(HEADS, CHANNELS, -1),
    }
    for name, rows in pieces(arrays[f"{prefix}in_proj.weight"], [*shapes]):
        found[name] = rows.T.reshape(-1, *shapes[name])
    convolved = ("value", "key", "query")
    for name, rows in pieces(arrays[f"{prefix}conv1d.weight"][:, 0], convolved):
        found[f"{name}_conv"] = rows.T.reshape(-1, *shapes[name])
    if f"{prefix}conv1d.bias" in arrays:
        for name, rows in pieces(arrays[f"{prefix}conv1d.bias"], convolved):
            found[f"{name}_conv_bias"] = rows.reshape(shapes[name])
    return found


@pytest.fixture(params=["mamba2", "mamba2_one_group", "mamba2_eight_groups"])
def case(request):
    with np.load(LAYERS / f"{request.param}.npz") as file:
        return config_of(request.param), dict(file)


@pytest.mark.parametrize("layout", ["one device", "contiguous", "zigzag"])
def test_a_layer_is_that_of_transformers(case, layout):
    config, arrays = case
    devices = 1 if layout == "one device" else 8
    mesh = st.make_mesh(st.Degrees(ring=devices), "auto", jax.devices()[:devices])
    order = "zigzag" if layout == "one device" else layout
    attention = st.LinearAttention(mesh, rule="ssd", layout=order)
    hooks = Hooks(linear_attention=lambda rule: attention)
    layer = Mamba2(config, attention_fn=None, hooks=hooks, out_gain=1.0, rngs=nnx.Rngs(0))
    for name, value in weights_of(config, arrays).items():
        weight = getattr(layer, name)
        weight = getattr(weight, "kernel", weight)
        assert weight[...].shape == value.shape, name
        weight.set_value(jnp.asarray(value))
    graph, weights = nnx.split(layer)

    def run(weights, x):
        layer = nnx.merge(graph, weights)
        return layer(x, None, None, layer.uncached({}))[0]

    permuted = [attention.layout.permute(arrays[name], axis=1) for name in ("x", "dout")]
    out, pull = jax.vjp(jax.jit(run), weights, permuted[0])
    of_weights, of_x = pull(permuted[1])
    for found, expected in ((out, "out"), (of_x, "dx")):
        found = attention.layout.unpermute(np.asarray(found), axis=1)
        limit = 1e-5 if expected == "out" else 1e-4
        scale = np.abs(arrays[expected]).max()
        np.testing.assert_allclose(found, arrays[expected], rtol=0, atol=limit * scale)
    for name, expected in weights_of(config, arrays, "d").items():
        found = of_weights[name]
        found = np.asarray(jax.tree.leaves(found)[0])
        limit = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit, err_msg=name)

"""Wan beside `WanTransformer3DModel` of diffusers, whose numbers `tests/parity/wan` keeps."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import startrail_jax as st
from models.wan import Wan
from trainer.dit.patches import grid_of, patchify, unpatchify
from trainer.dit.wan.tensors import places
from trainer.parallel.partition import path_name

REFERENCES = Path(__file__).parents[1] / "parity" / "wan"
CASES = sorted(path.name for path in REFERENCES.iterdir())


def make_wan(config, attention_fn):
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    return Wan(
        **{name: config[name] for name in ("in_channels", "out_channels", "text_dim", "image_dim")},
        patch=tuple(config["patch_size"]),
        width=heads * head_dim,
        layers=config["num_layers"],
        heads=heads,
        mlp_width=config["ffn_dim"],
        time_channels=config["freq_dim"],
        text_norm=config["cross_attn_norm"],
        attention_fn=attention_fn,
        rngs=nnx.Rngs(0),
    )


def padded(x, multiple):
    return np.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2))


@pytest.mark.slow_except_every(2)
@pytest.mark.parametrize("degrees", [st.Degrees(), st.Degrees.startrail(8, c=2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_wan_equals_that_of_diffusers(name, degrees):
    """Outputs and gradients of all weights; eight devices have tokens that are padding."""
    config = json.loads((REFERENCES / name / "config.json").read_text())
    tensors = load_file(REFERENCES / name / "diffusion_pytorch_model.safetensors")
    with np.load(REFERENCES / name / "reference.npz") as file:
        given = dict(file)
    mesh = st.make_mesh(degrees, "auto", jax.devices()[: degrees.num_devices])
    attention = st.Attention(mesh, causal=False)
    graph, state = nnx.split(make_wan(config, attention))
    shapes = {path_name(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(state)}
    found = dict(places(shapes))
    assert {name for place in found.values() for name in place.tensors} == tensors.keys()

    def read(path, x):
        place = found[path_name(path)]
        whole = [slice(0, size) for size in place.shape]
        each = [place.read(tensors[name], whole) for name in place.tensors]
        return jnp.asarray(np.stack(each) if place.stacked else each[0])

    weights = jax.tree_util.tree_map_with_path(read, state)
    patch, size = tuple(config["patch_size"]), given["latents"].shape[1:4]
    grid = grid_of(size, patch)
    count = int(np.prod(grid))
    index = np.stack(np.unravel_index(np.arange(count), grid), -1).astype(np.int32)
    positions = padded(np.tile(index, (2, 1, 1)), 8)
    times, each = given["times"], np.tile(np.arange(count, dtype=np.int32), (2, 1))
    segments = np.where(np.arange(positions.shape[1]) < count, 0, -1).astype(np.int32)
    patches, cotangent = (padded(patchify(given[x], patch), 8) for x in ("latents", "cotangent"))

    def loss(weights):
        options = dict(
            time_index=padded(each, 8) if times.shape[1] > 1 else None,
            image=given.get("image"),
            segment_ids=np.tile(segments, (2, 1)),
        )
        inputs = (patches, positions, times, given["text"]), options
        inputs, options = jax.tree.map(jnp.asarray, inputs)
        out = nnx.merge(graph, weights)(*inputs, **options)
        return jnp.sum(out * cotangent), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    out = unpatchify(np.asarray(out)[:, :count], size, patch)
    np.testing.assert_allclose(out, given["out"], atol=1e-5 * np.abs(given["out"]).max())
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        place = found[path_name(path)]
        each = np.asarray(gradient) if place.stacked else np.asarray(gradient)[None]
        for name, x in zip(place.tensors, each, strict=True):
            wanted = given[f"gradient {name}"]
            # With one token of text, keys have no gradient but what rounding leaves.
            atol = 1e-4 * np.abs(wanted).max() + 1e-6
            np.testing.assert_allclose(place.to_tensor(x), wanted, atol=atol, err_msg=name)

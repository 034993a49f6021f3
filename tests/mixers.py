"""Checks of models whose layers have recurrences, such as Mamba-2, or latents."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import startrail_jax as st
from models.hooks import Hooks
from models.parts.gpt import gpt_dims, gpt_weights
from programs import learnable_tokens, make_config, make_program, placed, saved_by_layers
from programs import train_steps as run_steps
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.gpt.config import DataConfig, attention_of
from trainer.gpt.generation import Generator
from trainer.gpt.objective import make_gpt
from trainer.gpt.token_choice import Sampling
from trainer.parallel.partition import path_name

END = 7  # Ends a document.


def losses_of(program, state):
    """Losses and gradient norms of all steps."""

    def batch(step):
        tokens = learnable_tokens(program.config, step, END)
        made = next_token_batch(tokens, layout=program.attention.layout, end_of_document=END)
        return place(made, program.batch_sharding)

    return run_steps(program, state, map(batch, range(program.config.steps)))[0]


def check_losses(found, one_device, *, fall):
    """Losses and gradient norms of a mesh beside those of one device, whose loss must fall."""
    np.testing.assert_allclose(found[:, 0], one_device[:, 0], rtol=1e-5)
    np.testing.assert_allclose(found, one_device, rtol=1e-4)
    assert one_device[-1, 0] < one_device[0, 0] - fall


def beside_oracle(model, config, oracle):
    """Logits, and gradients by path, of a model with random weights, norms and scalars too, and of
    an oracle, (weights by path, tokens, config) -> logits. The weights are those declared."""
    graph, weights = nnx.split(model)
    rng, vocab = np.random.default_rng(3), config.vocab_size

    def draw(path, x):
        centre = 1.0 if path_name(path).endswith(("scale", "layer_scalar")) else 0.0
        spread = 0.3 if centre else x.shape[-1] ** -0.5
        return jnp.asarray(centre + spread * rng.normal(size=x.shape), jnp.float32)

    weights = jax.tree_util.tree_map_with_path(draw, weights)
    tokens = jnp.asarray(np.random.default_rng(0).integers(vocab, size=(2, 11)), jnp.int32)
    positions = jnp.tile(jnp.arange(11), (2, 1))
    readout = jnp.asarray(np.random.default_rng(1).normal(size=(2, 11, vocab)), jnp.float32)
    named = by_path(weights)
    assert named.keys() == gpt_weights(config).keys()
    sizes = gpt_dims(config)
    for path, x in gpt_weights(config).items():
        dims = [sizes[dim] for dim in x.dims if dim != "layers"]
        assert named[path].shape[x.is_stacked :] == tuple(dims)

    def found(weights):
        logits = nnx.merge(graph, weights)(tokens, positions)
        return jnp.sum(logits * readout), logits

    def wanted(named):
        logits = oracle(named, tokens, config)
        return jnp.sum(logits * readout), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(found, has_aux=True))(weights)
    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
        (_, expected), slopes = jax.jit(jax.value_and_grad(wanted, has_aux=True))(named)
    return (logits, by_path(gradients)), (expected, slopes)


def by_path(tree):
    """The arrays of a tree by their paths."""
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def program_fixtures(config):
    """The program of a config on some degrees, with changes; and two fixtures of a module: its
    first state, and the losses of one device that begins with it."""

    @functools.cache
    def program(degrees, **changes):
        return make_program(dataclasses.replace(config, **changes), degrees)

    @pytest.fixture(scope="module")
    def initial_state():
        return jax.device_get(program(st.Degrees()).initialise())

    @pytest.fixture(scope="module")
    def one_device(initial_state):
        return losses_of(program(st.Degrees()), initial_state)

    return program, initial_state, one_device


def whole_pass(config, weights, tokens):
    """The likeliest token behind each token, of a model on one device, in natural order."""
    mesh = st.make_mesh(st.Degrees(), "auto", jax.devices()[:1])
    attention = st.Attention(mesh, causal=True)
    hooks = Hooks(
        linear_attention=lambda rule: st.LinearAttention(mesh, rule=rule),
        latent_attention=attention.latent,
    )
    graph = nnx.graphdef(
        nnx.eval_shape(lambda: make_gpt(config.model, config.lora, attention, hooks, nnx.Rngs(0)))
    )
    tokens = np.asarray(tokens, np.int32)[None]
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    run = jax.jit(lambda weights, *inputs: nnx.merge(graph, weights)(*inputs))
    return np.asarray(run(weights, tokens, positions)).argmax(-1)[0]


def check_greedy_tokens(config, degrees, weights):
    """Prompts of one token, of fewer than the convolution sees, and of more than a slice."""
    prompts = [8 + np.arange(n) % 40 for n in (1, 3, 40, 64)]
    longest = 64 + 6
    weights = jax.tree.map(lambda x: 2 * x if x.ndim == 2 else x, weights)
    mesh = st.make_mesh(degrees, "auto", jax.devices()[: degrees.num_devices])
    attention = st.Attention(mesh, causal=True, **attention_of(config.model))
    generator = Generator(config, attention, Sampling(temperature=0.0), zero=0)
    of_devices = placed(weights, generator.weight_shapes)
    found = np.array([*generator(of_devices, prompts, num_tokens=6)]).T
    for prompt, new in zip(prompts, found, strict=True):
        text = np.concatenate([prompt, new])
        padded = np.pad(text, (0, longest - len(text)))  # One program, which looks back alone.
        likeliest = whole_pass(config, weights, padded)[len(prompt) - 1 : len(text) - 1]
        assert likeliest.tolist() == new.tolist()
    assert len(set(found.ravel().tolist())) > 4


def check_saved_bytes(model, remat, degrees):
    """Of a model whose pattern of mixers repeats five times. Counted in the derivative that jax
    makes: no weights are among them."""
    turns, tokens = 5, 2048
    model = model | {"layers": len(model["mixers"]) * turns, "dtype": "bfloat16"}
    config = make_config(model, seq_len=tokens * degrees.sequence, remat=remat, batch_size=1)
    config = dataclasses.replace(config, data=DataConfig(mask_documents=False))
    program = make_program(config, degrees)
    step = program.train_step.__wrapped__
    jaxpr = jax.make_jaxpr(step)(program.state_shapes, program.batch_shapes)
    arrays = saved_by_layers(jaxpr.jaxpr, turns)
    formula = program.memory()["saved for the backward pass"]
    assert formula == turns * sum(x.size * x.dtype.itemsize for x in arrays)

"""Factors of embeddings, of the outputs of parts, and of logits, beside dense float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import startrail_jax as st
from mixers import check_saved_bytes
from models.config import GPTConfig, RopeConfig
from models.parts.experts import ExpertsConfig
from programs import SMALL, make_config, make_program, options, placed
from refusals import refused
from startrail_jax.errors import InputError
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.gpt.config import DataConfig, attention_of
from trainer.gpt.generation import Generator
from trainer.gpt.scoring.options import ScoreOptions
from trainer.gpt.scoring.scores import _Scores
from trainer.gpt.token_choice import Sampling, choose_token
from trainer.parallel.partition import path_name
from trainer.parallel.step import Program

EPSILON, LENGTH, ROWS = 1e-3, 32, 2
FACTORS = dict(embedding_scale=2.5, residual_scale=0.3, logit_divisor=1.7)
MODEL = dict(
    vocab_size=19,
    width=10,
    layers=3,
    heads=12,
    kv_heads=3,
    head_dim=4,
    mlp_width=15,
    feed_forwards=("mlp", "experts", "mlp"),
    experts=ExpertsConfig(count=5, top_k=2, width=6, shared_width=9, balance_loss=0.0),
    rope=RopeConfig(bases=("none",)),
    norm_eps=EPSILON,
    scale_dim=9,
)
CONFIG = GPTConfig(**MODEL, **FACTORS)
ALONE = st.Degrees()
TIED = dataclasses.replace(CONFIG, tied_head=True)


def normalised(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPSILON) * scale


def gated(x, gate, up, down):
    hidden = x @ gate
    return hidden / (1 + np.exp(-hidden)) * (x @ up) @ down


def experts_of(x, w):
    """The sum of two experts of each token, by the softmax of their logits, and the shared one."""
    names = ("gate", "up", "down")
    out = gated(x, *(w[f"mlp/shared/{name}/kernel"] for name in names))
    logits = x @ w["mlp/router"]
    for token in np.ndindex(*x.shape[:2]):
        chosen = np.argsort(-logits[token], kind="stable")[:2]
        shares = np.exp(logits[token][chosen])
        for expert, share in zip(chosen, shares / shares.sum(), strict=True):
            matrices = (w[f"mlp/expert_{name}/kernel"][expert] for name in names)
            out[token] += share * gated(x[token], *matrices)
    return out


def logits_of(weights, tokens, config):
    """Logits in float64, layer by layer."""
    numbers = {"blocks": 0, "expert_blocks": 0}
    x = config.embedding_scale * weights["embedding/embedding"][tokens]
    for feed in config.feed_forwards:
        stack = "blocks" if feed == "mlp" else "expert_blocks"
        w = {
            path.removeprefix(f"{stack}/"): y[numbers[stack]]
            for path, y in weights.items()
            if path.startswith(f"{stack}/")
        }
        numbers[stack] += 1
        y = normalised(x, w["attention_norm/scale"])
        heads = (
            np.einsum("btw,wnh->btnh", y, w[f"attention/{name}/kernel"])
            for name in ("query", "key", "value")
        )
        out, _ = oracle.attention(*heads, scale=1 / 3, causal=True)
        out = np.einsum("btnh,nhw->btw", out, w["attention/out/kernel"])
        x = x + config.residual_scale * out
        y = normalised(x, w["mlp_norm/scale"])
        if feed == "experts":
            out = experts_of(y, w)
        else:
            out = gated(y, *(w[f"mlp/{name}/kernel"] for name in ("gate", "up", "down")))
        x = x + config.residual_scale * out
    x = normalised(x, weights["norm/scale"])
    head = weights["embedding/embedding"].T if config.tied_head else weights["head/kernel"]
    return x @ head / config.logit_divisor


def logprobs_of(logits):
    most = logits.max(-1, keepdims=True)
    return logits - most - np.log(np.exp(logits - most).sum(-1, keepdims=True))


def mean_loss(weights, tokens, config):
    logprobs = logprobs_of(logits_of(weights, tokens[:, :-1], config))
    return -np.take_along_axis(logprobs, tokens[:, 1:, None], -1).mean()


@functools.cache
def program_of(config, degrees=ALONE, **changes):
    own = dict(seq_len=LENGTH, batch_size=ROWS, zero=0, data=DataConfig(mask_documents=False))
    return make_program(dataclasses.replace(make_config(vars(config)), **own | changes), degrees)


def drawn(config):
    """Random weights of a model, by path, and as its tree."""
    rng = np.random.default_rng(3)

    def one(path, x):
        is_scale = path_name(path).endswith("scale")
        spread = 0.3 if is_scale else max(x.shape[-2:]) ** -0.5
        return (is_scale + spread * rng.normal(size=x.shape)).astype(np.float32)

    tree = jax.tree_util.tree_map_with_path(one, program_of(config).state_shapes.weights)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): np.float64(x) for path, x in leaves}, tree


def tokens_of(config):
    return np.random.default_rng(0).integers(config.vocab_size, size=(ROWS, LENGTH + 1))


def batch_of(program, tokens):
    batch = next_token_batch(tokens, layout=program.attention.layout)
    return place(batch, program.batch_sharding)


SETTINGS = {
    "one device": (CONFIG, ALONE, {}),
    "tiles of logits, tensor": (TIED, st.Degrees(ring=2, tensor=3), {"tile": 4}),
    "tiles of logits": (TIED, ALONE, {"tile": 8}),
    "tensor": (CONFIG, st.Degrees(ring=2, tensor=3), {}),
    "StarTrail, ZeRO 3": (CONFIG, st.Degrees.startrail(8, c=2), {"zero": 3}),
}


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_losses_and_gradients_are_those_of_the_formulas(name):
    config, degrees, changes = SETTINGS[name]
    program, tokens = program_of(config, degrees, **changes), tokens_of(config)
    named, tree = drawn(config)
    weights = placed(tree, program.state_shapes.weights)
    batch = batch_of(program, tokens)

    def run(weights, batch):
        return program.gradients(weights, batch), program.outputs(weights, batch)

    compiled = jax.jit(run).lower(weights, batch).compile(options(program))
    (loss, gradients), logits = jax.device_get(compiled(weights, batch))
    logits = program.attention.layout.unpermute(logits)
    expected = logits_of(named, tokens[:, :-1], config)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_allclose(loss, mean_loss(named, tokens, config), rtol=1e-6)
    # Derivatives in a direction of each weight, by central differences.
    rng, step = np.random.default_rng(4), 1e-6
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        weight = named[path_name(path)]
        towards = rng.normal(size=weight.shape)
        ends = (
            mean_loss({**named, path_name(path): weight + x * towards}, tokens, config)
            for x in (step, -step)
        )
        slope = np.subtract(*ends) / (2 * step)
        size = np.linalg.norm(gradient) + 1e-9
        assert abs(np.vdot(gradient, towards) - slope) < 2e-5 * size * weight.size**0.5, path


@pytest.mark.parametrize("degrees", [st.Degrees(), st.Degrees(ring=2, tensor=3)], ids=str)
def test_tokens_are_drawn_from_the_logits_of_the_formulas(degrees):
    named, tree = drawn(CONFIG)
    prompt = tokens_of(CONFIG)[0, :5]
    sampling = Sampling(temperature=0.7, seed=3)
    mesh = st.make_mesh(degrees, "auto", jax.devices()[: degrees.num_devices])
    attention = st.Attention(mesh, causal=True, **attention_of(CONFIG))
    generator = Generator(make_config(vars(CONFIG)), attention, sampling, zero=0)
    weights = placed(tree, generator.weight_shapes)
    found = np.array([*generator(weights, [prompt], num_tokens=20)])[:, 0]

    def likely(divisor):
        """The tokens that the logits give behind the same text."""
        text = np.concatenate([prompt, found])[None]
        logits = logits_of(named, text, dataclasses.replace(CONFIG, logit_divisor=divisor))[0]
        key = jax.random.fold_in(jax.random.key(sampling.seed), 0)
        return [
            int(choose_token(jnp.float32(logits[n - 1]), sampling, jax.random.fold_in(key, n)))
            for n in range(len(prompt), len(text[0]))
        ]

    assert found.tolist() == likely(CONFIG.logit_divisor)
    assert found.tolist() != likely(1.0)


def test_scores_of_tokens_are_those_of_the_formulas():
    named, tree = drawn(TIED)
    tokens = tokens_of(TIED)
    config = dataclasses.replace(program_of(TIED).config, tile=8)
    scores = _Scores(config, ScoreOptions(seq_len=LENGTH))
    program = Program(config, program_of(TIED).attention, scores)
    batch = batch_of(program, tokens)
    found = np.asarray(program.numbers(placed(tree, program.state_shapes.weights), batch))
    found = program.attention.layout.unpermute(found)[..., 0]
    expected = logprobs_of(logits_of(named, tokens[:, :-1], TIED))
    expected = np.take_along_axis(expected, tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_factors_save_nothing_for_the_backward_pass():
    check_saved_bytes(
        SMALL | FACTORS | {"mixers": ("ssd", "attention")}, "projections_saved", st.Degrees()
    )


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_factors_that_are_no_positive_numbers_are_refused(name, value):
    with refused(InputError, f"model.{name} must be above 0 and finite", f"{name}={value}"):
        dataclasses.replace(CONFIG, **{name: value})


def test_two_factors_of_embeddings_are_refused():
    with refused(InputError, "model.embedding_scale must be 1 with model.scaled_embedding", "2.5"):
        dataclasses.replace(CONFIG, scaled_embedding=True)

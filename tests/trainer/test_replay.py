"""Experts that rollouts name: beside a dense model, on every mesh, in whole runs; and mistakes."""

import copy
import dataclasses
import functools
import tempfile
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import programs
import startrail_jax as st
import train
from configs.gpt import gpt_tiny
from models.config import ExpertsConfig, GPTConfig, LinearConfig
from models.gpt import GPT
from programs import (
    SMALL,
    check_same_gradients,
    make_config,
    make_program,
    records_of,
    whole_batch,
)
from refusals import refused
from rollout_cases import (
    grpo_advantages,
    make_rollouts,
    targets_of,
    with_experts,
    with_teacher,
    write_rollouts,
)
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.data.order import PartBatches
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.gpt.objectives.distill import Distill
from trainer.gpt.objectives.policy import Policy
from trainer.gpt.task import GPTTask
from trainer.parallel.partition import path_name

SEQ_LEN = 36
MODELS = {
    # As Qwen3-MoE.
    "experts": dict(
        layers=3,
        qk_norm=True,
        feed_forwards=("experts",),
        experts=ExpertsConfig(count=8, top_k=3, width=12, balance_loss=0.1),
    ),
    "every second": dict(
        layers=4,
        qk_norm=True,
        feed_forwards=("mlp", "experts"),
        experts=ExpertsConfig(
            **dict(count=8, top_k=2, width=12, scores="sigmoid", normalised=False),
            **dict(balance_loss=0.1, balance_rate=0.01),
        ),
    ),
    # As Qwen3.5-MoE, with a last period that is not whole.
    "hybrid": dict(
        layers=3,
        qk_norm=True,
        mixers=("linear", "attention"),
        feed_forwards=("experts",),
        experts=ExpertsConfig(count=8, top_k=2, width=12, shared_width=8, shared_gate=True),
        linear=LinearConfig(heads=4, key_heads=2, key_dim=8, value_dim=12, norm_eps=1e-2),
        attention_gate=True,
        norm_offset=True,
    ),
}


def layers_of(model):
    settings = MODELS[model]
    return settings["layers"] // (2 if "mlp" in settings["feed_forwards"] else 1)


@functools.cache
def records(model, own=False):
    """Rollouts with random experts, or with those that the router chooses."""
    experts, plain = MODELS[model]["experts"], make_rollouts()
    if not own:
        return with_experts(plain, layers_of(model), experts.top_k, experts.count)
    with in_float64(model) as weights:
        tokens = jnp.asarray(in_rows(x["tokens"] for x in plain))
        chosen = jax.jit(jax.vmap(lambda x: dense(model, weights, x)[1]))(tokens).tolist()
    return [x | {"experts": y[: len(x["tokens"])]} for x, y in zip(plain, chosen, strict=True)]


def in_rows(lists):
    """Lists of entries for tokens as rows that end with zeros."""
    arrays = [*map(np.array, lists)]
    longest = max(map(len, arrays))
    return np.stack([np.pad(x, [(0, longest - len(x))] + [(0, 0)] * (x.ndim - 1)) for x in arrays])


@functools.cache
def file_of(model, own=False):
    folder = Path(tempfile.mkdtemp())
    return write_rollouts(folder / "rollouts.jsonl", records(model, own))


def config_of(model, own=False, data=None, of_experts=None, **changes):
    sizes = SMALL | MODELS[model]
    sizes["experts"] = dataclasses.replace(sizes["experts"], **of_experts or {})
    path = file_of(model, own)
    settings = dict(objective="policy", policy=Policy(), seq_len=SEQ_LEN, batch_size=8)
    settings |= dict(run_dir=path.parent / "run", replay_experts=True)
    settings["data"] = DataConfig(path=(path,), **data or {})
    return make_config(sizes, **settings | changes)


@functools.cache
def initial_weights(model):
    """A bit away from the beginning, so that experts differ."""
    config = config_of("experts", replay_experts=False)  # Rollouts of any model: none is read.
    config = dataclasses.replace(config, model=GPTConfig(**SMALL | MODELS[model]))
    weights = jax.device_get(make_program(config, st.Degrees()).initialise().weights)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), weights)


def by_path(tree):
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@contextmanager
def in_float64(model):
    """The initial weights by path, and float64 for what is computed from them."""
    weights = by_path(initial_weights(model))
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield {name: jnp.asarray(x, jnp.float64) for name, x in weights.items()}


# A dense reference, which uses nothing of the package: w is weights by path.


def dense(model, w, tokens, experts=None):
    """Logits [n, vocab] of a document, the experts [n, layers, k] of its tokens, and the
    probabilities of all experts in each layer."""
    settings, counts, used, probabilities = MODELS[model], {}, [], []
    x = w["embedding/embedding"][jnp.asarray(tokens)]
    for layer in range(settings["layers"]):
        feeds = settings["feed_forwards"]
        is_dense = feeds[layer % len(feeds)] == "mlp"
        stack = "blocks" if is_dense else "expert_blocks"
        number = counts.setdefault(stack, 0)
        counts[stack] += 1

        def of(name, stack=stack, number=number):
            return w[f"{stack}/{name}"][number]

        x = x + dense_attention(of, normalised(x, of("attention_norm/scale")))
        y = normalised(x, of("mlp_norm/scale"))
        if is_dense:
            gate, up, down = (of(f"mlp/{name}/kernel") for name in ("gate", "up", "down"))
            x = x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
            continue
        given = None if experts is None else experts[:, number]
        out, chosen, probability = dense_experts(of, y, settings["experts"], given)
        x = x + out
        used.append(chosen)
        probabilities.append(probability)
    logits = normalised(x, w["norm/scale"]) @ w["head/kernel"]
    return logits, jnp.stack(used, 1), jnp.stack(probabilities, 1)


def normalised(x, scale):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def dense_attention(of, x):
    n, h = len(x), SMALL["head_dim"]
    query, key, value = (
        jnp.einsum("tc,cnh->tnh", x, of(f"attention/{name}/kernel"))
        for name in ("query", "key", "value")
    )
    angles = np.arange(n)[:, None] * 10_000.0 ** (-np.arange(h // 2) / (h // 2))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turned(y, name):
        first, second = jnp.split(normalised(y, of(f"attention/{name}_norm/scale")), 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    query, key = turned(query, "query"), turned(key, "key")
    key, value = (jnp.repeat(y, query.shape[1] // y.shape[1], 1) for y in (key, value))
    logits = jnp.einsum("tnh,snh->nts", query, key) * h**-0.5
    weights = jax.nn.softmax(jnp.where(np.tri(n, dtype=bool), logits, -jnp.inf))
    return jnp.einsum("nts,snh,nhc->tc", weights, value, of("attention/out/kernel"))


def dense_experts(of, x, settings, given):
    logits = x @ of("mlp/router")
    is_softmax = settings.scores == "softmax"
    scores = jax.nn.softmax(logits) if is_softmax else jax.nn.sigmoid(logits)
    bias = of("mlp/choice_bias") if settings.balance_rate else 0
    order = jnp.argsort(-(logits if is_softmax else scores + bias), axis=-1)
    chosen = order[:, : settings.top_k] if given is None else given
    shares = jnp.take_along_axis(scores, chosen, -1)
    if settings.normalised:
        shares = shares / shares.sum(-1, keepdims=True)
    gate, up = (
        jnp.einsum("tc,ecw->tew", x, of(f"mlp/expert_{name}/kernel")) for name in ("gate", "up")
    )
    every = jnp.einsum("tew,ewc->tec", jax.nn.silu(gate) * up, of("mlp/expert_down/kernel"))
    taken = (chosen[..., None] == np.arange(settings.count)) * shares[..., None]
    out = jnp.einsum("tke,tec->tc", taken, every)
    return out, chosen, scores / scores.sum(-1, keepdims=True)


def dense_loss(w, model):
    """PPO's loss of all rollouts, with the loss that balances experts, and the one whose gradient
    is their load."""
    settings, every = MODELS[model]["experts"], records(model)
    names = ("tokens", "experts", "weights", "logprobs")
    tokens, experts, weights, old = (in_rows(x[name] for x in every) for name in names)
    targets, advantages = in_rows(map(targets_of, every)), np.array(grpo_advantages(every, True))
    of_rows = jax.vmap(functools.partial(dense, model, w))
    logits, chosen, probability = of_rows(jnp.asarray(tokens), jnp.asarray(experts))
    lp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    ratio, advantage = jnp.exp(lp - old), advantages[:, None]
    gained = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    total, weight = -(gained * weights).sum(), weights.sum()
    is_chosen = (chosen[..., None] == np.arange(settings.count)).any(-2)
    loads, probabilities = (jnp.einsum("bt,btle->le", weights, x) for x in (is_chosen, probability))
    loads = loads / weight
    balance = settings.balance_loss * settings.count * (loads * probabilities / weight).sum()
    if settings.balance_rate:
        bias = w["expert_blocks/mlp/choice_bias"]
        excess = loads - loads.mean(-1, keepdims=True)
        balance += ((bias - jax.lax.stop_gradient(bias)) * excess).sum()
    return total / weight + balance


def gradients_of(config, degrees, model):
    program = make_program(config, degrees)
    return programs.gradients_of(program, initial_weights(model), whole_batch(program))


@functools.cache
def one_device(model, **changes):
    return gradients_of(config_of(model, **changes), st.Degrees(), model)


@functools.cache
def logprobs_of(model, degrees, **changes):
    """Log-probabilities of all targets that count, in order."""
    program = make_program(config_of(model, **changes), degrees)
    batch = whole_batch(program)
    weights = programs.placed(initial_weights(model), program.state_shapes.weights)
    found = program.numbers(weights, batch)
    layout = program.attention.layout
    found, counted = (layout.unpermute(np.asarray(x)) for x in (found, batch.weights))
    return found[..., 0][counted > 0]


@pytest.mark.parametrize("model", ["experts", "every second"])
def test_loss_and_gradients_are_those_of_dense_experts(model):
    with in_float64(model) as weights:
        compute = jax.jit(jax.value_and_grad(dense_loss), static_argnums=1)
        loss, gradients = compute(weights, model)
    found = one_device(model)
    np.testing.assert_allclose(found[0], loss, rtol=1e-6)
    assert by_path(found[2]).keys() == gradients.keys()
    for name, x in by_path(found[2]).items():
        want = np.asarray(gradients[name])
        np.testing.assert_allclose(x, want, atol=1e-5 * np.abs(want).max(), err_msg=name)
    # The router chooses others.
    plain = gradients_of(config_of(model, replay_experts=False), st.Degrees(), model)
    assert abs(plain[0] - float(loss)) > 1e-3


@pytest.mark.parametrize("model", ["experts", "every second"])
def test_the_choice_of_the_router_changes_nothing(model):
    config = config_of(model, own=True)
    plain = dataclasses.replace(config, replay_experts=False)
    found, want = (gradients_of(x, st.Degrees(), model) for x in (config, plain))
    check_same_gradients(found, want, rtol=1e-6, atol=1e-7)


MESHES = {
    "startrail": (st.Degrees.startrail(8, c=2), dict(remat="full", tile=7)),
    "gathered": (
        st.Degrees(tensor=2, ring=4),
        dict(zero=3, experts="gather", remat="attention_saved"),
    ),
    "dispatched": (st.Degrees.startrail(8, c=2), dict(zero=3, experts="dispatch")),
    "tensor, dispatched": (
        st.Degrees(tensor=2, data=2, head=2),
        dict(zero=3, experts="dispatch", remat="products_saved", tile=5),
    ),
    "accumulated": (st.Degrees(data=2, ring=2), dict(gradient_accumulation=2, zero=2)),
}


@pytest.mark.parametrize("model", ["experts", "hybrid", "every second"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow_except_every(6)
def test_scores_and_gradients_do_not_depend_on_the_mesh(mesh, model):
    degrees, changes = MESHES[mesh]
    parts = changes.get("gradient_accumulation", 1)
    found = gradients_of(config_of(model, **changes), degrees, model)
    want = one_device(model, gradient_accumulation=parts)
    check_same_gradients(found, want, rtol=1e-5, atol=1e-6)
    got, logprobs = logprobs_of(model, degrees, **changes), logprobs_of(model, st.Degrees())
    # A difference of logits, which are rounded as the largest is.
    np.testing.assert_allclose(got, logprobs, rtol=0, atol=1e-6 * np.abs(logprobs).max())


def test_whole_rollouts_have_the_experts_of_those_in_rows():
    """Each on as few devices as hold it. Parts of a batch are balanced by themselves."""
    of_experts = dict(balance_loss=0.0)
    data = dict(batches="documents", draw=64)
    config = config_of("experts", data=data, batch_size=16, of_experts=of_experts)
    program = make_program(config, st.Degrees(ring=4))
    opened = GPTTask().open_data(config, program.attention.layout)
    series = PartBatches(program.parts, opened, seed=0)
    batch = next(series)
    series.close()
    assert len({*batch.split[: batch.count].tolist()}) > 1
    placed = program.parts.place(batch)
    loss, _, gradients = programs.gradients_of(program, initial_weights("experts"), placed)
    plain = config_of("experts", of_experts=of_experts)
    want = gradients_of(plain, st.Degrees(), "experts")
    check_same_gradients((loss, {}, gradients), (want[0], {}, want[2]))


RECORD = {
    "tokens": [5, 6, 7, 8],
    "weights": [0, 1, 1, 0],
    "logprobs": [0, -1.5, -2.5, 0],
    "advantages": 1,
    "experts": [[[0, 1], [2, 3]], [[7, 6], [0, 2]], [[1, 0], [4, 3]], None],
}


def opened(tmp_path, given, **changes):
    path = write_rollouts(tmp_path / "rollouts.jsonl", given)
    config = config_of("every second", data=dict(cache=tmp_path / "cache"), **changes)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=(path,)))
    return GPTTask().open_data(dataclasses.replace(config, seq_len=8), Layout("contiguous", 1))


def test_experts_belong_to_the_tokens_that_are_read(tmp_path):
    data = opened(tmp_path, [RECORD, RECORD | {"experts": [*RECORD["experts"][2::-1], None]}])
    batch = data.collate([data.train[0]], [0])
    experts = batch.numbers["experts"]
    assert (experts.dtype, experts.shape) == (np.uint8, (1, 8, 2, 2))
    assert batch.tokens[0].tolist() == [5, 6, 7, 5, 6, 7, 0, 0]
    first = RECORD["experts"][:3]
    assert experts[0].tolist() == [*first, *first[::-1], *[[[0, 0]] * 2] * 2]
    (stored,) = (tmp_path / "cache").rglob("train.experts.npy")
    assert np.load(stored, mmap_mode="r").dtype == np.uint8
    # Without the setting, they are read by nothing.
    plain = opened(tmp_path, [RECORD], replay_experts=False)
    assert "experts" not in plain.collate([plain.train[0]], [0]).numbers


MISTAKES = {
    "none": (lambda x: x.pop("experts"), "got no experts in {place}"),
    "no list": (lambda x: x.update(experts="abc"), "got 'abc' for 4 tokens in {place}"),
    "short": (lambda x: x["experts"].pop(), "got 3 entries for 4 tokens in {place}"),
    "null": (lambda x: x["experts"].__setitem__(1, None), "got None for token 1 in {place}"),
    "layers": (lambda x: x["experts"][2].pop(), "got [[1, 0]] for token 2 in {place}, with 2 such"),
    "top_k": (lambda x: x["experts"][0][1].pop(), "got [[0, 1], [2]] for token 0 in {place}"),
    "real": (
        lambda x: x["experts"][0][1].__setitem__(0, 0.5),
        "got [[0, 1], [0.5, 3]] for token 0",
    ),
    "count": (
        lambda x: x["experts"][1].__setitem__(0, [8, 1]),
        "got [8, 1] for token 1, entry 0, in {place}, with count=8",
    ),
    "negative": (lambda x: x["experts"][1].__setitem__(1, [-1, 1]), "got [-1, 1] for token 1"),
    "twice": (
        lambda x: x["experts"][2].__setitem__(1, [4, 4]),
        "different; got [4, 4] for token 2, entry 1, in {place}",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_experts_is_named(tmp_path, mistake):
    change, message = MISTAKES[mistake]
    wrong = copy.deepcopy(RECORD)
    change(wrong)
    place = repr(f"{tmp_path / 'rollouts.jsonl'}:2")
    with refused(InputError, message.format(place=place), place):
        opened(tmp_path, [RECORD, wrong])


def test_runs_without_anything_to_replay_are_refused():
    with refused(InputError, "replay_experts needs layers of experts; got feed_forwards=mlp"):
        make_config(SMALL, objective="policy", replay_experts=True)
    for objective in ("next_token", "preference"):
        with refused(InputError, "needs an objective on rollouts", f"objective={objective!r}"):
            config_of("experts", objective=objective)


def test_a_model_takes_the_experts_of_all_its_layers():
    config = GPTConfig(**SMALL | MODELS["every second"])
    model = GPT(config, attention_fn=jax.nn.dot_product_attention, rngs=nnx.Rngs(0))
    tokens, experts = (jnp.zeros(shape, jnp.int32) for shape in ((1, 4), (1, 4, 4, 2)))
    with refused(InputError, "got (1, 4, 4, 2) for 2 layers of top_k=2"):
        model.hidden(tokens, tokens, experts=experts)


def test_a_run_trains_and_measures(tmp_path):
    """By distillation, which reads other numbers of several dimensions too."""
    path = write_rollouts(tmp_path / "rollouts.jsonl", with_teacher(records("every second")))
    config = dataclasses.replace(
        gpt_tiny(), model=GPTConfig(**SMALL | MODELS["every second"]), seq_len=SEQ_LEN, devices=2,
        run_dir=tmp_path / "run", sample=TextSampleConfig(), tensorboard=False, batch_size=4,
        steps=4, log_every=1, objective="distill", distill=Distill(top_k=6), replay_experts=True,
        data=DataConfig(path=(path,), validation_path=path.with_name("held.jsonl")),
    )  # fmt: skip
    write_rollouts(config.data.validation_path, with_teacher(records("every second")[:3]))
    result = train.train(config)
    assert np.isfinite(result.validation)
    assert all(x["busiest_expert"] < 2 for x in records_of(config.run_dir) if "train_loss" in x)

"""Steps of a hybrid of linear attention and attention with experts: one loss on every mesh."""

import dataclasses

import jax
import numpy as np
import pytest

import fake_jla
import startrail_jax as st
from mixers import (
    END,
    check_greedy_tokens,
    check_losses,
    check_saved_bytes,
    losses_of,
    program_fixtures,
)
from models.config import ExpertsConfig, GPTConfig, LinearConfig, RopeConfig
from programs import (
    SMALL,
    check_first_step,
    learnable_tokens,
    make_config,
    train_steps,
)
from programs import make_program as program_of
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import AttentionConfig, LoraConfig, OptimizerConfig
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.parallel.partition import path_name

STEPS = 10
# Two groups of a period and a last one that is not whole; fewer key heads than heads of values.
HYBRID = SMALL | dict(
    layers=5,
    mixers=("linear", "attention"),
    feed_forwards=("experts", "mlp"),
    experts=ExpertsConfig(
        **dict(count=6, top_k=2, width=8, shared_width=12, shared_gate=True, biases=True),
        **dict(balance_loss=0.1, balance_over="model", balance_rate=0.01, z_loss=0.01),
    ),
    # The first tokens have small outputs, and the norm of these makes rounding errors grow.
    linear=LinearConfig(heads=4, key_heads=2, key_dim=8, value_dim=12, norm_eps=1e-3),
    attention_gate=True,
    qk_norm=True,
    norm_offset=True,
    rope=RopeConfig(channels=2),
)
CONFIG = make_config(
    HYBRID,
    optimizer=OptimizerConfig(learning_rate=3e-3),
    steps=STEPS,
    seq_len=64,
    remat="attention_saved",
)


make_program, initial_state, one_device = program_fixtures(CONFIG)


# The first row is fast, and has what differs from a model of attention: rings and teams of linear
# attention, more tensor than its key heads, experts and states that are gathered.
SETTINGS = {
    "16 devices": (st.Degrees(team=2, ring=2, tensor=4), {"zero": 3}),
    "StarTrail": (st.Degrees.startrail(8, c=2), {}),
    "Ring Attention, zero 1": (st.Degrees.ring_attention(8), {"zero": 1}),
    "Ulysses, zero 3, full remat": (st.Degrees.ulysses(4), {"zero": 3, "remat": "full"}),
    "team x ring, zero 2, projections saved, tiled": (
        st.Degrees(team=2, ring=4),
        {"zero": 2, "remat": "projections_saved", "tile": 8},
    ),
    "tensor": (st.Degrees(data=2, team=2, tensor=2), {"zero": 3}),
    "more tensor than key heads": (st.Degrees(ring=2, tensor=4), {"remat": "none"}),
    "experts dispatched": (st.Degrees(head=2), {"zero": 3, "experts": "dispatch"}),
    "experts dispatched over an axis": (
        st.Degrees(team=2, ring=2, tensor=2),
        {"zero": 3, "zero_axes": ("team",), "experts": "dispatch", "remat": "full"},
    ),
    "accumulation, products saved": (
        st.Degrees(data=2, group=2, team=2),
        {"gradient_accumulation": 2, "remat": "products_saved"},
    ),
    "kernels of jla": (
        st.Degrees(ring=4),
        {"attention": AttentionConfig(linear_backend="jla"), "remat": "products_saved"},
    ),
}


@pytest.mark.slow_except_every(len(SETTINGS))
@pytest.mark.parametrize("name", SETTINGS)
def test_every_mesh_gives_the_losses_of_one_device(name, initial_state, one_device, monkeypatch):
    fake_jla.install(monkeypatch)
    degrees, changes = SETTINGS[name]
    found = losses_of(make_program(degrees, **changes), initial_state)
    if "gradient_accumulation" in changes:  # Experts are balanced in each part.
        one_device = losses_of(make_program(st.Degrees(), gradient_accumulation=2), initial_state)
    check_losses(found, one_device, fall=0.5)


@pytest.mark.parametrize(
    "degrees",
    [
        st.Degrees.startrail(8, c=2),
        pytest.param(st.Degrees(data=2, ring=2, tensor=2), marks=pytest.mark.slow),
        pytest.param(st.Degrees(head=2, tensor=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_greedy_tokens_are_the_likeliest_of_whole_forward_passes(degrees, initial_state):
    check_greedy_tokens(CONFIG, degrees, initial_state.weights)


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("degrees", [st.Degrees(ring=4), st.Degrees(group=2, team=2, tensor=2)])
@pytest.mark.parametrize(
    "remat", ["full", "attention_saved", "projections_saved", "products_saved"]
)
def test_memory_counts_what_layers_save(remat, degrees):
    linear = LinearConfig(heads=4, key_heads=2, key_dim=8, value_dim=12)
    pattern = dict(mixers=("linear", "attention"), feed_forwards=("mlp", "experts"), linear=linear)
    check_saved_bytes(HYBRID | pattern, remat, degrees)


def test_loads_of_experts_are_no_gradients_of_the_loss():
    program = make_program(st.Degrees())
    gradients = program.state_shapes.weights
    of_loss = jax.tree.leaves(program.objective.gradients_of_loss(gradients))
    biases = [x for path, x in jax.tree_util.tree_leaves_with_path(gradients)
              if "choice_bias" in jax.tree_util.keystr(path)]  # fmt: skip
    assert len(biases) == 1
    assert len(of_loss) == len(jax.tree.leaves(gradients)) - 1


@pytest.mark.slow
def test_loads_of_experts_are_no_part_of_the_norm_of_gradients():
    norms = []
    for rate in (0.0, 0.5):
        experts = ExpertsConfig(count=6, top_k=2, width=8, balance_loss=0.0, balance_rate=rate)
        changes = dict(layers=1, feed_forwards=("experts",), experts=experts)
        program = program_of(make_config(SMALL | changes, seq_len=16), st.Degrees())
        tokens = learnable_tokens(program.config, 0, END)
        batch = place(next_token_batch(tokens, layout=program.attention.layout),
                      program.batch_sharding)  # fmt: skip
        norms.append(train_steps(program, jax.device_get(program.initialise()), [batch])[0][0, 1])
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_bias_in_the_choice_of_experts_stays_or_moves_by_a_fixed_distance(rate):
    """No gradient of the loss reaches it, and no weight decay."""
    experts = ExpertsConfig(count=6, top_k=2, width=8, choice_bias=True, balance_rate=rate)
    changes = dict(layers=1, feed_forwards=("experts",), experts=experts)
    program = program_of(make_config(SMALL | changes, seq_len=16), st.Degrees())
    assert program.config.optimizer.weight_decay > 0
    tokens = learnable_tokens(program.config, 0, END)
    batch = place(next_token_batch(tokens, layout=program.attention.layout),
                  program.batch_sharding)  # fmt: skip

    def with_biases(state):
        paths, tree = jax.tree_util.tree_flatten_with_path(state)
        drawn = np.random.default_rng(0).normal(size=6)
        return jax.tree.unflatten(tree, [
            drawn.reshape(x.shape).astype(x.dtype)
            if "choice_bias" in (name := path_name(path)) and "weights" in name else x
            for path, x in paths
        ]), drawn  # fmt: skip

    state, before = with_biases(jax.device_get(program.initialise()))
    losses, state = train_steps(program, state, [batch] * 2)
    (after,) = (np.asarray(x).ravel() for path, x in
                jax.tree_util.tree_leaves_with_path(state.weights)
                if "choice_bias" in path_name(path))  # fmt: skip
    if not rate:
        np.testing.assert_array_equal(after, before.astype("f4"))
    else:
        steps = (after - before) / rate
        np.testing.assert_allclose(steps, np.round(steps), rtol=0, atol=1e-6)
        assert np.abs(steps).max() == pytest.approx(2, abs=1e-6)
    assert np.isfinite(losses).all()


def test_sizes_of_the_planner_are_those_of_the_weights():
    experts = dataclasses.replace(CONFIG.model.experts, balance_rate=0.0)
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, experts=experts),
        lora=LoraConfig(rank=3, targets=("query", "decay", "up", "expert_down")),
    )
    program = program_of(config, st.Degrees())
    whole = sum(x.size for x in jax.tree.leaves(program.state_shapes.model))
    sizes = program.objective.sizes
    assert sizes.elements == whole
    adapters = sum(x.size for x in jax.tree.leaves(program.state_shapes.weights))
    assert sum(kind.count * kind.adapters for kind in sizes.kinds) == adapters
    adapters -= 3 * 4 * 3 * (8 + 24)  # Those of four idle experts.
    assert sizes.active_adapters == adapters
    everything = sum(kind.count * kind.matrices for kind in sizes.kinds)
    # Three layers with three matrices of four idle experts; the router counts beside the matrices.
    assert sizes.matrices == everything - 3 * (3 * 4 * 24 * 8 - 6 * 24)
    # Three products with each state, forward, and twice as many backward.
    states = 6 * 3 * 8 * 12 * 4 * sizes.layer_mixers.count("linear")
    pairs = 12 * 8 * 4 * sum(range(1, 65)) / 64 * 2
    products = 2 * (2 * (sizes.matrices + 24 * 48) + 3 * adapters)
    assert sizes.flops_per_token(64) == pytest.approx(states + pairs + products, rel=1e-12)


@pytest.mark.parametrize("mixers", [("linear",), (), ("linear",) * 8 + ("attention",)])
def test_a_model_has_a_layer_with_attention(mixers):
    with refused(InputError, "model.mixers must"):
        GPTConfig(**HYBRID | {"mixers": mixers})


@pytest.mark.parametrize(
    ("experts", "others", "words"),
    [
        (dict(top_k=7), {}, "top_k=7, count=6"),
        (dict(count=0), {}, "model.experts.count"),
        (dict(groups=4), {}, "count=6, groups=4"),
        (dict(groups=6, top_groups=2), {}, "of 2 or more"),
        (dict(groups=3, top_groups=4), {}, "groups=3, top_groups=4"),
        (dict(groups=3, top_k=3), {}, "top_groups=1, top_k=3"),
        (dict(share_scale=0.0), {}, "model.experts.share_scale"),
        (dict(shared_width=0), {}, "model.experts.shared_gate needs a shared expert"),
        (dict(balance_loss=-1.0), {}, "balance_loss=-1.0"),
        ({}, dict(feed_forwards=("mlp",)), "model.experts.count needs layers of experts"),
        ({}, dict(feed_forwards=("mlp",) * 9), "model.feed_forwards must have no more entries"),
    ],
)
def test_experts_that_make_no_sense_are_refused(experts, others, words):
    with refused(InputError, words):
        experts = dataclasses.replace(HYBRID["experts"], **experts)
        GPTConfig(**HYBRID | {"experts": experts} | others)


def test_kernels_of_linear_attention_need_such_layers():
    with refused(InputError, "needs layers of linear attention", linear_backend="jla"):
        program_of(
            make_config(SMALL, attention=AttentionConfig(linear_backend="jla")), st.Degrees()
        )


def test_tokens_are_sent_to_experts_of_zero_3_alone():
    with refused(InputError, "experts=dispatch, zero=2, feed_forwards=experts mlp"):
        dataclasses.replace(CONFIG, zero=2, experts="dispatch")
    config = dataclasses.replace(CONFIG, zero=3, experts="dispatch")
    with refused(InputError, "got 4 devices and 6 experts"):
        check_first_step(config, st.Degrees(ring=4))


def test_adapters_need_a_projection_of_all_tokens():
    with refused(InputError, "balance_rate=0.01, lora.rank=2"):
        dataclasses.replace(CONFIG, lora=LoraConfig(rank=2))
    experts = ExpertsConfig(count=4)
    model = GPTConfig(**SMALL, feed_forwards=("experts",), experts=experts)
    with refused(InputError, "lora.targets must name projections of the model; got up"):
        dataclasses.replace(CONFIG, model=model, lora=LoraConfig(rank=2, targets=("query", "up")))

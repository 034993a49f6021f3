"""Models whose layers have one part each, as Nemotron-H: a mixer or a feed-forward."""

import dataclasses

import jax
import pytest

import startrail_jax as st
from mixers import check_greedy_tokens, check_losses, check_saved_bytes, losses_of, program_fixtures
from models.config import ExpertsConfig, GPTConfig, RopeConfig
from models.parts.ssd import SSDConfig
from programs import SMALL, check_first_step, make_config
from programs import make_program as program_of
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import LoraConfig, OptimizerConfig

STEPS = 10
# A layer of each kind, and one with both parts; two feed-forwards follow each other.
NEMOTRON = SMALL | dict(
    layers=7,
    mixers=("ssd", "none", "ssd", "attention", "none", "none", "ssd"),
    feed_forwards=("none", "experts", "none", "none", "mlp", "experts", "mlp"),
    mlp="relu2",
    rope=RopeConfig(bases=("none",)),
    ssd=SSDConfig(heads=8, head_dim=4, groups=4, state_dim=5, conv=3, least_step=0.01),
    experts=ExpertsConfig(
        **dict(count=6, top_k=2, width=8, latent_width=10, activation="relu2", shared_width=12),
        **dict(scores="sigmoid", groups=2, top_groups=1, share_scale=2.5, balance_loss=0.1),
        balance_rate=0.01,
    ),
)
CONFIG = make_config(
    NEMOTRON,
    optimizer=OptimizerConfig(learning_rate=3e-3),
    steps=STEPS,
    seq_len=64,
    remat="attention_saved",
)


make_program, initial_state, one_device = program_fixtures(CONFIG)


# The first row is fast.
SETTINGS = {
    "StarTrail, zero 3": (st.Degrees.startrail(8, c=2), {"zero": 3}),
    "tensor": (st.Degrees(data=2, ring=2, tensor=2), {"zero": 1, "remat": "full"}),
    "head and tensor": (st.Degrees(head=2, tensor=4), {"remat": "none"}),
    "tokens are sent to experts": (st.Degrees(data=2), {"zero": 3, "experts": "dispatch"}),
    "tiles": (st.Degrees(team=2, ring=4), {"zero": 2, "remat": "projections_saved", "tile": 8}),
}


@pytest.mark.slow_except_every(len(SETTINGS))
@pytest.mark.parametrize("name", SETTINGS)
def test_every_mesh_gives_the_losses_of_one_device(name, initial_state, one_device):
    degrees, changes = SETTINGS[name]
    found = losses_of(make_program(degrees, **changes), initial_state)
    check_losses(found, one_device, fall=0.2)


@pytest.mark.slow_except_every(2)
@pytest.mark.parametrize("degrees", [st.Degrees.startrail(8, c=2), st.Degrees(tensor=2)], ids=str)
def test_greedy_tokens_are_the_likeliest_of_whole_forward_passes(degrees, initial_state):
    check_greedy_tokens(CONFIG, degrees, initial_state.weights)


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize("mixers", [("attention",), ("ssd", "attention")], ids=str)
@pytest.mark.parametrize(
    "remat", ["full", "attention_saved", "projections_saved", "products_saved"]
)
def test_memory_counts_what_layers_save(remat, mixers):
    pairs = [pair for mixer in mixers for pair in ((mixer, "none"), ("none", "mlp"))]
    pattern = dict(zip(("mixers", "feed_forwards"), zip(*pairs, strict=True), strict=True))
    model = {name: x for name, x in NEMOTRON.items() if name != "experts"}
    if "ssd" not in mixers:
        del model["ssd"]
    check_saved_bytes(model | pattern, remat, st.Degrees(group=2, team=2, tensor=2))


def test_sizes_of_the_planner_are_those_of_the_weights():
    experts = dataclasses.replace(CONFIG.model.experts, balance_rate=0.0)
    lora = LoraConfig(rank=3, targets=("query", "step", "up", "expert_down", "latent_in"))
    model = dataclasses.replace(CONFIG.model, experts=experts)
    program = program_of(dataclasses.replace(CONFIG, model=model, lora=lora), st.Degrees())
    sizes = program.objective.sizes
    shapes = program.state_shapes
    assert sizes.elements == sum(x.size for x in jax.tree.leaves(shapes.model))
    adapters = sum(kind.count * kind.adapters for kind in sizes.kinds)
    assert adapters == sum(x.size for x in jax.tree.leaves(shapes.weights))
    # Of each expert, two matrices of 8 x 10; four of six are idle.
    assert sizes.expert_elements == 6 * 2 * 8 * 10
    everything = sum(kind.count * kind.matrices for kind in sizes.kinds)
    assert sizes.matrices == everything - 2 * (4 * 2 * 8 * 10 - 6 * 24)
    assert sizes.mlp_matrices == 2
    assert sizes.layer_windows == (None,)
    states = 6 * 2 * 8 * 5 * 4 * 3
    pairs = 12 * 8 * 4 * sum(range(1, 65)) / 64
    products = 2 * (2 * (sizes.matrices + 24 * 48) + 3 * sizes.active_adapters)
    assert sizes.flops_per_token(64) == pytest.approx(states + pairs + products, rel=1e-12)


def test_a_step_of_all_parts_runs():
    muon = OptimizerConfig(kind="muon", learning_rate=1e-3)
    check_first_step(dataclasses.replace(CONFIG, optimizer=muon), st.Degrees(team=2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(mixers=("attention", "none")), "Every layer must have a mixer or a feed-forward"),
        (dict(mixers=("none",)), "one layer or more attention"),
        (dict(experts=dict(activation="relu2", biases=True)), "experts with a gate"),
        (dict(experts=dict(latent_width=4, biases=True)), "latent_width=4"),
        (dict(experts=dict(latent_width=0)), "model.experts.latent_width"),
    ],
)
def test_layers_without_parts_are_refused(changes, words):
    feeds = dict(feed_forwards=("none", "none", "experts"))
    with refused(InputError, words):
        experts = {"experts": ExpertsConfig(**changes.get("experts", {}))}
        GPTConfig(**NEMOTRON | feeds | changes | experts)

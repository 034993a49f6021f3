"""Training of models with latent attention: meshes, adapters, memory, text."""

import dataclasses

import jax
import numpy as np
import pytest

import startrail_jax as st
from mixers import (
    END,
    check_greedy_tokens,
    check_losses,
    check_saved_bytes,
    losses_of,
    program_fixtures,
)
from models.config import ExpertsConfig
from models.parts.gated_delta import LinearConfig
from models.parts.latent import LatentConfig
from programs import SMALL, check_first_step, learnable_tokens, make_config, placed
from programs import make_program as program_of
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import LoraConfig, OptimizerConfig
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.gpt.config import DataConfig
from trainer.parallel.partition import path_name, split_adapters
from trainer.parallel.splits import check_parts

STEPS = 10
# A dense layer first, as in DeepSeek V3, and layers of linear attention, as in Kimi Linear.
MOONLIGHT = SMALL | dict(
    layers=4,
    kv_heads=8,
    mixers=("latent", "linear", "latent", "latent"),
    feed_forwards=("mlp", "experts", "experts", "experts"),
    latent=LatentConfig(rank=10, query_rank=12, key_dim=5, rotary_dim=4, value_dim=3),
    linear=LinearConfig(key_dim=4, value_dim=4),
    experts=ExpertsConfig(
        **dict(count=4, top_k=2, width=8, shared_width=12, scores="sigmoid", share_scale=2.0),
        balance_rate=0.01,
    ),
)
CONFIG = make_config(
    MOONLIGHT,
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
    "2D-Attention": (st.Degrees(head=4, ring=2), {"zero": 2, "remat": "projections_saved"}),
    "tiles": (st.Degrees(team=2, ring=4), {"zero": 2, "remat": "products_saved", "tile": 8}),
}


@pytest.mark.slow_except_every(len(SETTINGS))
@pytest.mark.parametrize("name", SETTINGS)
def test_every_mesh_gives_the_losses_of_one_device(name, initial_state, one_device):
    degrees, changes = SETTINGS[name]
    found = losses_of(make_program(degrees, **changes), initial_state)
    check_losses(found, one_device, fall=0.2)


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize(
    "degrees", [st.Degrees.startrail(8, c=2), st.Degrees(head=2, tensor=2)], ids=str
)
def test_greedy_tokens_are_the_likeliest_of_whole_forward_passes(degrees, rank, initial_state):
    config, weights = CONFIG, initial_state.weights
    if rank is not None:
        config = with_adapters(targets=("key", "value", "query", "latent"))
        weights = drawn(program_of(config, st.Degrees()).state_shapes.model)
    check_greedy_tokens(config, degrees, weights)


@pytest.mark.parametrize("remat", ["full", "attention_saved", "projections_saved"])
def test_memory_counts_what_layers_save(remat):
    pattern = dict(mixers=("latent",), feed_forwards=("mlp",))
    model = {name: x for name, x in MOONLIGHT.items() if name not in ("experts", "linear")}
    check_saved_bytes(model | pattern, remat, st.Degrees(group=2, team=2, tensor=2))


def drawn(shapes):
    """Random weights of a model, on the host."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (rng.normal(size=x.shape) * x.shape[-1] ** -0.5).astype(x.dtype), shapes
    )


def with_adapters(**options):
    """The config with adapters, without the bias of experts, which adapters would freeze."""
    experts = dataclasses.replace(CONFIG.model.experts, balance_rate=0.0)
    model = dataclasses.replace(CONFIG.model, experts=experts)
    return dataclasses.replace(CONFIG, model=model, lora=LoraConfig(rank=2, alpha=3.0, **options))


def merged(weights, scale):
    """Weights without adapters, which are added to their kernels."""
    named = {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(weights)}

    def one(path, x):
        name = path_name(path).removesuffix("kernel")
        if f"{name}lora_a" not in named:
            return x
        a, b = (named[f"{name}lora_{letter}"] for letter in "ab")
        return x + scale * np.stack([np.tensordot(*pair, 1) for pair in zip(a, b, strict=True)])

    return one


@pytest.mark.parametrize("targets", [("key", "value"), ("value", "rotated"), ("query_down", "out")])
def test_adapters_are_those_that_are_added_to_the_weights(targets):
    config = with_adapters(targets=targets)
    adapted = program_of(config, st.Degrees(ring=2, tensor=2))
    plain = program_of(dataclasses.replace(config, lora=LoraConfig()), st.Degrees())
    weights = drawn(adapted.state_shapes.model)
    whole = jax.tree_util.tree_map_with_path(merged(weights, 1.5), split_adapters(weights)[1])
    logits = []
    for program, given in ((adapted, weights), (plain, whole)):
        tokens = learnable_tokens(CONFIG, 0, END)
        batch = next_token_batch(tokens, layout=program.attention.layout, end_of_document=END)
        batch = place(batch, program.batch_sharding)
        shapes = program.state_shapes.model
        found = jax.jit(program.outputs)(placed(given, shapes), batch)
        logits.append(program.attention.unshard(found))
    np.testing.assert_allclose(*logits, atol=1e-5 * np.abs(logits[1]).max())


def test_a_step_of_all_parts_runs():
    muon = OptimizerConfig(kind="muon", learning_rate=1e-3)
    check_first_step(dataclasses.replace(CONFIG, optimizer=muon), st.Degrees(team=2))


def test_sizes_of_the_planner_are_those_of_the_weights():
    config = with_adapters(targets=("query", "key", "latent", "expert_up"))
    program = program_of(config, st.Degrees())
    sizes, shapes = program.objective.sizes, program.state_shapes
    assert sizes.elements == sum(x.size for x in jax.tree.leaves(shapes.model))
    adapters = sum(kind.count * kind.adapters for kind in sizes.kinds)
    assert adapters == sum(x.size for x in jax.tree.leaves(shapes.weights))
    assert (sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.value_head_dim) == (8, 1, 9, 3)
    assert sizes.latent_dim == sizes.key_channels == 14
    assert sizes.layer_windows == (None,) * 3
    # The matrices of keys and values, in layers of both stacks.
    assert [kind.expanding for kind in sizes.kinds if kind.mixer == "latent"] == [10 * 8 * 8] * 2
    states = 6 * 8 * 4 * 4
    pairs = 3 * 2 * 8 * (9 + 3) * sum(range(1, 65)) / 64
    products = 2 * (2 * (sizes.matrices + 24 * 48) + 3 * sizes.active_adapters)
    flops = products + 3 * (states + pairs)
    assert sizes.flops_per_token(64) == pytest.approx(flops, rel=1e-12)


@pytest.mark.parametrize("mixers", [("latent",), ("latent", "attention")])
def test_batches_of_documents_let_devices_along_tensor_share_latents(mixers):
    """But no key head of the layers of attention beside them."""
    model = MOONLIGHT | dict(kv_heads=1, mixers=mixers, linear=LinearConfig())
    config = make_config(model, data=DataConfig(batches="documents"))
    if mixers == ("latent",):
        check_parts(config, st.Degrees(ring=2, tensor=2))
        return
    with refused(InputError, "mesh.tensor must divide the key heads", "tensor=2, kv_heads=1"):
        check_parts(config, st.Degrees(ring=2, tensor=2))

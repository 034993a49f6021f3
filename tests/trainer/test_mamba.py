"""Models with layers of Mamba-2: one loss on every mesh, text, adapters, plans and refusals."""

import jax
import numpy as np
import pytest

import startrail_jax as st
import train
from mixers import check_greedy_tokens, check_losses, check_saved_bytes, losses_of, program_fixtures
from models.config import ExpertsConfig
from models.parts.ssd import SSDConfig
from plan import find_run
from programs import SMALL, make_config
from programs import make_program as program_of
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError
from trainer.config import LoraConfig, OptimizerConfig
from trainer.gpt.pretrained.families.table import family_of

STEPS = 30
MAMBA = SMALL | dict(
    layers=4,
    mixers=("ssd", "ssd", "attention"),
    ssd=SSDConfig(heads=4, head_dim=12, groups=2, state_dim=8, least_step=0.001, norm_eps=1e-3),
)
CONFIG = make_config(
    MAMBA,
    optimizer=OptimizerConfig(learning_rate=3e-3),
    steps=STEPS,
    seq_len=64,
    remat="attention_saved",
)


make_program, initial_state, one_device = program_fixtures(CONFIG)


# The first row is fast, and has more devices along `tensor` than groups.
SETTINGS = {
    "more tensor than groups": (st.Degrees(ring=2, tensor=4), {"zero": 3}),
    "StarTrail": (st.Degrees.startrail(8, c=2), {}),
    "Ring Attention, zero 1": (st.Degrees.ring_attention(8), {"zero": 1}),
    "Ulysses, zero 3, full remat": (st.Degrees.ulysses(4), {"zero": 3, "remat": "full"}),
    "team x ring, zero 2, tiled": (
        st.Degrees(team=2, ring=4),
        {"zero": 2, "remat": "projections_saved", "tile": 8},
    ),
    "tensor": (st.Degrees(data=2, team=2, tensor=2), {"zero": 3}),
    "head and tensor": (st.Degrees(head=2, tensor=4), {"remat": "none"}),
    "accumulation": (
        st.Degrees(data=2, group=2, team=2),
        {"gradient_accumulation": 2, "remat": "products_saved"},
    ),
}


@pytest.mark.slow_except_every(len(SETTINGS))
@pytest.mark.parametrize("name", SETTINGS)
def test_every_mesh_gives_the_losses_of_one_device(name, initial_state, one_device):
    degrees, changes = SETTINGS[name]
    found = losses_of(make_program(degrees, **changes), initial_state)
    check_losses(found, one_device, fall=0.5)


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize(
    "degrees",
    [st.Degrees(ring=2, tensor=4), st.Degrees.startrail(8, c=2), st.Degrees(data=2, head=4)],
    ids=str,
)
def test_greedy_tokens_are_the_likeliest_of_whole_forward_passes(degrees, initial_state):
    check_greedy_tokens(CONFIG, degrees, initial_state.weights)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [st.Degrees(ring=4), st.Degrees(group=2, team=2, tensor=2)])
@pytest.mark.parametrize(
    "remat", ["full", "attention_saved", "projections_saved", "products_saved"]
)
def test_memory_counts_what_layers_save(remat, degrees):
    check_saved_bytes(MAMBA | {"mixers": ("ssd", "attention")}, remat, degrees)


def test_adapters_and_experts_are_those_of_the_declaration():
    lora = LoraConfig(rank=3, targets=("query", "step", "out_gate", "expert_up"))
    model = dict(feed_forwards=("mlp", "experts"), experts=ExpertsConfig(count=4, width=8))
    config = make_config(MAMBA | model, lora=lora)
    program = program_of(config, st.Degrees())
    shapes = program.state_shapes
    sizes = program.objective.sizes
    assert sizes.elements == sum(x.size for x in jax.tree.leaves(shapes.model))
    adapters = sum(kind.count * kind.adapters for kind in sizes.kinds)
    assert adapters == sum(x.size for x in jax.tree.leaves(shapes.weights))
    assert set(program.state_shapes.weights) == {"ssd_blocks", "ssd_expert_blocks", "blocks"}
    # Two products with each state, forward, and twice as many backward.
    states = 6 * 2 * 4 * 8 * 12 * 3
    pairs = 12 * 8 * 4 * sum(range(1, 65)) / 64
    products = 2 * (2 * (sizes.matrices + 24 * 48) + 3 * sizes.active_adapters)
    assert sizes.flops_per_token(64) == pytest.approx(states + pairs + products, rel=1e-12)


def test_plans_and_wrong_settings():
    plan = find_run("gpt_tiny_mamba", ["--model.ssd.groups", "4"], seq_len="64K").sizes
    assert plan.recurrences["ssd"].key_heads == 4
    for changes, told in (
        (dict(ssd=SSDConfig(groups=3)), "groups=3, heads=8"),
        (dict(mixers=("attention",)), "model.ssd.heads needs layers of Mamba-2"),
        (dict(mixers=("ssd",)), "one layer or more attention"),
    ):
        with refused(InputError, told):
            make_config(MAMBA | changes)
    with refused(InputError, "least_step=-1"):
        SSDConfig(least_step=-1)
    # No family of transformers that is served has such layers.
    with refused(UnsupportedError, "mixers=('ssd', 'ssd', 'attention')"):
        family_of(CONFIG.model)


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path):
    words = f"gpt_tiny_mamba --run-dir {tmp_path / 'run'} --devices 8 --mesh.c 2 --steps 2"
    words += " --seq-len 128 --batch-size 2 --validation-sequences 2 --no-tensorboard"
    first = train.train(train.read_command_line(words.split()).settings)
    words = words.replace("--mesh.c 2 --steps 2", "--mesh.tensor 4 --steps 4 --allow-changes")
    config = train.read_command_line(words.split()).settings
    assert len(train.train(config).train) == 2
    assert np.isfinite(first.validation)

"""Training of models with Kimi Delta Attention: meshes, adapters, memory, text, plans."""

import jax
import numpy as np
import pytest

import startrail_jax as st
import train
from mixers import check_greedy_tokens, check_losses, check_saved_bytes, losses_of, program_fixtures
from models.config import ExpertsConfig, RopeConfig
from models.parts.kda import KDAConfig
from models.parts.latent import LatentConfig
from plan import find_run
from programs import SMALL, make_config
from programs import make_program as program_of
from refusals import refused
from startrail_jax.errors import UnsupportedError
from trainer.config import LoraConfig, OptimizerConfig
from trainer.gpt.pretrained.families.table import family_of

STEPS = 10
# As Kimi Linear: a dense layer first, and latent attention without positions.
KIMI = SMALL | dict(
    layers=4,
    kv_heads=8,
    mixers=("kda", "kda", "kda", "latent"),
    feed_forwards=("mlp", "experts", "experts", "experts"),
    kda=KDAConfig(heads=4, head_dim=6, rank=5, conv=3, norm_eps=1e-3),
    latent=LatentConfig(rank=10, key_dim=5, rotary_dim=4, value_dim=3),
    rope=RopeConfig(bases=("none",)),
    experts=ExpertsConfig(
        **dict(count=4, top_k=2, width=8, shared_width=12),
        scores="sigmoid",
        share_scale=2.0,
        balance_rate=0.01,
    ),
)
CONFIG = make_config(
    KIMI,
    optimizer=OptimizerConfig(learning_rate=3e-3),
    steps=STEPS,
    seq_len=64,
    remat="attention_saved",
)


make_program, initial_state, one_device = program_fixtures(CONFIG)


# The first row is fast.
SETTINGS = {
    "StarTrail, zero 3": (st.Degrees.startrail(8, c=2), {"zero": 3}),
    "ring, tensor": (st.Degrees(ring=2, tensor=4), {"zero": 1}),
    "head and tensor": (st.Degrees(data=2, head=2, tensor=2), {"remat": "none"}),
    "2D-Attention": (st.Degrees(head=4, ring=2), {"zero": 2, "remat": "projections_saved"}),
    "accumulation": (
        st.Degrees(data=2, group=2, team=2),
        {"remat": "products_saved", "tile": 8},
    ),
}


@pytest.mark.slow_except_every(len(SETTINGS))
@pytest.mark.parametrize("name", SETTINGS)
def test_every_mesh_gives_the_losses_of_one_device(name, initial_state, one_device):
    degrees, changes = SETTINGS[name]
    found = losses_of(make_program(degrees, **changes), initial_state)
    check_losses(found, one_device, fall=0.2)


@pytest.mark.slow_except_every(2)
@pytest.mark.parametrize(
    "degrees", [st.Degrees.startrail(8, c=2), st.Degrees(head=2, tensor=2)], ids=str
)
def test_greedy_tokens_are_the_likeliest_of_whole_forward_passes(degrees, initial_state):
    check_greedy_tokens(CONFIG, degrees, initial_state.weights)


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("degrees", [st.Degrees(ring=4), st.Degrees(group=2, team=2, tensor=2)])
@pytest.mark.parametrize(
    "remat", ["full", "attention_saved", "projections_saved", "products_saved"]
)
def test_memory_counts_what_layers_save(remat, degrees):
    pattern = dict(mixers=("kda", "latent"), feed_forwards=("mlp",))
    model = {name: x for name, x in KIMI.items() if name != "experts"}
    check_saved_bytes(model | pattern, remat, degrees)


def test_sizes_of_the_planner_are_those_of_the_weights():
    lora = LoraConfig(rank=3, targets=("query", "decay_down", "decay", "out_gate", "beta"))
    config = make_config(
        {name: x for name, x in KIMI.items() if name not in ("experts", "feed_forwards")}, lora=lora
    )
    program = program_of(config, st.Degrees())
    shapes, sizes = program.state_shapes, program.objective.sizes
    assert sizes.elements == sum(x.size for x in jax.tree.leaves(shapes.model))
    adapters = sum(kind.count * kind.adapters for kind in sizes.kinds)
    assert adapters == sum(x.size for x in jax.tree.leaves(shapes.weights))
    # Three products with each state, forward, and twice as many backward.
    states = 6 * 3 * 4 * 6 * 6 * 3
    pairs = 6 * (9 + 3) * 8 * sum(range(1, 65)) / 64
    products = 2 * (2 * (sizes.matrices + 24 * 48) + 3 * sizes.active_adapters)
    assert sizes.flops_per_token(64) == pytest.approx(states + pairs + products, rel=1e-12)


def test_plans_and_models_of_no_family():
    flags = ["--model.mixers", "kda", "attention", "--model.kda.rank", "16"]
    sizes = find_run("gpt_tiny", flags, seq_len="64K").sizes
    assert (sizes.recurrences["kda"].rank, sizes.recurrences["kda"].heads) == (16, sizes.heads)
    with refused(UnsupportedError, "mixers=('kda', 'attention')"):
        family_of(make_config(SMALL | {"mixers": ("kda", "attention")}).model)


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path):
    """Its losses are those of a run that was not stopped."""
    model = "--model.mixers kda latent --model.layers 2 --model.kv-heads 4 --model.latent.rank 24"
    words = f"gpt_tiny {model} --devices 8 --mesh.c 2 --seq-len 128 --batch-size 2 --no-tensorboard"
    words += " --validation-sequences 2 --optimizer.schedule constant --optimizer.warmup-steps 0"
    words += " --run-dir {} --steps {}"

    def losses(folder, steps, more=""):
        typed = words.format(tmp_path / folder, steps) + more
        return list(train.train(train.read_command_line(typed.split()).settings).train)

    whole = losses("whole", 4)
    first = losses("stopped", 2)
    typed = " --mesh.c 1 --mesh.tensor 2 --mesh.ring 4 --allow-changes"
    again = losses("stopped", 4, typed)
    assert len(again) == 2
    np.testing.assert_allclose([*first, *again], whole, rtol=1e-5)

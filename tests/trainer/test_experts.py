"""Training steps with experts: the same losses on every mesh, and none of a token dropped."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import startrail_jax as st
from programs import SMALL, learnable_tokens, make_config, train_steps
from programs import make_program as program_of
from trainer.config import OptimizerConfig
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.gpt.config import ExpertsConfig, LinearConfig

STEPS = 30
END = 7  # Ends a document.
# Dense layers in between, and layers of both mixers.
MODEL = SMALL | dict(
    layers=6,
    mixers=("linear", "attention"),
    feed_forwards=("mlp", "experts", "experts"),
    linear=LinearConfig(heads=4, key_heads=2, key_dim=8, value_dim=12, norm_eps=1e-3),
    experts=ExpertsConfig(
        **dict(count=6, top_k=2, width=8, shared_width=12, shared_gate=True, biases=True),
        **dict(balance_loss=0.1, z_loss=0.01),
    ),
)
CONFIG = make_config(
    MODEL,
    optimizer=OptimizerConfig(learning_rate=1e-3),
    steps=STEPS,
    seq_len=64,
    remat="attention_saved",
)


@functools.cache
def make_program(degrees, **changes):
    return program_of(dataclasses.replace(CONFIG, **changes), degrees)


def losses_of(program, state):
    """Losses and gradient norms of all steps."""

    def batch(step):
        tokens = learnable_tokens(CONFIG, step, END)
        made = next_token_batch(tokens, layout=program.attention.layout, end_of_document=END)
        return place(made, program.batch_sharding)

    return train_steps(program, state, map(batch, range(STEPS)))[0]


@pytest.fixture(scope="module")
def initial_state():
    return jax.device_get(make_program(st.Degrees()).initialise())


@pytest.fixture(scope="module")
def one_device(initial_state):
    return losses_of(make_program(st.Degrees()), initial_state)


SETTINGS = {
    "StarTrail": (st.Degrees.startrail(8, c=2), {}),
    "Ulysses, zero 3, full remat": (st.Degrees.ulysses(4), {"zero": 3, "remat": "full"}),
    "team x ring, zero 2, projections saved, tiled": (
        st.Degrees(team=2, ring=4),
        {"zero": 2, "remat": "projections_saved", "tile": 8},
    ),
    "tensor": (st.Degrees(data=2, team=2, tensor=2), {"zero": 3}),
    "none saved": (st.Degrees(ring=2, tensor=4), {"remat": "none", "zero": 1}),
}


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_mesh_gives_the_losses_of_one_device(name, initial_state, one_device):
    degrees, changes = SETTINGS[name]
    found = losses_of(make_program(degrees, **changes), initial_state)
    np.testing.assert_allclose(found, one_device, rtol=1e-4)
    np.testing.assert_allclose(found[:, 0], one_device[:, 0], rtol=1e-5)
    assert one_device[-1, 0] < one_device[0, 0] - 0.5

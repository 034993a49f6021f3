"""Low-rank adapters: trained beside a frozen model, on every mesh, and taken to other programs."""

import dataclasses

import jax
import numpy as np
import pytest

import startrail_jax as st
from programs import make_config, make_program, options
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.gpt.config import LoraConfig

ALL = ("query", "key", "value", "out", "gate", "up", "down")
MODEL = dict(vocab_size=48, width=24, layers=2, heads=8, kv_heads=2, head_dim=4, mlp_width=32)
CONFIG = make_config(
    MODEL, seq_len=64, lora=LoraConfig(rank=4, targets=ALL), steps=3
)


def lora_config(dtype="float32", **changes):
    model = dataclasses.replace(CONFIG.model, dtype=dtype)
    return dataclasses.replace(CONFIG, model=model, **changes)


def batch(program, seed=0):
    layout = program.attention.layout
    tokens = np.random.default_rng(seed).integers(48, size=(4, 65))
    return place(next_token_batch(tokens, layout=layout), program.batch_sharding)


def steps_of(program, state, steps=3):
    """Losses and norms of so many steps, from a state of the host."""
    state = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, program.state_shapes)
    found = []
    for step in range(steps):
        state, metrics = program.train_step(state, batch(program, step))
        found += [float(metrics.loss), float(metrics.gradient_norm)]
    return found, state


@pytest.fixture(scope="module")
def one_device():
    """A state whose adapters add something, and the losses of its steps on one device."""
    program = make_program(lora_config(), st.Degrees())
    state = jax.device_get(program.initialise())
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype) / 8, state.weights)
    state = state._replace(weights=weights)
    return state, *steps_of(program, state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_loss_is_that_of_the_model_bit_for_bit(dtype):
    base = make_program(lora_config(dtype, lora=LoraConfig()), st.Degrees())
    adapted = make_program(lora_config(dtype), st.Degrees())
    before, state = base.initialise(), adapted.initialise()
    tokens = batch(base)
    expected, found = base.outputs(before.weights, tokens), adapted.outputs(state.model, tokens)
    np.testing.assert_array_equal(expected, found)
    assert np.asarray(expected).any()


@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        (st.Degrees.startrail(8, c=2), dict(zero=0, remat="attention_saved", tile=8)),
        (st.Degrees.startrail(8, c=2), dict(zero=2, accumulation=2)),
        (st.Degrees(data=2, ring=2, tensor=2), dict(zero=3)),
        (st.Degrees(head=2, tensor=4), dict(zero=1, remat="full")),
    ],
    ids=str,
)
def test_losses_do_not_depend_on_the_mesh(one_device, degrees, changes):
    state, expected, _ = one_device
    found, _ = steps_of(make_program(lora_config(**changes), degrees), state)
    np.testing.assert_allclose(found, expected, rtol=2e-5)

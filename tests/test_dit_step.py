"""Training steps of a DiT: the same losses on every mesh, with and without text."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import startrail_jax as st
from startrail_jax.training.batches import place
from startrail_jax.training.config import (
    DiffusionConfig,
    DiTConfig,
    DiTTrainConfig,
    OptimizerConfig,
)
from startrail_jax.training.denoising import image_batch
from startrail_jax.training.diffusion import estimates
from startrail_jax.training.images import Example
from startrail_jax.training.step import Program

STEPS = 30
CONFIG = DiTTrainConfig(
    model=DiTConfig(channels=2, classes=3, width=32, layers=2, heads=8, mlp_width=48),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    steps=STEPS,
    batch_size=4,
    size=(2, 8, 8),
    ema_decay=0.9,
    run_dir=Path("unused"),
)
# Attention over text too; neither it nor the image divides into 8 shares: both are padded.
WITH_TEXT = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, caption_length=5, patch=(1, 2, 4)),
    size=(3, 6, 8),
)


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """Half the time to compile; what is compared is compiled alike."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_program(degrees, config=CONFIG, **changes):
    mesh = st.make_mesh(degrees, "auto", jax.devices()[: degrees.num_devices])
    attention = st.Attention(mesh, causal=False)
    return Program(dataclasses.replace(config, **changes), attention)


def batch(program, step):
    """Images that say which class they are of."""
    config = program.config
    rng = np.random.default_rng(step)
    numbers = [step * config.batch_size + row for row in range(config.batch_size)]
    examples = []
    for label in rng.integers(config.model.classes, size=config.batch_size):
        latent = rng.normal(label - 1, 0.1, (*config.size, config.model.channels))
        caption = [b"low", b"", b"high!"][label]
        examples.append(Example(latent.astype(np.float32), np.int32(label), caption))
    made = image_batch(examples, numbers, config=config, layout=program.attention.layout)
    return place(made, program.batch_sharding)


def initial_state(config):
    return jax.device_get(make_program(st.Degrees(), config).initialise())


def train(program, state, steps=STEPS):
    """Losses and gradient norms of every step, and the state after the last."""
    state = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, program.state_shapes)
    losses = []
    for step in range(steps):
        state, metrics = program.train_step(state, batch(program, step))
        assert metrics.finite
        losses.append((float(metrics.loss), float(metrics.gradient_norm)))
    return np.array(losses), state


@pytest.fixture(scope="module")
def one_device():
    state = initial_state(CONFIG)
    return state, *train(make_program(st.Degrees()), state)


STARTRAIL = st.Degrees.startrail(8, c=2)
SETTINGS = {
    "Ring Attention": (st.Degrees.ring_attention(8), {}),
    "all-gather": (st.Degrees.all_gather(8), {}),
    "Ulysses": (st.Degrees.ulysses(8), {}),
    "2D-Attention": (st.Degrees.loongtrain(8, head=2), {}),
    "StarTrail": (STARTRAIL, {}),
    "teams": (st.Degrees(team=2, ring=4), {}),
    "tiles": (st.Degrees(team=4, group=2), {}),
    "StarTrail x Ulysses": (st.Degrees.startrail(8, c=2, head=2), {}),
    "data, zero 3, attention saved": (
        st.Degrees(data=2, team=2, ring=2),
        {"zero": 3, "remat": "attention_saved"},
    ),
    "tensor, zero 2, tiled, accumulation": (
        st.Degrees(tensor=2, team=2),
        {"zero": 2, "tile": 8, "accumulation": 2},
    ),
}


@pytest.mark.parametrize(("degrees", "changes"), SETTINGS.values(), ids=SETTINGS.keys())
def test_losses_do_not_depend_on_how_it_runs(degrees, changes, one_device):
    state, expected, last = one_device
    losses, found = train(make_program(degrees, **changes), state)
    assert losses[-5:, 0].mean() < 0.7 * losses[:5, 0].mean()
    np.testing.assert_allclose(losses[:, 0], expected[:, 0], rtol=1e-4)
    np.testing.assert_allclose(losses[:, 1], expected[:, 1], rtol=1e-3)
    leaves = (jax.tree.leaves(jax.device_get(x.average)) for x in (found, last))
    for average, one in zip(*leaves, strict=True):
        np.testing.assert_allclose(average, one, atol=1e-3 * abs(one).max())


def test_text_is_divided_among_the_devices_like_the_image():
    state = initial_state(WITH_TEXT)
    one, _ = train(make_program(st.Degrees(), WITH_TEXT), state)
    many, _ = train(make_program(STARTRAIL, WITH_TEXT), state)
    assert many[-5:, 0].mean() < 0.7 * many[:5, 0].mean()
    np.testing.assert_allclose(many[:, 0], one[:, 0], rtol=1e-4)


def shown(step=0, *, training, **changes):
    """A batch as the model is shown it, before it is on any device."""
    program = make_program(st.Degrees(), **changes)
    return program.objective.prepare(batch(program, step), training=training)


def test_noise_depends_on_the_number_of_the_example_alone():
    first, again, later = shown(training=True), shown(training=True), shown(1, training=True)
    np.testing.assert_array_equal(first.patches, again.patches)
    assert len({*first.times.tolist(), *later.times.tolist()}) == 2 * CONFIG.batch_size


def test_labels_are_dropped_in_training_alone():
    never, often = DiffusionConfig(dropout=0.0), DiffusionConfig(dropout=0.9)
    labels = shown(training=True, diffusion=never).labels
    assert max(labels) < CONFIG.model.classes
    np.testing.assert_array_equal(shown(training=False, diffusion=often).labels, labels)
    dropped = [shown(step, training=True, diffusion=often).labels for step in range(10)]
    assert np.mean(np.array(dropped) == CONFIG.model.classes) == pytest.approx(0.9, abs=0.15)


@pytest.mark.parametrize("target", ["flow", "v", "eps"])
def test_patches_and_targets_are_of_the_same_image(target):
    changes = {"diffusion": DiffusionConfig(target=target, times="logit_normal")}
    noisy = shown(training=True, **changes)
    images = batch(make_program(st.Degrees(), **changes), 0)
    x0, _ = estimates(target, noisy.patches, noisy.targets, noisy.times)
    np.testing.assert_allclose(x0, images.patches, atol=1e-3)

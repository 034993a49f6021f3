"""Training steps of a DiT: the same losses on every mesh, with classes and with texts."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

import startrail_jax as st
from programs import make_dit_config, make_text_config, train_steps
from programs import make_program as program_of
from trainer.data.batches import place
from trainer.data.order import NO_EXAMPLE
from trainer.dit.batches import image_batch
from trainer.dit.config import DiffusionConfig
from trainer.dit.diffusion import estimates
from trainer.dit.images import Example

STEPS = 30
CONFIG = make_dit_config(steps=STEPS, ema_decay=0.9)
OF_TEXTS = make_text_config(steps=STEPS, ema_decay=0.9)
WORDS = np.random.default_rng(7).standard_normal((3, OF_TEXTS.model.text_dim))
# An image that does not divide into 8 shares is padded.
PADDED = make_dit_config(dict(patch=(1, 2, 4)), size=(3, 6, 8), steps=STEPS, ema_decay=0.9)


@functools.cache
def make_program(degrees, config=CONFIG, **changes):
    return program_of(dataclasses.replace(config, **changes), degrees)


def batch(program, step):
    """Images with a brightness that depends on their class or text."""
    config = program.config
    rng = np.random.default_rng(step)
    numbers = [step * config.batch_size + row for row in range(config.batch_size)]
    examples = []
    for number in rng.integers(len(WORDS), size=config.batch_size):
        latent = rng.normal(number - 1, 0.1, (*config.size, config.model.channels))
        label, text = np.int32(number), None
        if config.model.text_dim is not None:
            # The first word decides; texts have 1 to 3 of them.
            label, text = None, WORDS[[number, *[0] * rng.integers(3)]].astype(np.float32)
        examples.append(Example(latent.astype(np.float32), label, text))
    made = image_batch(examples, numbers, config=config, layout=program.attention.layout)
    return place(made, program.batch_sharding)


def initial_state(config):
    return jax.device_get(make_program(st.Degrees(), config).initialise())


def train(program, state, steps=STEPS, batch=batch):
    """Losses and gradient norms of every step, and the state after the last."""
    return train_steps(program, state, (batch(program, step) for step in range(steps)))


@functools.cache
def one_device(config):
    state = initial_state(config)
    return state, *train(make_program(st.Degrees(), config), state)


STARTRAIL = st.Degrees.startrail(8, c=2)
# `test_step.py` has the rest: what differs here is that attention is not causal, and the model.
SETTINGS = {
    "Ring Attention": (CONFIG, st.Degrees.ring_attention(8), {}),
    "padded": (PADDED, STARTRAIL, {}),
    "tiles, projections saved": (
        *(CONFIG, st.Degrees(team=4, group=2), {"remat": "projections_saved"}),
    ),
    "StarTrail x Ulysses": (CONFIG, st.Degrees.startrail(8, c=2, head=2), {}),
    "data, zero 3, attention saved": (
        *(CONFIG, st.Degrees(data=2, team=2, ring=2), {"zero": 3, "remat": "attention_saved"}),
    ),
    "tensor, zero 2, tiled, accumulation": (
        *(CONFIG, st.Degrees(tensor=2, team=2)),
        {"zero": 2, "tile": 8, "gradient_accumulation": 2},
    ),
    "texts, StarTrail x Ulysses": (OF_TEXTS, st.Degrees.startrail(8, c=2, head=2), {}),
    "texts, tensor, tiled, products saved, accumulation": (
        *(OF_TEXTS, st.Degrees(tensor=2, team=2)),
        {"zero": 2, "tile": 8, "gradient_accumulation": 2, "remat": "products_saved"},
    ),
    "texts, data, zero 3, attention saved": (
        *(OF_TEXTS, st.Degrees(data=2, ring=2)),
        {"zero": 3, "remat": "attention_saved"},
    ),
    "zero 3, products saved": (CONFIG, st.Degrees(ring=2), {"zero": 3, "remat": "products_saved"}),
}


def assert_near(found, wanted):
    """Each array of a tree, to a thousandth of its greatest element."""
    leaves = (jax.tree.leaves(jax.device_get(x)) for x in (found, wanted))
    for array, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(array, other, atol=1e-3 * abs(other).max())


@pytest.mark.slow
@pytest.mark.parametrize(("config", "degrees", "changes"), SETTINGS.values(), ids=SETTINGS.keys())
def test_losses_do_not_depend_on_how_it_runs(config, degrees, changes):
    state, expected, last = one_device(config)
    losses, found = train(make_program(degrees, config, **changes), state)
    assert losses[-5:, 0].mean() < 0.7 * losses[:5, 0].mean()
    np.testing.assert_allclose(losses[:, 0], expected[:, 0], rtol=1e-4)
    np.testing.assert_allclose(losses[:, 1], expected[:, 1], rtol=1e-3)
    assert_near(found.average, last.average)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.2, 0.9])
def test_average_follows_its_equation_and_is_what_is_measured(decay):
    """The average of https://arxiv.org/abs/2006.11239, with a decay that rises."""
    program = make_program(st.Degrees(team=2), ema_decay=decay)
    state = program.initialise()
    expected = jax.device_get(state.weights)
    for step in range(4):
        state, _ = program.train_step(state, batch(program, step))
        rate = min(decay, (1 + step) / (10 + step))
        expected = jax.tree.map(
            lambda mean, new, rate=rate: rate * mean + (1 - rate) * np.asarray(new),
            expected,
            state.weights,
        )
    assert state.result is state.average
    chex.assert_trees_all_close(state.average, expected, rtol=1e-7, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("compile_well")
def test_weights_are_used_alike_at_every_level_of_zero():
    """In bfloat16, the type in which weights are gathered from level 1 on."""
    config = dataclasses.replace(
        PADDED, model=dataclasses.replace(PADDED.model, dtype="bfloat16", layers=1)
    )

    def random_weights(shapes):
        """Random, since the zeros of adaLN-Zero would hide the gradients of the other weights."""
        rng = np.random.default_rng(0)
        return jax.tree.map(
            lambda x: jax.device_put(rng.normal(0, 0.2, x.shape).astype(x.dtype), x.sharding),
            shapes,
        )

    results = []
    for level in (0, 3):
        program = make_program(st.Degrees(ring=2), config, zero=level)
        weights = random_weights(program.state_shapes.weights)
        results.append(jax.device_get(jax.jit(program.gradients)(weights, batch(program, 0))))
    for one, two in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-6 * abs(one).max())


@functools.cache
def prepare_of(program, training):
    return jax.jit(functools.partial(program.objective.prepare, training=training))


def shown(step=0, *, training, degrees=None, config=CONFIG, reverse=False, **changes):
    """A batch as the model takes it; `reverse` reverses the order of its rows."""
    program = make_program(degrees or st.Degrees(), config, **changes)
    images = batch(program, step)
    if reverse:
        images = jax.tree.map(lambda x: x[::-1], images)
    return prepare_of(program, training)(images)


def noise_of(noisy, config=CONFIG):
    _, noise = estimates("flow", noisy.patches, noisy.targets, noisy.times)
    return np.asarray(noise)[:, : config.num_tokens]


@pytest.mark.slow
def test_noise_depends_on_the_number_of_the_example_alone():
    first, later = shown(training=True), shown(1, training=True)
    rows = np.concatenate([noise_of(first), noise_of(later)])
    rows = rows.reshape(2 * CONFIG.batch_size, -1)
    assert abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 0.4
    assert rows.std() == pytest.approx(1, abs=0.05)
    assert len({*first.times.tolist(), *later.times.tolist()}) == 2 * CONFIG.batch_size
    # The noise does not depend on the place in the batch, on the mesh or on padding.
    other = shown(training=True, reverse=True, degrees=STARTRAIL, config=PADDED)
    same = shown(training=True, config=PADDED)
    assert other.patches.shape != same.patches.shape
    np.testing.assert_array_equal(other.times[::-1], same.times)
    found, wanted = (noise_of(x, PADDED) for x in (other, same))
    np.testing.assert_allclose(found[::-1], wanted, atol=1e-4)


def test_measuring_draws_other_noise_than_training():
    measured, trained = shown(training=False), shown(training=True)
    assert not set(measured.times.tolist()) & set(trained.times.tolist())
    assert abs(noise_of(measured) - noise_of(trained)).max() > 1


def test_rows_that_fill_up_a_batch_do_not_count():
    program = make_program(st.Degrees())
    images = batch(program, 0)
    numbers = np.where(np.arange(CONFIG.batch_size) < 2, images.numbers, NO_EXAMPLE)
    for training, expected in ((True, CONFIG.batch_size), (False, 2)):
        prepared = prepare_of(program, training)(images._replace(numbers=numbers))
        assert (np.asarray(prepared.weights).sum(axis=1) > 0).sum() == expected


@pytest.mark.slow
def test_labels_are_dropped_in_training_alone():
    never, often = DiffusionConfig(dropout=0.0), DiffusionConfig(dropout=0.8)
    kept = shown(training=True, config=PADDED, diffusion=never)
    classes = PADDED.model.classes
    assert max(kept.labels) < classes
    measured = shown(training=False, config=PADDED, diffusion=often)
    np.testing.assert_array_equal(measured.labels, kept.labels)
    dropped = []
    for step in range(10):
        noisy = shown(step, training=True, config=PADDED, diffusion=often)
        dropped.append(noisy.labels == classes)
    assert np.mean(dropped) == pytest.approx(0.8, abs=0.2)


def test_texts_are_dropped_in_training_alone():
    never, often = DiffusionConfig(dropout=0.0), DiffusionConfig(dropout=0.8)
    kept = shown(training=True, config=OF_TEXTS, diffusion=never).rows.arrays
    assert min(kept.counts) >= 1
    measured = shown(training=False, config=OF_TEXTS, diffusion=often).rows.arrays
    chex.assert_trees_all_equal(measured, kept)
    counts = []
    for step in range(10):
        noisy = shown(step, training=True, config=OF_TEXTS, diffusion=often)
        counts.append(noisy.rows.arrays.counts)
        assert not np.asarray(noisy.labels).any()
    assert np.mean(np.array(counts) == 0) == pytest.approx(0.8, abs=0.2)


@pytest.mark.parametrize("target", ["flow", "v", "eps"])
@pytest.mark.slow_except_every(3)
def test_patches_and_targets_are_of_the_same_image(target):
    changes = {"diffusion": DiffusionConfig(target=target, times="logit_normal")}
    noisy = shown(training=True, **changes)
    images = batch(make_program(st.Degrees(), **changes), 0)
    x0, _ = estimates(target, noisy.patches, noisy.targets, noisy.times)
    np.testing.assert_allclose(x0, images.patches, atol=1e-3)

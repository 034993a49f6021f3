"""Training steps of a Wan: the same losses on every mesh, and bit for bit after a resume."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import startrail_jax as st
from models.hooks import Hooks
from programs import make_program as program_of
from programs import make_wan_config, train_steps
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import AttentionConfig, LoraConfig
from trainer.data.batches import place
from trainer.dit.wan.batches import Clip, clip_batch
from trainer.dit.wan.config import ClipConfig, FlowConfig
from trainer.planner.models import IMAGE_TOKENS

STEPS = 10
CONFIG = make_wan_config(steps=STEPS)
# Odd sizes, whose tokens are filled up on 8 devices; all that a Wan can be given.
IMAGE = make_wan_config(dict(first_frame="channels", image_dim=12), size=(3, 4, 6), steps=STEPS)
OF_TIME = make_wan_config(dict(first_frame="time"), size=(3, 6, 10), steps=STEPS)
IN_BLOCKS = make_wan_config(size=(5, 6, 10), block_frames=2, steps=STEPS)


@functools.cache
def make_program(degrees, config=CONFIG, **changes):
    return program_of(dataclasses.replace(config, **changes), degrees)


def make_clip(config, rng, size):
    """A video whose brightness is that of its text."""
    model, brightness = config.model, rng.choice([-1.0, 1.0])
    shape = (*size, model.channels)
    text = np.full((rng.integers(1, model.text_tokens + 1), model.text_dim), brightness)
    latent = rng.normal(brightness, 0.1, shape).astype(np.float32)
    given = image = None
    if model.first_frame == "channels":
        given = latent * (np.arange(size[0]) == 0)[:, None, None, None]
    if model.image_dim is not None:
        image = rng.normal(size=(IMAGE_TOKENS, model.image_dim))
    return Clip(latent, text, given, image)


def batch(program, step, size=None):
    config = program.config
    rng = np.random.default_rng(step)
    numbers = [step * config.batch_size + row for row in range(config.batch_size)]
    clips = [make_clip(config, rng, size or config.size) for _ in numbers]
    empty = np.zeros((1, config.model.text_dim))
    options = dict(empty=empty, config=config, layout=program.attention.layout)
    return place(clip_batch(clips, numbers, **options), program.batch_sharding)


def initial_state(config):
    return jax.device_get(make_program(st.Degrees(), config).initialise())


def train(program, state, steps=STEPS, batch=batch):
    return train_steps(program, state, (batch(program, step) for step in range(steps)))


@functools.cache
def one_device(config=CONFIG):
    """The state before, and losses and norms of every step on one device."""
    state = initial_state(config)
    if state.frozen is not None:
        # That of a new model is 0, and then no adapter has a gradient.
        head = state.frozen["head"]["outputs"]["kernel"]
        head.set_value(np.random.default_rng(0).normal(0, 0.1, head.shape).astype(np.float32))
    return state, train(make_program(st.Degrees(), config), state)[0]


LORA = make_wan_config(steps=STEPS, lora=LoraConfig(rank=3, targets=("query", "out", "up", "down")))
SETTINGS = {
    "data, zero 3": (CONFIG, st.Degrees(data=2, team=2, ring=2), {"zero": 3}),
    "Ring Attention": (CONFIG, st.Degrees.ring_attention(8), {}),
    "StarTrail": (CONFIG, st.Degrees.startrail(8, c=2), {"remat": "projections_saved", "tile": 8}),
    "StarTrail x Ulysses": (CONFIG, st.Degrees.startrail(8, c=2, head=2), {"remat": "full"}),
    "a double ring": (CONFIG, st.Degrees(ring=8), {"attention": AttentionConfig(inner=2)}),
    "team x ring": (CONFIG, st.Degrees(team=4, ring=2), {"remat": "attention_saved"}),
    "tensor, accumulation": (
        *(CONFIG, st.Degrees(tensor=2, team=2, ring=2), {"gradient_accumulation": 2}),
    ),
    "adapters": (LORA, st.Degrees(tensor=2, team=2, ring=2), {"zero": 2}),
    "an image": (IMAGE, st.Degrees(team=4, group=2), {}),
    "an image, tensor": (IMAGE, st.Degrees(tensor=4, ring=2), {"zero": 3}),
    "a first frame": (OF_TIME, st.Degrees.startrail(8, c=2), {"zero": 1}),
    "blocks of frames": (IN_BLOCKS, st.Degrees(team=2, ring=4), {}),
}


@pytest.mark.slow_except_every(len(SETTINGS))
@pytest.mark.parametrize(("config", "degrees", "changes"), SETTINGS.values(), ids=SETTINGS.keys())
def test_losses_do_not_depend_on_how_it_runs(config, degrees, changes):
    state, expected = one_device(config)
    losses, _ = train(make_program(degrees, config, **changes), state)
    assert losses[1:, 0].mean() < (1 if config.has_adapters else 0.9) * losses[0, 0]
    np.testing.assert_allclose(losses[:, 0], expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(losses[:, 1], expected[:, 1], rtol=1e-3)


def test_blocks_of_frames_see_no_later_block():
    """The loss is that of dense attention with a mask, and FLOPs are those of what it shows."""
    program = make_program(st.Degrees(team=2, ring=2), IN_BLOCKS)
    objective = program.objective
    _, state = train(program, initial_state(IN_BLOCKS), 3)
    made = batch(program, 3)
    shown = objective.prepare(jax.device_get(made), training=True)
    frame = np.asarray(shown.positions[0, :, 0])

    def dense(query, key, value, *, segment_ids):
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = same & (frame // 2 <= frame[:, None] // 2)[None]
        return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])

    @jax.jit
    def losses_of(weights, shown):
        model = objective.make_model(dense, Hooks(), nnx.Rngs(0))
        model = nnx.merge(nnx.graphdef(model), weights)
        return objective.losses(model, objective.hidden(model, shown), shown.targets)

    losses = losses_of(jax.tree.map(jnp.asarray, jax.device_get(state.weights)), shown)
    _, metrics = program.train_step(state, made)
    expected = (losses * shown.weights).sum() / shown.weights.sum()
    np.testing.assert_allclose(float(metrics.loss), expected, rtol=1e-5)

    whole = dataclasses.replace(IN_BLOCKS, block_frames=None)
    pairs = sum(2 * 15 * 15 * min(2 * x + 2, 5) for x in (0, 1)) + 15 * 15 * 5
    less = (75**2 - pairs) / 75 * 12 * IN_BLOCKS.model.layers * IN_BLOCKS.model.width
    of_all = make_program(st.Degrees(), whole).objective.flops_per_token
    assert of_all - objective.flops_per_token == pytest.approx(less)
    longer = dataclasses.replace(IN_BLOCKS, block_frames=6)
    assert make_program(st.Degrees(), longer).objective.flops_per_token == of_all


@pytest.mark.parametrize(
    "changes",
    [
        dict(block_frames=0),
        dict(block_frames=3, model=dict(patch=(2, 2, 2)), size=(4, 6, 10)),
        dict(block_frames=1, size=(2, 8, 8), data=ClipConfig(path=Path(), sizes=("2x4x8",))),
    ],
)
def test_blocks_that_make_no_sense_are_refused(changes):
    with refused(InputError, "block_frames must be"):
        make_wan_config(**changes)


SIZES = make_wan_config(data=ClipConfig(path=CONFIG.run_dir, sizes=("1x8x6",)))


@pytest.mark.slow
def test_batches_may_be_of_several_sizes():
    """Each size has a program of its own, and the same losses on every mesh."""

    def of_size(program, step):
        return batch(program, step, program.config.sizes[step % 2])

    state = initial_state(SIZES)
    expected, _ = train(make_program(st.Degrees(), SIZES), state, 4, of_size)
    losses, _ = train(make_program(st.Degrees.startrail(8, c=2), SIZES), state, 4, of_size)
    np.testing.assert_allclose(losses[:, 0], expected[:, 0], rtol=1e-5)


def prepared(config, training=True, **changes):
    """A batch of four videos as the model takes it."""
    program = make_program(st.Degrees(), config, **changes)
    made = batch(program, 0)
    return made, program.objective.prepare(made, training=training)


def test_first_frame_of_time_0_is_clean_and_not_counted():
    made, found = prepared(OF_TIME)
    first = np.asarray(found.positions[:, :, 0]) == 0
    np.testing.assert_array_equal(found.patches[first], made.patches[first])
    assert not np.asarray(found.weights)[first].any()
    assert np.asarray(found.weights)[~first].all()
    times = np.take_along_axis(
        np.asarray(found.rows.arrays.times), np.asarray(found.time_index), axis=1
    )
    assert not times[first].any()
    assert times[~first].all()


def test_image_to_video_is_given_a_mask_and_a_latent_beside_the_noise():
    made, found = prepared(IMAGE)
    channels, model = IMAGE.model.channels, IMAGE.model
    given = np.asarray(found.patches).reshape(*found.patches.shape[:2], -1, 2 * channels + 4)
    first = np.asarray(found.positions[:, :, 0]) == 0
    mask = given[..., channels : channels + 4]
    assert (mask[first] == 1).all()
    assert not mask[~first].any()
    latent = np.asarray(made.patches).reshape(*given.shape[:3], channels)
    np.testing.assert_array_equal(given[..., channels + 4 :][first], latent[first])
    assert not given[..., channels + 4 :][~first].any()
    assert found.rows.arrays.image.shape[1:] == (IMAGE_TOKENS, model.image_dim)


def test_captions_are_dropped_in_training_alone():
    changes = {"batch_size": 64, "diffusion": FlowConfig(dropout=0.5)}
    made, found = prepared(CONFIG, **changes)
    dropped = ~np.asarray(found.rows.arrays.text).any(axis=(1, 2))
    assert 16 < dropped.sum() < 48
    _, found = prepared(CONFIG, training=False, **changes)
    np.testing.assert_array_equal(found.rows.arrays.text, made.rows.arrays.text)


def test_flops_are_those_of_the_matrix_products():
    sizes = dict(width=128, layers=1, heads=2, mlp_width=512, text_dim=64, text_tokens=96)
    config = make_wan_config(dict(sizes, channels=16), size=(2, 32, 32), batch_size=1)
    objective = make_program(st.Degrees(), config).objective

    def attend(*arrays, segment_ids):
        return jax.nn.dot_product_attention(*arrays)

    model = objective.make_model(attend, Hooks(), nnx.Rngs(0))

    def forward(*arrays):
        return model(*arrays[:4])

    grid = (512, 64), (512, 3)
    shapes = ((1, *grid[0]), "f4"), ((1, *grid[1]), "i4"), ((1, 1), "f4"), ((1, 96, 64), "f4")
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    counted = jax.jit(forward).lower(*given).compile().cost_analysis()["flops"]
    # A step has two products for each of the forward pass. XLA also counts what is no product, and
    # what is done once for a video.
    assert 3 * counted / 512 == pytest.approx(objective.flops_per_token, rel=0.05)

"""Drawing: images that depend on what is asked for alone, and the files that they come in."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import startrail_jax as st
from programs import make_dit_config, make_text_config
from programs import make_program as program_of
from refusals import refused
from startrail_jax.errors import InputError
from trainer.dit.batches import Grid, texts_of
from trainer.dit.config import DiffusionConfig
from trainer.dit.diffusion import sample
from trainer.dit.drawing import Drawing, save_grid, to_pixels
from trainer.dit.objective import DRAWING, Denoising, ImageRequest
from trainer.dit.patches import patchify, unpatchify

# The 20 patches do not divide into 8 shares: they are padded.
CONFIG = make_dit_config(dict(patch=(1, 2, 4)), steps=1, size=(5, 4, 8))
ONE_DEVICE = st.Degrees()
NO_CLASS = CONFIG.model.classes
LABELS = [2, 0, 2, 1, NO_CLASS]
SEED = 2**32 - 1


@functools.cache
def make_program(degrees=ONE_DEVICE, config=CONFIG):
    return program_of(config, degrees)


def with_target(config, target):
    return dataclasses.replace(config, diffusion=DiffusionConfig(target=target))


def make_drawing(program, *, sampler="euler", steps=2, guidance=1.0):
    target = program.config.diffusion.target
    return Drawing(
        program,
        sample=lambda predict, noise: sample(target, sampler, predict, noise, steps),
        guidance=guidance,
    )


def make_weights(program):
    """Not those that a model begins with: they predict 0."""
    rng = np.random.default_rng(0)

    def make(shape):
        weights = 0.2 * rng.standard_normal(shape.shape)
        return jax.device_put(weights.astype(np.float32), shape.sharding)

    return jax.tree.map(make, program.state_shapes.weights)


def draw(drawing, weights, labels=LABELS, seed=SEED):
    given = ImageRequest(np.array(labels, np.int32))
    without = ImageRequest(np.full_like(given.labels, NO_CLASS))
    return np.stack([*drawing.draw(weights, given=given, without=without, seed=seed)])


def expected_noise(config, count, seed=SEED):
    """What images start from, in the shape of images."""
    shape = (config.num_tokens, config.patch_elements)
    key = jax.random.fold_in(jax.random.key(seed), DRAWING)
    keys = [jax.random.fold_in(key, number) for number in range(count)]
    noise = np.stack([jax.random.normal(key, shape) for key in keys])
    return unpatchify(noise, config.size, config.model.patch)


@functools.cache
def on_one_device(steps):
    """A function that draws; one step goes from noise to noise - prediction."""
    program = make_program()
    return functools.partial(draw, make_drawing(program, steps=steps), make_weights(program))


STARTRAIL = st.Degrees.startrail(8, c=2, head=2)
SETTINGS = {
    "Ring Attention": (st.Degrees.ring_attention(8), {}, 5),
    "StarTrail x Ulysses": (STARTRAIL, {}, 2),
    "data, zero 3": (st.Degrees(data=2, team=2, ring=2), {"zero": 3}, 3),
    "tensor, tiled": (st.Degrees(tensor=2, team=2), {"tile": 7}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "changes", "rows"), SETTINGS.values(), ids=SETTINGS.keys())
def test_images_do_not_depend_on_the_mesh_or_how_many_at_a_time(degrees, changes, rows):
    rows = -(-rows // degrees.data) * degrees.data
    program = make_program(degrees, dataclasses.replace(CONFIG, batch_size=rows, **changes))
    drawn = draw(make_drawing(program), make_weights(program))
    assert drawn.shape == (len(LABELS), *CONFIG.size, CONFIG.model.channels)
    expected = on_one_device(2)()
    np.testing.assert_allclose(drawn, expected, atol=1e-5 * abs(expected).max())


@pytest.mark.slow
def test_images_depend_on_label_place_and_seed():
    images = on_one_device(2)
    first = images()
    np.testing.assert_array_equal(images(), first)
    # The same label, at another place.
    assert differ(first[0], first[2])
    others = images(labels=[0, *LABELS[1:]])
    assert differ(others[0], first[0])
    np.testing.assert_array_equal(others[1:], first[1:])
    assert all(differ(*pair) for pair in zip(images(seed=0), first, strict=True))
    np.testing.assert_array_equal(images(LABELS[:2]), first[:2])


def differ(one, other):
    return np.abs(one - other).mean() > 1e-2


@pytest.mark.slow
def test_with_guidance_1_a_step_follows_the_prediction_of_the_model():
    noise = expected_noise(CONFIG, len(LABELS))
    program = make_program()
    assert isinstance(program.objective, Denoising)
    shown = program.objective.shown(
        jnp.asarray(patchify(noise, CONFIG.model.patch)),
        jnp.ones(len(LABELS)),
        ImageRequest(np.array(LABELS, np.int32)),
        grid=Grid.of(CONFIG.size, CONFIG.model.patch),
    )
    velocity = np.asarray(jax.jit(program.outputs)(make_weights(program), shown))
    velocity = unpatchify(velocity, CONFIG.size, CONFIG.model.patch)
    drawn = on_one_device(1)()
    assert all(differ(*pair) for pair in zip(drawn, noise, strict=True))
    np.testing.assert_allclose(drawn, noise - velocity, atol=1e-5 * abs(drawn).max())


@pytest.mark.slow
def test_guidance_goes_on_from_the_unconditional_prediction():
    one_step = on_one_device(1)
    program = make_program(STARTRAIL)
    drawn = draw(make_drawing(program, steps=1, guidance=1.7), make_weights(program))
    conditional = one_step()
    unconditional = one_step([NO_CLASS] * len(LABELS))
    # The last image has no class.
    assert all(differ(*pair) for pair in zip(drawn[:-1], conditional[:-1], strict=True))
    expected = unconditional + 1.7 * (conditional - unconditional)
    np.testing.assert_allclose(drawn, expected, atol=1e-5 * abs(expected).max())


@pytest.mark.slow
def test_images_of_texts_do_not_depend_on_the_mesh_nor_on_what_fills_them_up():
    config = make_text_config(dict(patch=(1, 2, 4)), steps=1, size=(5, 4, 8), batch_size=2)
    words = np.random.default_rng(2).standard_normal((5, config.model.text_dim))
    each = [words[:2].astype(np.float32), words[:0], words[2:].astype(np.float32)]
    drawn = []
    for degrees, length in ((ONE_DEVICE, 3), (STARTRAIL, 7)):
        program = make_program(degrees, config)
        given = ImageRequest(np.zeros(3, np.int32), texts_of(each, length))
        without = given._replace(texts=given.texts._replace(counts=np.zeros(3, np.int32)))
        drawing, weights = make_drawing(program, guidance=1.7), make_weights(program)
        drawn.append(np.stack([*drawing.draw(weights, given=given, without=without, seed=0)]))
        # A row without text is drawn alike with guidance and without.
        plain = make_drawing(program)
        plain = np.stack([*plain.draw(weights, given=given, without=None, seed=0)])
        np.testing.assert_allclose(plain[1], drawn[-1][1], atol=1e-5 * abs(plain).max())
        assert differ(plain[0], drawn[-1][0])
        assert differ(plain[2], drawn[-1][2])
    np.testing.assert_allclose(drawn[1], drawn[0], atol=1e-5 * abs(drawn[0]).max())


@pytest.mark.parametrize(
    ("target", "sampler"), [("flow", "euler"), ("flow", "heun"), ("v", "ddim")]
)
@pytest.mark.slow_except_every(3)
def test_a_model_that_predicts_0_leaves_the_noise(target, sampler):
    """As rectified flow it stands still; v turns an angle, of which each step keeps the cosine."""
    steps = 7
    program = make_program(config=with_target(CONFIG, target))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), program.state_shapes.weights)
    drawing = make_drawing(program, sampler=sampler, steps=steps)
    images = draw(drawing, zeros)
    expected = expected_noise(CONFIG, len(LABELS))
    if target == "v":
        times = np.append(np.linspace(0.995, 0.005, steps), 0)
        expected = expected * np.prod(np.cos(np.pi / 2 * np.diff(times)))
    np.testing.assert_allclose(images, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (with_target(CONFIG, "v"), {"sampler": "euler"}, ["sampler='euler'"]),
        (CONFIG, {"steps": 0}, ["steps=0"]),
        (CONFIG, {"guidance": math.nan}, ["0 and"]),
    ],
)
def test_what_the_model_has_not_learnt_is_refused_at_once(config, changes, words):
    with refused(InputError, *words):
        make_drawing(make_program(config=config), **changes)


def test_pixels_are_rounded_and_clipped_and_frames_of_a_video_lie_side_by_side():
    values = np.array([[-1, 1, 0, -0.999, 0.5, -7, 7]], np.float32)
    pixels = to_pixels(values[None, ..., None])
    assert pixels.shape == (1, 7, 1)
    assert pixels.ravel().tolist() == [0, 255, 128, 0, 191, 0, 255]
    video = np.stack([np.full((2, 3, 1), value, np.float32) for value in (-1, 1, -1)])
    np.testing.assert_array_equal(to_pixels(video)[..., 0], [[0] * 3 + [255] * 3 + [0] * 3] * 2)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_pixels_of_the_file_are_where_they_should_be(channels, mode, tmp_path):
    images = np.random.default_rng(0).integers(1, 256, (5, 2, 3, channels), np.uint8)
    path = tmp_path / "grid.png"
    with path.open("wb") as file:
        save_grid(list(images), file, columns=2, scale=7)
    with Image.open(path) as file:
        assert (file.format, file.mode) == ("PNG", mode)
        assert file.size == (7 * (2 * 4 + 1), 7 * (3 * 3 + 1))
        pixels = np.asarray(file).reshape(70, 63, channels)
    np.testing.assert_array_equal(pixels, pixels[::7, ::7].repeat(7, axis=0).repeat(7, axis=1))
    seen = pixels[3::7, 3::7].copy()
    for number, image in enumerate(images):
        top, left = 1 + 3 * (number // 2), 1 + 4 * (number % 2)
        np.testing.assert_array_equal(seen[top : top + 2, left : left + 3], image)
        seen[top : top + 2, left : left + 3] = 0
    assert not seen.any()  # Gaps, and the place that is left.

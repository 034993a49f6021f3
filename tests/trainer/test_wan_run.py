"""Programs with a Wan: going on after a stop, and what sample.py draws and refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from test_wan_clips import OTHER, SIZE, configured, write_clip, write_folder

import sample
import startrail_jax as st
import train
from configs.wan import dit_video
from programs import interrupt_after, make_program, make_wan_config, save_run
from refusals import message_of_sample, refused, usage_error
from startrail_jax.errors import InputError
from trainer.dit.diffusion import draw_times, shifted
from trainer.dit.flow_steps import euler, unipc

pytestmark = pytest.mark.usefixtures("shared")

RUN = dict(batch_size=2, validation_sequences=2, log_every=1, tensorboard=False, devices=8)
SMALL = dataclasses.replace(dit_video().model, width=16, layers=1, heads=2, mlp_width=16)


def config_of(folder, run_dir, model=None, steps=8, **changes):
    return configured(folder, model, steps=steps, run_dir=run_dir, **RUN | changes)


@pytest.mark.slow
def test_a_run_on_videos_of_two_sizes_goes_on_bit_for_bit_and_on_another_mesh(
    tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "encoded"
    write_folder(folder, count=16)
    whole = train.train(config_of(folder, tmp_path / "whole"))
    shown = capsys.readouterr().out
    assert "of 2x8x8 (32 tokens)" in shown
    assert "of 1x8x6 (12 tokens)" in shown
    for name, later in (("same", {}), ("other", {"devices": 1})):
        config = config_of(folder, tmp_path / name)
        with monkeypatch.context() as patch:
            interrupt_after(patch, 3)
            first = train.train(config)
        second = train.train(dataclasses.replace(config, **later))
        losses, validation = first.train + second.train, second.validation
        if not later:
            assert (losses, validation) == (whole.train, whole.validation)
        else:
            np.testing.assert_allclose(losses, whole.train, rtol=1e-5)
            np.testing.assert_allclose(validation, whole.validation, rtol=1e-5)


@pytest.mark.slow
def test_damaged_video_costs_no_step_and_the_run_goes_on_when_it_is_restored(tmp_path):
    folder = tmp_path / "encoded"
    write_folder(folder, sizes=(SIZE,), count=12)
    options = dict(sizes=(), devices=1, steps=5)
    whole = train.train(config_of(folder, tmp_path / "whole", **options))
    files = {path: path.read_bytes() for path in (folder / "clips").iterdir()}
    # The first batches are whole, whichever videos they are of.
    for path in list(files)[::2]:
        path.write_bytes(b"")
    run = config_of(folder, tmp_path / "run", **options)
    with refused(InputError, "must be a whole safetensors file"):
        train.train(run)
    for path, content in files.items():
        path.write_bytes(content)
    done = [int(x.name) for x in (tmp_path / "run").glob("checkpoints/*")]
    after = train.train(run)
    assert after.train == whole.train[max(done, default=0) :]


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_data(tmp_path):
    folder = tmp_path / "encoded"
    write_folder(folder)
    train.train(config_of(folder, tmp_path / "run", steps=1))
    write_clip(folder, "new.safetensors", OTHER)
    with refused(InputError, "--allow-changes"):
        train.train(config_of(folder, tmp_path / "run", steps=1))


@functools.cache
def new_state(config):
    return make_program(config, st.Degrees()).initialise()


def new_run(config, noise=0.0, like=None):
    """A run with a checkpoint, whose weights are new, or those and noise."""
    state = new_state(like or config)
    rng = np.random.default_rng(config.seed)

    def noisy(x):
        return x + noise * rng.normal(size=x.shape).astype(x.dtype)

    weights, average = (jax.tree.map(noisy, x) for x in (state.weights, state.average))
    return save_run(config, {1: state._replace(weights=weights, average=average)})


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run on moving digits."""
    run_dir = tmp_path_factory.mktemp("digits") / "run"
    return new_run(dataclasses.replace(dit_video(), model=SMALL, run_dir=run_dir, **RUN))


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """A run on encoded videos that begins with a frame."""
    folder = tmp_path_factory.mktemp("clips")
    config = config_of(
        folder / "encoded", folder / "run", dict(first_frame="channels", image_dim=7), steps=1
    )
    write_folder(folder / "encoded", config, image_dim=7, caption="a cat")
    return new_run(config)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run on latents that has no encoded videos, as one that was imported."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    return new_run(make_wan_config(size=(2, 4, 4), run_dir=run_dir, **RUN))


RANGES = ((0.875, 1.0), (0.0, 0.875), (0.0, 0.5), (0.0, 0.875), (0.0, 0.875))
QUICK = ("--steps", "2", "--devices", "2")


def test_contact_sheet_has_a_row_for_each_caption(digits, tmp_path, capsys):
    flags = ("--prompt", "seven left", "two up", "--samples", "3", "--out", tmp_path / "a.png")
    sample.sample([str(digits), *QUICK, *map(str, flags)])
    assert "row: seven left" in capsys.readouterr().err
    with Image.open(tmp_path / "a.png") as image:
        # Frames lie side by side, with a gap of a pixel between videos; pixels are 4 times as big.
        assert image.size == (4 * (3 * (5 * 12 + 1) + 1), 4 * (2 * (12 + 1) + 1))
    for number, (flags, devices) in enumerate(((("--batch-size", "4"), "4"), ((), "1"))):
        out = tmp_path / f"{number}.npz"
        sample.sample(
            [str(digits), "--steps", "2", "--devices", devices, *flags, "--out", str(out)]
        )
    one, other = (np.load(tmp_path / f"{number}.npz") for number in range(2))
    assert one["captions"].tolist() == ["seven left", "three down", "zero right", "five up"]
    np.testing.assert_allclose(one["latents"], other["latents"], atol=1e-4)


@pytest.mark.slow
def test_latents_are_drawn_for_files_and_for_what_is_held_out(clips, tmp_path, capsys):
    sample.sample([str(clips), *QUICK])
    assert "row: a cat" in capsys.readouterr().err
    with np.load(clips / "samples.npz") as file:
        assert (file["latents"].shape, file["captions"].tolist()) == ((1, *SIZE, 2), ["a cat"])
    file = clips.parent / "encoded" / "clips" / "2.safetensors"
    out = tmp_path / "out.npz"
    flags = ["--prompt-embeddings", file, "--sampler", "euler", "--guidance", "1", "--out", out]
    sample.sample([str(clips), *QUICK, *map(str, flags)])
    assert np.isfinite(np.load(out)["latents"]).all()
    # The other size has other files.
    flags = ["--size", "1x8x6", "--prompt-embeddings", str(file)]
    message = message_of_sample(clips, *QUICK, *flags)
    assert "must have the shape [1, 8, 6, 2]" in message


@pytest.fixture(scope="module")
def halves(digits):
    """Runs that learn the upper times, the lower ones, and others."""
    config = dataclasses.replace(dit_video(), model=SMALL, **RUN)
    found = []
    for seed, (low, high) in enumerate(RANGES):
        model = dataclasses.replace(SMALL, heads=1 if seed == 3 else 2)
        dropout = 0.0 if seed == 4 else config.diffusion.dropout
        diffusion = dataclasses.replace(config.diffusion, range=(low, high), dropout=dropout)
        run_dir = digits.parent / f"half{seed}"
        half = dict(model=model, diffusion=diffusion, run_dir=run_dir, seed=seed)
        found.append(new_run(dataclasses.replace(config, **half), noise=0.3, like=config))
    return found


def test_two_models_draw_at_the_times_that_each_has_learnt(halves, tmp_path, capsys):
    upper, lower, *_ = halves
    drawn = {}
    for name, run, *flags in (
        ("one", upper, "--other-run", lower, "--guidance", "3", "--other-guidance", "1"),
        ("other", lower, "--other-run", upper, "--guidance", "1", "--other-guidance", "3"),
        ("same", upper, "--other-run", lower, "--guidance", "3"),
        ("upper", upper, "--other-run", upper, "--guidance", "3"),
        ("lower", lower, "--other-run", lower, "--guidance", "3"),
    ):
        out = tmp_path / f"{name}.npz"
        words = [*flags, "--prompt", "two up", "--sampler", "euler", "--shift", "1", "--out", out]
        sample.sample([str(run), "--steps", "8", "--devices", "2", *map(str, words)])
        drawn[name] = np.load(out)["latents"]
    assert f"model: {lower} after step 1" in capsys.readouterr().err
    np.testing.assert_array_equal(drawn["one"], drawn["other"])
    for name in ("same", "upper", "lower"):
        assert np.abs(drawn["one"] - drawn[name]).max() > 1e-2, name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "Give the run of the other model, --other-run RUN"),
        (["--other-run", 0], None),
        (["--other-run", 2], "must fill 0 to 1, and meet; got diffusion.range (0.875, 1.0) and"),
        (["--other-run", 3], "got one that differs in heads"),
        (["--other-run", "absent"], "--other-run must be the folder of a run"),
        (["--other-guidance", "2"], "without --other-run"),
        (["--other-run", 1, "--other-guidance", "-1"], "guidance must be at least 0"),
        (["--other-run", 4, "--other-guidance", "2"], "Use --other-guidance 1"),
    ],
)
def test_models_that_draw_no_video_together(halves, capsys, flags, words):
    flags = [str(halves[x]) if type(x) is int else x for x in flags]
    if words is None:
        sample.sample([str(halves[0]), *QUICK, *flags])
    elif "without" in words:
        assert words in usage_error(capsys, sample.sample, [halves[0], *flags])
    else:
        assert words in message_of_sample(halves[0], *QUICK, *flags)


@pytest.mark.parametrize(
    ("run", "flags", "words"),
    [
        ("clips", ["--size", "1x1x1"], "Choose from 2x8x8, 1x8x6"),
        ("clips", ["--prompt", "cat"], "--decode FOLDER"),
        ("clips", ["--out", "a.png"], "--out must end in .npz for latents"),
        ("clips", ["--prompt-embeddings", "absent.safetensors"], "absent.safetensors"),
        ("clips", ["--guidance", "-1"], "guidance must be at least 0"),
        ("digits", ["--prompt", "seven fast"], "got 'fast'"),
        ("digits", ["--prompt-embeddings", "a"], "--prompt 'seven left'"),
        ("digits", ["--decode", "."], "moving digits, whose videos are pixels"),
        ("plain", [], "needs the text encoder of its model; got no --decode FOLDER"),
    ],
)
def test_wishes_that_a_run_cannot_serve(run, flags, words, request):
    assert words in message_of_sample(request.getfixturevalue(run), *QUICK, *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--image", "."], "without --decode"),
        (["--prompt", "a", "--prompt-embeddings", "b"], "Leave one of them out"),
        (["--samples", "0"], "samples must be at least 1"),
    ],
)
def test_flags_that_cannot_be(digits, capsys, flags, words):
    assert words in usage_error(capsys, sample.sample, [digits, *flags])


# From the schedulers of diffusers 0.42.1, for the velocity sin(x + t) + x t.
SAMPLED = [
    ("unipc", 1, 1.0, [-0.996922, 0.478801, -0.140108]),
    ("euler", 1, 1.0, [-0.997495, 0.479426, -0.14112]),
    ("unipc", 2, 3.0, [-0.521351, -0.249825, 0.041232]),
    ("euler", 2, 3.0, [-0.976655, 0.457666, -0.120986]),
    ("unipc", 5, 5.0, [-0.286046, -0.436626, 0.231783]),
    ("euler", 5, 5.0, [-0.343087, -0.387087, 0.187347]),
    ("unipc", 20, 3.0, [-0.078621, -0.559438, 0.539475]),
    ("euler", 20, 3.0, [-0.108263, -0.539593, 0.492722]),
]


@pytest.mark.parametrize(("name", "steps", "shift", "expected"), SAMPLED)
def test_samplers_are_those_of_diffusers(name, steps, shift, expected):
    def predict(x, time):
        return jnp.sin(x + time[:, None]) + x * time[:, None]

    noise = jnp.array([[0.5, -1.5, 2.0]])
    found = {"unipc": unipc, "euler": euler}[name](predict, noise, steps=steps, shift=shift)
    np.testing.assert_allclose(found[0], expected, atol=3e-6)


@pytest.mark.parametrize("density", ["uniform", "logit_normal"])
def test_times_lie_in_their_range_and_are_shifted(density):
    key = jax.random.key(0)
    plain = draw_times(key, density, (4000,))
    np.testing.assert_allclose(
        draw_times(key, density, (4000,), shift=3.0), 3 * plain / (1 + 2 * plain), rtol=1e-6
    )
    # Those in a range are distributed as those of all times that happen to lie in it.
    both = dict(shift=3.0, within=(0.5, 0.8))
    inside = np.sort(draw_times(key, density, (4000,), **both))
    assert inside.min() >= 0.5
    assert inside.max() <= 0.8
    every = np.asarray(draw_times(jax.random.key(1), density, (40_000,), shift=3.0))
    wanted = np.sort(every[(every > 0.5) & (every < 0.8)])
    quantiles = np.linspace(0.1, 0.9, 9)
    np.testing.assert_allclose(
        np.quantile(inside, quantiles), np.quantile(wanted, quantiles), atol=0.01
    )
    assert shifted(shifted(0.3, 5.0), 1 / 5.0) == pytest.approx(0.3)

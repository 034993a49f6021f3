"""sample.py: images from the folder of a run, and what it says where it cannot draw any."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from PIL import Image

import sample
import startrail_jax as st
from configs.dit import dit_digits
from programs import make_program, save_run
from refusals import message_of_sample as message_of
from refusals import usage_error
from trainer.dit.config import DiffusionConfig, DiTConfig, ImageConfig, ImageOptions
from trainer.dit.sample import rows_of_grid, save_new

QUICK = ("--steps", "2", "--samples", "3")
MODEL = DiTConfig(channels=1, classes=3, width=8, layers=1, heads=1, mlp_width=8)


def make_run(run_dir, **changes):
    """A run with a checkpoint whose averaged weights are not its weights."""
    config = replace(dit_digits(), **{"model": MODEL, "devices": 2, "run_dir": run_dir} | changes)
    state = make_program(config, st.Degrees()).initialise()
    average = jax.tree.map(lambda x: x + 0.02, state.weights)
    return save_run(config, {1: state._replace(average=average)})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


def pixels(path):
    return np.asarray(Image.open(path))


@pytest.mark.slow
def test_grid_has_a_row_for_each_class(run_dir, tmp_path, capsys):
    sample.sample([str(run_dir), *QUICK])
    whole = pixels(run_dir / "samples.png")
    # Images of 8 x 8, 8 times as large, with gaps of one pixel of theirs.
    assert whole.shape == (8 * (3 * 9 + 1), 8 * (3 * 9 + 1))
    assert "9 images" in capsys.readouterr().err
    # On another mesh, in other portions; class 2 is in another row, with other noise.
    other = tmp_path / "other.png"
    first = (run_dir / "samples.png").read_bytes()
    flags = ("--classes", "0", "1", "--mesh.head", "1", "--devices", "4", "--batch-size", "2")
    sample.sample([str(run_dir), *QUICK, *flags, "--out", str(other)])
    difference = whole[: 8 * 19].astype(int) - pixels(other)
    assert abs(difference).max() <= 1
    assert np.unique(pixels(other)).size > 50
    # A file that is named is not overwritten either, and this is said before anything is drawn.
    drawn = other.read_bytes()
    assert "--out must be a new file; got" in message_of(run_dir, *QUICK, "--out", other)
    assert (other.read_bytes(), (run_dir / "samples.png").read_bytes()) == (drawn, first)
    assert not list(run_dir.glob("*.part"))


@pytest.mark.parametrize("name", ["samples.png", "samples.npz"])
def test_files_are_kept_and_the_new_one_gets_a_number(tmp_path, name):
    places = [save_new(tmp_path / name, lambda file: file.write(b"new")) for _ in range(3)]
    stem, suffix = name.split(".")
    assert places == [tmp_path / x for x in (name, f"{stem}-2.{suffix}", f"{stem}-3.{suffix}")]
    (tmp_path / name).write_bytes(b"old")
    places.append(save_new(tmp_path / name, lambda file: file.write(b"newest")))
    assert [place.read_bytes() for place in places] == [b"old", b"new", b"new", b"newest"]
    assert sorted(tmp_path.iterdir()) == sorted(places)


def test_file_that_cannot_be_written_leaves_nothing(tmp_path):
    def fail(file):
        file.write(b"a part")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        save_new(tmp_path / "samples.png", fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_folder_that_cannot_be_written_is_named_before_anything_is_drawn(run_dir, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "--out must lie in a folder that can be written; got" in message_of(run_dir, *QUICK)


@pytest.mark.slow
def test_latents_come_as_numbers(tmp_path, capsys):
    """In the scale of the data, in a file that is named."""
    run = make_run(tmp_path / "run", data=ImageConfig(path=tmp_path / "latents.npz"))
    config = json.loads((run / "config.json").read_text())
    drawn = []
    for number, scale in ((1, 1.0), (2, 0.25)):
        config["data"]["latent_scale"] = scale
        (run / "config.json").write_text(json.dumps(config))
        sample.sample([str(run), *QUICK, "--classes", "2"])
        path = run / ("samples.npz" if number == 1 else "samples-2.npz")
        assert f"3 latents: {path}\n" in capsys.readouterr().err
        with np.load(path) as file:
            assert file["latents"].shape == (3, 1, 8, 8, 1)
            assert file["labels"].tolist() == [2, 2, 2]
            drawn.append(file["latents"])
    np.testing.assert_array_equal(drawn[1], 4 * drawn[0])
    assert "--out must end in .npz for latents" in message_of(run, "--out", tmp_path / "a.png")


@pytest.mark.parametrize(("asked", "labels"), [((2, 0), [2, 0]), (None, [0, 1, 2])])
def test_classes_are_drawn_by_label(asked, labels):
    config = replace(dit_digits(), model=MODEL)
    assert rows_of_grid(config, ImageOptions(classes=asked, samples=1)) == labels


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--classes 1 3", "--classes must be of the 3 classes of the model; got 3."),
        ("--classes -1", "--classes must be of the 3 classes of the model; got -1."),
        ("--sampler ddim", "sampler='ddim'"),
        ("--guidance -1", "guidance must be at least 0 and finite; got guidance=-1.0"),
        ("--seed -1", "seed must be at least 0"),
        ("--seed 4294967296", "and below 2**32; got seed=4294967296"),
        ("--out no/such/folder/a.png", "--out must lie in a folder that exists"),
        ("--out a.jpg", "--out must end in .png or .npz for images; got 'a.jpg'"),
    ],
)
def test_wishes_that_cannot_be_served(run_dir, flags, message):
    assert message in message_of(run_dir, *QUICK, *flags.split())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"diffusion": DiffusionConfig(dropout=0.0)}, "classes=3, text_dim=None, dropout=0.0"),
        ({"model": replace(MODEL, classes=0)}, "classes=0, text_dim=None, dropout=0.1"),
    ],
)
def test_guidance_needs_something_to_go_away_from(tmp_path, changes, words):
    run = make_run(tmp_path / "run", **changes)
    assert words in message_of(run, *QUICK, "--guidance", "2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--samples 0", "samples must be at least 1; got samples=0"),
        ("--scale 0", "scale must be at least 1; got scale=0"),
        ("--prompt a", "--prompt"),
    ],
)
def test_flags_that_cannot_be_read(run_dir, capsys, flags, message):
    assert message in usage_error(capsys, sample.sample, [run_dir, *flags.split()])

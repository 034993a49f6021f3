"""Digits and latents: what is read, what is held out; an error for all that can be wrong."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from configs.dit import dit_digits
from refusals import refused
from startrail_jax.errors import InputError
from trainer.dit import images
from trainer.dit.config import DiTConfig, ImageConfig
from trainer.errors import MissingPackageError

pytestmark = pytest.mark.quick

HEIGHT, WIDTH = 5, 7
OF_TEXTS = {"text_dim": 3, "text_tokens": 5}
LATENTS = {"size": (2, 3, 5), "channels": 4}
RNG = np.random.default_rng(0)


def make_config(
    path=None, *, size=(1, HEIGHT, WIDTH), classes=0, channels=3, text_dim=None, **options
):
    sizes = dict(patch=(1, 1, 1), width=8, layers=1, heads=1, mlp_width=8)
    model = DiTConfig(channels=channels, classes=classes, text_dim=text_dim, **sizes)
    data = ImageConfig(path=path, **{"validation_fraction": 0.25} | options)
    return replace(dit_digits(), model=model, data=data, size=size)


def open_images(*args, **options):
    return images.open_images(make_config(*args, **options), list)


def open_digits(**wanted):
    return open_images(**{"size": (1, 8, 8), "channels": 1, "classes": 10} | wanted)


def examples(opened):
    parts = [(part.numbers[i], part[i]) for part in (opened.train, opened.held_out)
             for i in range(len(part))]  # fmt: skip
    return [example for _, example in sorted(parts, key=lambda pair: pair[0])]


def write_npz(path, count=6, **arrays):
    latents = RNG.standard_normal((count, *LATENTS["size"], LATENTS["channels"]))
    np.savez(path, **{"latents": latents.astype(np.float16)} | arrays)
    return path


# What is read.


@pytest.mark.slow
def test_digits_are_images_with_labels():
    opened = open_digits()
    found = examples(opened)
    assert len(found) == 1797
    # Imported here, as that takes seconds, which not every process of the tests need spend.
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.testing.assert_array_equal([x.label for x in found], digits.target)
    latents = np.stack([x.latent for x in found])
    assert (latents.min(), latents.max(), latents.dtype) == (-1, 1, np.float32)
    np.testing.assert_array_equal((latents[:, 0, :, :, 0] + 1) * 8, digits.images)


def test_held_out_is_a_share_that_stays_the_same():
    opened, again = (
        open_digits(validation_fraction=0.1, classes=0),
        open_digits(validation_fraction=0.1),
    )
    assert (len(opened.train), len(opened.held_out)) == (1617, 180)
    assert set(opened.train.numbers) | set(opened.held_out.numbers) == set(range(1797))
    np.testing.assert_array_equal(opened.held_out.numbers, again.held_out.numbers)
    # Not a piece of the data: those may be in order.
    assert np.ptp(opened.held_out.numbers) > 1700
    assert opened.description == (
        "handwritten digits of scikit-learn: 1,617 examples to train on, 180 held out"
    )
    # What the model does not take is not read.
    assert opened.train[0].label is None


def test_npz_holds_latents_with_labels(tmp_path):
    latents = RNG.standard_normal((6, 2, 3, 5, 4))
    labels = np.array([2, 0, 1, 2, 0, 0])
    path = write_npz(tmp_path / "x.npz", latents=latents, labels=labels)
    opened = open_images(path, **LATENTS, classes=3)
    found = examples(opened)
    np.testing.assert_array_equal([x.latent for x in found], latents.astype(np.float32))
    assert found[0].latent.dtype == np.float32
    assert [x.label for x in found] == labels.tolist()
    # That of images may leave out the frame.
    path = write_npz(tmp_path / "y.npz", latents=latents[:, 0])
    found = examples(open_images(path, size=(1, 3, 5), channels=4))
    np.testing.assert_array_equal([x.latent for x in found], latents[:, :1].astype(np.float32))


def test_npz_holds_latents_with_texts(tmp_path):
    texts = RNG.standard_normal((6, 5, 3)).astype(np.float16)
    path = write_npz(tmp_path / "x.npz", texts=texts)
    found = examples(open_images(path, **LATENTS, **OF_TEXTS))
    np.testing.assert_array_equal([x.text for x in found], texts.astype(np.float32))
    counts = np.array([5, 0, 1, 2, 3, 4])
    before = open_images(path, **LATENTS, **OF_TEXTS).digest
    write_npz(path, texts=texts, text_tokens=counts)
    opened = open_images(path, **LATENTS, **OF_TEXTS)
    assert [len(x.text) for x in examples(opened)] == counts.tolist()
    assert opened.digest != before
    assert examples(open_images(path, **LATENTS))[0].text is None


# What is wrong.


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with refused(MissingPackageError, "Run: pip install"):
        open_digits()


@pytest.mark.parametrize("wanted", [{"size": (1, 8, 16)}, {"channels": 3}, {"classes": 7}])
def test_digits_are_of_one_size(wanted):
    with refused(InputError, "digits", " need size=", **wanted):
        open_digits(**wanted)


def test_digits_have_no_texts():
    with refused(InputError, "needs data.path", text_dim=3):
        open_digits(classes=0, **OF_TEXTS)


def test_data_that_are_missing_or_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with refused(InputError, "data.path must"):
            open_images(path)


def test_data_replaced_in_place_have_another_hash(tmp_path):
    latents = np.ones((6, *LATENTS["size"], LATENTS["channels"]))
    path = write_npz(tmp_path / "x.npz", latents=latents)
    before = open_images(path, **LATENTS).digest
    latents[-1, -1, -1, -1, -1] = 2
    write_npz(path, latents=latents)
    assert open_images(path, **LATENTS).digest != before


SHAPE = (6, 2, 3, 5, 4)
INFINITE = np.zeros(SHAPE)
INFINITE[3, 1, 2, 4, 3] = 1e60


@pytest.mark.parametrize(
    ("arrays", "options", "named"),
    [
        *[
            ({"latents": latents}, {}, named)
            for latents, named in (
                (np.zeros((6, 3, 5, 4)), "must have the shape [number, 2, 3, 5, 4];"),
                (np.zeros((6, 2, 3, 4, 5)), "shape (6, 2, 3, 4, 5) of"),
                (np.zeros(SHAPE, int), "`latents` must be floating; got"),
                (INFINITE, "example 3"),
                (np.zeros((0, 2, 3, 5, 4)), "2 examples"),
                (np.array([None] * 6), "*.npz file of arrays without objects;"),
            )
        ],
        ({}, {"classes": 3}, "or use --model.classes 0 for no labels"),
        *[
            ({"labels": labels}, {"classes": 3}, named)
            for labels, named in (
                (np.zeros(5, int), "be 6"),
                (np.zeros(6), "be 6"),
                (np.array([0, 1, 3, 0, 0, 0]), "--model.classes"),
                (np.array([0, -1, 1, 0, 0, 0]), "example 1"),
            )
        ],
        ({}, OF_TEXTS, "no --model.text-dim for no texts"),
        *[
            ({"texts": np.zeros((6, 5, 3))} | arrays, OF_TEXTS, named)
            for arrays, named in (
                ({"texts": np.zeros((6, 5, 4))}, "shape [6, tokens, model.text_dim=3];"),
                ({"texts": np.zeros((5, 5, 3))}, "shape (5, 5, 3)"),
                ({"texts": np.zeros((6, 5, 3), int)}, "`texts` must be floating"),
                ({"texts": np.full((6, 5, 3), np.nan)}, "`texts` must be finite"),
                ({"texts": np.zeros((6, 6, 3))}, "got 6 for example 0"),
                ({"text_tokens": np.zeros(6)}, "must be 6 integers"),
                ({"text_tokens": np.array([0, 1, 6, 0, 0, 0])}, "got 6 for example 2"),
            )
        ],
    ],
)
def test_npz_with_wrong_arrays_is_refused(tmp_path, arrays, options, named):
    path = write_npz(tmp_path / "x.npz", **arrays)
    with refused(InputError, named):
        open_images(path, **LATENTS, **options)


def test_latents_of_a_large_scale_are_warned_of_with_the_factor_to_use(tmp_path):
    latents = 100 * RNG.standard_normal((7, 2, 3, 5, 4))
    rms = np.sqrt(np.mean(latents**2))
    path = write_npz(tmp_path / "x.npz", latents=latents)

    def advised(opened):
        return re.search(r"Use --data\.latent-scale (\S+),", opened.description)[1]

    opened = open_images(path, **LATENTS)
    assert opened.description.count("warning:") == 1
    warning = opened.description.splitlines()[-1]
    found = re.match(r"warning: the latents have a root mean square of (\S+),.*", warning)
    factor = float(advised(opened))
    assert float(found[1]) == pytest.approx(rms, rel=0.01)
    assert factor == pytest.approx(1 / rms, rel=0.01)
    # The factor is applied, and then there is nothing to warn of.
    scaled = open_images(path, **LATENTS, latent_scale=factor)
    assert "warning" not in scaled.description
    first, second = opened.train[0].latent, scaled.train[0].latent
    assert second.dtype == np.float32
    np.testing.assert_array_equal(second, first * np.float32(factor))
    # A factor that is wrong itself is corrected.
    opened = open_images(path, **LATENTS, latent_scale=1e-6)
    assert float(advised(opened)) == pytest.approx(1 / rms, rel=0.01)


@pytest.mark.parametrize(("scale", "warns"), [(0.0, 0), (0.1, 1), (0.5, 0), (3.0, 0), (5.5, 1)])
def test_only_latents_of_an_unusual_scale_are_warned_of(tmp_path, scale, warns):
    path = write_npz(tmp_path / "x.npz", latents=np.full((6, 2, 3, 5, 4), scale))
    assert open_images(path, **LATENTS).description.count("warning") == warns


def test_file_that_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    whole = write_npz(path).read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    np.save(tmp_path / "y.npy", np.zeros(3))
    for content in (b"", b"no such file", whole[:-100], damaged, (tmp_path / "y.npy").read_bytes()):
        path.write_bytes(content)
        with refused(InputError, "data.path must"):
            open_images(path, **LATENTS)

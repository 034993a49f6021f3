"""Folders of images: what is found in them, what they become, and an error for each mistake."""

import csv
import json
import os
import sys
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from PIL import ExifTags, Image
from safetensors.numpy import load_file, save_file

import sample
import startrail_jax as st
import train
from configs.dit import dit_1b
from refusals import message_of_sample, refused, usage_error
from startrail_jax.errors import InputError
from train import read_command_line
from trainer.dit import encode
from trainer.dit.batches import image_batch
from trainer.dit.config import ImageConfig, ImageOptions
from trainer.dit.encoded_images import KEPT, read_images
from trainer.dit.images import open_images
from trainer.dit.pictures import find_pictures, open_picture, sizes_of_area
from trainer.dit.sample import rows_of_grid
from trainer.dit.texts import TextEncoder
from trainer.dit.vae import ImageVae, vae_sizes
from trainer.errors import MissingPackageError
from trainer.run.exit import exit_on_user_errors
from trainer.run.settings import save_config

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("shared")]

RNG = np.random.default_rng(0)
CLASSES = ("Zebra", "ant", "b e\n'e", "été")
"""In the order of Python's `sorted`."""
TINY = "--model.width 16 --model.layers 2 --model.heads 2 --model.mlp-width 32 --batch-size 4 "
TINY += "--model.dtype float32 --validation-sequences 4 --log-every 1 --zero 0 --no-tensorboard "
TINY += "--devices 4 --checkpoint.every 1000 --mesh.data 2"


def write_image(path, height=8, width=8, value=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(256, size=(height, width, 3), dtype=np.uint8)
    if value is not None:
        pixels[:] = value
    Image.fromarray(pixels).save(path, **options)
    return pixels


@pytest.fixture
def images(tmp_path):
    """Twelve images of three sizes in four classes."""
    for number in range(12):
        height, width = ((8, 8), (8, 16), (24, 12))[number % 3]
        name = CLASSES[number % 4]
        write_image(tmp_path / "images" / name / f"{number}.png", height, width, value=number)
    return tmp_path / "images"


class Vae:
    """Stands for the VAE: a position of a latent is the mean of 2 x 2 pixels, over 4 channels."""

    loaded = 0

    def __init__(self, folder, *, option, device):
        Vae.loaded += 1

    def encode(self, images):
        n, height, width, _ = images.shape
        means = images.reshape(n, height // 2, 2, width // 2, 2, 3).mean((2, 4))
        latents = np.concatenate([means, means[..., :1]], axis=-1) / 8
        return np.where(latents == 255 / 8, np.nan, latents).astype(np.float32)

    def decode(self, latents):
        return [np.full((*(2 * n for n in x.shape[:2]), 3), 77, np.uint8) for x in latents]


@pytest.fixture
def vae(tmp_path, monkeypatch):
    """Folder of a VAE that halves height and width."""
    monkeypatch.setattr("trainer.dit.vae.ImageVae", Vae)
    monkeypatch.setattr("trainer.dit.sample.ImageVae", Vae)
    return write_vae(tmp_path / "vae")


def write_vae(folder, **changes):
    folder.mkdir(exist_ok=True)
    values = {"_class_name": "AutoencoderKL", "block_out_channels": [4, 4], "latent_channels": 4}
    (folder / "config.json").write_text(json.dumps(values | changes))
    save_file({"x": np.zeros(1, np.float32)}, folder / "diffusion_pytorch_model.safetensors")
    return folder


def encoded(images, *flags, out="out"):
    """Runs the command; returns its status, or what it says."""
    try:
        with exit_on_user_errors():
            encode.main([str(images), str(images.parent / out), *map(str, flags)])
    except SystemExit as end:
        return end.code
    return 0


def configured(path, *flags):
    """The settings of `train.py dit_1b`."""
    arguments = ["dit_1b", "--data.path", str(path), *TINY.split(), *flags]
    return read_command_line(arguments).settings


def opened(config):
    layout = st.Layout("contiguous", 4)
    return open_images(config, partial(image_batch, config=config, layout=layout))


def examples(data):
    """All examples in their order, with the groups of their sizes."""
    found, of_size = {}, data.groups
    for part, groups in ((data.train, of_size.train), (data.held_out, of_size.held_out)):
        pairs = zip(part.numbers, groups, strict=True)
        found |= {number: (part[i], group) for i, (number, group) in enumerate(pairs)}
    return [found[number] for number in range(len(found))]


# From images to a sample.


def test_images_become_latents_with_classes_in_the_order_of_their_names(images, vae, capsys):
    assert encoded(images, "--vae", vae, "--size", "16", "--max-ratio", "2") == 0
    shown = capsys.readouterr().err
    assert "4 classes, in this order: 'Zebra', 'ant'" in shown
    assert "next: python train.py dit_1b --data.path" in shown
    about = json.loads((images.parent / "out" / "encoded.json").read_text())
    assert about["classes"] == list(CLASSES)
    config = configured(images.parent / "out")
    assert (config.size, config.data.sizes) == ((1, 8, 8), ("1x6x10", "1x10x6"))
    assert (config.model.channels, config.model.classes, config.data.pixels) == (4, 4, False)
    data = opened(config)
    assert data.groups.names == ("1x8x8", "1x6x10", "1x10x6")
    assert data.groups.lengths.tolist() == [16, 15, 15]
    files = sorted(f"{CLASSES[n % 4]}/{n}.png" for n in range(12))
    for file, (example, group) in zip(files, examples(data), strict=True):
        number = int(file.partition("/")[2][:-4])
        assert example.label == number % 4
        assert group == number % 3
        size = ((1, 8, 8, 4), (1, 6, 10, 4), (1, 10, 6, 4))[number % 3]
        np.testing.assert_array_equal(example.latent, np.full(size, number / 8, np.float32))
    # Of a batch, all have one size.
    some = [example for example, group in examples(data) if group == 1]
    batch = data.collate(some, list(range(len(some))))
    assert batch.grid.size == (1, 3, 5)


def test_pixels_go_from_minus_1_to_1(images):
    assert encoded(images, "--pixels", "--size", "8") == 0
    config = configured(images.parent / "out")
    assert (config.size, config.model.channels, config.data.pixels) == ((1, 8, 8), 3, True)
    data = opened(config)
    number = int(read_lines(images.parent / "out")[data.train.numbers[0]].image.split("/")[1][:-4])
    latent = data.train[0].latent
    assert (latent.shape, latent.dtype) == ((1, 8, 8, 3), np.float32)
    np.testing.assert_allclose(latent, number / 127.5 - 1, atol=1e-7)
    assert "warning" not in data.description


def read_lines(out):
    return sorted(line for line in read_images(out).values() if line.file is not None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pixels", "latents"])
def test_every_command_from_images_to_a_sample(images, vae, kind, capsys):
    flags = ("--pixels",) if kind == "pixels" else ("--vae", vae)
    assert encoded(images, *flags, "--size", "16", "--max-ratio", "2") == 0
    run_dir = images.parent / "run"
    flags = ["--steps", "3", "--run-dir", str(run_dir), "--sample.every", "3"]
    losses = train.train(configured(images.parent / "out", *flags))
    assert len(losses.train) == 3
    shown = capsys.readouterr().out
    assert "of 1x8x8 (16 tokens)" in shown or "of 1x16x16 (64 tokens)" in shown
    suffix = "png" if kind == "pixels" else "npz"
    assert [x.name for x in (run_dir / "samples").iterdir()] == [f"step-3.{suffix}"]
    draw = [str(run_dir), "--steps", "2", "--samples", "2"]
    decode = [] if kind == "pixels" else ["--decode", str(vae)]
    sample.sample([*draw, *decode, "--classes", "été", "0"])
    assert "row: class 3, 'été'" in capsys.readouterr().err
    drawn = np.asarray(Image.open(run_dir / "samples.png"))
    assert drawn.shape == (4 * (2 * 17 + 1), 4 * (2 * 17 + 1), 3)
    if kind == "pixels":
        assert "--decode is for a run on latents" in message_of_sample(*draw, "--decode", vae)
        return
    assert set(np.unique(drawn)) == {0, 77}
    sample.sample([*draw, "--size", "1x6x10"])
    with np.load(run_dir / "samples.npz") as file:
        assert file["latents"].shape == (8, 1, 6, 10, 4)
    message = message_of_sample(*draw, "--size", "1x6x6")
    assert "Choose from 1x8x8, 1x6x10, 1x10x6" in message
    assert "--out must end in .png" in message_of_sample(*draw, *decode, "--out", "a.npz")
    write_vae(vae, latent_channels=16)
    assert "latents of 4 channels; got 16" in message_of_sample(*draw, *decode)
    write_vae(vae, scaling_factor=2)
    sample.sample([*draw, *decode])
    assert "has another config or other weights" in capsys.readouterr().err


def test_classes_are_drawn_by_number_or_name():
    config = dit_1b()
    asked = ImageOptions(classes=("ant", 0, "1"), samples=1)
    assert rows_of_grid(config, asked, ("x", "1", "ant")) == [2, 0, 1]
    with refused(InputError, "got 'anr'. Did you mean 'ant'?"):
        rows_of_grid(config, ImageOptions(classes=("anr",)), ("x", "1", "ant"))


# Changes, and what goes on.


def replaced(images):
    write_image(images / "ant" / "1.png", value=99)


def removed(images):
    (images / "ant" / "1.png").unlink()


def lost(images):
    out = images.parent / "out"
    path = min((out / "images").iterdir())
    path.unlink()
    return sum(line.file == path.name for line in read_lines(out))


def damaged(images):
    (images / "ant" / "1.png").write_bytes(b"no image")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("change", "renewed", "words"),
    [
        (lambda images: None, 0, "6 images are as they were"),
        (replaced, 1, "renewed, since the image or its caption has changed: 'ant/1.png'"),
        (removed, 0, "dropped, since no longer"),
        (lost, None, "images are as they were"),
        (damaged, 0, "left out: An image must be a whole image, as PNG"),
    ],
)
def test_encoded_images_are_those_there_now(images, vae, capsys, count, change, renewed, words):
    flags, out = ["--vae", vae, "--size", "16", "--max-ratio", "2"], images.parent / "out"
    processes = [[*flags, "--process", index, count] for index in range(count)]
    assert [encoded(images, *process) for process in processes] == [0] * count
    before = {line.image: line for line in read_lines(out)}
    count_lost = change(images)
    capsys.readouterr()
    status = [encoded(images, *process) for process in processes]
    assert words.replace("6", str(12 // count)) in capsys.readouterr().err
    lines = read_lines(out)
    there = {x.relative_to(images).as_posix() for x in images.rglob("*.png")}
    if change is damaged:
        there.remove("ant/1.png")
    assert {line.image for line in lines} == there
    assert sorted(status) == [*[0] * (count - 1), int(change is damaged)]
    changed = sum(line.version != before[line.image].version for line in lines)
    assert changed == (count_lost if renewed is None else renewed)
    for line in lines:
        number = int(line.image.split("/")[1][:-4])
        number = 99 if change is replaced and number == 1 else number
        found = load_file(out / "images" / line.file)["images"][line.row]
        np.testing.assert_array_equal(found, np.full_like(found, number / 8))
    assert {x.name for x in (out / "images").iterdir()} == {line.file for line in lines}


def test_a_run_knows_its_images_by_content_not_by_how_they_were_written(images, vae):
    assert encoded(images, "--vae", vae, "--size", "8") == 0
    before = opened_digest(images)
    for path in (images.parent / "out" / "images").iterdir():
        path.unlink()
    assert encoded(images, "--vae", vae, "--size", "8") == 0
    assert opened_digest(images) == before
    replaced(images)
    assert encoded(images, "--vae", vae, "--size", "8") == 0
    assert opened_digest(images) != before


def opened_digest(images):
    return opened(configured(images.parent / "out")).digest


def test_a_log_shows_progress(images, monkeypatch, capsys):
    monkeypatch.setattr("trainer.dit.encoded.SECONDS_BETWEEN_LINES", 0)
    assert encoded(images, "--pixels", "--size", "8") == 0
    assert "encoding: 7 of 12" in capsys.readouterr().err


def test_latents_that_are_not_finite_are_left_out_by_name(images, vae, capsys):
    write_image(images / "ant" / "white.png", value=255)
    assert encoded(images, "--vae", vae, "--size", "8") == 1
    assert "must be finite; got others of 'ant/white.png'" in capsys.readouterr().err
    assert len(read_lines(images.parent / "out")) == 12


# Captions.


def write_metadata(folder, kind="jsonl", rows=None, column="text"):
    names = sorted(x.relative_to(folder).as_posix() for x in folder.rglob("*.png"))
    rows = rows or [{"file_name": x, column: f"A picture, “{x}”"} for x in names]
    with (folder / f"metadata.{kind}").open("w", encoding="utf-8", newline="") as file:
        if kind == "csv":
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_captions_stand_beside_images(images, vae, kind, capsys):
    rows = write_metadata(images, kind)
    assert encoded(images, "--vae", vae, "--size", "8") == 0
    out = images.parent / "out"
    assert [(x.image, x.caption) for x in read_lines(out)] == [tuple(x.values()) for x in rows]
    # They are not encoded: the error names the choice.
    with refused(InputError, "captions that are not encoded", "--model.classes 0"):
        opened(configured(out))
    with refused(InputError, "captions that are not encoded", "--text-encoder", text_dim=3):
        opened(configured(out, *OF_TEXTS.split()))
    data = opened(configured(out, "--model.classes", "0"))
    assert data.train[0].label is None
    # A new caption needs no new latent.
    rows[0]["text"] = "another"
    write_metadata(images, kind, rows)
    loaded = Vae.loaded
    assert encoded(images, "--vae", vae, "--size", "8") == 0
    assert Vae.loaded == loaded
    assert read_lines(out)[0].caption == "another"
    assert "renewed, since the image or its caption" in capsys.readouterr().err


# Captions that a model learns.

WORDS = {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "picture": 4, "red": 5, "blue": 6}
OF_TEXTS = "--model.classes 0 --model.text-dim 3 --data.text-tokens 4"


def write_encoder(folder, **changes):
    """Folder of a T5 of 6 channels without weights, with a tokenizer of words."""
    folder.mkdir(exist_ok=True, parents=True)
    values = {"model_type": "t5", "d_model": 6, "vocab_size": len(WORDS)} | changes
    (folder / "config.json").write_text(json.dumps(values))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder):
    folder.mkdir(exist_ok=True)
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = {"single": "$A </s>", "special_tokens": [("</s>", 1)]}
    built.post_processor = tokenizers.processors.TemplateProcessing(**ends)
    built.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 9} | special
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def vector(token, channels=6):
    """What stands for the output of the encoder for a token: a bfloat16 would round it."""
    return np.float32(token) + np.arange(channels, dtype=np.float32) / 1000


@pytest.fixture
def encoder(tmp_path, monkeypatch):
    """Folder of a text encoder, whose model makes a fixed vector of each token."""

    def load(self):
        self._model, self._device = "loaded", "cpu"

    def encode(self, rows):
        return [np.array([vector(token) for token in row]) for row in rows]

    monkeypatch.setattr(TextEncoder, "_load", load)
    monkeypatch.setattr(TextEncoder, "_encoded", encode)
    return write_encoder(tmp_path / "encoder")


def write_captions(images):
    """A caption of as many words as the number of the image modulo 3, and one more."""
    names = sorted(x.relative_to(images).as_posix() for x in images.rglob("*.png"))
    rows = [{"file_name": x, "text": caption_of(x)} for x in names]
    return write_metadata(images, rows=rows)


def caption_of(name):
    return " ".join(["a", "red", "picture"][: 1 + int(name.split("/")[1][:-4]) % 3])


def in_halves(tokens, channels=6):
    wanted = np.array([vector(token, channels) for token in tokens])
    return wanted.astype(jnp.bfloat16)


def test_captions_become_texts_beside_latents(images, vae, encoder):
    write_captions(images)
    flags = ["--vae", vae, "--size", "16", "--max-ratio", "2", "--text-encoder", encoder]
    assert encoded(images, *flags) == 0
    config = configured(images.parent / "out")
    assert (config.model.classes, config.model.text_dim, config.data.text_tokens) == (0, 6, 4)
    data = opened(config)
    files = sorted(f"{CLASSES[n % 4]}/{n}.png" for n in range(12))
    for file, (example, _) in zip(files, examples(data), strict=True):
        tokens = [WORDS[word] for word in caption_of(file).split()]
        np.testing.assert_array_equal(example.text, in_halves([*tokens, 1]))
        assert (example.caption, example.label) == (caption_of(file), None)
        number = int(file.partition("/")[2][:-4])
        assert (example.latent == np.float32(number / 8)).all()
    some = [example for example, group in examples(data) if group == 1]
    batch = data.collate(some, list(range(len(some))))
    texts = batch.rows.arrays
    assert texts.tokens.shape == (4, 4, 6)
    assert texts.counts.tolist() == [len(example.text) for example in some]
    assert not texts.tokens[0, texts.counts[0] :].any()
    # Without them, and without the digest of their encoder.
    without = "--model.text-dim None --model.classes 0"
    plain = opened(configured(images.parent / "out", *without.split()))
    assert plain.train[0].text is None
    assert plain.digest != data.digest


def test_a_changed_caption_is_encoded_again(images, vae, encoder, capsys):
    rows = write_captions(images)
    flags = ["--vae", vae, "--size", "8", "--text-encoder", encoder]
    assert encoded(images, *flags) == 0
    before = opened_digest(images)
    rows[0]["text"] = "blue"
    write_metadata(images, rows=rows)
    capsys.readouterr()
    assert encoded(images, *flags) == 0
    shown = capsys.readouterr().err
    assert f"renewed, since the image or its caption has changed: {rows[0]['file_name']!r}" in shown
    assert "11 images are as they were" in shown
    data = opened(configured(images.parent / "out"))
    assert data.digest != before
    texts = {
        part.numbers[i]: part[i] for part in (data.train, data.held_out) for i in range(len(part))
    }
    np.testing.assert_array_equal(texts[0].text, in_halves([WORDS["blue"], 1]))
    latent = texts[0].latent
    assert (latent == np.float32(int(rows[0]["file_name"].split("/")[1][:-4]) / 8)).all()
    assert encoded(images, *flags) == 0
    assert "12 images are as they were" in capsys.readouterr().err


def test_captions_that_are_too_long_are_left_out_by_name(images, encoder, capsys):
    rows = write_captions(images)
    rows[2]["text"] = "a picture a picture"
    write_metadata(images, rows=rows)
    flags = ["--pixels", "--size", "8", "--text-encoder", encoder, "--text-tokens", "4"]
    assert encoded(images, *flags) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert f"{rows[2]['file_name']}: A caption must have at most 4 tokens" in shown
    assert "with 5. Shorten it, or use --text-tokens 5." in shown
    assert len(read_lines(images.parent / "out")) == 11
    # What the encoder takes at most is said too.
    with refused(InputError, "with 10. Shorten it: the encoder takes 9."):
        TextEncoder(encoder).encode(["a " * 9])
    assert "at most the 9 of the text encoder" in encoded(images, *flags[:-1], "10", out="other")


def test_texts_that_are_not_finite_are_left_out_by_name(images, encoder, monkeypatch, capsys):
    rows = write_captions(images)
    rows[1]["text"] = "blue"
    write_metadata(images, rows=rows)
    found = TextEncoder._encoded

    def broken(self, rows):
        return [
            x + (np.nan if WORDS["blue"] in row else 0)
            for x, row in zip(found(self, rows), rows, strict=True)
        ]

    monkeypatch.setattr(TextEncoder, "_encoded", broken)
    assert encoded(images, "--pixels", "--size", "8", "--text-encoder", encoder) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert f"The text of an image must be finite; got others of {rows[1]['file_name']!r}" in shown
    lines = read_lines(images.parent / "out")
    assert len(lines) == 11
    # Those of the others are theirs.
    data = opened(configured(images.parent / "out"))
    parts = [
        (part.numbers[i], part[i]) for part in (data.train, data.held_out) for i in range(len(part))
    ]
    for number, example in parts:
        tokens = [WORDS[word] for word in lines[number].caption.split()]
        np.testing.assert_array_equal(example.text, in_halves([*tokens, 1]))


def test_an_empty_text_is_none(encoder):
    texts = TextEncoder(encoder).encode(["", "red", "a blue"])
    assert [x.shape for x in texts] == [(0, 6), (2, 6), (3, 6)]
    np.testing.assert_array_equal(texts[2], [vector(3), vector(6), vector(1)])


def test_the_text_encoder_of_a_pipeline_is_in_its_subfolder(tmp_path, encoder):
    encoder.rename(tmp_path / "text_encoder")
    write_tokenizer(tmp_path / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "text_encoder" / name).unlink()
    assert TextEncoder(tmp_path).sizes == (6, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "got none in"),
        (lambda folder: write_vae(folder), "got one without model_type"),
        (lambda folder: write_encoder(folder, model_type="vit"), "got one of vit in"),
        (lambda folder: write_encoder(folder, model_type="none"), "its tokenizer; got"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "its tokenizer; got"),
    ],
)
def test_folders_that_are_no_text_encoders_are_refused(images, encoder, change, words):
    write_captions(images)
    change(encoder)
    flags = ["--pixels", "--size", "8", "--text-encoder", encoder]
    assert words in " ".join(encoded(images, *flags).split())
    assert not (images.parent / "out").exists()


def test_text_encoders_are_for_captions(images, encoder):
    flags = ["--pixels", "--size", "8"]
    message = encoded(images, *flags, "--text-encoder", encoder)
    assert "--text-encoder is for images with captions" in message
    assert "--text-tokens belongs to --text-encoder" in encoded(images, *flags, "--text-tokens", 3)
    write_captions(images)
    assert encoded(images, *flags) == 0
    message = encoded(images, *flags, "--text-encoder", encoder)
    assert "with text_dim=None and 6 now" in message
    assert encoded(images, *flags, "--text-encoder", encoder, out="other") == 0
    assert "with text_dim=6 and None now" in encoded(images, *flags, out="other")
    write_tokenizer(encoder)
    (encoder / "config.json").write_text((encoder / "config.json").read_text() + " ")
    message = encoded(images, *flags, "--text-encoder", encoder, out="other")
    assert "with text_model=" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model.text-dim 5", "got text_dim=6"),
        ("--data.text-tokens 2", "at least the 4 tokens of the longest caption"),
        ("--model.text-dim None --model.classes 3", "captions in their place"),
    ],
)
def test_settings_of_texts_are_compared_with_the_folder(images, encoder, flags, words):
    write_captions(images)
    assert encoded(images, "--pixels", "--size", "8", "--text-encoder", encoder) == 0
    with refused(InputError, words):
        opened(configured(images.parent / "out", *flags.split()))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model.text-dim 5", "A DiT learns classes or texts"),
        ("--model.text-dim 5 --model.classes 0", "text_dim=5, text_tokens=None"),
        ("--data.text-tokens 5", "text_dim=None, text_tokens=5"),
        ("--model.text-dim 0 --model.classes 0", "model.text_dim must be at least 1"),
    ],
)
def test_settings_of_texts_belong_together(capsys, flags, words):
    arguments = ["dit_1b", *TINY.split(), *flags.split()]
    assert words in usage_error(capsys, read_command_line, arguments)


@pytest.mark.parametrize("damage", ["gone", "infinite", "other"])
def test_damaged_texts_are_named_when_they_are_read(images, encoder, damage):
    write_captions(images)
    assert encoded(images, "--pixels", "--size", "8", "--text-encoder", encoder) == 0
    data = opened(configured(images.parent / "out"))
    (path,) = (images.parent / "out" / "images").iterdir()
    tensors = load_file(path)
    texts = tensors.pop("texts")
    if damage != "gone":
        changed = texts[:, :2] if damage == "other" else texts + np.float32(np.inf)
        tensors["texts"] = np.ascontiguousarray(changed)
    save_file(tensors, path)
    words = {"infinite": "finite texts", "other": "what its lines"}.get(damage, "be a whole")
    with refused(InputError, words, path.name, "encode the images again"):
        data.train[2]


def test_weights_of_an_encoder_need_pytorch(encoder, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch", None)
    with refused(MissingPackageError, "pip install -e '.[video]'"):
        TextEncoder(encoder).encode(["a"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pixels", "latents"])
def test_every_command_from_captions_to_a_sample(images, vae, encoder, kind, capsys):
    write_captions(images)
    flags = ("--pixels",) if kind == "pixels" else ("--vae", vae)
    flags = [*flags, "--size", "16", "--text-encoder", encoder]
    assert encoded(images, *flags) == 0
    run_dir = images.parent / "run"
    flags = ["--steps", "3", "--run-dir", str(run_dir), "--sample.every", "3"]
    losses = train.train(configured(images.parent / "out", *flags, "--sample.images", "2"))
    assert np.isfinite(losses.train).all()
    suffix = "png" if kind == "pixels" else "npz"
    (during,) = (run_dir / "samples").iterdir()
    assert during.name == f"step-3.{suffix}"
    capsys.readouterr()
    # By default, those of what is held out, as during training.
    draw = [str(run_dir), "--samples", "2"]
    sample.sample(draw)
    assert "row: 'a" in capsys.readouterr().err
    if kind == "latents":
        with np.load(run_dir / "samples.npz") as file, np.load(during) as former:
            np.testing.assert_allclose(file["latents"], former["latents"], atol=1e-4)
            assert file["captions"].tolist() == former["captions"].tolist()
    draw = [*draw, "--steps", "2", "--text-encoder", str(encoder), "--prompt", "a blue picture", ""]
    decode = [] if kind == "pixels" else ["--decode", str(vae)]
    sample.sample([*draw, *decode, "--out", str(images.parent / "drawn.png")])
    shown = capsys.readouterr().err
    assert "row: 'a blue picture'" in shown
    assert "row: no text" in shown
    assert "warning" not in shown
    drawn = np.asarray(Image.open(images.parent / "drawn.png"))
    assert drawn.shape[0] == drawn.shape[1]
    # Another encoder.
    (encoder / "config.json").write_text((encoder / "config.json").read_text() + " ")
    sample.sample([*draw, *decode, "--out", str(images.parent / "again.png")])
    assert "has other files than the text encoder" in capsys.readouterr().err
    write_encoder(encoder, d_model=8)
    assert "of 6 channels; got 8" in message_of_sample(*draw)
    assert "of the 0 classes" in message_of_sample(str(run_dir), "--classes", "1")
    (run_dir / KEPT).unlink()
    (images.parent / "out" / "encoded.json").unlink()
    assert "data.path must be" in message_of_sample(str(run_dir))


def test_prompts_are_for_models_of_texts(tmp_path, capsys):
    read = partial(usage_error, capsys, lambda x: sample.read_command_line(x))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save_config(configured_as(ImageConfig()), run_dir / "config.json")
    assert "without --text-encoder" in read([run_dir, "--prompt", "a kite"])
    assert "alone. Add --prompt" in read([run_dir, "--text-encoder", run_dir])
    assert "Leave one out" in read([run_dir, "--prompt", "", "--classes", "1"])
    message = message_of_sample(run_dir, "--prompt", "", "--devices", "1")
    assert "--prompt is for a model that has learnt captions" in message


def test_the_column_of_captions_is_text_or_caption_or_named(images):
    rows = write_metadata(images, column="blip")
    assert find_pictures(images, None).images[0].caption == rows[0]["blip"]
    write_metadata(images, rows=[row | {"other": "x"} for row in rows])
    with refused(InputError, "got the columns ['blip', 'other']", "--text-column NAME"):
        find_pictures(images, None)
    assert find_pictures(images, "other").images[0].caption == "x"
    write_metadata(images, rows=[row | {"caption": "y"} for row in rows])
    assert find_pictures(images, None).images[0].caption == "y"


def test_images_in_the_folder_itself_have_no_classes(tmp_path, vae, capsys):
    for number in range(4):
        write_image(tmp_path / "images" / f"{number}.PNG")
    (tmp_path / "images" / "README").write_text("")
    assert encoded(tmp_path / "images", "--vae", vae, "--size", "8") == 0
    shown = capsys.readouterr().err
    assert "no classes and no captions" in shown
    assert "1 other files are left out: 'README'" in shown
    with refused(InputError, "got images with none in", "--model.classes 0"):
        opened(configured(tmp_path / "out"))


def test_order_of_classes_that_are_numbers_is_warned_of(tmp_path, capsys):
    for name in ("0", "1", "2", "10"):
        write_image(tmp_path / "images" / name / "x.png")
    assert encoded(tmp_path / "images", "--pixels", "--size", "8") == 0
    assert "class '10' has the number 2" in capsys.readouterr().err


# Pixels of every kind of image.


def read(path):
    return np.asarray(open_picture(path, str(path)))


def test_transparent_pixels_lie_on_white(tmp_path):
    pixels = RNG.integers(256, size=(6, 5, 4), dtype=np.uint8)
    pixels[..., 3] = 0
    pixels[2:, :, 3] = 255
    path = tmp_path / "x.png"
    wanted = np.where(pixels[..., 3:] > 0, pixels[..., :3], 255)
    Image.fromarray(pixels).save(path)
    np.testing.assert_array_equal(read(path), wanted)
    Image.fromarray(pixels[..., [0, 3]]).save(path)
    grey = np.where(pixels[..., 3] > 0, pixels[..., 0], 255)
    np.testing.assert_array_equal(read(path), np.stack([grey] * 3, -1))


@pytest.mark.parametrize("transparency", [None, 0])
def test_palettes_and_colours_that_are_transparent(tmp_path, transparency):
    path, options = tmp_path / "x.png", {}
    if transparency is not None:
        options["transparency"] = transparency
    numbers = np.array([[0, 1], [2, 1]], np.uint8)
    image = Image.fromarray(numbers, mode=None).convert("L")
    palette = Image.fromarray(numbers).convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    palette.putdata(numbers.ravel().tolist())
    palette.save(path, **options)
    colours = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90]])
    if transparency == 0:
        colours[0] = 255
    np.testing.assert_array_equal(read(path), colours[numbers])
    image.save(path, **options)
    grey = np.where((numbers == 0) & (transparency == 0), 255, numbers)
    np.testing.assert_array_equal(read(path), np.stack([grey] * 3, -1))


def test_grey_and_16_bits(tmp_path):
    path = tmp_path / "x.png"
    deep = RNG.integers(2**16, size=(5, 4), dtype=np.uint16)
    Image.fromarray(deep).save(path)
    with Image.open(path) as image:
        assert image.mode == "I;16"
    wanted = np.round(deep / 257).astype(np.uint8)
    np.testing.assert_array_equal(read(path), np.stack([wanted] * 3, -1))
    Image.fromarray(deep).save(path, transparency=5)
    with refused(InputError, "grey of 16 bits with transparency", "x.png"):
        read(path)
    for mode in ("1", "L", "CMYK"):
        image = Image.fromarray(wanted).convert(mode)
        image.save(path.with_suffix(".jpg" if mode == "CMYK" else ".png"))
        found = read(path.with_suffix(".jpg" if mode == "CMYK" else ".png"))
        assert found.shape == (5, 4, 3)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_images_stand_upright(tmp_path, suffix):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    path = tmp_path / f"x.{suffix}"
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, 16:] = 255
    Image.fromarray(pixels).save(path, exif=exif)
    # What is on the right is shown below.
    np.testing.assert_allclose(read(path), pixels.transpose(1, 0, 2), atol=40)


def test_animations_and_other_formats_are_refused(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for suffix in ("png", "webp"):
        path = tmp_path / f"x.{suffix}"
        frames[0].save(path, save_all=True, append_images=frames[1:])
        with refused(InputError, "an animation", f"x.{suffix}"):
            read(path)
    frames[0].save(tmp_path / "x.gif")
    (tmp_path / "x.gif").rename(tmp_path / "y.png")
    with refused(InputError, "must be a whole image", "y.png"):
        read(tmp_path / "y.png")
    whole = (tmp_path / "x.webp").read_bytes()
    (tmp_path / "z.webp").write_bytes(whole[: len(whole) // 2])
    with refused(InputError, "must be a whole image", "z.webp"):
        read(tmp_path / "z.webp")


def test_images_of_too_many_pixels_are_refused(tmp_path, monkeypatch):
    write_image(tmp_path / "x.png")
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 63)
    with refused(InputError, "exceeds limit of 63 pixels", "x.png"):
        read(tmp_path / "x.png")


def test_names_that_are_no_text_are_kept(tmp_path, capsys):
    names = [os.fsdecode(x) for x in (b"\xff", b"$(x)", b"a\x1bb")]
    for name in names:
        write_image(tmp_path / "images" / name / f"{name}.png")
    assert encoded(tmp_path / "images", "--pixels", "--size", "8") == 0
    lines = read_lines(tmp_path / "out")
    assert [line.image for line in lines] == sorted(f"{x}/{x}.png" for x in names)
    assert [line.label for line in lines] == [0, 1, 2]
    assert "\x1b" not in capsys.readouterr().err
    data = opened(configured(tmp_path / "out"))
    assert sorted(example.label for example in [*data.train, *data.held_out]) == [0, 1, 2]
    assert encoded(tmp_path / "images", "--pixels", "--size", "8") == 0
    assert "3 images are as they were" in capsys.readouterr().err


def test_sizes_have_at_most_the_area_and_the_ratio():
    assert sizes_of_area(256, 16, 1.0) == ((256, 256),)
    sizes = sizes_of_area(256, 16, 2.0)
    assert sizes[0] == (256, 256)
    assert {(176, 352), (352, 176), (192, 336)} <= set(sizes)
    for height, width in sizes:
        assert height % 16 == width % 16 == 0
        assert 0.85 * 256**2 < height * width <= 256**2
        assert max(height, width) <= 2 * min(height, width)
        assert (width, height) in sizes


# Mistakes.


def at(name):
    return lambda images: write_image(images / name)


def file(name, text=""):
    return lambda images: (images / name).write_text(text)


def without_images(images):
    for path in images.rglob("*.png"):
        path.unlink()


def deeper(images):
    images.rename(images.parent / "train")
    images.mkdir()
    (images.parent / "train").rename(images / "train")


def metadata(change, kind="jsonl"):
    def write(images):
        rows = write_metadata(images)
        change(rows)
        (images / "metadata.jsonl").unlink()
        write_metadata(images, kind, rows)

    return write


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_images, "FOLDER must hold images (.png, "),
        (deeper, "which is deeper. Give another folder, such as"),
        (at("root.png"), "'Zebra/0.png' and 'root.png'"),
        (at("ant/deep/x.png"), "Images must all lie in folders of classes"),
        (lambda images: (images / "empty").mkdir(), "got none in 'empty'"),
        (file("ant/x.gif"), "got 'ant/x.gif'"),
        (file("ant/x.TIFF"), "got 'ant/x.TIFF'"),
        (file("film.mp4"), "not both; got 'Zebra/0.png' and 'film.mp4'"),
        (file("metadata.parquet"), "metadata.jsonl or metadata.csv"),
        (file("ant/metadata.csv"), "of IMAGES itself"),
        (file("metadata.jsonl", '{"text": "x"}\n'), "with file_name and a caption"),
        (file("metadata.csv", "name,text\nx,y\n"), "must have a column file_name; got ['name',"),
        (file("metadata.csv", "file_name,text\na,b,c\n"), "got more in row 1"),
        (metadata(lambda rows: rows[0].update(file_name="gone.png")), "got 'gone.png', which"),
        (metadata(lambda rows: rows.append(rows[0]), "csv"), "again in row 13"),
        (metadata(lambda rows: rows.pop()), "got none of 'été/"),
        (metadata(lambda rows: rows[1].update(text=" ")), "got ' ' for"),
    ],
)
def test_folders_with_mistakes_are_refused_before_anything_is_written(images, vae, change, words):
    change(images)
    loaded = Vae.loaded
    assert words in encoded(images, "--vae", vae, "--size", "8")
    assert Vae.loaded == loaded
    assert not (images.parent / "out").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "got neither --vae nor --pixels"),
        ("--pixels --size 7", "--size must be multiples of 2"),
        ("--vae VAE --size 10", "--size must be multiples of 4"),
        ("--vae VAE --sizes 8x10", "--sizes must be multiples of 4"),
        ("--pixels --sizes 8x8 --size 8", "got --size or --max-ratio too"),
        ("--vae VAE --frames 5", "--frames is for a folder of videos"),
        ("--vae VAE --captions=x", "--captions is for a folder of videos"),
        ("--pixels --model x", "--model is for a folder of videos"),
        ("--pixels --text-column x", "--text-column is for a folder with metadata.jsonl"),
        ("--vae gone", "--vae must be a folder of diffusers"),
        ("--vae PIPELINE", "PIPELINE/vae'."),
        ("--vae WAN", "got one of AutoencoderKLWan"),
        ("--vae SCALE", "scaling_factor=0"),
    ],
)
def test_flags_with_mistakes_are_refused(images, vae, flags, words):
    folder = images.parent
    write_vae(folder / "WAN", _class_name="AutoencoderKLWan")
    write_vae(folder / "SCALE", scaling_factor=0)
    (folder / "PIPELINE").mkdir()
    write_vae(folder / "PIPELINE" / "vae")
    flags = flags.replace("VAE", str(vae)) if "VAE" in flags.split() else flags
    for name in ("WAN", "SCALE", "PIPELINE"):
        flags = flags.replace(f" {name}", f" {folder / name}")
    assert words in encoded(images, *flags.split())
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--vae x --pixels", "got --vae and --pixels. Leave one out."),
        ("--pixels --size 0", "--size must be from 1"),
        ("--pixels --max-ratio 0.5", "--max-ratio must be from 1 to 8"),
        ("--pixels --sizes 8", "--sizes must be HEIGHTxWIDTH; got '8'"),
        ("--pixels --process 2 2", "--process must be a number from 0"),
        ("--pixel", "--pixel"),
    ],
)
def test_flags_that_cannot_be_read(images, capsys, flags, words):
    assert words in usage_error(capsys, encode.main, [images, "out", *flags.split()])


def test_flags_for_images_are_refused_with_videos(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.mp4").touch()
    assert "--vae is for a folder of images" in encoded(tmp_path / "images", "--vae", "x")
    assert "got one of videos" in encoded(tmp_path / "images", "--max_ratio=2")
    assert "without --model" in encoded(tmp_path / "images")


@pytest.mark.parametrize(
    ("prepare", "flags", "words"),
    [
        (lambda out: out.write_text(""), "", "OUT must be a folder"),
        (lambda out: (out / "x").mkdir(parents=True), "", "program has written; got"),
        (lambda out: encode_into(out, "--size", "4"), "", "sizes=['4x4'] and ['8x8'] now"),
        (lambda out: encode_videos_into(out), "", "which holds videos"),
    ],
)
def test_out_that_exists_must_be_of_the_same(images, prepare, flags, words):
    prepare(images.parent / "out")
    assert words in encoded(images, "--pixels", "--size", "8", *flags)


def encode_into(out, *flags):
    assert encoded(out.parent / "images", "--pixels", *flags) == 0


def encode_videos_into(out):
    out.mkdir()
    (out / "encoded.json").write_text('{"channels": 16, "text_dim": 6}')


def test_out_does_not_lie_in_images_nor_hold_others(images, tmp_path):
    encode_into(images.parent / "out", "--size", "8")
    assert "OUT must not lie in IMAGES" in encoded(
        images, "--pixels", "--size", "8", out="images/out"
    )
    (images / "more").mkdir()
    write_image(images / "more" / "x.png")
    assert "classes=['Zebra'" in encoded(images, "--pixels", "--size", "8")
    # A Wan refuses images, and so does the encoder of videos.
    with refused(InputError, "which holds images", "train.py dit_1b"):
        read_command_line(["dit_video", "--data.path", str(images.parent / "out")])
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").touch()
    (tmp_path / "videos" / "a.txt").write_text("x")
    model = tmp_path / "model"
    for part, values in {"": {"_class_name": "WanPipeline"}, "text_encoder": {}, "vae": {}}.items():
        (model / part).mkdir(exist_ok=True)
        name = "config.json" if part else "model_index.json"
        (model / part / name).write_text(json.dumps(values))
    assert "which holds images" in encoded(tmp_path / "videos", "--model", model)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model.classes 3", "model.classes must be at least"),
        ("--model.channels 5", "model.channels must be 3"),
        ("--data.no-pixels", "data.pixels must be True"),
        ("--size 1 16 16", "got 12 of 1x8x8"),
    ],
)
def test_settings_are_compared_with_the_folder(images, flags, words):
    encode_into(images.parent / "out", "--size", "8")
    with refused(InputError, words):
        opened(configured(images.parent / "out", *flags.split()))


def test_folder_that_is_none_of_images_is_refused(tmp_path):
    (tmp_path / "encoded.json").write_text('{"channels": 2}')
    with refused(InputError, "data.path must be", "one of videos, for a Wan"):
        opened(configured_as(ImageConfig(path=tmp_path)))
    (tmp_path / "encoded.json").unlink()
    with refused(InputError, "no folder of this kind"):
        opened(configured_as(ImageConfig(path=tmp_path)))


def configured_as(data):
    from dataclasses import replace

    return replace(dit_1b(), data=data)


@pytest.mark.parametrize("damage", ["gone", "cut", "infinite", "other"])
def test_damaged_file_is_named_when_it_is_read(images, vae, damage):
    assert encoded(images, "--vae", vae, "--size", "8") == 0
    data = opened(configured(images.parent / "out"))
    (path,) = (images.parent / "out" / "images").iterdir()
    tensors = load_file(path)["images"]
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        changed = tensors[:, :2] if damage == "other" else tensors + np.float32(np.inf)
        save_file({"images": np.ascontiguousarray(changed)}, path)
    words = {"infinite": "finite latents", "other": "what its lines"}.get(damage, "be a whole")
    with refused(InputError, words, path.name, "encode the images again"):
        data.train[2]


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path, monkeypatch):
    folder = write_vae(tmp_path / "vae")
    monkeypatch.setitem(sys.modules, "torch", None)
    with refused(MissingPackageError, "pip install -e '.[video]'"):
        ImageVae(folder, option="--vae")
    write_image(tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with refused(MissingPackageError, "pip install -e '.[images]'"):
        read(tmp_path / "x.png")


def test_statistics_of_a_vae_are_those_of_its_config(tmp_path):
    found = vae_sizes(write_vae(tmp_path / "vae", scaling_factor=0.5, shift_factor=0.1), "--vae")
    assert found == (4, 2, (0.1,) * 4, (2.0,) * 4)
    plain = vae_sizes(write_vae(tmp_path / "vae"), "--vae")
    assert plain.deviation == (1 / 0.18215,) * 4
    own = dict(latents_mean=[1, 2], latents_std=[3, 4], scaling_factor=2, latent_channels=2)
    found = vae_sizes(write_vae(tmp_path / "vae", **own), "--vae")
    assert found == (2, 2, (1, 2), (1.5, 2))

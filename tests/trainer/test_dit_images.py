"""Images and latents: what is read, what is held out; an error for all that can be wrong."""

import json
import re
import shutil
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from refusals import refused
from startrail_jax.errors import InputError
from trainer.dit import image_folder, images
from trainer.dit.config import ImageConfig
from trainer.dit.examples import Wanted
from trainer.dit.pixels import BadImageError, check_pixels, read_pixels
from trainer.errors import MissingPackageError
from trainer.processes import Peers

pytestmark = pytest.mark.quick

HEIGHT, WIDTH = 5, 7
SIZES = Wanted(size=(1, HEIGHT, WIDTH), channels=3, classes=0, caption_length=0)
LATENTS = {"size": (2, 3, 5), "channels": 4}
RNG = np.random.default_rng(0)


def open_images(path=None, *, held_out=0.25, peers=None, config=None, **wanted):
    sizes = {"size": (1, HEIGHT, WIDTH), "channels": 3, "classes": 0, "caption_length": 0}
    config = ImageConfig(path=path, held_out=held_out, **config or {})
    return images.open_images(config, **sizes | wanted, peers=peers)


def open_digits(**wanted):
    return open_images(**{"size": (1, 8, 8), "channels": 1, "classes": 10} | wanted)


def examples(opened):
    """All examples in their order."""
    parts = [(part.numbers[i], part[i]) for part in (opened.train, opened.held_out)
             for i in range(len(part))]  # fmt: skip
    return [example for _, example in sorted(parts, key=lambda pair: pair[0])]


def make_pixels(*, mode="RGB", height=HEIGHT, width=WIDTH):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return RNG.integers(256, size=shape, dtype=np.uint8)


def write_image(path, pixels=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(make_pixels() if pixels is None else pixels).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path):
    """Three classes of images, four in all, of several formats."""
    for name in ["cat/1.png", "cat/2.bmp", "ant/deep/3.PNG", "dog/4.png", ".hidden/5.png"]:
        write_image(tmp_path / "images" / name)
    return tmp_path / "images"


def write_npz(path, count=6, **arrays):
    latents = RNG.standard_normal((count, *LATENTS["size"], LATENTS["channels"]))
    np.savez(path, **{"latents": latents.astype(np.float16)} | arrays)
    return path


@pytest.mark.slow
def test_content_of_examples_is_known_whatever_their_names(folder, tmp_path):
    def differing(first, second):
        pairs = zip(first.fingerprints, second.fingerprints, strict=True)
        return [i for i, (x, y) in enumerate(pairs) if x != y]

    before = open_images(folder)
    assert len(set(before.fingerprints)) == 4
    assert before.fingerprints == open_images(folder).fingerprints
    write_image(folder / "cat/1.png")
    assert differing(before, open_images(folder)) == [1]

    latents = RNG.standard_normal((100, *LATENTS["size"], LATENTS["channels"]), np.float32)
    path = write_npz(tmp_path / "latents.npz", latents=latents)
    before = open_images(path, **LATENTS)
    assert len(before.fingerprints) == images.COMPARED_EXAMPLES
    write_npz(path, latents=latents)
    assert not differing(before, open_images(path, **LATENTS))
    latents[-1] += 1
    write_npz(path, latents=latents)
    assert differing(before, open_images(path, **LATENTS)) == [63]
    assert len(open_digits().fingerprints) == 64


# What is read.


@pytest.mark.slow
def test_digits_are_images_with_labels_and_captions():
    opened = open_digits(caption_length=5)
    found = examples(opened)
    assert len(found) == 1797
    # Imported here, as that takes seconds, which not every process of the tests need spend.
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.testing.assert_array_equal([x.label for x in found], digits.target)
    latents = np.stack([x.latent for x in found])
    assert (latents.min(), latents.max(), latents.dtype) == (-1, 1, np.float32)
    np.testing.assert_array_equal((latents[:, 0, :, :, 0] + 1) * 8, digits.images)
    assert found[0].caption == b"zero"


def test_what_the_model_does_not_take_is_not_read():
    opened = open_digits(classes=0)
    assert opened.train[0].label is None
    assert opened.train[0].caption is None


def test_held_out_is_a_share_that_stays_the_same():
    opened, again = open_digits(held_out=0.1), open_digits(held_out=0.1)
    assert (len(opened.train), len(opened.held_out)) == (1617, 180)
    assert set(opened.train.numbers) | set(opened.held_out.numbers) == set(range(1797))
    np.testing.assert_array_equal(opened.held_out.numbers, again.held_out.numbers)
    # Not a piece of the data: those may be in order.
    assert np.ptp(opened.held_out.numbers) > 1700
    assert opened.description == (
        "handwritten digits of scikit-learn: 1,617 examples to train on, 180 held out"
    )


@pytest.mark.parametrize(("held_out", "count"), [(0.01, 1), (0.99, 3)])
def test_there_is_something_to_train_on_and_something_held_out(folder, held_out, count):
    opened = open_images(folder, held_out=held_out)
    assert (len(opened.train), len(opened.held_out)) == (4 - count, count)
    with pytest.raises(IndexError):
        opened.held_out[count]


def test_folders_are_classes_in_their_order(folder):
    opened = open_images(folder, classes=3)
    assert [x.label for x in examples(opened)] == [0, 1, 1, 2]


def test_images_without_classes_may_lie_anywhere(folder):
    write_image(folder / "0.png")
    (folder / "metadata.jsonl").write_text("{}")
    (folder / "README").write_text("")
    (folder / "0.txt").write_text("no caption is wanted")
    opened = open_images(folder)
    assert len(examples(opened)) == 5
    assert opened.description.endswith("2 other files left out (.jsonl, README)")


@pytest.mark.parametrize("suffix", ["png", "bmp", "jpg", "jpeg", "webp"])
@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("L", 3)])
def test_pixels_go_from_minus_1_to_1(tmp_path, suffix, mode, channels):
    # Of one colour: some formats do not keep more.
    pixels = make_pixels(mode=mode)
    pixels[...] = pixels[0, 0]
    for index in range(2):
        write_image(tmp_path / f"{index}.{suffix}", pixels)
    latent = open_images(tmp_path, channels=channels).train[0].latent
    assert (latent.shape, latent.dtype) == ((1, HEIGHT, WIDTH, channels), np.float32)
    found = ((latent[0] + 1) * 127.5).reshape(HEIGHT, WIDTH, channels)
    expected = pixels if mode == "RGB" else pixels[:, :, None]
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), atol=4)


def test_images_of_other_modes_are_converted_and_turned_upright(tmp_path):
    pixels = make_pixels(height=WIDTH, width=HEIGHT)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    write_image(tmp_path / "0.png", pixels, exif=exif)
    palette = Image.fromarray(make_pixels()).quantize(16)
    palette.save(tmp_path / "1.png", transparency=bytes(range(16)))
    Image.fromarray(make_pixels()).convert("RGBA").save(tmp_path / "2.png")
    turned, *others = (x.latent[0] for x in examples(open_images(tmp_path)))
    np.testing.assert_allclose((turned + 1) * 127.5, np.rot90(pixels, -1), atol=1e-4)
    assert {x.shape for x in others} == {(HEIGHT, WIDTH, 3)}


def test_captions_lie_beside_their_images(folder):
    for number, path in enumerate(sorted(folder.glob("[acd]*/**/*.*"))):
        path.with_suffix(".txt").write_text(f"größe {number}\n")
    opened = open_images(folder, caption_length=10)
    captions = [x.caption for x in examples(opened)]
    assert captions == [f"größe {number}".encode() for number in range(4)]
    place = str(folder / "ant" / "deep" / "3.txt")
    end = f"; the longest caption has 9 of 10 bytes, in {place!r}"
    assert opened.description.endswith(end)


def test_npz_holds_latents_with_labels_and_captions(tmp_path):
    latents = RNG.standard_normal((6, 2, 3, 5, 4))
    labels, captions = np.array([2, 0, 1, 2, 0, 0]), np.array(["a", "bc", "", "é", "e", "f"])
    path = write_npz(tmp_path / "x.npz", latents=latents, labels=labels, captions=captions)
    opened = open_images(path, **LATENTS, classes=3, caption_length=2)
    found = examples(opened)
    np.testing.assert_array_equal([x.latent for x in found], latents.astype(np.float32))
    assert found[0].latent.dtype == np.float32
    assert [x.label for x in found] == labels.tolist()
    assert [x.caption for x in found] == [text.encode() for text in captions]


def test_npz_of_images_may_leave_out_the_frame(tmp_path):
    latents = RNG.standard_normal((2, 3, 5, 4))
    path = write_npz(tmp_path / "x.npz", latents=latents)
    found = examples(open_images(path, size=(1, 3, 5), channels=4))
    np.testing.assert_array_equal([x.latent[0] for x in found], latents.astype(np.float32))


# What is wrong.


@pytest.mark.parametrize("package", ["PIL", "sklearn.datasets"])
def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, folder, package):
    monkeypatch.setitem(sys.modules, package, None)
    with refused(MissingPackageError, "Run: pip install"):
        open_images(folder) if package == "PIL" else open_digits()


@pytest.mark.parametrize("wanted", [{"size": (1, 8, 16)}, {"channels": 3}, {"classes": 7}], ids=str)
def test_digits_are_of_one_size(wanted):
    ((name, value),) = wanted.items()
    with pytest.raises(ValueError, match=f"digits.* need size=.*got.*{name}=") as error:
        open_digits(**wanted)
    assert f"{name}={value}" in str(error.value)


def test_data_that_are_missing_or_no_images_are_refused(tmp_path):
    with refused(InputError, "data.path must"):
        open_images(tmp_path / "absent")
    with refused(InputError, "A folder of images must"):
        open_images(tmp_path)
    (tmp_path / "a.gif").write_bytes(b"")
    with refused(InputError, "A folder of images must"):
        open_images(tmp_path)


def test_one_example_is_too_few(tmp_path):
    write_image(tmp_path / "a.png")
    with refused(InputError, "Data must"):
        open_images(tmp_path)


@pytest.mark.parametrize("wanted", [{"size": (2, HEIGHT, WIDTH)}, {"channels": 4}], ids=str)
def test_folder_of_images_holds_no_videos_and_no_latents(folder, wanted):
    with refused(InputError, "A folder of images needs"):
        open_images(folder, **wanted)


def test_classes_must_be_the_folders(folder):
    match = r"model\.classes must be the number of folders.*classes=2 and 3.*--model\.classes 3"
    with pytest.raises(ValueError, match=match):
        open_images(folder, classes=2)
    write_image(folder / "loose.png")
    match = r"Each class must have a folder of its own.*1 images beside.*'loose\.png'"
    with pytest.raises(ValueError, match=match):
        open_images(folder, classes=3)


def test_image_of_another_size_is_named_when_data_are_opened(folder):
    write_image(folder / "dog/odd.png", make_pixels(width=11))
    with refused(InputError, "height=5", "width=7", "width=11"):
        open_images(folder)


def test_image_of_16_bits_is_refused(folder):
    write_image(folder / "dog/deep.png", np.zeros((HEIGHT, WIDTH), np.uint16))
    with refused(InputError, "At most data.max_bad=0 examples may be bad"):
        open_images(folder)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n"], ids=str)
def test_file_that_is_no_image_is_named_when_data_are_opened(folder, content):
    (folder / "dog/bad.png").write_bytes(content)
    with refused(InputError, "bad.png"):
        open_images(folder)


def test_image_that_moves_is_refused(folder):
    frames = [Image.new("L", (WIDTH, HEIGHT), shade) for shade in (0, 255)]
    frames[0].save(folder / "moves.webp", save_all=True, append_images=frames[1:], lossless=True)
    with refused(InputError, "At most data.max_bad=0 examples may be bad"):
        open_images(folder)


@pytest.fixture
def with_bad(folder):
    """The folder and three images that are bad, each in another way; one only in its pixels."""
    frames = [Image.new("L", (WIDTH, HEIGHT), shade) for shade in (0, 255)]
    moves = folder / "ant/moves.webp"
    frames[0].save(moves, save_all=True, append_images=frames[1:], lossless=True)
    (folder / "dog/empty.png").write_bytes(b"")
    cut = write_image(folder / "cat/cut.png")
    cut.write_bytes(cut.read_bytes()[:-40])
    return folder


def test_bad_images_are_all_named_with_the_flag_that_leaves_them_out(with_bad):
    with refused(InputError, "At most data.max_bad=0 examples may be bad") as error:
        open_images(with_bad)
    lines = str(error.value).splitlines()
    assert lines[0] == (
        f"At most data.max_bad=0 examples may be bad; got 2 of 7 in {str(with_bad)!r}:"
    )
    assert re.match(r"  Images must not be animated; got 2 frames in '.*moves\.webp'$", lines[1])
    assert re.match(r"  '.*empty\.png' must be a whole image; got Unidentified", lines[2])
    assert "--data.max-bad 2: the example after a bad one" in lines[3]
    assert "It checks all pixels first, and may find more" in lines[3]
    # Where bad images are expected, their pixels are checked as well.
    with refused(InputError, "max_bad=2"):
        open_images(with_bad, config={"max_bad": 2})


def test_error_names_some_of_many_bad_images(folder):
    for number in range(12):
        (folder / f"dog/{number}.png").write_bytes(b"")
    with refused(InputError, "At most data.max_bad=0 examples may be bad") as error:
        open_images(folder)
    assert str(error.value).count("must be a whole image") == 10


def test_bad_images_are_replaced_by_the_next_and_named_once(with_bad):
    before = open_images(folder_without_damage(with_bad), held_out=0.3)
    opened = open_images(with_bad, held_out=0.3, config={"max_bad": 3})
    bad = ("ant/moves.webp", "cat/cut.png", "dog/empty.png")
    keys = ["ant/deep/3.PNG", "ant/moves.webp", "cat/1.png", "cat/2.bmp", "cat/cut.png",
            "dog/4.png", "dog/empty.png"]  # fmt: skip
    for part, old in ((opened.train, before.train), (opened.held_out, before.held_out)):
        # As many examples in the same order, so that a run goes on where it was.
        assert len(part) == len(old)
        good = [number for number in old.numbers if keys[number] not in bad]
        for number, was in zip(part.numbers, old.numbers, strict=True):
            assert number == next((x for x in good if x >= was), good[0])
    for name in bad:
        assert opened.description.count(name) == 1
    lines = opened.description.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("bad, and replaced by the example after it: ") for line in lines[1:])
    labels = [example.label for example in examples(open_images(
        with_bad, held_out=0.3, classes=3, config={"max_bad": 3}))]  # fmt: skip
    assert len(labels) == len(keys)
    assert all(len(example.latent) for example in examples(opened))


def folder_without_damage(folder):
    """A copy in which every file is the same whole image."""
    copy = folder.parent / "whole"
    for path in folder.rglob("*.*"):
        if path.is_file():
            write_image(copy / path.relative_to(folder))
    return copy


def test_part_of_bad_images_alone_is_refused(folder):
    for path in folder.rglob("*.*"):
        if path.is_file():
            path.write_bytes(b"")
    with refused(InputError, "Of the examples to train on and"):
        open_images(folder, config={"max_bad": 9})


def test_long_check_says_how_far_it_is(folder, monkeypatch, capsys):
    monkeypatch.setattr(image_folder, "SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(image_folder, "FILES_AT_A_TIME", 3)
    open_images(folder, config={"max_bad": 1})
    assert capsys.readouterr().err == "0 of 4 images are checked\n3 of 4 images are checked\n"


def in_processes(count, work):
    """What `work` returns for each of some processes, which are threads here."""
    given, barrier = {}, threading.Barrier(count, timeout=300)

    def run(index):
        def gather(value):
            given[index] = json.loads(json.dumps(value))
            barrier.wait()
            return [given[other] for other in range(count)]

        return work(Peers(index=index, count=count, gather=gather))

    with ThreadPoolExecutor(count) as threads:
        return [run.result() for run in [threads.submit(run, index) for index in range(count)]]


def test_processes_share_the_check_and_agree(with_bad, monkeypatch):
    """All leave out what any has found; each decodes its share of the files."""
    decoded = []
    check_pixels = image_folder.check_pixels

    def count(path, wanted):
        decoded.append(path)
        check_pixels(path, wanted)

    monkeypatch.setattr(image_folder, "check_pixels", count)
    alone = open_images(with_bad, config={"max_bad": 3})
    assert len(decoded) == 7
    decoded.clear()
    found = in_processes(3, lambda peers: open_images(with_bad, config={"max_bad": 3}, peers=peers))
    assert sorted(decoded) == sorted(set(decoded))
    assert len(decoded) == 7
    for opened in found:
        assert opened.description == alone.description
        np.testing.assert_array_equal(opened.train.numbers, alone.train.numbers)
        np.testing.assert_array_equal(opened.held_out.numbers, alone.held_out.numbers)


def test_processes_with_other_data_are_told(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "dog/4.png").rename(other / "dog/5.png")
    with refused(InputError, "All processes must"):
        in_processes(2, lambda peers: open_images((folder, other)[peers.index], peers=peers))


# Stripes of red, green and blue, 9 x 27.
STRIPES = np.repeat(np.repeat(np.eye(3, dtype=np.uint8)[None] * 255, 9, axis=1), 9, axis=0)


@pytest.mark.parametrize("resize", ["crop", "pad", "stretch"])
def test_images_of_other_sizes_are_resized_on_request(tmp_path, resize):
    same = make_pixels(height=9, width=9)
    write_image(tmp_path / "0.png", same)
    write_image(tmp_path / "1.png", STRIPES)
    # A palette, whose numbers cannot be mixed, and lies on its side.
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    palette = Image.fromarray(np.rot90(STRIPES)).quantize(3)
    palette.save(tmp_path / "2.png", exif=exif)
    opened = open_images(tmp_path, size=(1, 9, 9), config={"resize": resize})
    kept, stripes, turned = ((x.latent[0] + 1) / 2 for x in examples(opened))
    np.testing.assert_allclose(kept * 255, same, atol=1e-4)
    np.testing.assert_allclose(turned, stripes, atol=1 / 255)
    red, green, blue, black = (*np.eye(3), np.zeros(3))
    middle = {
        "crop": [green] * 9,
        "pad": [red] * 3 + [green] * 3 + [blue] * 3,
        "stretch": [red] * 3 + [green] * 3 + [blue] * 3,
    }[resize]
    # Colours mix where two stripes meet.
    pure = slice(None) if resize == "crop" else [0, 1, 4, 7, 8]
    np.testing.assert_allclose(stripes[4][pure], np.array(middle)[pure], atol=0.05)
    top = [black] * 9 if resize == "pad" else middle
    np.testing.assert_allclose(stripes[0][pure], np.array(top)[pure], atol=0.05)


def test_link_to_a_folder_that_is_found_already_is_refused(folder):
    (folder / "loop").symlink_to(folder)
    with refused(InputError, "A folder of data must"):
        open_images(folder)


def test_damaged_pixels_are_named_when_they_are_read(folder):
    for path in folder.glob("*/*.png"):
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) // 2])
    match = r"\.png' must be a whole image; got .*use --data\.max-bad 1: the example after"
    with pytest.raises(ValueError, match=match):
        examples(open_images(folder))


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
def test_no_damage_escapes_the_error_for_it(tmp_path, suffix):
    """Pillow raises errors of many types for damaged files. A check finds what reading finds."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8)
    whole = write_image(tmp_path / f"0.{suffix}", pixels).read_bytes()
    bad = 0
    for number in range(1, 150):
        raw = bytearray(whole[: rng.integers(len(whole))] if number % 3 == 0 else whole)
        for place in rng.integers(min(len(raw), 120), size=3) if raw else ():
            raw[place] = rng.integers(256)
        path = tmp_path / f"{number}.{suffix}"
        path.write_bytes(raw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors = [error_of(function, path) for function in (check_pixels, read_pixels)]
        assert repr(errors[0]) == repr(errors[1])
        bad += isinstance(errors[0], BadImageError)
        if errors[0] and not isinstance(errors[0], BadImageError):
            assert str(errors[0]).startswith("All images must be of the size")
    assert bad > 50


def error_of(function, path):
    try:
        function(path, SIZES)
    except InputError as error:
        return error


def test_file_that_changes_after_it_was_checked_is_named(folder):
    opened = open_images(folder)
    write_image(folder / "dog/4.png", make_pixels(width=11))
    with refused(InputError, "height=5", "width=11"):
        examples(opened)
    (folder / "dog/4.png").unlink()
    # It may be back soon, so it is not bad.
    with refused(InputError, "4.png"):
        examples(opened)


def test_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with refused(InputError, "must be readable; got PermissionError: Permission denied"):
        open_images(folder)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "4.txt"),
        (b"gr\xf6", "4.txt"),
        (b"123456", "model.caption_length"),
    ],
)
def test_wrong_caption_of_a_file_is_named(folder, content, named):
    for path in folder.glob("[acd]*/**/[123].*"):
        path.with_suffix(".txt").write_bytes(b"right")
    if content is not None:
        (folder / "dog/4.txt").write_bytes(content)
    with refused(InputError, named):
        open_images(folder, caption_length=5)


def test_the_longest_of_the_captions_that_do_not_fit_is_named(folder):
    for path, length in zip(sorted(folder.glob("[acd]*/**/*.*")), (6, 8, 7, 3), strict=True):
        path.with_suffix(".txt").write_text("x" * length)
    with refused(InputError, "caption_length=5"):
        open_images(folder, caption_length=5)


def test_caption_of_digits_must_fit():
    with refused(InputError, "caption_length=4"):
        open_digits(caption_length=4)


def one_infinite():
    latents = np.zeros((6, 2, 3, 5, 4))
    latents[3, 1, 2, 4, 3] = 1e60
    return latents


@pytest.mark.parametrize(
    ("latents", "named"),
    [
        (np.zeros((6, 3, 5, 4)), "must have the shape [number, 2, 3, 5, 4];"),
        (np.zeros((6, 2, 3, 4, 5)), "shape (6, 2, 3, 4, 5) of"),
        (np.zeros((6, 2, 3, 5, 4), int), "`latents` must be floating; got"),
        (one_infinite(), "example 3"),
        (np.zeros((0, 2, 3, 5, 4)), "2 examples"),
        (np.array([None] * 6), "*.npz file of arrays without objects;"),
    ],
    ids=["rank", "shape", "integers", "infinite", "empty", "objects"],
)
def test_npz_with_wrong_latents_is_refused(tmp_path, latents, named):
    path = write_npz(tmp_path / "x.npz", latents=latents)
    with refused(InputError, named):
        open_images(path, **LATENTS)


def test_latents_that_are_not_finite_are_left_out_on_request(tmp_path):
    path = write_npz(tmp_path / "x.npz", latents=one_infinite())
    opened = open_images(path, **LATENTS, config={"max_bad": 1})
    assert 3 not in {*opened.train.numbers, *opened.held_out.numbers}
    assert (len(opened.train), len(opened.held_out)) == (4, 2)
    assert "bad, and replaced by the example after it: `latents` must" in opened.description
    assert all(np.isfinite(example.latent).all() for example in examples(opened))


def test_latents_of_a_large_scale_are_warned_of_with_the_factor_to_use(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "CHECKED_VALUES", 2 * 120)  # Two examples at a time.
    latents = 100 * RNG.standard_normal((7, 2, 3, 5, 4))
    latents[2, 0, 0, 0, 0] = np.nan
    rms = np.sqrt(np.mean(np.delete(latents, 2, axis=0) ** 2))
    path = write_npz(tmp_path / "x.npz", latents=latents)
    opened = open_images(path, **LATENTS, config={"max_bad": 1})
    assert opened.description.count("warning:") == 1
    warning = opened.description.splitlines()[-1]
    found = re.match(r"warning: the latents have a root mean square of (\S+),.*", warning)
    factor = re.search(r"Use --data\.latent-scale (\S+),", warning)
    assert found is not None
    assert factor is not None
    assert float(found[1]) == pytest.approx(rms, rel=0.01)
    assert float(factor[1]) == pytest.approx(1 / rms, rel=0.01)
    # The factor is applied, and then there is nothing to warn of.
    scaled = open_images(path, **LATENTS, config={"max_bad": 1, "latent_scale": float(factor[1])})
    assert "warning" not in scaled.description
    first, second = opened.train[0].latent, scaled.train[0].latent
    assert second.dtype == np.float32
    np.testing.assert_array_equal(second, first * np.float32(float(factor[1])))
    # A factor that is wrong itself is corrected.
    opened = open_images(path, **LATENTS, config={"max_bad": 1, "latent_scale": 1e-6})
    corrected = re.search(r"--data\.latent-scale (\S+),", opened.description)
    assert corrected is not None
    assert float(corrected[1]) == pytest.approx(1 / rms, rel=0.01)


@pytest.mark.parametrize(("scale", "warns"), [(0.0, 0), (0.1, 1), (0.5, 0), (3.0, 0), (5.5, 1)])
def test_only_latents_of_an_unusual_scale_are_warned_of(tmp_path, scale, warns):
    path = write_npz(tmp_path / "x.npz", latents=np.full((6, 2, 3, 5, 4), scale))
    assert open_images(path, **LATENTS).description.count("warning") == warns


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (np.zeros(5, int), "be 6"),
        (np.zeros(6), "be 6"),
        (np.array([0, 1, 3, 0, 0, 0]), "--model.classes"),
        (np.array([0, -1, 1, 0, 0, 0]), "example 1"),
    ],
    ids=["few", "floating", "high", "negative"],
)
def test_npz_with_wrong_labels_is_refused(tmp_path, labels, named):
    path = write_npz(tmp_path / "x.npz", labels=labels)
    with refused(InputError, named):
        open_images(path, **LATENTS, classes=3)


def test_npz_without_an_array_that_the_model_needs_is_refused(tmp_path):
    path = write_npz(tmp_path / "x.npz")
    with refused(InputError, "or use --model.classes 0 for no labels"):
        open_images(path, **LATENTS, classes=3)


@pytest.mark.parametrize(
    ("captions", "named"),
    [
        (np.array(["a"] * 5), "be 6"),
        (np.zeros(6), "be 6"),
        (np.array(["a", "ééé", *"cdef"]), "caption_length=5"),
        (np.array(["a", "\ud800", *"cdef"]), "'\\ud800'"),
    ],
    ids=["few", "numbers", "long", "surrogate"],
)
def test_npz_with_wrong_captions_is_refused(tmp_path, captions, named):
    path = write_npz(tmp_path / "x.npz", captions=captions)
    with refused(InputError, named):
        open_images(path, **LATENTS, caption_length=5)


def damaged_npz(path):
    raw = bytearray(write_npz(path).read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    return bytes(raw)


@pytest.mark.parametrize(
    "content",
    [
        lambda path: b"",
        lambda path: b"no such file",
        lambda path: write_npz(path).read_bytes()[:-100],
        damaged_npz,
        lambda path: (
            np.save(path.with_suffix(".npy"), np.zeros(3))
            or Path(path.with_suffix(".npy")).read_bytes()
        ),
    ],
    ids=["empty", "text", "truncated", "damaged", "npy"],
)
def test_file_that_is_no_npz_is_refused(tmp_path, content):
    path = tmp_path / "x.npz"
    path.write_bytes(content(path))
    with refused(InputError, "data.path must"):
        open_images(path, **LATENTS)

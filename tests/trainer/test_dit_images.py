"""Images and latents: what is read, what is held out; an error for all that can be wrong."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import ExifTags, Image

from configs.dit import dit_digits
from refusals import refused
from startrail_jax.errors import InputError
from train import read_command_line
from trainer.dit import images
from trainer.dit.config import DiTConfig, ImageConfig
from trainer.errors import MissingPackageError

pytestmark = pytest.mark.quick

HEIGHT, WIDTH = 5, 7
LATENTS = {"size": (2, 3, 5), "channels": 4}
RNG = np.random.default_rng(0)


def make_config(path=None, *, size=(1, HEIGHT, WIDTH), classes=0, channels=3, **options):
    model = DiTConfig(
        channels=channels, classes=classes, patch=(1, 1, 1), width=8, layers=1, heads=1, mlp_width=8
    )
    data = ImageConfig(path=path, **{"validation_fraction": 0.25} | options)
    return replace(dit_digits(), model=model, data=data, size=size)


def open_images(*args, **options):
    return images.open_images(make_config(*args, **options), list)


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


@pytest.mark.parametrize(("held_out", "count"), [(0.01, 1), (0.99, 3)])
def test_there_is_something_to_train_on_and_something_held_out(folder, held_out, count):
    opened = open_images(folder, validation_fraction=held_out)
    assert (len(opened.train), len(opened.held_out)) == (4 - count, count)
    with pytest.raises(IndexError):
        opened.held_out[count]


def test_folders_are_classes_in_their_order(folder):
    opened = open_images(folder, classes=3)
    assert [x.label for x in examples(opened)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("names", "labels", "said"),
    [
        (["0", "10", "2"], [0, 2, 1], "labels: 0 0, 1 2, 2 10"),
        (["02", "10", "a"], [0, 1, 2], "labels: 0 02, 1 10, 2 a"),
        ([f"{n:02}" for n in range(25)], [*range(25)], "19 19, and 5 more"),
    ],
)
def test_folders_that_are_numbers_are_classes_in_order_of_these(tmp_path, names, labels, said):
    for name in names:
        write_image(tmp_path / name / "1.png")
    opened = open_images(tmp_path, classes=len(names))
    assert [x.label for x in examples(opened)] == labels
    assert said in opened.description


@pytest.mark.parametrize(
    ("flags", "model", "size"),
    [
        ("", dict(classes=3, channels=3), (1, HEIGHT, WIDTH)),
        ("--model.channels 1 --size 1 6 4", dict(classes=3, channels=1), (1, 6, 4)),
        ("--model.classes 0", dict(classes=0, channels=3), (1, HEIGHT, WIDTH)),
        ("--model.classes 7", dict(classes=7, channels=3), (1, HEIGHT, WIDTH)),
    ],
)
def test_classes_channels_and_size_follow_the_images_unless_flags_give_them(
    folder, flags, model, size
):
    flags = f"dit_digits --data.path {folder} --model.patch 1 1 1 {flags}".split()
    config = read_command_line(flags).settings
    assert {name: getattr(config.model, name) for name in model} == model
    assert config.size == size
    assert config.data.class_names == (("ant", "cat", "dog") if model["classes"] == 3 else ())


def test_grey_images_in_one_folder_have_one_channel_and_no_class(tmp_path):
    for number in range(3):
        write_image(tmp_path / f"{number}.png", make_pixels()[..., 0])
    config = read_command_line(
        ["dit_digits", "--data.path", str(tmp_path), "--model.patch", "1", "1", "1"]
    ).settings
    assert (config.model.classes, config.model.channels, config.data.class_names) == (0, 1, ())
    assert "pixels, grey" in open_images(tmp_path, channels=1).description


def test_names_of_classes_are_those_of_the_folders(folder):
    with refused(InputError, "data.class_names, in order; got ant, cat, dog"):
        open_images(folder, classes=3, class_names=("ant", "dog", "cat"))
    with refused(InputError, "data.class_names must name each of model.classes"):
        make_config(folder, classes=2, class_names=("ant", "cat", "dog"))


def test_images_without_classes_may_lie_anywhere(folder):
    write_image(folder / "0.png")
    (folder / "metadata.jsonl").write_text("{}")
    (folder / "README").write_text("")
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


# What is wrong.


@pytest.mark.parametrize("package", ["PIL", "sklearn.datasets"])
def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, folder, package):
    monkeypatch.setitem(sys.modules, package, None)
    with refused(MissingPackageError, "Run: pip install"):
        open_images(folder) if package == "PIL" else open_digits()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"size": (1, 8, 16)}, ["digits", " need size=", "size=(1, 8, 16)"]),
        ({"channels": 3}, ["digits", " need size=", "channels=3"]),
        ({"classes": 7}, ["digits", " need size=", "classes=7"]),
    ],
)
def test_digits_are_of_one_size(wanted, words):
    with refused(InputError, *words):
        open_digits(**wanted)


def of_size(height=HEIGHT, width=WIDTH, dtype=np.uint8):
    return lambda path: write_image(path, np.zeros((height, width), dtype))


def moving(path):
    frames = [Image.new("L", (WIDTH, HEIGHT), shade) for shade in (0, 255)]
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def is_loop(path):
    path.symlink_to(path.parent)


def is_(content):
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "write", "options", "words"),
    [
        (None, None, {"size": (2, HEIGHT, WIDTH)}, ["A folder of images needs"]),
        (None, None, {"channels": 4}, ["A folder of images needs"]),
        ("dog/odd.png", of_size(width=11), {}, ["height=5", "width=7", "width=11"]),
        ("dog/deep.png", of_size(dtype=np.uint16), {}, ["deep.png"]),
        ("dog/bad.png", is_(b""), {}, ["bad.png"]),
        ("dog/bad.png", is_(b"no image"), {}, ["bad.png"]),
        ("dog/bad.png", is_(b"\x89PNG\r\n\x1a\n"), {}, ["bad.png"]),
        ("moves.webp", moving, {}, ["2 frames", "moves.webp"]),
        ("loop", is_loop, {}, ["A folder of data must"]),
        ("cat/1.png", half, {}, ["1.png' must be a whole image"]),
        (
            *(None, None, {"classes": 2}),
            ["model.classes must", "classes=2 and 3", "--model.classes 3"],
        ),
        (
            *("loose.png", write_image, {"classes": 3}),
            ["Each class must have a folder of its own", "1 images beside", "'loose.png'"],
        ),
    ],
)
def test_wrong_folder_of_images_is_refused(folder, name, write, options, words):
    if write is not None:
        write(folder / name)
    with refused(InputError, *words):
        examples(open_images(folder, **options))


def test_data_that_are_missing_or_too_few_are_refused(tmp_path):
    with refused(InputError, "data.path must"):
        open_images(tmp_path / "absent")
    with refused(InputError, "A folder of images must"):
        open_images(tmp_path)
    (tmp_path / "a.gif").write_bytes(b"")
    with refused(InputError, "A folder of images must"):
        open_images(tmp_path)
    write_image(tmp_path / "a.png")
    with refused(InputError, "Data must"):
        open_images(tmp_path)


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
    opened = open_images(tmp_path, size=(1, 9, 9), resize=resize)
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


SIZES = {"size": (1, 6, 6), "sizes": ("3x12", "12x3", "2x2")}


def test_images_go_to_the_size_of_the_nearest_proportions_and_area(tmp_path):
    shapes = [(6, 6), (30, 30), (5, 5), (3, 3), (2, 12), (4, 9), (4, 8), (9, 2), (24, 6)]
    for number, (height, width) in enumerate(shapes):
        write_image(tmp_path / f"{number}.png", make_pixels(height=height, width=width))
    opened = open_images(tmp_path, resize="crop", **SIZES)
    square, wide, high, small = (6, 6), (3, 12), (12, 3), (2, 2)
    # 4 x 9 is between 1 : 1 and 1 : 4, nearer to the latter; 4 x 8 is as near to both, and of
    # nearly the area of both.
    expected = [square, square, square, small, wide, wide, square, high, high]
    assert [x.latent.shape[1:3] for x in examples(opened)] == expected
    groups = opened.groups
    sizes = [square, wide, high, small]
    for part, found in ((opened.train, groups.train), (opened.held_out, groups.held_out)):
        assert [sizes[group] for group in found] == [expected[number] for number in part.numbers]
    assert groups.lengths.tolist() == [36, 36, 36, 4]
    assert groups.names == ("6x6", "3x12", "12x3", "2x2")
    # With one size, nothing is grouped.
    assert open_images(tmp_path, resize="crop", size=(1, 6, 6)).groups is None


def test_images_of_none_of_the_sizes_are_refused_unless_they_are_resized(tmp_path):
    for number, (height, width) in enumerate([(6, 6), (12, 3), (3, 12)]):
        write_image(tmp_path / f"{number}.png", make_pixels(height=height, width=width))
    before = open_images(tmp_path, **SIZES)
    assert [x.latent.shape[1:3] for x in examples(before)] == [(6, 6), (12, 3), (3, 12)]
    # Other proportions make other batches, so a run that goes on must know.
    write_image(tmp_path / "2.png", make_pixels(height=12, width=3))
    assert open_images(tmp_path, **SIZES).digest != before.digest
    write_image(tmp_path / "3.png", make_pixels(height=6, width=7))
    with refused(InputError, "6x6, 3x12, 12x3, 2x2", "height=6, width=7", "add 6x7 to"):
        open_images(tmp_path, **SIZES)


@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_transparent_lies_on_white(tmp_path, channels):
    """Whatever colour hides there."""
    red = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    red[..., 0], red[0, :, 3] = 255, 255
    write_image(tmp_path / "0.png", red)
    palette = Image.fromarray(red[..., :3]).quantize(2)
    palette.save(tmp_path / "1.png", transparency=bytes(256))
    first, second = (x.latent[0] for x in examples(open_images(tmp_path, channels=channels)))
    np.testing.assert_array_equal(first[1:], 1)
    np.testing.assert_array_equal(second, 1)
    np.testing.assert_allclose(first[0, :, 0], 1 if channels == 3 else 0.299 * 2 - 1, atol=0.01)


def test_data_replaced_in_place_have_another_hash(folder, tmp_path):
    before = open_images(folder).digest
    assert open_images(folder).digest == before
    (folder / "cat/1.png").rename(folder / "cat/3.png")
    assert open_images(folder).digest != before
    latents = np.ones((6, *LATENTS["size"], LATENTS["channels"]))
    path = write_npz(tmp_path / "x.npz", latents=latents)
    before = open_images(path, **LATENTS).digest
    latents[-1, -1, -1, -1, -1] = 2
    write_npz(path, latents=latents)
    assert open_images(path, **LATENTS).digest != before


def test_file_that_changes_after_it_was_checked_is_named(folder):
    opened = open_images(folder)
    write_image(folder / "dog/4.png", make_pixels(width=11))
    with refused(InputError, "height=5", "width=11"):
        examples(opened)
    (folder / "dog/4.png").unlink()
    # It may be back soon, so it is not bad.
    with refused(InputError, "4.png"):
        examples(opened)


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

"""Videos that a Wan trains on: moving digits, and folders of encoded ones."""

import dataclasses
import json
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import startrail_jax as st
from configs.wan import dit_video
from programs import make_wan_config
from refusals import refused
from startrail_jax.errors import InputError
from train import read_command_line
from trainer.dit import encode
from trainer.dit.wan.batches import clip_batch
from trainer.dit.wan.clips import open_clips, read_lines
from trainer.dit.wan.config import ClipConfig, FlowConfig
from trainer.dit.wan.digits import STEPS, MovingDigits, embedded
from trainer.dit.wan.videos import find_videos, frames_shown, without_wait
from trainer.planner.models import IMAGE_TOKENS
from trainer.run.exit import exit_on_user_errors

pytestmark = pytest.mark.quick

RNG = np.random.default_rng(0)
SIZE, OTHER = (2, 8, 8), (1, 8, 6)


def write_clip(folder, name, size, *, tokens=2, caption="", image_dim=None, config=None):
    model = (config or make_wan_config()).model
    shape = (*size, model.channels)
    tensors = {
        "latent": RNG.normal(size=shape).astype(ml_dtypes.bfloat16),
        "text": RNG.normal(size=(tokens, model.text_dim)).astype(ml_dtypes.bfloat16),
        "given": RNG.normal(size=shape).astype(ml_dtypes.bfloat16),
    }
    if image_dim:
        tensors["image"] = RNG.normal(size=(IMAGE_TOKENS, image_dim)).astype(ml_dtypes.bfloat16)
    (folder / "clips").mkdir(exist_ok=True)
    save_file(tensors, folder / "clips" / name)
    line = {"file": name, "size": size, "tokens": tokens, "caption": caption}
    with (folder / f"clips-{len(name) % 2}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return tensors


def write_folder(folder, config=None, sizes=(SIZE, OTHER), count=8, **options):
    model = (config or make_wan_config()).model
    folder.mkdir(exist_ok=True)
    about = {"channels": model.channels, "text_dim": model.text_dim}
    (folder / "encoded.json").write_text(json.dumps(about))
    save_file({"text": np.ones((1, model.text_dim), np.float32)}, folder / "empty.safetensors")
    return {
        f"{number}.safetensors": write_clip(
            folder, f"{number}.safetensors", sizes[number % len(sizes)], config=config, **options
        )
        for number in range(count)
    }


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "encoded")
    return tmp_path / "encoded"


def configured(folder, model=None, sizes=("1x8x6",), **changes):
    return make_wan_config(model, data=ClipConfig(path=folder, sizes=sizes), size=SIZE, **changes)


def opened(config):
    layout = st.Layout("contiguous", 4)
    return open_clips(config, partial(clip_batch, config=config, layout=layout))


def test_clips_are_read_as_they_were_written(tmp_path):
    config = configured(tmp_path / "encoded", dict(first_frame="channels", image_dim=7))
    written = write_folder(tmp_path / "encoded", config, image_dim=7)
    data = opened(config)
    assert (len(data.train), len(data.held_out)) == (7, 1)
    assert data.description.endswith("7 videos to train on, 1 held out")
    for index, number in enumerate(data.train.numbers):
        clip, wanted = data.train[index], written[f"{number}.safetensors"]
        for name in ("latent", "text", "given", "image"):
            np.testing.assert_array_equal(getattr(clip, name), wanted[name])
    # Every size has a number, by which batches are made of one size.
    assert data.groups.names == ("2x8x8", "1x8x6")
    assert data.groups.lengths.tolist() == [32, 12]
    of_train = [0 if clip.latent.shape[0] == 2 else 1 for clip in (data.train[i] for i in range(7))]
    assert data.groups.train.tolist() == of_train


def test_batch_has_tokens_texts_and_what_is_given(tmp_path):
    config = configured(tmp_path / "encoded", dict(first_frame="channels", image_dim=7))
    written = write_folder(tmp_path / "encoded", config, image_dim=7, sizes=(OTHER,))
    data = opened(dataclasses.replace(config, size=OTHER, data=ClipConfig(path=config.data.path)))
    clips = [data.train[i] for i in range(3)]
    batch = data.collate(clips, [5, 6, 2**31 + 7])
    assert batch.patches.shape == (3, 12, 8)
    texts = batch.rows.arrays
    assert texts.text.shape == (3, config.model.text_tokens, config.model.text_dim)
    wanted = written[f"{data.train.numbers[1]}.safetensors"]
    np.testing.assert_array_equal(texts.text[1, :2], wanted["text"])
    assert not texts.text[1, 2:].any()
    assert texts.empty[:, 0].all()
    assert not texts.empty[:, 1:].any()
    np.testing.assert_array_equal(texts.image[1], wanted["image"])
    # The mask is 1 in the first frame, which is the only one here; then the latent that is given.
    given = batch.given.reshape(3, 12, 4, 6)
    assert (given[..., :4] == 1).all()
    first = wanted["given"][0, :2, :2].reshape(4, 2)
    np.testing.assert_array_equal(given[1, 0, :, 4:], first)
    assert batch.numbers.tolist() == [5, 6, 7]


def test_sizes_follow_the_folder_unless_flags_give_them(folder):
    flags = ["dit_video", "--data.path", str(folder), "--model.channels", "2"]
    flags += ["--model.text-dim", "6", "--model.patch", "1", "2", "2"]
    config = read_command_line(flags).settings
    assert (config.size, config.data.sizes) == (SIZE, ("1x8x6",))
    given = read_command_line([*flags, "--size", "4", "8", "8"]).settings
    assert (given.size, given.data.sizes) == ((4, 8, 8), ())


def test_digits_move_as_their_captions_say():
    config = dit_video()
    videos = MovingDigits(config)
    words = {tuple(embedded(name, config.model.text_dim)[0]): name for name in STEPS}
    for number in range(20):
        clip, again = videos[number], MovingDigits(config)[number]
        np.testing.assert_array_equal(clip.latent, again.latent)
        rows, columns = STEPS[words[tuple(clip.text[1])]]
        bright = [np.argwhere(frame[..., 0] > -1).mean(0) for frame in clip.latent]
        np.testing.assert_allclose(np.diff(bright, axis=0), [[rows, columns]] * 4, atol=1e-4)
    assert len({tuple(videos[number].text[0]) for number in range(200)}) == 10


@pytest.mark.parametrize(
    "changes", [dict(size=(5, 16, 8)), dict(channels=2), dict(first_frame="time")], ids=str
)
def test_digits_need_their_size_and_channels(changes):
    config = dit_video()
    model = {name: x for name, x in changes.items() if name != "size"}
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        size=changes.get("size", config.size),
    )
    with refused(InputError, "moving digits", "--data.path"):
        MovingDigits(config)


def one_clip(folder):
    for path in folder.glob("clips-*.jsonl"):
        path.unlink()
    write_clip(folder, "one.safetensors", SIZE)


def about(text):
    return lambda folder: (folder / "encoded.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "encoded.json").unlink(), "trainer.dit.encode"),
        (about('{"channels": 16, "text_dim": 6}'), "model.channels=2"),
        (about('{"channels": 2, "text_dim": 4096}'), "model.text_dim=6"),
        (lambda folder: (folder / "clips-0.jsonl").write_text("{'file': 1}\n"), "Line 1 of"),
        (partial(write_clip, name="x", size=SIZE, tokens=9), "--model.text-tokens 9"),
        (partial(write_clip, name="x", size=(5, 8, 8)), "1 of 5x8x8"),
        (one_clip, "at least 2 videos"),
        (lambda folder: folder.rename(folder.with_name("moved")), "no such folder"),
    ],
)
def test_wrong_folder_is_refused(folder, damage, words):
    damage(folder)
    with refused(InputError, words):
        opened(configured(folder))


def tensors(value=0.0, size=SIZE, names=("latent", "given")):
    latent = np.full((*size, 2), value)
    arrays = dict.fromkeys(names, latent) | {"text": np.zeros((2, 6))}
    return lambda path: save_file(arrays, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "must exist"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "whole safetensors file"),
        (tensors(names=("latent",)), "no given"),
        (tensors(value=np.inf), "finite"),
        (tensors(size=(1, 8, 8)), "a latent of 2x8x8"),
    ],
)
def test_wrong_file_is_named_when_it_is_read(tmp_path, damage, words):
    config = configured(tmp_path / "encoded", dict(first_frame="channels"), sizes=())
    write_folder(tmp_path / "encoded", config, sizes=(SIZE,))
    data = opened(config)
    name = f"{data.train.numbers[2]}.safetensors"
    damage(config.data.path / "clips" / name)
    with refused(InputError, words, name):
        data.train[2]


def rounded(rate, tick, start=0.0):
    """Times in ticks of 20 frames of a constant rate, of which the first is at `start` seconds."""
    return [int((start + k / rate) / tick + 0.5) for k in range(20)]


MKV, MP4 = Fraction(1, 1000), Fraction(1, 16000)


@pytest.mark.parametrize("start", [0, 1, 0.0005, 0.0137])
@pytest.mark.parametrize(
    ("times", "tick", "rate", "taken"),
    [
        *[
            (lambda start, tick=tick, of=of: rounded(of, tick, start), tick, rate, taken)
            for tick in (MKV, MP4)
            for of, rate, taken in (
                (16, 16, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
                (16, 8, [0, 2, 4, 6, 8, 10, 12, 14, 16]),
                (16, 32, [0, 0, 1, 1, 2, 2, 3, 3, 4]),
                (24, 16, [0, 1, 3, 4, 6, 7, 9, 10, 12]),
                (29.97, 29.97, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
            )
        ],
        # A tick of avi is a frame, so that times are exact.
        *[
            (lambda start: [round(16 * start) + k for k in range(20)], Fraction(1, 16), rate, taken)
            for rate, taken in (
                (16, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
                (12, [0, 1, 2, 4, 5, 6, 8, 9, 10]),
                (15, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
                (32, [0, 0, 1, 1, 2, 2, 3, 3, 4]),
            )
        ],
        # A picture that stays for a while, and two at once.
        (lambda start: [7, 107, 507, 508, 607], MKV, 10, [0, 1, 1, 1, 1, 2, 4]),
        (lambda start: [5], MKV, 16, [0]),
        (lambda start: [], MKV, 16, []),
    ],
)
def test_frames_are_those_shown_at_each_time_after_the_first(start, times, tick, rate, taken):
    frames = [(time, number) for number, time in enumerate(times(start))]
    assert list(islice(frames_shown(frames, tick=tick, rate=float(rate)), 9)) == taken


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ([0, 17, 18, 19], [16, 17, 18, 19]),
        ([0, 1, 2], [0, 1, 2]),
        ([0, 1, 9], [0, 1, 9]),
        ([0], [0]),
    ],
)
def test_avi_begins_with_its_first_frame_however_late(times, wanted):
    frames = zip(times, "abcd", strict=False)
    assert list(without_wait(frames)) == list(zip(wanted, "abcd", strict=False))


@pytest.mark.parametrize("place", ["a.txt", "captions.jsonl"])
def test_captions_are_utf8_without_a_mark(tmp_path, place):
    caption = "\u201cDrachen\u201d \u2028 f\u00e4hrt"
    (tmp_path / "a.mp4").touch()
    line = json.dumps({"file": "a.mp4", "caption": caption}, ensure_ascii=False) + "\n"
    path = tmp_path / place
    path.write_text(caption if place == "a.txt" else line, encoding="utf-8-sig")
    lines = path if place != "a.txt" else None
    assert find_videos(tmp_path, lines) == [("a.mp4", caption)]
    path.write_bytes("fährt".encode("latin-1"))
    with refused(InputError, "must be UTF-8", place):
        find_videos(tmp_path, lines)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", "must exist; got FileNotFoundError"),
        ("file", "must be a folder; got NotADirectory"),
    ],
)
def test_folder_that_is_none_is_said_to_be_none(tmp_path, name, words):
    (tmp_path / "file").touch()
    with refused(InputError, words, name, "Correct the path"):
        find_videos(tmp_path / name, None)
    if name == "gone":
        (tmp_path / "a.mp4").touch()
        with refused(InputError, words, "gone.jsonl"):
            find_videos(tmp_path, tmp_path / "gone.jsonl")


class Encoders:
    """Stands for VAE and text encoder."""

    loaded = 0

    def __init__(self, folder, **_):
        Encoders.loaded += 1

    def text(self, caption, *, most):
        return np.full((len(caption.split()), 6), len(caption), np.float32)

    def video(self, frames):
        return {"latent": frames}


@pytest.fixture
def videos(tmp_path, monkeypatch):
    """Three videos with captions, `encode` with tiny encoders, and the videos that it has read."""
    read = []

    def read_video(path, shape):
        read.append(path.name)
        if path.read_bytes().startswith(b"short"):
            raise InputError(f"Videos must have at least 5 frames; got 2 in {path.name!r}.")
        return np.full((*SIZE, 2), path.read_bytes()[0], np.float32)

    monkeypatch.setattr("trainer.dit.wan.pipelines.TorchModels", Encoders)
    monkeypatch.setattr("trainer.dit.wan.videos.read_video", read_video)
    parts = {
        "": {"_class_name": "WanPipeline"},
        "text_encoder": {"d_model": 6},
        "vae": {"z_dim": 2},
    }
    for part, values in parts.items():
        (tmp_path / "model" / part).mkdir(exist_ok=True, parents=True)
        name = "config.json" if part else "model_index.json"
        (tmp_path / "model" / part / name).write_text(json.dumps(values))
    (tmp_path / "videos").mkdir()
    for name in "abc":
        write_video(tmp_path, name, name)
    return tmp_path, read


def write_video(folder, name, content):
    (folder / "videos" / f"{name}.mp4").write_text(content)
    (folder / "videos" / f"{name}.txt").write_text(f"video {name}")


def encoded(folder, *flags):
    """Runs the command; returns its status."""
    places = [str(folder / name) for name in ("videos", "out", "model")]
    try:
        with exit_on_user_errors():
            encode.main([*places[:2], "--model", places[2], *flags])
    except SystemExit as end:
        return end.code
    return 0


def replaced(name, content=None, caption=None):
    def change(folder):
        for suffix, text in ((".mp4", content), (".txt", caption)):
            if text:
                (folder / "videos" / f"{name}{suffix}").write_text(text)

    return change


def removed(pattern):
    def change(folder):
        (path,) = folder.glob(pattern)
        path.unlink()

    return change


def added(folder):
    write_video(folder, "d", "d")


KEPT = {"video a": "a", "video b": "b", "video c": "c"}
WITHOUT_A = {"video b": "b", "video c": "c"}


@pytest.mark.parametrize(
    "flags", [[["--process", "0", "1"]], [["--process", x, "2"] for x in "01"]]
)
@pytest.mark.parametrize(
    ("change", "wanted", "read", "words"),
    [
        (lambda folder: None, KEPT, [], "encodes 0"),
        (replaced("a", caption="red"), {"red": "a", **WITHOUT_A}, [], "renewed, "),
        (replaced("a", "x"), {**KEPT, "video a": "x"}, ["a.mp4"], "renewed, "),
        (replaced("a", "x", "red"), {"red": "x", **WITHOUT_A}, ["a.mp4"], "renewed, "),
        (removed("videos/a.mp4"), WITHOUT_A, [], "dropped, "),
        (removed("out/clips/a-*.safetensors"), KEPT, ["a.mp4"], "encodes 1"),
        (replaced("a", "short"), WITHOUT_A, ["a.mp4"], "left out: Videos must have at least"),
        (added, KEPT | {"video d": "d"}, ["d.mp4"], "4 videos"),
    ],
)  # fmt: skip
def test_encoded_videos_are_those_there_now(videos, capsys, flags, change, wanted, read, words):
    folder, of_reading = videos
    for process in flags:
        assert encoded(folder, *process) == 0
    change(folder)
    of_reading.clear()
    capsys.readouterr()
    status = [encoded(folder, *process) for process in flags]
    text = capsys.readouterr().err
    assert words in text
    assert "a.mp4" in text or wanted.items() >= KEPT.items()
    assert of_reading == read
    assert (1 in status) == ("left out" in words)
    assert ("next: python train.py" in text) == (1 not in status or len(flags) > 1)
    held = {
        line.caption: chr(
            int(load_file(folder / "out" / "clips" / line.file)["latent"][0, 0, 0, 0])
        )
        for line in read_lines(folder / "out")
    }
    assert held == wanted
    assert len(list((folder / "out" / "clips").iterdir())) == len(wanted)
    # What was renewed may come back.
    for name in "abc":
        write_video(folder, name, name)
    for process in flags:
        assert encoded(folder, *process) == 0
    assert {line.caption for line in read_lines(folder / "out")} == {*KEPT, *wanted} - {"red"}


def test_encoding_that_ends_with_errors_can_be_begun_otherwise(videos, capsys):
    folder, _ = videos
    for name in "abc":
        write_video(folder, name, "short")
    assert encoded(folder) == 1
    text = capsys.readouterr().err
    assert "3 videos were left out" in text
    assert "next:" not in text
    for name in "abc":
        write_video(folder, name, name)
    assert encoded(folder, "--frames", "5") == 0
    assert "frames=[5] and [81] now" in encoded(folder)
    # A pipeline whose tensors are others.
    index = folder / "model" / "model_index.json"
    index.write_text(json.dumps({"_class_name": "WanImageToVideoPipeline"}))
    assert "OUT must be new" in encoded(folder, "--frames", "5")
    index.write_text(json.dumps({"_class_name": "WanPipeline"}))
    # Videos of another folder.
    for name in "abc":
        removed(f"videos/{name}.mp4")(folder)
    write_video(folder, "other", "x")
    assert "none of them" in encoded(folder, "--frames", "5")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--frames", "6"], "Use 5"),
        (["--sizes", "30x32"], "multiples of 16"),
        (["--captions", "gone.jsonl"], "'gone.jsonl' must exist"),
        (["--model", "gone"], "'gone', no such folder"),
    ],
)
def test_settings_are_checked_before_encoders_are_loaded(videos, flags, words):
    folder, _ = videos
    Encoders.loaded = 0
    assert words in encoded(folder, *flags)
    assert Encoders.loaded == 0
    assert not (folder / "out").exists()


def test_unknown_words_are_named():
    with refused(InputError, "'fast'", "seven left"):
        embedded("seven fast", 4)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (ClipConfig, dict(sizes=("8x8",), path=Path()), "FRAMESxHEIGHTxWIDTH"),
        (ClipConfig, dict(sizes=("2x8x8",)), "--data.path"),
        (ClipConfig, dict(validation_fraction=1.0), "validation_fraction"),
        (FlowConfig, dict(dropout=1.0), "dropout=1.0"),
        (FlowConfig, dict(shift=0.0), "shift=0.0"),
        (FlowConfig, dict(range=(0.5, 0.5)), "range=0.5 0.5"),
        (FlowConfig, dict(range=(0.5, 1.5)), "range=0.5 1.5"),
        (make_wan_config, dict(model=dict(image_dim=4)), "model.first_frame='channels'"),
        (make_wan_config, dict(model=dict(image_dim=0)), "model.image_dim must be at least 1"),
        (make_wan_config, dict(model=dict(heads=5)), "model.heads"),
        (make_wan_config, dict(size=(2, 8, 7)), "model.patch"),
        *[
            (make_wan_config, dict(data=ClipConfig(path=Path(), sizes=(size,))), words)
            for size, words in (
                ("9x9x8", "model.patch"),
                ("9x8x8", "largest"),
                ("2x8x8", "each size once"),
            )
        ],
    ],
)
def test_settings_are_checked(make, settings, words):
    with refused(InputError, words):
        make(**settings)

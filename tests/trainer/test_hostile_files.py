"""Files that were made to harm: no program is started, nothing waits, memory stays bounded."""

import hashlib
import io
import json
import struct
import time
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import tokenizers
from PIL import EpsImagePlugin, Image

from refusals import refused
from startrail_jax.errors import InputError
from trainer.data import documents, slices
from trainer.data.arrays import Archive
from trainer.dit import images
from trainer.dit.config import ImageConfig
from trainer.dit.examples import Wanted
from trainer.dit.pixels import BadImageError, check_header, check_pixels, read_pixels
from trainer.gpt.config import DataConfig, GPTTrainConfig
from trainer.gpt.corpus import open_corpus
from trainer.gpt.tokenizer import FileTokenizer
from trainer.run.settings import load_config, read_kind

pytestmark = pytest.mark.quick

WANTED = Wanted(size=(1, 5, 7), channels=3, classes=0, caption_length=0)
LATENTS = {"size": (2, 3, 5), "channels": 4, "classes": 0, "caption_length": 0}
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 7 5\n%%EndComments\nshowpage\n%%EOF\n"


def open_latents(path, **wanted):
    return images.open_images(ImageConfig(path=path), **LATENTS | wanted)


# Images.


@pytest.mark.parametrize("function", [check_header, check_pixels, read_pixels])
def test_image_starts_no_other_program(tmp_path, monkeypatch, function):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **_: started.append(given))
    path = tmp_path / "x.png"
    path.write_bytes(EPS)
    with refused(BadImageError, "must be a whole image; got UnidentifiedImageError"):
        function(path, WANTED)
    assert not started


@pytest.mark.parametrize("suffix", ["gif", "tiff", "ppm", "ico"])
def test_image_of_another_format_is_refused_whatever_its_name(tmp_path, suffix):
    Image.new("RGB", (7, 5)).save(tmp_path / f"x.{suffix}")
    path = (tmp_path / f"x.{suffix}").rename(tmp_path / "x.png")
    with refused(BadImageError, "must be a whole image; got UnidentifiedImageError"):
        read_pixels(path, WANTED)


def png_header(width, height):
    def chunk(name, data):
        checked = name + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + data + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("width", [9_500, 50_000])
@pytest.mark.parametrize("function", [check_header, read_pixels])
def test_image_of_too_many_pixels_is_refused_by_its_header(tmp_path, function, width):
    """Pillow would only warn of the smaller one."""
    path = tmp_path / "x.png"
    path.write_bytes(png_header(width, width))
    wanted = Wanted(size=(1, 5, 7), channels=3, classes=0, caption_length=0, resize="crop")
    with pytest.raises(BadImageError, match=r"at most 89,478,485 pixels; got .* in '.*x.png'"):
        function(path, wanted)


# Pipes, sockets, devices.


# Arrays.


def npy_header(shape, dtype="<f2"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


def write_archive(path, compression=zipfile.ZIP_DEFLATED, **members):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


@pytest.fixture
def few_bytes():
    """Fails if more than 40 MB are allocated at any time."""
    tracemalloc.start()
    began = time.process_time()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6
    assert time.process_time() - began < 20


ZEROS = bytes(1 << 22)


@pytest.mark.usefixtures("few_bytes")
def test_claim_of_terabytes_is_refused(tmp_path):
    path = write_archive(tmp_path / "x.npz", latents=npy_header((10**11, 2, 3, 5, 4)) + b"few")
    with refused(InputError, "data.path must"):
        open_latents(path)


@pytest.mark.usefixtures("few_bytes")
def test_archive_that_confirms_the_claim_of_its_header_is_refused(tmp_path):
    header = npy_header((10**7, 2, 3, 5, 4))
    path = write_archive(tmp_path / "x.npz", latents=header + b"few")
    # The size as the central directory of the archive gives it.
    raw = bytearray(path.read_bytes())
    place = raw.index(b"PK\1\2") + 24
    raw[place : place + 4] = struct.pack("<I", len(header) + 240 * 10**7)
    path.write_bytes(raw)
    match = r"BadArrayError: arrays of 2,400,000,000 bytes in a file of \d+, where at most 32 times"
    with pytest.raises(InputError, match=match):
        open_latents(path)


@pytest.mark.usefixtures("few_bytes")
def test_array_that_is_much_larger_than_its_file_is_refused(tmp_path, monkeypatch):
    count = len(ZEROS) // 240
    content = npy_header((count, 2, 3, 5, 4)) + ZEROS[: count * 240]
    path = write_archive(tmp_path / "x.npz", latents=content)
    assert path.stat().st_size * 500 < len(content)
    monkeypatch.setattr("trainer.data.arrays.UNPACKED_BYTES", 1 << 20)
    with refused(InputError, "32 times"):
        open_latents(path)


@pytest.mark.usefixtures("few_bytes")
def test_wrong_shape_is_refused_before_anything_is_unpacked(tmp_path, monkeypatch):
    unpack, unpacked = Archive._read, []
    monkeypatch.setattr(
        Archive, "_read", lambda self, *given: unpacked.append(given[0]) or unpack(self, *given)
    )
    content = npy_header((len(ZEROS) // 2,)) + ZEROS
    path = write_archive(tmp_path / "x.npz", latents=content, labels=content)
    with refused(InputError, "`latents` must"):
        open_latents(path)
    latents = npy_header((3, 2, 3, 5, 4)) + bytes(720)
    path = write_archive(tmp_path / "y.npz", latents=latents, labels=content, captions=content)
    with refused(InputError, "`labels` must"):
        open_latents(path, classes=2)
    with refused(InputError, "`captions` must"):
        open_latents(path, caption_length=2)
    assert not unpacked
    # What is not wanted is not read.
    assert len(open_latents(path).train.numbers) == 2
    assert unpacked == ["latents"]


def test_fortran_order_and_an_array_of_one_value_are_read(tmp_path):
    latents = np.random.default_rng(0).standard_normal((3, 2, 3, 5, 4))
    np.savez(tmp_path / "x.npz", latents=np.asfortranarray(latents), labels=np.arange(3))
    opened = open_latents(tmp_path / "x.npz", classes=3)
    both = opened.train, opened.held_out
    for number, example in [(p.numbers[i], p[i]) for p in both for i in range(len(p))]:
        np.testing.assert_array_equal(example.latent, latents[number].astype(np.float32))
        assert example.label == number
    np.savez(tmp_path / "x.npz", latents=np.float32(3))
    with refused(InputError, "`latents` must"):
        open_latents(tmp_path / "x.npz")


def test_archive_in_another_compression_is_refused(tmp_path):
    path = write_archive(tmp_path / "x.npz", zipfile.ZIP_BZIP2, latents=npy_header((0,)))
    with refused(InputError, "data.path must"):
        open_latents(path)


def test_encrypted_archive_is_refused(tmp_path):
    path = write_archive(tmp_path / "x.npz", latents=npy_header((0,)))
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(raw)
    with refused(InputError, "data.path must"):
        open_latents(path)


# Tokenizers and JSON.


def tokenizer_file(path, **changes):
    model = {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 1}, "unk_token": "a"}
    values = {"version": "1.0", "added_tokens": [], "model": model, **changes}
    path.write_text(json.dumps(values))
    return path


def test_panic_of_the_tokenizer_names_the_file(tmp_path):
    options = {"end_of_document": None, "vocab_size": 2}
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path = tokenizer_file(tmp_path / "load.json", normalizer=broken)
    with pytest.raises(InputError, match=r"got '.*load.json': PanicException: .* Give the file"):
        FileTokenizer(path, **options)

    broken = {"type": "FixedLength", "length": 0}
    tokenizer = FileTokenizer(
        tokenizer_file(tmp_path / "encode.json", pre_tokenizer=broken), **options
    )
    document = documents.Document(key="", place="", text="a b")
    for encode in (lambda: tokenizer.encode([document]), lambda: tokenizer.ids("a b")):
        with pytest.raises(InputError, match=r"got '.*encode.json': PanicException: .* on a text"):
            encode()

    broken = {"type": "Strip", "content": "a", "start": 100, "stop": 100}
    tokenizer = FileTokenizer(tokenizer_file(tmp_path / "decode.json", decoder=broken), **options)
    with pytest.raises(InputError, match=r"got '.*decode.json': PanicException: "):
        tokenizer.decode(np.array([0, 1]))


def test_tokenizer_has_the_hash_of_its_text_whatever_ends_its_lines(tmp_path):
    path = tokenizer_file(tmp_path / "x.json")
    text = path.read_text().replace(",", ",\n")
    digests = set()
    for end in ("\n", "\r\n", "\r"):
        path.write_bytes(text.replace("\n", end).encode())
        digests.add(FileTokenizer(path, end_of_document=None, vocab_size=2).digest)
    versioned = f"{tokenizers.__version__} {text}"
    assert digests == {hashlib.sha256(versioned.encode()).hexdigest()}


def test_interruption_of_the_tokenizer_is_no_error_of_its_file(tmp_path, monkeypatch):
    def interrupt(text):
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenizers.Tokenizer.from_str", interrupt, raising=True)
    with pytest.raises(KeyboardInterrupt):
        FileTokenizer(tokenizer_file(tmp_path / "x.json"), end_of_document=None, vocab_size=2)


def test_word_that_the_tokenizer_does_not_know_names_its_file(tmp_path):
    path = tokenizer_file(
        tmp_path / "x.json",
        model={"type": "WordLevel", "vocab": {"a": 0, "<eos>": 1}, "unk_token": "none"},
    )
    tokenizer = FileTokenizer(path, end_of_document=None, vocab_size=2)
    with refused(InputError, "x.json"):
        tokenizer.ids("b")


DEEP = "[" * 100_000


def test_deep_json_names_its_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(DEEP)
    for read in (read_kind, lambda path: load_config(GPTTrainConfig, path)):
        with pytest.raises(InputError, match=r"x.json must hold the config of a run. .*recursion"):
            read(path)
    with pytest.raises(InputError, match=r"must be a Hugging Face tokenizer.json; got '.*x.json'"):
        FileTokenizer(path, end_of_document=None, vocab_size=2)
    path = path.rename(tmp_path / "x.jsonl")
    with pytest.raises(InputError, match=r"JSON object; got .*recursion.* in '.*x.jsonl:1'"):
        open_corpus(DataConfig(path=path), vocab_size=256)


def test_text_that_cannot_be_cut_is_refused(monkeypatch):
    monkeypatch.setattr(slices, "LONGEST_SLICE", 1 << 12)
    slicer = slices.Slicer(lambda text: [ord(x) for x in text], length=1 << 10, window=64)
    whole = documents.Document(key="a", place="a.txt", text="a" * (1 << 14))
    with refused(InputError, "Text must"):
        list(slicer.add(whole))

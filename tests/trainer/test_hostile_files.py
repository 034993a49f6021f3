"""Files that were made to harm: no program is started, nothing waits, memory stays bounded."""

import gzip
import hashlib
import io
import itertools
import json
import os
import re
import socket
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from PIL import EpsImagePlugin, Image

from refusals import refused
from startrail_jax.errors import InputError
from trainer.data import documents, opening, progress, slices, tables
from trainer.data.arrays import LONGEST_HEADER, Archive
from trainer.data.files import find_files, map_tokens
from trainer.data.opening import open_regular, read_whole
from trainer.dit import image_folder, images
from trainer.dit.config import ImageConfig
from trainer.dit.examples import Wanted
from trainer.dit.pixels import BadImageError, check_header, check_pixels, read_pixels
from trainer.gpt import encoding
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


@pytest.fixture(params=["pipe", "socket", "device", "link"])
def special(request, tmp_path):
    """Gives a path to what is no regular file."""

    def make(name):
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True)
        if request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "socket":
            # A path of a socket must be short.
            here = os.getcwd()
            os.chdir(path.parent)
            try:
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(name)
            finally:
                os.chdir(here)
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(tmp_path / "pipe")
            path.symlink_to(tmp_path / "pipe")
        return path

    return make


REFUSED = r"{}' must be a regular file; got a folder, pipe, socket or device"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.bin", "a.npy"])
def test_text_and_tokens_are_regular_files(special, name):
    with pytest.raises(InputError, match=REFUSED.format(name)):
        open_corpus(DataConfig(path=special(name)), vocab_size=256)


def test_tokenizer_is_a_regular_file(special):
    with pytest.raises(InputError, match=REFUSED.format("tokenizer.json")):
        FileTokenizer(special("tokenizer.json"), end_of_document=None, vocab_size=9)


def test_archive_is_a_regular_file(special):
    with pytest.raises(InputError, match=REFUSED.format("x.npz")):
        open_latents(special("x.npz"))


def test_image_is_a_regular_file(special):
    folder = special("x.png").parent
    with pytest.raises(InputError, match=REFUSED.format("x.png")):
        images.open_images(ImageConfig(path=folder), **LATENTS | {"size": (1, 5, 7), "channels": 3})


def test_caption_is_a_regular_file(special):
    folder = special("x.txt").parent
    Image.new("RGB", (7, 5)).save(folder / "x.png")
    wanted = LATENTS | {"size": (1, 5, 7), "channels": 3, "caption_length": 9}
    with pytest.raises(InputError, match=REFUSED.format("x.txt")):
        images.open_images(ImageConfig(path=folder), **wanted)


def test_pipe_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"text")
    regular = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(type(path), "stat", lambda self: regular)
    with pytest.raises(InputError, match=REFUSED.format("a.txt")), open_regular(path):
        pass


def test_long_captions_and_lines_are_read_in_part(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"12345")
    assert read_whole(path, 5) == b"12345"
    with refused(InputError, "must have at most 4 bytes; got"):
        read_whole(path, 4)
    monkeypatch.setattr(image_folder, "LONGEST_CAPTION", 4)
    with refused(InputError, "must have at most 4 bytes; got"):
        image_folder._read_caption(tmp_path / "a.png")
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n{"text": "12"}\n')
    monkeypatch.setattr(documents, "LONGEST_LINE", 14)
    with refused(InputError, "A line of a JSONL file must"):
        open_corpus(DataConfig(path=tmp_path / "a.jsonl"), vocab_size=256)


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


def wrong_headers():
    long_header = b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1) + b" " * (4 * LONGEST_HEADER)
    nested = b"-" * 9_000 + b"1"
    return {
        "long": (long_header, "BadArrayError"),
        "nested": (b"\x93NUMPY\1\0" + struct.pack("<H", len(nested)) + nested, "BadArrayError"),
        "version": (b"\x93NUMPY\3\0" + bytes(99), r"version \(3, 0\)"),
        "negative": (npy_header((-3, 2, 3, 5, 4)), r"the shape \(-3,"),
        "objects": (npy_header((3, 2, 3, 5, 4), "|O") + bytes(99), "array of objects|hasobject|"),
    }


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize("name", wrong_headers())
def test_wrong_header_of_an_array_is_refused(tmp_path, name):
    content, match = wrong_headers()[name]
    with pytest.raises(InputError, match=rf"must be a folder of images, or .*got .*{match}"):
        open_latents(write_archive(tmp_path / "x.npz", latents=content))
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"must be a whole .npy file of integers; got"):
        map_tokens(path, "")


@pytest.mark.parametrize("length", [10**13, 2**62, 2**70])
def test_vector_that_is_longer_than_its_file_is_refused(tmp_path, length):
    path = tmp_path / "x.npy"
    path.write_bytes(npy_header((length,), "<u2") + bytes(99))
    with refused(InputError, "227 bytes"):
        map_tokens(path, "")


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
    with pytest.raises(InputError, match=r"must be JSON; got .*recursion.* in '.*x.jsonl:1'"):
        open_corpus(DataConfig(path=path), vocab_size=256)


# What expands.


def bomb(path, kind, times=3_000):
    """A small file that gives 1 MiB of text so many times."""
    text = "a" * (1 << 20)
    if kind == "parquet":
        column = pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), [text])
        pq.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
    elif kind == "arrow":
        column = pa.array([text] * 8)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(path, pa.schema({"text": pa.string()}), options=options) as stream:
            for _ in range(times // 8):
                stream.write(pa.record_batch({"text": column}))
    else:
        line = json.dumps({"text": text}).encode() + b"\n"
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(times):
                file.write(line if kind == "jsonl.gz" else text.encode())
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl.gz", "txt.gz"])
def test_file_that_gives_much_more_than_its_size_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(opening, "EXPANDS_FREELY", 1 << 22)
    path = bomb(tmp_path / f"x.{kind}", kind, times=24)
    tracemalloc.start()
    try:
        with refused(InputError, "200 times"):
            open_corpus(DataConfig(path=path), vocab_size=300)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_rows_of_a_table_take_little_memory_at_a_time(tmp_path):
    """Three terabytes in a file of seven kilobytes."""
    path = bomb(tmp_path / "x.parquet", "parquet", times=3_000_000)
    assert path.stat().st_size < 10_000
    rows = tables.read_parquet(path, ["text"])
    before = pa.total_allocated_bytes()
    assert len(next(rows)[0]["text"]) == 1 << 20
    assert pa.total_allocated_bytes() - before < 1.5 * tables.BATCH_BYTES
    rows.close()


@pytest.mark.parametrize("kind", ["txt", "parquet"])
def test_text_that_is_more_than_memory_is_refused(tmp_path, monkeypatch, kind):
    if kind == "txt":
        (path := tmp_path / "x.txt").touch()
        os.truncate(path, 1 << 40)  # A file of holes, which takes a quarter of an hour to read.
        found = "1,099.5 GB"
    else:
        path = bomb(tmp_path / "x.parquet", kind, times=20)
        monkeypatch.setattr(encoding, "MEMORY_SHARE", 0.0)
        monkeypatch.setattr(encoding.os, "sysconf", lambda _: 1 << 20)
        found = "0.0 GB"
    with pytest.raises(
        InputError, match=rf"must fit in memory .*got {found} .*--data.cache FOLDER"
    ):
        open_corpus(DataConfig(path=path), vocab_size=300)


def test_text_that_cannot_be_cut_is_refused(monkeypatch):
    monkeypatch.setattr(slices, "LONGEST_SLICE", 1 << 12)
    slicer = slices.Slicer(lambda text: [ord(x) for x in text], length=1 << 10, window=64)
    whole = documents.Document(key="a", place="a.txt", text="a" * (1 << 14))
    with refused(InputError, "Text must"):
        list(slicer.add(whole))


def test_long_reading_shows_that_it_goes_on(tmp_path, monkeypatch, capfd):
    (path := tmp_path / "x.txt").write_bytes(b"a" * (documents.BLOCK_BYTES * 3))
    times = itertools.count(0.0, 2.5)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    documents.scan_files(find_files(path, "data.path"))
    assert re.search(r"reading .*x.txt: 1.0 of 3.1 MB\n.*x.txt: 3.1 MB in", capfd.readouterr().err)


def test_file_that_the_system_makes_up_is_refused():
    """Such as /proc/kmsg, which never ends."""
    with (
        refused(InputError, "must be a file of a disk"),
        open_regular(Path("/proc/self/status")),
    ):
        pass


def test_shape_of_true_is_none(tmp_path):
    header = "{'descr': '<i8', 'fortran_order': False, 'shape': (True,), }".ljust(117) + "\n"
    (path := tmp_path / "x.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(8)
    )
    with refused(InputError, "must be a whole .npy file of"):
        map_tokens(path, "uint16")

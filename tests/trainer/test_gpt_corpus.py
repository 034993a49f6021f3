"""What is read, how it becomes tokens, what is held out; an error for all that can be wrong."""

import dataclasses
import gzip
import io
import json
import os

import numpy as np
import pytest
import tokenizers

from configs.gpt import gpt_tiny
from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.data import documents, files
from trainer.gpt import corpus, encoding
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.gpt.encoding import share_of_key
from trainer.gpt.task import GPTTask
from trainer.gpt.tokenizer import ByteTokenizer, FileTokenizer

pytestmark = pytest.mark.quick


def open_corpus(path, *, vocab_size=256, **options):
    paths = () if path is None else (path,)
    (opened,) = corpus.open_corpora(DataConfig(path=paths, **options), vocab_size=vocab_size)
    return opened


def texts(streams):
    """The documents of a stream of bytes."""
    (stream,) = streams
    return bytes(stream.read(0, len(stream)).astype(np.uint8)).split(b"\0")[:-1]


def ids(streams):
    return [stream.read(0, len(stream)).tolist() for stream in streams]


def write(folder, **contents):
    """Files named as the arguments, `_` for the dot."""
    for name, content in contents.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def lines(*texts):
    return "".join(f"{text}\n" for text in texts).encode()


def write_lines(path, texts):
    path.write_bytes(lines(*texts))
    return path


@pytest.fixture
def tokenizer(tmp_path):
    """Words by number, `<eos>` the last; cut to two tokens and padded, as files may ask."""
    words = ["[UNK]", "one", "two", "three", "<eos>"]
    model = tokenizers.models.WordLevel(
        {word: index for index, word in enumerate(words)}, unk_token="[UNK]"
    )
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.add_special_tokens(["<eos>"])
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 4)]
    )
    built.enable_truncation(2)
    built.enable_padding(length=7)
    path = tmp_path / "tokenizer.json"
    built.save(str(path))
    return path


# The standard library.


def test_standard_library_split_is_that_of_earlier_results_whatever_other_files(
    tmp_path, monkeypatch
):
    for index in range(97):
        (tmp_path / f"module_{index}.py").write_bytes(b"# %d\n" % index)
    for name in ["test/a.py", "site-packages/b.py", "c/tests/d.py", "encodings/e.py", "f.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"left out")
    monkeypatch.setattr(files.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    opened = open_corpus(None, validation_fraction=0.05)
    train, held_out = texts(opened.train), texts(opened.held_out)
    assert sorted(train + held_out) == sorted(b"# %d\n" % index for index in range(97))
    # Those whose path has a CRC-32 divisible by 20.
    assert held_out == [b"# 26\n", b"# 36\n", b"# 46\n", b"# 7\n"]
    assert (opened.end_of_document, opened.unit) == (0, "byte")
    assert f"{len(train)} documents, {len(opened.train[0])} bytes to train" in opened.description
    assert f"{len(held_out)} documents" in opened.description
    for index in range(0, 97, 2):
        (tmp_path / f"module_{index}.py").unlink()
    after = texts(open_corpus(None, validation_fraction=0.05).held_out)
    assert after == [text for text in held_out if int(text[2:]) % 2]
    for path in tmp_path.rglob("*.py"):
        path.unlink()
    with refused(InputError, "The standard library must"):
        open_corpus(None)


def test_standard_library_of_this_interpreter_is_large():
    opened = open_corpus(None, validation_fraction=0.05)
    (train,), (held_out,) = opened.train, opened.held_out
    assert len(train) > 1_000_000
    assert 0.01 < len(held_out) / len(train) < 0.2


# Text.


def test_folder_is_read_in_order_with_links_and_without_hidden_files(tmp_path):
    write(tmp_path, d_txt=b"3")
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data / "a", data / ".git", elsewhere):
        folder.mkdir(parents=True)
    (data / "link").symlink_to(elsewhere)
    write(data, b_txt=b"2", a_md=b"1", _hidden=b"no")
    write(data / "a", c_txt="\u00e9".encode())
    write(data / ".git", d_txt=b"no")
    write(elsewhere, a_txt=b"linked")
    opened = open_corpus(data, validation_path=tmp_path / "d.txt")
    assert texts(opened.train) == [b"1", b"\xc3\xa9", b"2", b"linked"]
    assert texts(opened.held_out) == [b"3"]


def test_held_out_documents_are_about_the_share_and_nested_wherever_the_folder_is(tmp_path):
    many = tmp_path / "many"
    for index in range(200):
        path = many / f"part_{index % 3}" / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {index}")
    few = texts(open_corpus(many, validation_fraction=0.05).held_out)
    more = open_corpus(many, validation_fraction=0.3)
    assert 3 <= len(few) <= 20
    assert 40 <= len(texts(more.held_out)) <= 80
    assert set(few) < set(texts(more.held_out))
    found = sorted(texts(more.train) + texts(more.held_out))
    assert found == sorted(b"text %d" % index for index in range(200))
    many.rename(tmp_path / "moved")
    assert texts(open_corpus(tmp_path / "moved", validation_fraction=0.05).held_out) == few


def test_single_text_file_holds_out_its_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0123456\u00e9\u00e9\u00e9", encoding="utf-8")
    for end, vocab_size in ((0, 256), (256, 257)):
        # A token beyond them may end documents of bytes.
        options = {"end_of_document": 256} if end else {}
        opened = open_corpus(path, validation_fraction=0.2, vocab_size=vocab_size, **options)
        assert ids(opened.train) == [[*b"0123456\xc3\xa9", end]]
        assert ids(opened.held_out) == [[*b"\xc3\xa9\xc3\xa9", end]]
    path.write_bytes(b"ab\0cdefghi")
    opened = open_corpus(path, validation_fraction=0.2, vocab_size=257, end_of_document=256)
    assert ids(opened.train) == [[*b"ab\0cdefg", 256]]


@pytest.mark.parametrize("end", [0, 256])
def test_bytes_decode_any_token(end):
    decode = ByteTokenizer(end_of_document=end, vocab_size=300).decode
    assert decode(np.array([97, 255, end, 98, 299])) == "a\ufffd\nb\ufffd"


def test_jsonl_has_a_document_a_line_and_a_split_that_no_other_line_changes(tmp_path, monkeypatch):
    """Whether a document is held out follows from the number of its line alone."""
    monkeypatch.setattr(encoding, "CHUNK", 20)  # Of some lines each.
    given = [f"text {index}" for index in range(100)]
    given[50:50] = ["", "  "]
    written = [json.dumps({"body": x, "id": 7}) if x.strip() else x for x in given]
    written[0] = f"\ufeff{written[0]}"  # A byte order mark is no part of a record.
    opened = open_corpus(write_lines(tmp_path / "a.jsonl", written), text_key="body")
    is_held_out = [share_of_key(f"a.jsonl:{i}") < 0.05 for i in range(1, 103)]
    parts = [
        [x.encode() for x, held in zip(given, is_held_out, strict=True) if x.strip() and held == y]
        for y in (False, True)
    ]
    assert [texts(opened.train), texts(opened.held_out)] == parts
    assert len(parts[1]) > 1
    assert "the end of every document" not in opened.description


# The tokenizer of a file.


def test_tokenizer_encodes_whole_documents_and_decodes(tmp_path, tokenizer):
    path = write_lines(
        tmp_path / "a.jsonl", ['{"text": "one two three one"}', '{"text": "three four"}']
    )
    other = write_lines(tmp_path / "b.jsonl", ['{"text": "two"}'])
    options = {"validation_path": other, "tokenizer": tokenizer}
    opened = open_corpus(path, vocab_size=5, **options)
    assert ids(opened.train) == [[1, 2, 3, 1, 4, 3, 0, 4]]
    assert (opened.end_of_document, opened.unit) == (4, "token")
    assert opened.decode(np.array([3, 1, 4, 17])) == "three one <eos>"
    given = open_corpus(path, end_of_document=5, vocab_size=6, **options)
    assert ids(given.train) == [[1, 2, 3, 1, 5, 3, 0, 5]]


def test_file_that_is_no_tokenizer_or_has_no_end_of_document_raises(tmp_path):
    path, no_tokenizer = tmp_path / "t.json", "must be a Hugging Face tokenizer.json; got "
    with_no_end = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    for content, words in (
        *((x, f"{no_tokenizer}'{path}'") for x in (None, b"{}", b"\xff", b"", b"[" * 100_000)),
        (with_no_end.to_str().encode(), "A tokenizer must"),
    ):
        if content is not None:
            path.write_bytes(content)
        with refused(InputError, words):
            FileTokenizer(path, end_of_document=None, vocab_size=9)


# Files of tokens.


def test_npy_holds_out_the_end_of_each_file(tmp_path):
    # Of the last no token is held out.
    contents = (np.arange(10, dtype=np.uint16), np.arange(20, 40, dtype=">i8"), np.arange(1))
    for name, tokens in zip("abc", contents, strict=True):
        np.save(tmp_path / f"{name}.npy", tokens)
    opened = open_corpus(tmp_path, validation_fraction=0.3, vocab_size=40, end_of_document=7)
    assert ids(opened.train) == [[*range(7)], [*range(20, 34)], [0]]
    assert ids(opened.held_out) == [[7, 8, 9], [*range(34, 40)]]
    assert (opened.end_of_document, opened.decode, opened.unit) == (7, None, "token")
    assert "3 files, 22 tokens to train on; 2 files, 9 tokens held out" in opened.description
    assert all(isinstance(stream.tokens, np.memmap) for stream in opened.train)
    # What is held out by its name is not trained on.
    opened = open_corpus(tmp_path, validation_path=tmp_path / "b.npy")
    assert ids(opened.train) == [[*range(10)], [0]]
    assert ids(opened.held_out) == [[*range(20, 40)]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_bin_is_read_as_its_type(tmp_path, dtype):
    np.array([3, 1, 4, 1, 5], dtype).tofile(tmp_path / "a.bin")
    np.array([9, 2], dtype).tofile(tmp_path / "b.bin")
    opened = open_corpus(
        tmp_path / "a.bin", validation_path=tmp_path / "b.bin", bin_dtype=dtype, vocab_size=11
    )
    assert ids(opened.train) == [[3, 1, 4, 1, 5]]
    assert ids(opened.held_out) == [[9, 2]]
    assert opened.end_of_document is None


def test_token_beyond_the_vocabulary_raises_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHECKED_TOKENS", 10)
    tokens = np.zeros(200, np.int32)
    tokens[[50, 160]] = 40
    np.save(tmp_path / "a.npy", tokens)
    opened = open_corpus(tmp_path, validation_fraction=0.5, vocab_size=40)
    assert not opened.train[0].read(10, 50).any()
    with refused(InputError, "Token ids must"):
        opened.train[0].read(45, 55)
    with refused(InputError, "Token ids must"):
        opened.held_out[0].read(55, 65)


def test_bin_dtype_that_cannot_hold_the_vocabulary_raises(tmp_path):
    """Files of uint32 would be read as twice as many tokens, all of which are in the vocabulary."""
    np.arange(1000, dtype=np.uint32).tofile(tmp_path / "a.bin")
    with refused(InputError, bin_dtype="uint16"):
        open_corpus(tmp_path, vocab_size=128_256)
    open_corpus(tmp_path, vocab_size=128_256, bin_dtype="uint32")
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    open_corpus(tmp_path, vocab_size=1 << 16)


def test_tokens_that_fill_no_sequence_are_counted_in_the_log(tmp_path):
    (tmp_path / "tokens").mkdir()
    for name, length in [("a", 1000), *((str(i), 60) for i in range(9))]:
        np.save(tmp_path / "tokens" / name, np.zeros(length, np.uint16))
    np.save(tmp_path / "val.npy", np.zeros(100, np.uint16))
    data = DataConfig(path=(tmp_path / "tokens",), validation_path=tmp_path / "val.npy")
    config = dataclasses.replace(
        gpt_tiny(),
        data=data,
        seq_len=64,
        sample=TextSampleConfig(length=8),
        run_dir=tmp_path / "run",
    )
    opened = GPTTask().open_data(config, Layout("contiguous", 1))
    assert len(opened.train) == 15
    left_out = 9 * 60 + 1000 - 15 * 64
    assert f"; {left_out} tokens are not trained on, as they fill no" in opened.description


def test_digest_of_large_file_of_tokens_sees_both_ends_and_the_length(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HASHED_BYTES", 80)
    monkeypatch.setattr(files, "HASHED_BLOCK", 8)

    def digest(tokens):
        np.asarray(tokens, np.uint16).tofile(tmp_path / "a.bin")
        return open_corpus(tmp_path, vocab_size=2000).digest

    for length in (40, 41, 1000):
        tokens = np.arange(length)
        before = digest(tokens)
        assert digest(tokens) == before
        assert digest(tokens[:-1]) != before
        for index in (0, length - 1):
            changed = tokens.copy()
            changed[index] = 7
            assert digest(changed) != before
    # A file that is not large is hashed whole.
    assert digest([*range(20), 7, *range(21, 40)]) != digest(range(40))


# What is held out by its place or its name.


@pytest.mark.parametrize("option", ["val/b.txt", "val", "link.txt"])
def test_what_is_held_out_is_not_trained_on(tmp_path, option):
    (tmp_path / "data" / "val").mkdir(parents=True)
    write(tmp_path / "data", a_txt=b"one", c_txt=b"three")
    write(tmp_path / "data/val", b_txt=b"two")
    (tmp_path / "link.txt").symlink_to(tmp_path / "data/val/b.txt")
    place = tmp_path if option == "link.txt" else tmp_path / "data"
    opened = open_corpus(tmp_path / "data", validation_path=place / option)
    assert texts(opened.train) == [b"one", b"three"]
    assert texts(opened.held_out) == [b"two"]
    assert "not trained on, since held out: 'val/b.txt'" in opened.description


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        (["train.bin"], ["val.bin"]),
        (["train.bin"], ["validation.bin"]),
        (["train_000.bin", "train_001.bin"], ["val_000.bin"]),
        (["train-00000-of-00001.bin"], ["valid-00000-of-00001.bin"]),
    ],
)
def test_parts_by_name_are_split_as_meant(tmp_path, train, held_out):
    """As in a folder of nanoGPT, with other files beside them."""
    write(tmp_path, input_txt=b"text", meta_pkl=b"\xff", prepare_py=b"", test_bin=b"\0\0")
    for start, name in enumerate([*train, *held_out]):
        np.arange(start, start + 5, dtype=np.uint16).tofile(tmp_path / name)
    opened = open_corpus(tmp_path)
    found = [[*range(start, start + 5)] for start in range(len(train) + 1)]
    assert ids(opened.train) == found[:-1]
    assert ids(opened.held_out) == found[-1:]
    assert f"held out from '{held_out[0]}'; 4 other files left out" in opened.description
    assert "'input.txt', 'meta.pkl'" in opened.description
    with refused(InputError, "data.validation_fraction must"):
        open_corpus(tmp_path, validation_fraction=0.3)


def test_parts_by_name_may_be_text(tmp_path):
    write_lines(tmp_path / "train.jsonl", ['{"text": "one"}', '{"text": "two"}'])
    (tmp_path / "val.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    write(tmp_path.parent, other_txt=b"four")
    # Another validation path is heeded.
    other = tmp_path.parent / "other.txt"
    for path, held_out in ((None, b"three"), (other, b"four")):
        opened = open_corpus(tmp_path, validation_path=path)
        assert texts(opened.train) == [b"one", b"two"]
        assert texts(opened.held_out) == [held_out]


@pytest.mark.parametrize("names", [("train.py", "val.py"), ("trainer.txt", "val.txt")])
def test_other_names_do_not_split(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text(name)
    write(tmp_path, other_txt=b"other")
    opened = open_corpus(tmp_path, validation_fraction=0.5)
    assert len(texts(opened.train)) + len(texts(opened.held_out)) == 3


# Kinds of files.


@pytest.mark.parametrize("block", [1, 2, 3, 5, 100])
def test_text_is_read_in_parts_without_cutting_characters(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents, "BLOCK", block)
    text = "a\u00e9\u6f22\U0001f389b"
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    for cut in range(1, 5):
        opened = open_corpus(path, validation_fraction=1 - cut / 5)
        assert ids(opened.train) == [[*text[:cut].encode(), 0]]
        assert ids(opened.held_out) == [[*text[cut:].encode(), 0]]
    for mark in ("\ufeff", "\ufeff\ufeff"):
        path.write_text(mark + text, encoding="utf-8")
        assert ids(open_corpus(path, validation_fraction=0.2).train) == [
            [*(mark[1:] + text[:4]).encode(), 0]
        ]
    for wrong in (text.encode() + b"c\xe9d", text.encode() + b"\xe6\xbc", b"abc\0d"):
        path.write_bytes(wrong)
        with refused(InputError, "Text must"):
            open_corpus(path, validation_fraction=0.2)
    for order in ("utf-16", "utf-16-be"):
        path.write_bytes(("\ufeff" * (order != "utf-16") + text).encode(order))
        with refused(InputError, "Text must be UTF-8", "as files of UTF-16 begin"):
            open_corpus(path, validation_fraction=0.2)


# Wrong data.


def data_are(text):
    return {"a_txt": text}


TWO = {"a_txt": b"one", "b_txt": b"two"}
TOKENS = {"a_npy": npy(np.arange(100) % 9)}
GZIP = gzip.compress(bytes(range(97, 120)), mtime=0)
WRONG_LINES = [
    ('{"text": ', "a.jsonl"),
    ("[" * 100_000, "a.jsonl"),
    ('["text"]', "a.jsonl"),
    ('{"Text": "a"}', "'text'"),
    ('{"text": 7}', "'text'"),
    (r'{"text": "\ud800"}', "'\\ud800'"),
    (r'{"text": "a\u0000"}', "a.jsonl"),
]
KINDS = ["a.json", "a.json.gz", "a.JSON", "a.txt.zst", "a.tar.gz", "a.tgz", "a.bin.gz", "a.npy.gz"]
# The files; the path, and other options, of which "validation_path" lies in the same folder; words.
WRONG_DATA = [
    (data_are(b"one two three"), "a.txt", dict(tokenizer=True, vocab_size=4), "vocab_size=4"),
    (data_are(b"text"), "a.txt", dict(vocab_size=255), "vocab_size=255"),
    (data_are(b"text"), "a.txt", dict(vocab_size=128_256), "vocab_size=128256. Give --data.t"),
    ({}, "", dict(end_of_document=256), "end_of_document=256"),
    # Files of tokens.
    (
        {"a_bin": np.arange(1, 101, dtype=np.uint16).tobytes()},
        *("", dict(bin_dtype="uint32", vocab_size=50_000), "Token ids must"),
    ),
    *[
        (
            {"a_npy": npy(np.insert(np.zeros(99, np.int32), 93, token))},
            *("", dict(validation_fraction=0.2, vocab_size=40)),
            *(f"got id {token} at token 93 of '", "a.npy' with vocab_size=40"),
        )
        for token in (-1, 40)
    ],
    ({"a_bin": bytes(13)}, "", dict(bin_dtype="int32"), "bin_dtype='int32'"),
    *[
        (
            {"a_bin": np.array([magic, 1, 9, *[0] * 253], "<i4").tobytes() + bytes(36)},
            *("", dict(vocab_size=1 << 16, bin_dtype=dtype), "header of llm.c", dtype),
        )
        for magic, dtype in ((20240520, "uint16"), (20240801, "uint32"))
    ],
    *[
        ({"a_npy": npy(np.arange(100))[:kept]}, "", {}, "a.npy' must be a whole", "truncated")
        for kept in (0, 5, 40, 200)
    ],
    *[
        ({"a_npy": npy(array)}, "", {}, "must hold a vector of integers; got")
        for array in (np.zeros((2, 3), int), np.zeros(3), np.array(3))
    ],
    ({"a_npy": npy(np.array([{}]))}, "", {}, "must be a whole .npy file of"),
    ({"a_npy": npy(np.zeros(0, int))}, "a.npy", {}, "a.npy' must hold tokens; got none"),
    ({"a_bin": b""}, "a.bin", {}, "a.bin' must hold tokens; got none"),
    (TOKENS, "a.npy", dict(tokenizer=True), "data.tokenizer must"),
    (TOKENS, "", dict(end_of_document=3, mask_documents=False), "mask_documents=False"),
    # What is held out.
    (TWO, "a.txt", dict(validation_path=""), "data.path must"),
    # Of one character each, so that only whole documents can be held out.
    *[({"a_txt": b"a", "b_txt": b"b"}, "", dict(validation_fraction=x), "fraction must leave")
      for x in (0.999, 0.001)],
    (data_are(b"a"), "", {}, "data.validation_fraction must"),
    ({"c_npy": npy(np.zeros(3, int))}, "c.npy", dict(validation_fraction=0.1), "must leave some"),
    # Options that do nothing.
    *[
        (TWO, "", options, f"data.{next(iter(options))} must be left out where it has no effect")
        for options in (
            *(dict(bin_dtype="int32"), dict(text_key="body")),
            dict(validation_fraction=0.3, validation_path="a.txt"),
        )
    ],
    # Paths.
    (data_are(b"text"), "book.txt", {}, "data.path must exist", "book.txt"),
    (data_are(b"text"), "a.txt", dict(validation_path="b.txt"), "data.validation_path must exist"),
    ({"_hidden": b"text"}, "", {}, "data.path must"),
    (data_are(b""), "a.txt", {}, "Data must"),
    ({"c_jsonl": b"\n"}, "c.jsonl", {}, "Data must"),
    ({"b_txt": b"", "d_txt": b"text"}, "d.txt", dict(validation_path="b.txt"), "Data must"),
    ({"a_bin": b"1", "b_txt": b"2"}, "", {}, "All files of data.path must"),
    (
        {"a_bin": b"1", "b_txt": b"2"},
        *("b.txt", dict(validation_path="a.bin"), "data.validation_path must"),
    ),
    *[({name.replace(".", "_"): b"anything"}, path, {}, "data.path must be text", repr(name))
      for name in KINDS for path in (name, "")],
    # Text.
    *[({"a_txt_gz": x}, "", {}, "a.txt.gz") for x in (b"no gzip", GZIP[:-9])],
    ({"a_jsonl": b'{"text": "one"}\n{"text": "caf\xe9"}\n'}, "", {}, "Text must"),
    *[({"a_jsonl": lines('{"text": "one"}', "", x)}, "", {}, named) for x, named in WRONG_LINES],
]  # fmt: skip


@pytest.mark.parametrize("row", WRONG_DATA, ids=lambda row: f"{[*row[0]]}, {row[1]}, {row[2]}")
def test_wrong_data_and_options_are_refused(row, tmp_path, tokenizer):
    files, path, options, *words = row
    options = dict(options)
    if "tokenizer" in options:
        options["tokenizer"] = tokenizer
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", **files)
    if "validation_path" in options:
        options["validation_path"] = tmp_path / "data" / options["validation_path"]
    with refused(InputError, *words):
        open_corpus(tmp_path / "data" / path, **options)


def test_links_that_dangle_or_loop_raise(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    for path in [tmp_path, tmp_path / "a.txt"]:
        with refused(InputError, "a.txt"):
            open_corpus(path)
    (tmp_path / "a.txt").unlink()
    write(tmp_path, a_txt=b"text")
    (tmp_path / "loop").symlink_to(tmp_path)
    with refused(InputError, "A folder of data must"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.npy", "a.bin", None])
def test_unreadable_file_or_folder_raises(tmp_path, name, monkeypatch):
    # Permissions would not stop root.
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    if name is None:
        (tmp_path / "inner").mkdir()
        monkeypatch.setattr(os, "scandir", refuse)
    else:
        (tmp_path / name).write_bytes(npy(np.zeros(9, int)))
        monkeypatch.setattr("builtins.open", refuse)
        monkeypatch.setattr("io.open", refuse)
        monkeypatch.setattr(np, "memmap", refuse)
    with refused(InputError, "must be readable; got PermissionError: Permission denied"):
        open_corpus(tmp_path)


def write_documents(folder, kind, contents):
    """Documents in files of these names, or in lines of one file."""
    if kind == "jsonl":
        texts = [json.dumps({"text": x.decode()}) for x in contents.values()]
        write_lines(folder / "a.jsonl", texts)
    else:
        for name, text in contents.items():
            (folder / name).write_bytes(text)


@pytest.mark.parametrize("count", [2, 3, 5, 10, 20])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_few_documents_hold_out_the_end_of_each_if_none_falls_to_a_part(tmp_path, count, kind):
    letters = [bytes([ord("a") + i]) * 100 for i in range(count)]
    # Of these names and lines, none has a hash that is held out.
    names = [x for x in (f"{i}.txt" for i in range(100, 200)) if share_of_key(x) >= 0.05]
    write_documents(tmp_path, kind, dict(zip(names, letters, strict=False)))
    held_out = 0.05 if kind == "txt" else 0.01
    opened = open_corpus(tmp_path, validation_fraction=held_out)
    cut = round(100 * (1 - held_out))
    assert sorted(texts(opened.train)) == [x[:cut] for x in letters]
    assert sorted(texts(opened.held_out)) == [x[cut:] for x in letters]
    assert "held out, the end of every document, as no choice of whole" in opened.description


@pytest.mark.parametrize("held_out", [1e-4, 0.05, 0.5, 0.9999])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_short_documents_leave_a_character_to_each_part(tmp_path, held_out, kind, monkeypatch):
    monkeypatch.setattr(encoding, "share_of_key", lambda key: 0.99999)
    whole = [bytes([ord("a") + i]) * size for i, size in enumerate([0, 1, 2, 3, 10])]
    write_documents(tmp_path, kind, {f"{i}.txt": text for i, text in enumerate(whole)})
    opened = open_corpus(tmp_path, validation_fraction=held_out)
    train, rest = (b"".join(texts(x)) for x in (opened.train, opened.held_out))
    assert b"".join(sorted(x[:1] for x in whole if len(x) > 1)) == bytes(sorted(set(rest)))
    for text in whole:
        kept = train.count(text[:1]) if text else 0
        assert kept + (rest.count(text[:1]) if text else 0) == len(text)
        assert kept or not text
        if len(text) > 1:
            assert abs(kept - len(text) * (1 - held_out)) <= 1


def test_text_shorter_than_a_sequence_is_filled_up_and_said(tmp_path):
    texts = [json.dumps({"text": f"line {i} of a short file"}) for i in range(5)]
    data = DataConfig(path=(write_lines(tmp_path / "a.jsonl", texts),))
    config = dataclasses.replace(gpt_tiny(), data=data, run_dir=tmp_path / "runs" / "a")
    with pytest.warns(UserWarning, match=r"at most 110 bytes in one place, .* --seq-len 109\."):
        data = GPTTask().open_data(config, Layout("contiguous", 1))
    assert "; held-out sequences are filled up to --seq-len 1024" in data.description
    for part, length in ((data.train, 110), (data.held_out, 10)):
        (sequence,) = (part[i] for i in range(len(part)))
        assert (sequence >= 0).sum() == length

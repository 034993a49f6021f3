"""Files of tokenizers that are wrong or strange, and what they become."""

import hashlib
import json

import numpy as np
import pytest
import tokenizers

from refusals import refused
from startrail_jax.errors import InputError
from trainer.data import documents, slices
from trainer.gpt.config import DataConfig, GPTTrainConfig
from trainer.gpt.corpus import open_corpus
from trainer.gpt.tokenizer import FileTokenizer
from trainer.run.settings import load_config, read_kind

pytestmark = pytest.mark.quick


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

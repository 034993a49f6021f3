"""Files of tokenizers that are wrong or strange, and what they become."""

import json
import sys

import numpy as np
import pytest
import transformers

from refusals import refused
from startrail_jax.errors import InputError
from trainer.data import documents, slices
from trainer.errors import MissingPackageError
from trainer.gpt.config import DataConfig, GPTTrainConfig
from trainer.gpt.corpus import open_corpus
from trainer.gpt.tokenizer import FileTokenizer, check_tokenizer_of_model, load_tokenizer
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


def test_hash_follows_from_the_tokens_and_not_from_the_ends_of_lines(tmp_path):
    path = tokenizer_file(tmp_path / "tokenizer.json")
    text = path.read_text().replace(",", ",\n")

    def digest():
        return FileTokenizer(path, end_of_document=None, vocab_size=2).digest

    digests = set()
    for end in ("\n", "\r\n", "\r"):
        path.write_bytes(text.replace("\n", end).encode())
        digests.add(digest())
    assert len(digests) == 1
    added = {"added_tokens_decoder": {"2": {"content": "<call>", "special": False}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    assert digest() not in digests


def test_tokens_that_only_the_config_names_are_tokens(tmp_path):
    """Control tokens of some models are in `added_tokens_decoder` alone."""
    path = tokenizer_file(tmp_path / "tokenizer.json")
    added = {
        str(2 + n): {"content": name, "special": n == 0} for n, name in enumerate(["<|x|>", "<y>"])
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = FileTokenizer(path, end_of_document=None, vocab_size=4)
    assert tokenizer.ids("a<|x|>a<y>") == [0, 2, 0, 3]
    assert tokenizer.num_ids == 4
    model = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert model("a<|x|>a<y>").input_ids == [0, 2, 0, 3]


def test_special_token_that_the_model_lacks_is_refused(tmp_path):
    """transformers gives it a new id."""
    path = tokenizer_file(tmp_path / "tokenizer.json")
    assert check_tokenizer_of_model(path, 2, None) == ""
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with refused(InputError, "no ids beyond its vocabulary", vocab_size=2):
        check_tokenizer_of_model(path, 2, None)


def test_missing_transformers_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"must have the package transformers.*\[hf\]"):
        load_tokenizer(tokenizer_file(tmp_path / "tokenizer.json"))


def test_interruption_of_the_tokenizer_is_no_error_of_its_file(tmp_path, monkeypatch):
    def interrupt(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.__init__", interrupt)
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

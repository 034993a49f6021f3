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
from trainer.gpt.tokenizer import FileTokenizer, check_tokenizer_of_model, load_tokenizer

pytestmark = pytest.mark.quick

DOCUMENT = documents.Document(key="", place="", text="a b")


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 1}, "unk_token": "a"}


def tokenizer_file(path, **changes):
    values = {"version": "1.0", "added_tokens": [], "model": WORDS, **changes}
    path.write_text(json.dumps(values))
    return path


def open_tokenizer(path, **changes):
    return FileTokenizer(tokenizer_file(path, **changes), end_of_document=None, vocab_size=2)


@pytest.mark.parametrize(
    ("broken", "use", "words"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            *(lambda one: one, ["PanicException: ", "Give the file"]),
        ),
        *[
            ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, encode, words)
            for encode, words in (
                (lambda one: one.encode([DOCUMENT]), ["PanicException: ", " on a text"]),
                (lambda one: one.ids("a b"), ["PanicException: ", " on a text"]),
            )
        ],
        (
            {"decoder": {"type": "Strip", "content": "a", "start": 100, "stop": 100}},
            *(lambda one: one.decode(np.array([0, 1])), ["PanicException: "]),
        ),
        # A word that it does not know.
        ({"model": WORDS | {"unk_token": "none"}}, lambda one: one.ids("b"), []),
    ],
)
def test_failure_of_the_tokenizer_names_the_file(tmp_path, broken, use, words):
    with refused(InputError, f"'{tmp_path / 'x.json'}'", *words):
        use(open_tokenizer(tmp_path / "x.json", **broken))


def test_what_is_no_fault_of_the_file_is_not_said_of_it(tmp_path, monkeypatch):
    def interrupt(*given, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast.__init__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_tokenizer(tmp_path / "x.json")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(MissingPackageError, "must have the package transformers", "[hf]"):
        load_tokenizer(tokenizer_file(tmp_path / "tokenizer.json"))


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


def test_file_is_loaded_once_until_it_changes(tmp_path):
    path = tokenizer_file(tmp_path / "tokenizer.json")
    first = load_tokenizer(path)
    assert load_tokenizer(path) is first
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    assert load_tokenizer(path).eos_token_id == 1


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


def test_deep_json_names_its_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[" * 100_000)
    with refused(InputError, "must be a Hugging Face tokenizer.json; got '", "x.json'"):
        FileTokenizer(path, end_of_document=None, vocab_size=2)


def test_text_that_cannot_be_cut_is_refused(monkeypatch):
    monkeypatch.setattr(slices, "LONGEST_SLICE", 1 << 12)
    slicer = slices.Slicer(lambda text: [ord(x) for x in text], length=1 << 10, window=64)
    whole = documents.Document(key="a", place="a.txt", text="a" * (1 << 14))
    with refused(InputError, "Text must"):
        list(slicer.add(whole))

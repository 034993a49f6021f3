"""Files of tokenizers that are wrong or strange, and what they become."""

import json
import sys

import numpy as np
import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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


TEXTS = [
    "Hello, world 12345!  Two  spaces\nA new line, \u00fcml\u00e4ut \ufb01",
    "  def f(x):\n    return x + 1000<|end|> ",
]


def trained(model, pre_tokenizer, decoder, normalizer=None, **options):
    found = Tokenizer(model)
    found.pre_tokenizer, found.decoder = pre_tokenizer, decoder
    if normalizer is not None:
        found.normalizer = normalizer
    kind = trainers.WordLevelTrainer if isinstance(model, models.WordLevel) else trainers.BpeTrainer
    special = ["<unk>", "<|end|>", "<s>", "</s>"]
    found.train_from_iterator(
        TEXTS, kind(vocab_size=330, special_tokens=special, show_progress=False, **options)
    )
    return found


def byte_level(*first, prefix=False, normalizer=None):
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(
        models.BPE(), pre_tokenizers.Sequence([*first, last]), decoders.ByteLevel(), normalizer,
        initial_alphabet=alphabet,
    )  # fmt: skip


def metaspace(scheme):
    kinds = (x.Metaspace(prepend_scheme=scheme) for x in (pre_tokenizers, decoders))
    return trained(models.BPE(unk_token="<unk>"), *kinds)


TOKENIZERS = {
    "bytes": byte_level,
    "digits": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "three digits": lambda: byte_level(pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")),
    "prefix space": lambda: byte_level(prefix=True),
    "lower case": lambda: byte_level(normalizer=normalizers.Lowercase()),
    "NFKC": lambda: byte_level(normalizer=normalizers.NFKC()),
    "metaspace": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "characters": lambda: trained(
        *(models.WordLevel(unk_token="<unk>"), pre_tokenizers.Split(Regex("."), "isolated")),
        decoders.Fuse(),
    ),
}
CLASSES = {
    "llama": "LlamaTokenizerFast",
    "mistral": "LlamaTokenizer",
    "qwen2": "LlamaTokenizerFast",
    "qwen3": None,
    "smollm3": "PreTrainedTokenizerFast",
    "gemma2": "GemmaTokenizerFast",
    "gemma3_text": "Qwen2TokenizerFast",
}
"""Family -> the class that the folder names, rightly or wrongly; None for none."""


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_are_those_of_the_file_whatever_the_folder_names(kind, tmp_path):
    """transformers makes a tokenizer of the class, and drops what the file says beside it."""
    path, file = tmp_path / "tokenizer.json", TOKENIZERS[kind]()
    file.save(str(path))
    expected = [file.encode(text, add_special_tokens=False).ids for text in TEXTS]
    for family, name in CLASSES.items():
        named = {"tokenizer_class": name, "eos_token": "</s>", "chat_template": "{{ messages }}"}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        settings = tmp_path / "tokenizer_config.json"
        settings.write_text(json.dumps(named)) if name else settings.unlink(missing_ok=True)
        found = FileTokenizer(path, end_of_document=1, vocab_size=330)
        assert [found.ids(text) for text in TEXTS] == expected, family
        assert [found.decode(np.array(x)) for x in expected] == [
            file.decode(x, skip_special_tokens=False) for x in expected
        ]
        loaded = load_tokenizer(path)
        if name:
            assert (loaded.eos_token, loaded.chat_template) == ("</s>", "{{ messages }}")


def test_text_that_cannot_be_cut_is_refused(monkeypatch):
    monkeypatch.setattr(slices, "LONGEST_SLICE", 1 << 12)
    slicer = slices.Slicer(lambda text: [ord(x) for x in text], length=1 << 10, window=64)
    whole = documents.Document(key="a", place="a.txt", text="a" * (1 << 14))
    with refused(InputError, "Text must"):
        list(slicer.add(whole))

"""The tokens that some pretrained models have always seen in front of texts and at their end."""

import dataclasses
import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import transformers

from configs.gpt import gpt_tiny
from pretrained import REFERENCES
from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from train import read_command_line
from trainer import pretrained
from trainer.config import LoraConfig
from trainer.data import slices
from trainer.gpt.batches import next_token_batch
from trainer.gpt.chat.corpus import open_examples
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.gpt.corpus import open_corpora
from trainer.gpt.pretrained import config_json
from trainer.gpt.pretrained.defaults import ending_of, eos_of, with_model_of
from trainer.gpt.task import GPTTask
from trainer.gpt.text import encode_prompt, open_tokenizer
from trainer.gpt.tokenize import main as tokenize
from trainer.gpt.tokenizer import beginning_of
from trainer.run.settings import save_config

NATURAL = Layout("contiguous", 1)
BEGIN, END, OTHER, WORD = range(4)


@pytest.fixture
def tokenizer(tmp_path):
    return save(tmp_path / "tokenizer.json", "<s> $A")


def save(path, template):
    """A tokenizer of letters, with a template for what it puts around a text elsewhere."""
    letters = {chr(x): x for x in range(32, 127)}
    names = {"<s>": BEGIN, "</s>": END, "<|im_start|>": OTHER, "é": WORD}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(names | letters, []))
    built.add_special_tokens(["<s>", "</s>", "<|im_start|>"])
    if template is not None:
        built.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", BEGIN), ("</s>", END)]
        )
    built.save(str(path))
    return path


def data_of(tokenizer, *records, held_out=None, **options):
    """The config of data with these records, and with `held_out` or the same held out."""
    folder = tokenizer.parent
    for name, lines in (("train", records), ("val", records if held_out is None else held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    paths = dict(path=(folder / "train.jsonl",), validation_path=folder / "val.jsonl")
    return DataConfig(**paths, tokenizer=tokenizer, **options)


def opened(config, seq_len=32):
    cache = config.path[0].parent / "cache"
    (data,) = open_examples(config, NATURAL, vocab_size=128, seq_len=seq_len, cache=cache)
    return data


ASKED = {"prompt": "ask", "completion": "yes"}
ANSWER = {"role": "assistant", "content": "yes"}
AS_OBJECT = {"__type": "AddedToken", "content": "<s>"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("template", "beside", "expected"),
    [
        ("<s> $A", None, BEGIN),  # Llama 3, Gemma.
        ("<s> $A </s>", None, BEGIN),
        ("$A </s>", None, None),
        (None, {"bos_token": "<s>", "add_bos_token": False}, None),  # Qwen 2.
        ("<s> $A", {"bos_token": AS_OBJECT, "add_bos_token": True}, BEGIN),  # Llama 2.
        (None, {"bos_token": None}, None),
        ("<s> </s> $A", None, None),
    ],
)
def test_tokenizer_says_what_is_in_front_of_a_text(template, beside, expected, tmp_path):
    path = save(tmp_path / "tokenizer.json", template)
    if beside is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    assert beginning_of(path) == expected
    model = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert (model("a").input_ids[0] == BEGIN) == ("<s>" in (template or ""))


def test_every_document_begins_with_it_once(tokenizer, monkeypatch):
    monkeypatch.setattr(slices.Slicer.__init__, "__kwdefaults__", {"length": 40, "window": 10})
    texts = ["short", "<s>named", "", "long words " * 30]
    config = data_of(tokenizer, *({"text": x} for x in texts), held_out=[{"text": "held out"}])
    plain, begun = (
        open_corpora(dataclasses.replace(config, begin_of_document=x), vocab_size=128)[0]
        for x in (None, BEGIN)
    )
    tokens = begun.train[0].tokens
    ends = np.flatnonzero(tokens == END) + 1
    # An empty document has none: nothing is learned from it, as without the token.
    begins = [begin for begin in (0, *ends[:-1]) if tokens[begin] != END]
    assert len(begins) == len(texts) - 1
    assert [int(x) for x in np.flatnonzero(tokens == BEGIN)] == begins
    named = plain.train[0].tokens
    np.testing.assert_array_equal(tokens[tokens != BEGIN], named[named != BEGIN])
    assert begun.digest != plain.digest
    batch = next_token_batch(tokens[None], layout=NATURAL, end_of_document=END)
    # No document has to guess that another begins.
    assert not batch.weights[batch.targets == BEGIN].any()
    assert not batch.weights[(batch.tokens == BEGIN) & (batch.targets == END)].any()
    assert (batch.positions[batch.tokens == BEGIN] == 0).all()
    # Tokens of bytes have no such token.
    of_bytes = dataclasses.replace(config, tokenizer=None, begin_of_document=1)
    with refused(InputError, "data.begin_of_document must"):
        open_corpora(of_bytes, vocab_size=256)


def test_completions_begin_with_it_and_conversations_as_their_template_says(tokenizer):
    tokenizer.with_name("chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    said = {"messages": [{"role": "user", "content": "ask"}, ANSWER]}
    config = data_of(tokenizer, ASKED, said, loss="answers", begin_of_document=BEGIN)
    with pytest.warns(UserWarning, match=r"2 of 4 examples do not begin with '<s>', as prompts of"):
        row = opened(config).train[0]
    first, second = (row.tokens[row.examples == i] for i in range(2))
    assert first.tolist() == [BEGIN, *map(ord, "askyes"), END]
    assert row.counted[row.examples == 0].tolist() == [False] * 4 + [True] * 4
    # The token that begins the next turn ends this one.
    assert second.tolist() == [OTHER, *map(ord, "ask"), OTHER, *map(ord, "yes"), OTHER]


@pytest.mark.parametrize("asked", ["tokenizer", "template", "flag"])
def test_token_that_no_conversation_gets_raises_if_it_was_asked_for(asked, tmp_path):
    tokenizer = save(tmp_path / "tokenizer.json", "<s> $A" if asked == "tokenizer" else None)
    tokenizer.with_name("chat_template.jinja").write_text(
        ("<s>" if asked == "template" else "") + "{% for m in messages %}{% generation %}"
        "{{ m.content }}</s>{% endgeneration %}{% endfor %}"
    )
    said = {"messages": [ANSWER]}
    outcome = {
        # A pretrained model has seen the token first: this is its default, not what a user wants.
        "tokenizer": pytest.warns(UserWarning, match=r"2 of 2 examples do not begin with '<s>'"),
        "template": nullcontext(),
        "flag": refused(InputError, "data.begin_of_document must"),
    }
    with outcome[asked]:
        opened(data_of(tokenizer, said, loss="answers", begin_of_document=BEGIN))


def test_prompt_begins_as_documents_do(tokenizer, tmp_path, capsys):
    def prompt(text, **options):
        data = DataConfig(tokenizer=tokenizer, **options)
        return encode_prompt(open_tokenizer(data, vocab_size=128), text).tolist()

    for text in ("ab", "<s>ab"):
        assert prompt(text, begin_of_document=BEGIN) == [BEGIN, ord("a"), ord("b")]
    # The model may begin by itself.
    assert prompt("", begin_of_document=BEGIN) == [BEGIN]
    # Files of tokens say what prompts need.
    (tmp_path / "a.txt").write_text("some text " * 9)
    flags = ["--tokenizer", str(tokenizer), "--begin-of-document", str(BEGIN)]
    tokenize([str(tmp_path / "a.txt"), str(tmp_path / "out"), *flags])
    assert np.load(tmp_path / "out" / "train.npy")[0] == BEGIN
    assert "every document begins with <s>: begin prompts of" in capsys.readouterr().err
    assert prompt("<s>a") == [BEGIN, ord("a")]


@pytest.mark.parametrize("saved", [OTHER, None])
def test_config_of_a_run_says_how_documents_begin(saved, tokenizer, tmp_path):
    config = gpt_tiny()
    data = dataclasses.replace(config.data, tokenizer=tokenizer, begin_of_document=saved)
    config = dataclasses.replace(
        config, init_from=tokenizer.parent, run_dir=tmp_path / "new", data=data
    )

    def found(config, **flags):
        return GPTTask().after_flags(config, flags.get).data

    assert found(config).begin_of_document == saved
    # The id is that of its tokenizer, and means nothing for another.
    flags = {"--data.tokenizer": str(tokenizer)}
    assert found(config, **flags).begin_of_document == BEGIN
    flags |= {"--data.begin-of-document": str(saved)}
    assert found(config, **flags).begin_of_document == saved
    np.save(tmp_path / "tokens.npy", np.arange(9))
    tokens = dataclasses.replace(data, path=(tmp_path / "tokens.npy",))
    found_for_tokens = found(dataclasses.replace(config, data=tokens))
    assert (found_for_tokens.tokenizer, found_for_tokens.begin_of_document) == (None, None)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tokenizer_config", "generation", "config", "expected"),
    [
        ("<|im_start|>", END, END, OTHER),
        (AS_OBJECT | {"content": "<|im_start|>"}, END, END, OTHER),
        (None, [OTHER, END], END, OTHER),
        (None, None, OTHER, OTHER),
        (None, None, [], None),
        (None, None, -1, None),
        (None, None, None, None),
    ],
)
def test_files_of_a_model_say_where_it_ends(
    tokenizer_config, generation, config, expected, tokenizer, tmp_path
):
    for name, key, value in (
        ("tokenizer_config", "eos_token", tokenizer_config),
        ("generation_config", "eos_token_id", generation),
        ("config", "eos_token_id", config),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({key: value}))
    assert ending_of(tokenizer) == expected
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["<eos>"]}')
    with refused(InputError, "eos_token_id of a model must"):
        eos_of(tmp_path)


def ended(config, **flags):
    """The token that ends a document, of a command line."""
    flags = {f"--{name.replace('__', '.').replace('_', '-')}": x for name, x in flags.items()}
    return GPTTask().after_flags(config, flags.get).data.end_of_document


@pytest.fixture
def completions(tokenizer, tmp_path):
    """The config of a run on completions, with a model that stops at another token than </s>."""
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_start|>"}')
    data = dataclasses.replace(data_of(tokenizer, ASKED, loss="answers"), tokenizer=None)
    options = {"init_from": tmp_path, "run_dir": tmp_path / "run", "data": data}
    return dataclasses.replace(gpt_tiny(), **options)


def test_completions_end_where_the_model_stops(completions, tokenizer, tmp_path):
    config = GPTTask().after_flags(completions, {"--init-from": str(tmp_path)}.get)
    assert config.data.end_of_document == OTHER
    found = opened(config.data, seq_len=9)
    assert found.train[0].tokens[:8].tolist() == [BEGIN, *map(ord, "askyes"), OTHER]
    assert found.description.endswith("; completions end with '<|im_start|>', id 2")
    # What the user says comes first, and text that is no completion ends as before.
    assert ended(completions, init_from="", data__end_of_document="None") is None
    text = dataclasses.replace(completions.data, loss=None)
    assert ended(dataclasses.replace(completions, data=text), init_from="") is None
    # Without a tokenizer tokens are bytes, and the model says where it ends.
    tokenizer.unlink()
    for name, end in (("config", 7), ("generation_config", [50256, 5])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": end}))
    (tmp_path / "tokenizer_config.json").unlink()
    assert ended(completions, init_from="") == 5


def test_answers_of_pairs_end_where_the_model_stops(completions):
    """As score.py ends them, which gives the log-probabilities of a reference."""
    data = dataclasses.replace(completions.data, loss=None)
    for name, of_answers in (("preference", True), ("reward", True), ("policy", False)):
        model = dataclasses.replace(completions.model, scores=name == "reward")
        options = {"objective": name, "model": model, "sample": TextSampleConfig(), "data": data}
        config = dataclasses.replace(completions, **options)
        assert ended(config, init_from="") == (OTHER if of_answers else None)
    # A run that an import has begun says nothing of answers.
    imported = dataclasses.replace(data, tokenizer=completions.init_from / "tokenizer.json")
    config = dataclasses.replace(completions, objective="preference", data=imported)
    assert ended(config) is None
    assert ended(config, objective="preference") == OTHER


def test_config_of_a_run_says_how_completions_end(completions, tokenizer):
    assert ended(completions) is None
    data = dataclasses.replace(completions.data, tokenizer=tokenizer)
    of_run = dataclasses.replace(completions, data=data)
    assert ended(of_run) is None
    assert ended(of_run, init_from="") is None
    # That of an import says nothing of completions.
    assert ended(of_run, data__loss="answers") == OTHER
    given = dataclasses.replace(of_run, data=dataclasses.replace(data, end_of_document=END))
    assert ended(given, data__loss="answers") == END
    assert ended(given, data__tokenizer=str(tokenizer)) == OTHER


def test_model_of_another_folder_takes_no_end_of_completions(tmp_path, monkeypatch):
    described = SimpleNamespace(model=gpt_tiny().model)
    monkeypatch.setattr(config_json, "read_description", lambda folder: described)
    for loss, folder, expected in (
        ("answers", "other", None),
        ("answers", "same", END),
        (None, "other", END),  # Of files of tokens.
    ):
        data = DataConfig(loss=loss, end_of_document=END)
        config = dataclasses.replace(gpt_tiny(), init_from=tmp_path / "same", data=data)
        assert with_model_of(tmp_path / folder, config).data.end_of_document == expected


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        ("", 1e-5),
        ("--lora.rank 4", 1e-4),
        ("--lora.rank=4", 1e-4),
        ("--lora.rank None", 1e-5),
        ("--lora.rank 4 --optimizer.learning-rate 3e-6", 3e-6),
        # The rate of a recipe that is already higher stays.
        ("gpt_tiny --lora.rank 4", 0.004),
    ],
)
@pytest.mark.slow_except_every(3)
def test_adapters_of_a_pretrained_model_learn_faster_by_default(flags, rate, tmp_path):
    shutil.copyfile(REFERENCES / "llama" / "config.json", tmp_path / "config.json")
    # Of tokens, which need no tokenizer.
    np.save(tmp_path / "data.npy", np.zeros(9, np.int32))
    data = ["--data.path", str(tmp_path / "data.npy")]
    words = [*flags.split(), "--init-from", str(tmp_path), *data]
    assert read_command_line(words).settings.optimizer.learning_rate == rate
    if not flags.startswith("gpt_tiny"):  # An imported model has the same default.
        imported = pretrained.read_command_line([str(tmp_path), *data]).settings
        save_config(imported, tmp_path / "run.json")
        words = [str(tmp_path / "run.json"), "--steps", "9", *flags.split()]
        assert read_command_line(words).settings.optimizer.learning_rate == rate
        # Adapters that a run has already keep the rate of that run.
        adapted = dataclasses.replace(imported, lora=LoraConfig(rank=4))
        save_config(adapted, tmp_path / "run.json")
        words = [str(tmp_path / "run.json"), "--steps", "9", "--lora.rank", "4"]
        assert read_command_line(words).settings.optimizer.learning_rate == 1e-5

"""`benchmarks/needle/`: what is hidden and where, what is right, what is refused."""

import json
import re

import numpy as np
import pytest

import train
from benchmarks.needle import run as needle
from benchmarks.needle.haystack import ANSWER_TOKENS, CITIES, Haystacks
from benchmarks.needle.run import Options, answers
from configs.gpt import gpt_tiny
from refusals import refused
from startrail_jax.errors import InputError
from trainer.gpt.text import IdTokenizer
from trainer.gpt.tokenizer import ByteTokenizer, FileTokenizer

BYTES = ByteTokenizer(end_of_document=None, vocab_size=256)
HAY = "Nothing of note happens here.\n"


def rng():
    return np.random.default_rng(1)


def haystacks_in(folder, longest=700):
    (folder / "text.txt").write_text(HAY * 60)
    return Haystacks(BYTES, folder / "text.txt", longest=longest)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_needle_that_is_asked_for_lies_at_its_depth(tmp_path, depth):
    haystacks = haystacks_in(tmp_path)
    case = haystacks.case(rng(), length=700, needles=5, depth=depth)
    assert len(case.prompt) + ANSWER_TOKENS == 700
    text = BYTES.decode(case.prompt)
    (key,) = re.search(r"\?\nAnswer: The secret number of (\w+) is$", text).groups()
    sentence = f"\nThe secret number of {key} is {case.answer}.\n"
    at = text.index(sentence)
    context = text[: text.index("\n\nQuestion:")]
    needles = re.findall(r"\nThe secret number of (\w+) is (\d{7})\.\n", context)
    assert len({city for city, _ in needles}) == 5
    assert {city for city, _ in needles} <= set(CITIES)
    hay = re.sub(r"\nThe secret number of \w+ is \d{7}\.\n", "", context)
    before = re.sub(r"\nThe secret number of \w+ is \d{7}\.\n", "", context[:at])
    assert len(before) == round(depth * len(hay))
    if depth in (0, 1):
        assert at == depth * (len(context) - len(sentence))  # No other needle is further out.


@pytest.mark.parametrize("depth", [0, 1])
def test_token_that_begins_a_document_is_the_first_of_the_prompt_alone(tmp_path, depth):
    words = ["begin", "apple", "bird", "cloud", "</s>"]
    described = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": "apple",
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = FileTokenizer(
        tmp_path / "tokenizer.json",
        end_of_document=None,
        begin_of_document=0,
        vocab_size=len(words),
    )
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "ab":
        (texts / f"{name}.txt").write_text(" ".join(30 * words[1:4]))
    haystacks = Haystacks(tokenizer, texts, longest=100)
    case = haystacks.case(rng(), length=100, needles=3, depth=depth)
    assert np.flatnonzero(case.prompt == 0).tolist() == [0]
    assert len(case.prompt) + ANSWER_TOKENS == 100


def test_answer_is_right_if_it_begins_with_the_number(tmp_path):
    haystacks = haystacks_in(tmp_path)
    assert haystacks.is_right(np.frombuffer(b" 1234567.", np.uint8), "1234567")
    assert not haystacks.is_right(np.frombuffer(b" 123456.", np.uint8), "1234567")
    assert not haystacks.is_right(np.frombuffer(b"It is 1234567.", np.uint8), "1234567")


def test_prompts_are_answered_in_batches_of_one_shape(tmp_path):
    haystacks = haystacks_in(tmp_path)
    cases = [haystacks.case(rng(), length=500 + i, needles=2, depth=1) for i in range(5)]
    shapes = []

    def generator(weights, prompts, *, num_tokens):
        shapes.append(len(prompts))
        for i in range(num_tokens):
            yield tuple(len(prompt) + i for prompt in prompts)

    said = list(answers(generator, None, cases, rows=2, num_tokens=3))
    assert shapes == [2, 2, 2]
    first = len(cases[0].prompt)
    assert [x.tolist() for x in said] == [[first + i + j for j in range(3)] for i in range(5)]


@pytest.mark.slow
def test_run_is_judged_at_every_length_and_depth(tmp_path, capsys):
    run = tmp_path / "run"
    sizes = "--steps 1 --seq-len 64 --batch-size 8 --model.width 16 --model.layers 1 --devices 1"
    flags = f"gpt_tiny {sizes} --model.mlp-width 16 --sample-length 0 --no-tensorboard"
    config = train.read_command_line([*flags.split(), "--run-dir", str(run)]).settings
    train.train(config)
    capsys.readouterr()
    asked = "--lengths 1K 2K --depths 2 --cases 2 --needles 2 --rows 2 --devices 4 --mesh.c 2"
    needle.main(["--run", str(run), *asked.split()])
    scores = json.loads((run / "needle.json").read_text())
    assert [(x["length"], x["depth"]) for x in scores] == [
        (1024, 0.0), (1024, 1.0), (2048, 0.0), (2048, 1.0)]  # fmt: skip
    # A model that has learnt nothing guesses no number of 7 digits.
    assert [x["share"] for x in scores] == 4 * [0.0]
    assert re.search(r"^ +1K +0% +0% +0\.0%", capsys.readouterr().out, re.MULTILINE)


def test_what_cannot_be_asked_is_refused(tmp_path):
    haystacks = haystacks_in(tmp_path)
    with refused(InputError, needles=25):
        haystacks.case(rng(), length=900, needles=25, depth=0.5)
    with refused(InputError, depth=1.5):
        haystacks.case(rng(), length=100, needles=2, depth=1.5)
    with refused(InputError, length=20):
        haystacks.case(rng(), length=20, needles=5, depth=0.5)
    (tmp_path / "text.txt").write_text("short\n")
    with refused(InputError, "haystack must"):
        Haystacks(BYTES, tmp_path / "text.txt", longest=1000)
    with refused(InputError, "--tokenizer"):
        Haystacks(IdTokenizer(end_of_document=None), None, longest=10)
    np.save(tmp_path / "ids.npy", np.arange(9, dtype=np.uint16))
    with refused(InputError, "npy"):
        Haystacks(BYTES, tmp_path / "ids.npy", longest=10)


def test_options_that_do_not_fit_a_run_are_refused(tmp_path):
    for given in (["--run", str(tmp_path)], []):
        with refused(InputError, "--run-dir"):
            needle.main(given)
    with refused(InputError, "'many'"):
        Options(run=tmp_path, lengths=("many",))
    assert Options.of(tmp_path, gpt_tiny()).lengths == ("1K",)

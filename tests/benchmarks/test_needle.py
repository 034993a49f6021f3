"""`benchmarks/needle/`: what is hidden and where, what counts, what is right, what is refused."""

import json
import re

import numpy as np
import pytest

import train
from benchmarks.needle import run as needle
from benchmarks.needle.haystack import HAY, NAMES, NUMBERS, Sentences, Words, spread
from benchmarks.needle.report import Score, draw, report
from benchmarks.needle.run import OfRun, answers, wording_of
from benchmarks.needle.training import (
    EASY_CASES,
    FACTOR,
    SHORT_ROWS,
    Sizes,
    commands,
    write_data,
)
from configs.gpt import gpt_tiny
from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.config import MeshConfig
from trainer.gpt.chat.corpus import open_examples
from trainer.gpt.config import DataConfig, RopeConfig
from trainer.gpt.pretrained.families import to_values
from trainer.gpt.text import IdTokenizer
from trainer.gpt.tokenizer import ByteTokenizer, FileTokenizer

SIZES = Sizes(length=67, steps=2, tuning_steps=1, needles=5, seed=3)
BYTES = ByteTokenizer(end_of_document=None, vocab_size=256)


def rng():
    return np.random.default_rng(1)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_needle_that_is_asked_for_lies_at_its_depth(depth):
    words = Words()
    case = words.case(rng(), length=101, needles=5, depth=depth)
    text = words.text(case.context).split()
    (key,) = re.fullmatch(r"\? (\w+)", words.text(case.questions[0])).groups()
    at = case.needle_at
    assert text[at : at + 4] == ["remember", key, case.answers[0], "."]
    assert len(case.prompt) + 1 == 101
    before = sum(word in HAY for word in text[:at])
    assert before == round(depth * sum(word in HAY for word in text))
    if depth in (0, 1):
        assert at == depth * (len(text) - 4)  # No other needle is further out.
    hidden = re.findall(r"remember (\w+) (\w+) \.", " ".join(text))
    keys = {name for name, _ in hidden}
    assert len(keys) == 5
    assert keys <= set(NAMES)
    assert {value for _, value in hidden} <= set(NUMBERS)


def test_haystack_of_text_is_filled_to_the_token_and_holds_the_sentence(tmp_path):
    (tmp_path / "text.txt").write_text("Nothing of note happens here.\n" * 60)
    sentences = Sentences(BYTES, tmp_path / "text.txt", longest=700)
    case = sentences.case(rng(), length=700, needles=3, depth=0.5)
    text = BYTES.decode(case.prompt)
    needle_ = text[case.needle_at :]
    assert len(case.prompt) + sentences.most_answer_tokens == 700
    assert needle_.startswith("\nThe secret number of")
    assert f"is {case.answers[0]}." in needle_.split("\n")[1]
    city = re.search(r"number of (\w+) is$", text)[1]
    assert f"of {city} is {case.answers[0]}." in text
    assert len(set(re.findall(r"of (\w+) is \d{7}\.", text))) == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_token_that_begins_a_document_is_the_first_of_the_prompt_alone(tmp_path, depth):
    words = Words()
    begin = words.vocabulary.index("15")
    tokenizer = FileTokenizer(
        words.write_tokenizer(tmp_path / "tokenizer"),
        end_of_document=None,
        begin_of_document=begin,
        vocab_size=len(words.vocabulary),
    )
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "ab":
        (texts / f"{name}.txt").write_text(" ".join(3 * HAY))
    sentences = Sentences(tokenizer, texts, longest=100)
    case = sentences.case(rng(), length=100, needles=3, depth=depth)
    assert np.flatnonzero(case.prompt == begin).tolist() == [0]
    assert len(case.prompt) + sentences.most_answer_tokens == 100
    # The 7 words of a needle are the tokens of this vocabulary, known or not.
    assert case.needle_at == (len(case.context) - 7 if depth else 1)


def test_loss_counts_the_answers_and_nothing_else(tmp_path):
    words = Words()
    write_data(words, tmp_path, SIZES)
    data = open_examples(
        DataConfig(
            path=tmp_path / "data" / "short",
            tokenizer=tmp_path / "tokenizer" / "tokenizer.json",
            loss_on="completion",
        ),
        Layout("contiguous", 1),
        vocab_size=len(words.vocabulary),
        seq_len=SIZES.length,
        cache=tmp_path / "tokens",
    )
    # Every case fills its row, or its part of one.
    assert len(data.train) == SIZES.steps * SHORT_ROWS
    batch = data.collate([data.train[0], data.train[1]], [0, 1])
    for row, needles in ((0, [SIZES.needles]), (1, [2] * EASY_CASES)):
        cases = batch.segment_ids[row]
        assert cases.max() + 1 == len(needles)
        for case, count in enumerate(needles):
            tokens, targets = (x[row][cases == case] for x in (batch.tokens, batch.targets))
            counted = batch.weights[row][cases == case] > 0
            values = dict(re.findall(r"remember (\w+) (\w+) \.", words.text(tokens)))
            assert len(values) == counted.sum() == count
            # The key in a question is what is read when the answer is due.
            asked = [words.vocabulary[token] for token in tokens[counted]]
            assert words.text(targets[counted]).split() == [values[key] for key in asked]
            assert all(tokens[np.flatnonzero(counted) - 1] == words.vocabulary.index("?"))


def test_answer_is_right_if_it_begins_with_the_value():
    words = Words()
    ids = {word: number for number, word in enumerate(words.vocabulary)}
    assert words.is_right(np.array([ids["11"]]), "11")
    assert not words.is_right(np.array([ids["07"]]), "11")
    assert not words.is_right(np.array([ids["Ada"], ids["11"]]), "11")
    sentences = Sentences(BYTES, None, longest=10)
    assert sentences.is_right(np.frombuffer(b" 1234567.", np.uint8), "1234567")
    assert not sentences.is_right(np.frombuffer(b" 123456.", np.uint8), "1234567")


def test_prompts_are_answered_in_batches_of_one_shape():
    words = Words()
    cases = [words.case(rng(), length=50 + i, needles=2, depth=1) for i in range(5)]
    shapes = []

    def generator(weights, prompts, *, num_tokens):
        shapes.append(len(prompts))
        for i in range(num_tokens):
            yield tuple(len(prompt) + i for prompt in prompts)

    said = list(answers(generator, None, cases, rows=2, num_tokens=3))
    assert shapes == [2, 2, 2]
    assert [x.tolist() for x in said] == [[49 + i, 50 + i, 51 + i] for i in range(5)]


def test_commands_train_the_same_model_on_longer_rows(tmp_path):
    wanted = commands(tmp_path, SIZES, MeshConfig(team=2), 4)
    write_data(Words(), tmp_path, SIZES)
    short = train.read_command_line(wanted["short"]).settings
    exported = tmp_path / "exported"
    exported.mkdir()
    values = to_values(short.model, length=short.seq_len, dtype="float32")
    (exported / "config.json").write_text(json.dumps(values))
    (exported / "tokenizer.json").write_bytes((tmp_path / "tokenizer/tokenizer.json").read_bytes())
    tuned = train.read_command_line(wanted["tuned"]).settings
    assert short.seq_len == SIZES.length
    assert tuned.seq_len == FACTOR * SIZES.length
    assert (short.devices, short.mesh.team) == (tuned.devices, tuned.mesh.team) == (4, 2)
    assert tuned.model.layer_windows == short.model.layer_windows == (2, None)
    assert short.model.rope.scaling == "none"
    assert tuned.model.rope == RopeConfig(
        base=short.model.rope.base, scaling="yarn", factor=FACTOR, original_length=SIZES.length
    )
    assert tuned.data.loss_on == "completion"
    # The control has the flags of the tuned run but for YaRN, which no other flag turns on.
    flags = " ".join(wanted["tuned"]).replace(str(tmp_path / "tuned"), str(tmp_path / "control"))
    yarn = re.search(r" --model\.rope\.scaling yarn( --model\.rope\.\S+ \d+){2}", flags)[0]
    assert " ".join(wanted["control"]) == flags.replace(yarn, "")


def test_report_writes_every_share_and_a_figure(tmp_path):
    scores = [
        Score(stage=stage, length=length, depth=depth, right=3, cases=4, seconds=1.0)
        for stage in ("a", "b")
        for length in (128, 4096)
        for depth in spread(2)
    ]
    report(scores, figure=tmp_path / "figure.png", results=tmp_path / "needle.json")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "needle.json").read_text())
    assert len(found) == 8
    assert found[0] | {"share": 0.75} == found[0]
    texts = [text.get_text() for axes in draw(scores).axes for text in axes.texts]
    assert texts == ["75%"] * 8


def test_what_cannot_be_asked_is_refused(tmp_path):
    words = Words()
    with refused(InputError, needles=17):
        words.case(rng(), length=900, needles=17)
    with refused(InputError, depth=1.5):
        words.case(rng(), length=100, needles=2, depth=1.5)
    with refused(InputError, length=20):
        words.case(rng(), length=20, needles=5)
    (tmp_path / "text.txt").write_text("short\n")
    with refused(InputError, "haystack must"):
        Sentences(BYTES, tmp_path / "text.txt", longest=1000)
    with refused(InputError, "--tokenizer"):
        Sentences(IdTokenizer(end_of_document=None), None, longest=10)
    np.save(tmp_path / "ids.npy", np.arange(9, dtype=np.uint16))
    with refused(InputError, "npy"):
        Sentences(BYTES, tmp_path / "ids.npy", longest=10)


def test_options_that_do_not_fit_a_run_are_refused(tmp_path):
    with refused(InputError, "--run-dir"):
        needle.main(["--run", str(tmp_path)])
    with refused(InputError, "--distributed"):
        needle.main(["--distributed"])
    config = gpt_tiny()
    with refused(InputError, "'many'"):
        OfRun(run=tmp_path, lengths=("many",))
    with refused(InputError, "haystack="):
        OfRun(run=tmp_path, lengths=("64",), wording="words", haystack=tmp_path)
    options = OfRun(run=tmp_path, lengths=("64",), wording="words")
    with refused(InputError, vocab_size=256):
        wording_of(options, config, 64, print)
    assert OfRun.of(tmp_path, config).lengths == ("1K",)

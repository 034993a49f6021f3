"""Conversations, and prompts with completions: what becomes of them, and what the loss counts."""

import dataclasses
import io
import json
from contextlib import suppress

import jax
import numpy as np
import pytest
import tokenizers
import transformers

from chat_templates import BORDERS, CONVERSATIONS, ENDS, OTHERS, SPECIAL, TEMPLATES
from configs.gpt import gpt_tiny
from programs import session_of_one
from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.gpt.chat.corpus import open_examples
from trainer.gpt.chat.forms import has_examples
from trainer.gpt.chat.packing import PADDING, EncodedExamples, PackedExamples, collate_rows
from trainer.gpt.chat.template import ChatTemplate
from trainer.gpt.config import DataConfig, TextOptions, TextSampleConfig
from trainer.gpt.corpus import open_corpora
from trainer.gpt.sample import prompt_tokens, stops_of_run, template_of_run
from trainer.gpt.task import GPTTask
from trainer.gpt.tokenizer import FileTokenizer

NATURAL = Layout("contiguous", 1)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
# Shows what was thought only in the last answer, as some templates do.
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if loop.last %} END{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four ß ünd"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def completions(path, count, prompt="ask: ", answer="answer"):
    return write(path, *({"prompt": f"{prompt}{i}", "completion": answer} for i in range(count)))


@pytest.fixture
def tokenizer(tmp_path):
    """Tokens are characters, but for the names of special tokens."""
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    characters = "".join(map(chr, range(32, 127))) + "\nüß"
    vocabulary = {x: i for i, x in enumerate((*names, *characters))}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    built.add_special_tokens(list(names))
    path = tmp_path / "tokenizer.json"
    built.save(str(path))
    return path


def opened(config, seq_len=32, vocab_size=256):
    sizes = {"vocab_size": vocab_size, "seq_len": seq_len}
    (data,) = open_examples(config, NATURAL, cache=config.path[0].parent, **sizes)
    return data


def of_completions(path, **changes):
    return DataConfig(**dict(path=(path,), loss="answers", validation_fraction=0.2) | changes)


def template(source, **tokens):
    vocabulary = {"<s>": 0, "</s>": 1}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=built, **tokens)
    name = "tokenizer_config.json"
    return ChatTemplate(tokenizer, source, name="the template", tokens_of="" if tokens else name)


@pytest.mark.parametrize(
    "row",
    [
        ("{% for m in messages %}", "got TemplateSyntaxError: ", "from 'the template' for 'here'"),
        (
            FORGETFUL,
            "must show what the assistant says",
            "of the first 3 messages",
            "generation %}",
        ),
        ("{{ raise_exception('no s') }}", "got TemplateError: no s from 'the template' for 'here'"),
        ("{{ messages[7].content + 1 }}", "got UndefinedError: ", "for 'here'"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "got SecurityError: ", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "got OverflowError: Range too big"),
        ("{{ messages.append(1) }}", "got SecurityError"),
        ("{% include 'passwords' %}", "got TypeError: no loader"),
        ("{% break %}", "got SyntaxError"),
        ("{{ strftime_now(messages[0].content) }}", "must write the form of a date"),
        ("{{ eos_token }}", "which uses eos_token, and no file 'tokenizer_config.json'"),
    ],
)
def test_template_that_fails_or_reaches_out_raises(row):
    source, *words = row
    with refused(InputError, *words):
        template(source).render(TALK, "here")


def test_template_has_no_today():
    source = """{{ strftime_now('%d %b %Y') }} {{ strftime_now( "%H:%M" ) }}"""
    assert template(source).question("a") == "26 Jul 2024 00:00"


def test_template_is_found_beside_the_tokenizer(tmp_path, tokenizer):
    config = tmp_path / "tokenizer_config.json"
    assert ChatTemplate.find(tokenizer, None) is None
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": None}
    for given in (MARKED, [{"name": "default", "template": MARKED}]):
        config.write_text(json.dumps({"chat_template": given, **tokens}))
        found = ChatTemplate.find(tokenizer, None)
        assert found.render(TALK, "").text.startswith("<|im_start|>SYSTEM: Be brief.")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    changed = ChatTemplate.find(tokenizer, None)
    assert changed.render(TALK, "").text.startswith("<|im_start|>system")
    assert changed.digest != found.digest
    (tmp_path / "mine").write_text("{{ bos_token }}{{ messages[0].content }}.")
    chosen = ChatTemplate.find(tokenizer, tmp_path / "mine")
    assert chosen.question("a") == "<|im_start|>a."
    for content in ("{", "[]"):
        config.write_text(content)
        with refused(InputError, "data.tokenizer must", "tokenizer.json"):
            ChatTemplate.find(tokenizer, None)
    config.unlink()
    with refused(InputError, "uses bos_token", "tokenizer_config.json"):
        ChatTemplate.find(tokenizer, tmp_path / "mine")
    with refused(InputError, "absent"):
        ChatTemplate.find(tokenizer, tmp_path / "absent")


def test_only_completions_count(tmp_path):
    path = completions(tmp_path / "data.jsonl", 30, prompt="ü? ", answer="ñ!")
    config = dataclasses.replace(
        gpt_tiny(),
        data=of_completions(path),
        seq_len=23,
        sample=TextSampleConfig(),
        run_dir=tmp_path / "run",
    )
    data = GPTTask().open_data(config, NATURAL)
    batch = data.collate([data.train[0], data.train[1]], [0, 1])
    text = bytes(batch.tokens[0].astype(np.uint8)).decode()
    assert text.startswith("ü? ")
    counted = batch.weights[0].astype(bool)
    # "ñ" is two bytes; the byte 0 ends an example.
    assert bytes(batch.targets[0][counted].astype(np.uint8)).decode() == "ñ!\0ñ!\0"
    assert (batch.segment_ids[0][:8] == 0).all()
    assert batch.segment_ids[0].max() == 1
    assert (batch.segment_ids[0][-5:] == PADDING).all()
    second = np.flatnonzero(batch.segment_ids[0] == 1)
    np.testing.assert_array_equal(batch.positions[0][second], np.arange(len(second)))
    assert data.loss_unit == "nats/byte"
    assert "30 examples" not in data.description
    assert f", {4 * len(data.train._part.ends)} of them counted, in " in data.description
    assert len(data.train._part.ends) + len(data.held_out._part.ends) == 30
    # Of few examples one is held out.
    for count in (2, 3, 5):
        few = DataConfig(path=(completions(tmp_path / "few.jsonl", count),), loss="answers")
        description = opened(few).corpus.description
        assert f"{count - 1} examples" in description
        assert "1 examples" in description.split("to train on")[1]


def test_tokens_of_conversations_are_kept(tmp_path, tokenizer, capsys):
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    path = write(tmp_path / "talk.jsonl", *[{"messages": TALK}] * 20)
    config = of_completions(path, tokenizer=tokenizer)
    data = opened(config, seq_len=160)
    again = opened(config, seq_len=160)
    assert capsys.readouterr().err == ""
    assert again.digest == data.digest
    np.testing.assert_array_equal(again.train[1].tokens, data.train[1].tokens)
    (tmp_path / "chat_template.jinja").write_text(" " + CHATML)
    assert opened(config, seq_len=160).digest != data.digest
    with refused(InputError, "Token ids must"):
        opened(config, seq_len=160, vocab_size=40)


def test_samples_stop_where_answers_end(tmp_path, tokenizer):
    """Not where documents end, as no row has that token."""
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    path = write(tmp_path / "talk.jsonl", *[{"messages": TALK}] * 20)
    config = dataclasses.replace(gpt_tiny(), data=of_completions(path, tokenizer=tokenizer))
    run_dir, other = tmp_path / "run", tmp_path / "other.json"
    run_dir.mkdir()
    data = opened(config.data, seq_len=160)
    assert data.corpus.stops == (2,)
    assert "; answers of conversations end with '<|im_end|>', id 2" in data.description
    assert "completions" not in data.description
    data.keep(run_dir)
    other.write_bytes(tokenizer.read_bytes() + b" ")
    for chosen, stops in ((tokenizer, (2,)), (None, ()), (other, ())):
        assert stops_of_run(run_dir, config, chosen) == stops
    write(path, *[{"messages": TALK}, {"prompt": "a", "completion": "b"}] * 10)
    both = opened(config.data, seq_len=160)
    assert both.corpus.stops == (2,)
    ends = "; completions end with '<|endoftext|>', id 0; answers of conversations end with '<|im"
    assert ends in both.description
    # A token that stands within answers too stops nothing.
    (tmp_path / "chat_template.jinja").write_text(CHATML.replace("{{ m.c", "<|im_end|>{{ m.c"))
    data = opened(config.data, seq_len=200)
    assert data.corpus.stops == ()
    assert "samples do not stop at '<|im_end|>', which stands within" in data.description
    # As does a text that is no token.
    (tmp_path / "chat_template.jinja").write_text(CHATML.replace("im_end", "end"))
    data = opened(config.data, seq_len=200)
    assert data.corpus.stops == ()
    assert "end with a text that is no single token, at which" in data.description


def test_loss_counts_answers_the_last_one_or_all(tmp_path, tokenizer):
    model = of_family(CHATML, tmp_path)
    expected = {"answers": [FIRST, SECOND], "last": [SECOND]}
    for loss, answers in expected.items():
        found = example_of({"messages": TALK}, tmp_path, tokenizer, loss=loss)
        assert counted_text(*found, model) == answers
    tokens, counted = example_of({"messages": TALK}, tmp_path, tokenizer, loss="all")
    assert counted.all()
    assert tokens.tolist() == model.apply_chat_template(TALK)["input_ids"]
    record = {"prompt": "a", "completion": "bc"}
    for loss, count in (("answers", 3), ("last", 3), ("all", 4)):
        assert example_of(record, tmp_path, tokenizer, loss=loss)[1].sum() == count
    with refused(InputError, "weight=0 for the last one"):
        silent = {"messages": [*TALK[:4], TALK[4] | {"weight": 0}]}
        example_of(silent, tmp_path, tokenizer, loss="last")


def test_loss_on_all_tokens_finds_out_what_the_data_are(tmp_path, tokenizer):
    of_family(CHATML, tmp_path)
    talks = write(tmp_path / "talks.jsonl", *[{"messages": TALK}] * 9)
    texts = write(tmp_path / "texts.jsonl", *[{"text": "a b" * 9}] * 9)
    for path, loss, expected in (
        *((talks, loss, True) for loss in ("answers", "last", "all")),
        *((texts, "all", False), (texts, None, False), (talks, None, False), (None, "all", False)),
    ):
        paths = () if path is None else (path,)
        assert has_examples(DataConfig(path=paths, loss=loss)) == expected
    config = dataclasses.replace(gpt_tiny(), seq_len=16, sample=TextSampleConfig())
    data = DataConfig(path=(talks,), tokenizer=tokenizer, loss="all")
    run = dict(run_dir=tmp_path / "run", seq_len=160)
    opened = GPTTask().open_data(dataclasses.replace(config, data=data, **run), NATURAL)
    assert "of them counted" in opened.description
    for paths in ((texts,), ()):
        data = DataConfig(path=paths, loss="all")
        assert "counted" not in GPTTask().open_data(
            dataclasses.replace(config, data=data), NATURAL
        ).description  # fmt: skip


def test_token_across_the_border_counts(tmp_path):
    """As " no", where the prompt ends with the space."""
    vocabulary = {x: i for i, x in enumerate(["<|endoftext|>", *"?abno", " ", " n", "? "])}
    merges = [(" ", "n"), ("?", " ")]
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    built.add_special_tokens(["<|endoftext|>"])
    path = tmp_path / "tokenizer.json"
    built.save(str(path))

    def counted_of(prompt, completion):
        record = {"prompt": prompt, "completion": completion}
        tokens, counted = example_of(record, tmp_path, path)
        return [built.id_to_token(x) for x in tokens[counted]]

    assert counted_of("ab? ", "no") == [" n", "o", "<|endoftext|>"]
    assert counted_of("ab", "? no") == ["?", " n", "o", "<|endoftext|>"]
    assert counted_of("ab?", "no") == ["n", "o", "<|endoftext|>"]


@pytest.mark.parametrize("longest", [None, 6])
@pytest.mark.parametrize("seed", range(4))
def test_examples_share_rows_whole(seed, longest):
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 14, 40)
    tokens = np.arange(lengths.sum())
    part = EncodedExamples(tokens=tokens, counted=np.ones_like(tokens), ends=lengths.cumsum())
    rows = PackedExamples(part, 9, name="these", longest=longest)
    most, found = longest or 10, []
    for row in (rows[i] for i in range(len(rows))):
        held = row.examples >= 0
        assert not row.counted[~held].any()
        assert (np.diff(np.flatnonzero(held)) == 1).all()
        found += [row.tokens[row.examples == n] for n in range(row.examples.max() + 1)]
    assert [len(x) for x in found] == [min(n, most) for n in lengths]
    np.testing.assert_array_equal([x[0] for x in found], part.ends - lengths)
    # No row has room for the first example of the next.
    sizes = [(rows[i].examples >= 0).sum() for i in range(len(rows))]
    firsts = [(rows[i + 1].examples == 0).sum() for i in range(len(rows) - 1)]
    assert all(size + first > 10 for size, first in zip(sizes, firsts, strict=False))
    assert rows.num_cut == (lengths > most).sum()
    assert rows.share_of_padding == pytest.approx(1 - sum(sizes) / (10 * len(rows)))


def test_examples_whose_answers_are_cut_off_are_left_out():
    lengths = np.array([20, 6, 20, 3])
    counted = np.zeros(49, int)
    counted[[8, 19, 25, 27, 47]] = 1  # In the first example 8 and 19, in the third 27.
    part = EncodedExamples(tokens=np.arange(49), counted=counted, ends=lengths.cumsum())
    rows = PackedExamples(part, 9, name="these")
    assert (rows.num_cut, rows.num_left_out, rows.num_counted) == (2, 0, 4)
    assert [int(rows[i].counted.sum()) for i in range(len(rows))] == [1, 1, 1, 1]
    counted[8] = counted[27] = 0
    rows = PackedExamples(part, 9, name="these")
    assert (rows.num_cut, rows.num_left_out, rows.num_counted) == (0, 2, 2)
    np.testing.assert_array_equal(rows[0].tokens[:9], [*range(20, 26), *range(46, 49)])


def test_batch_masks_examples_from_each_other_in_any_layout():
    tokens = np.arange(1, 13)
    part = EncodedExamples(tokens=tokens, counted=tokens % 2, ends=np.array([5, 8, 12]))
    rows = PackedExamples(part, 8, name="these")
    given = [rows[0], rows[1]]
    natural = collate_rows(given, [0, 1], layout=NATURAL, mask_documents=True)
    np.testing.assert_array_equal(natural.segment_ids[0], [0, 0, 0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(natural.positions[0], [0, 1, 2, 3, 4, 0, 1, 2])
    # Target 6 begins the next example, and target 9 is padding.
    np.testing.assert_array_equal(natural.weights[0], [0, 1, 0, 1, 0, 1, 0, 0])
    zigzag = Layout("zigzag", 4)
    other = collate_rows(given, [0, 1], layout=zigzag, mask_documents=True)
    for x, y in zip(*map(jax.tree.leaves, (natural, other)), strict=True):
        np.testing.assert_array_equal(zigzag.permute(x), y)
    unmasked = collate_rows(given, [0, 1], layout=NATURAL, mask_documents=False)
    assert unmasked.segment_ids is None
    np.testing.assert_array_equal(unmasked.positions[0], np.arange(8))
    np.testing.assert_array_equal(unmasked.weights, natural.weights)


def test_options_and_files_that_do_not_fit_raise(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("a" * 99)
    path = completions(tmp_path / "data.jsonl", 30)
    one = DataConfig(path=(completions(tmp_path / "one.jsonl", 1),), loss="answers")
    for config, seq_len, named in (
        (of_completions(text), 32, "the data must"),
        (of_completions(path, text_key="prompt"), 32, "loss='answers'"),
        (of_completions(path, chat_template=text), 32, "data.chat_template must"),
        (one, 32, "data.validation_fraction must"),
        (of_completions(path), 3, "seq_len=3"),
        (of_completions(path, longest_document=4), 32, "longest_document=4"),
    ):
        with refused(InputError, named):
            opened(config, seq_len=seq_len)


def test_spaces_count_where_they_are(tmp_path):
    vocabulary = {x: i for i, x in enumerate(("<|endoftext|>", "\u0120", "a", "b"))}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    built.add_special_tokens(["<|endoftext|>"])
    built.save(str(tmp_path / "tokenizer.json"))
    record = {"prompt": "a ", "completion": "  b  "}
    tokens, counted = example_of(record, tmp_path, tmp_path / "tokenizer.json")
    np.testing.assert_array_equal(tokens, [2, 1, 1, 1, 3, 1, 1, 0])
    np.testing.assert_array_equal(counted, [0, 0, 1, 1, 1, 1, 1, 1])


def test_prompt_of_a_chat_is_a_question_in_the_template(tmp_path, tokenizer, monkeypatch):
    config = dataclasses.replace(gpt_tiny(), data=DataConfig(tokenizer=tokenizer))
    with refused(InputError, "--chat must"):
        template_of_run(tmp_path / "run", config, tokenizer)
    with refused(InputError, "tokenizer=None"):
        template_of_run(tmp_path / "run", config, None)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    template = template_of_run(tmp_path / "run", config, tokenizer)
    opened = FileTokenizer(tokenizer, end_of_document=None, vocab_size=256)
    options = TextOptions(chat=True, prompt="Hi?\n", tokenizer=tokenizer)
    tokens = prompt_tokens(opened, options, session_of_one(), template)
    expected = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.tolist() == opened.ids(expected)
    # Without a text it is refused.
    for given in (b"", b" \n"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
        for options in (TextOptions(chat=True), TextOptions(chat=True, prompt=given.decode())):
            with refused(InputError, "--chat must"):
                prompt_tokens(opened, options, session_of_one(), template)


def of_family(source, tmp_path):
    """The tokenizer with a template, as transformers loads both."""
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    (tmp_path / "chat_template.jinja").write_text(source)
    return transformers.AutoTokenizer.from_pretrained(str(tmp_path))


def example_of(record, tmp_path, tokenizer, **changes):
    """The tokens of one record, and whether each counts."""
    path = write(tmp_path / "a.jsonl", record)
    held_out = write(tmp_path / "b.jsonl", record)
    config = of_completions(path, validation_path=held_out, tokenizer=tokenizer, **changes)
    row = opened(dataclasses.replace(config, validation_fraction=0.05), seq_len=400).train[0]
    return row.tokens[row.examples == 0], row.counted[row.examples == 0]


@pytest.mark.parametrize("talk", CONVERSATIONS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(family, talk, tmp_path, tokenizer):
    messages, source = CONVERSATIONS[talk], TEMPLATES[family]
    model = of_family(source, tmp_path)
    tokens, counted = example_of({"messages": messages}, tmp_path, tokenizer)
    is_marked = "generation %}" in source
    expected = model.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=is_marked
    )
    np.testing.assert_array_equal(tokens, expected["input_ids"])
    if is_marked:
        np.testing.assert_array_equal(counted, expected["assistant_masks"])
        return
    text = model.apply_chat_template(messages, tokenize=False)
    user, assistant = BORDERS[family]
    answers = [turn.partition(assistant)[2] for turn in text.split(user)[1:]]
    assert counted_text(tokens, counted, model) == [answer for answer in answers if answer]


FAMILIES = TEMPLATES | OTHERS


@pytest.fixture(scope="module")
def special():
    """A tokenizer of characters and of the special tokens of all families."""
    vocabulary = {x: i for i, x in enumerate((*SPECIAL, *map(chr, range(10, 256))))}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    built.add_special_tokens(list(SPECIAL))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=built, **names)


def rendered(family, special, messages, **variables):
    found = ChatTemplate(special, FAMILIES[family], name=family, tokens_of="")
    return found.render(messages, "here", **variables)


@pytest.mark.parametrize("talk", ["one turn", "turns"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_the_token_by_which_they_end(family, talk, special):
    messages, end = CONVERSATIONS[talk], ENDS[family]
    if end is None:
        ways = ("{{ eos_token }} behind the answers", "prompt and completion")
        with refused(InputError, "must end what the assistant says", f"got {family!r}", *ways):
            rendered(family, special, messages)
        return
    found = rendered(family, special, messages)
    assert found.ends - found.within == {end}
    assert not found.is_open
    answers = [found.text[first:last] for first, last in found.answers]
    said = [x["content"].strip() for x in messages if x["role"] == "assistant"]
    assert all(text in answer for text, answer in zip(said, answers, strict=True))
    # In one family, the token that begins a text follows that one.
    assert all(answer.rstrip().removesuffix("<s>").endswith(end) for answer in answers)
    # The text is that of transformers; where the next role ends a turn, its token is added.
    text = special.apply_chat_template(messages, chat_template=FAMILIES[family], tokenize=False)
    assert found.text == text + (end if family == "glm" else "")


VANISH = {
    "qwen": ("developer", "function", "human", "observation", "System"),
    "mistral": ("developer", "tool"),
    "deepseek3": ("developer", "System"),
    "alpaca": ("human",),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_are_shown_or_refused(family, special):
    for role in ("developer", "function", "human", "observation", "System", "tool", "system"):
        messages = [{"role": role, "content": "See this."}, *CONVERSATIONS["turns"]]
        with suppress(InputError):
            assert "See this." in rendered(family, special, messages).text
    for role in VANISH.get(family, ()):
        with refused(InputError, f"the content of message 1 of role {role!r}", "Remove or rename"):
            rendered(family, special, [{"role": role, "content": "a"}, *CONVERSATIONS["turns"]])


ANSWER = {"role": "assistant", "content": "a"}
LOOK = {"name": "look", "arguments": {"city": "Bonn", "days": 3, "unit": None}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": LOOK}]}
ASKED = [{"role": "user", "content": "Rain?"}, CALLS, {"role": "tool", "content": "4"}, ANSWER]


@pytest.mark.parametrize(
    ("family", "messages", "words"),
    [
        ("deepseek3", [TALK[0], TALK[0] | {"content": "b"}, *TALK[1:]], "content of message 1 of"),
        ("llama31", [ASKED[0], CALLS | {"content": "I look."}, *ASKED[2:]], "content of message 2"),
        ("llama31", [ASKED[0], CALLS | {"tool_calls": CALLS["tool_calls"] * 2}, *ASKED[2:]],
         "the call of 'look' in message 2"),
        ("qwen3", ASKED, "the arguments {'city': 'Bonn', 'days': 3, 'unit': None} of the call of"),
        ("llama31", [*TALK[:4], TALK[4] | {"name": "bob"}], "the name of message 5 of role 'assi"),
    ],
)  # fmt: skip
def test_strings_that_a_template_leaves_out_are_named(family, messages, words, special):
    with refused(InputError, words):
        rendered(family, special, messages)


def test_thoughts_that_do_not_count_may_be_forgotten(special):
    """By later turns, which show no thought of an earlier answer."""
    messages = [*TALK[:2], TALK[2] | {"reasoning_content": "hm"}, *TALK[3:]]
    found = rendered("qwen3", special, messages, counted=[x is TALK[4] for x in messages])
    assert "hm" not in found.text
    messages = [*TALK[:2], TALK[2] | {"role": "user", "reasoning_content": "hm"}, *TALK[3:]]
    with refused(InputError, "the reasoning_content of message 3 of role 'user'"):
        rendered("qwen3", special, messages)


@pytest.mark.parametrize("family", ["chatml", "qwen", "llama31", "deepseek3"])
def test_nulls_of_arguments_and_schemas_are_those_of_transformers(family, special):
    tools = [{"type": "function", "function": {"name": "look", "default": None}}]
    variables = {"tools": tools} if "tools" in FAMILIES[family] else {}
    options = dict(chat_template=FAMILIES[family], tokenize=False, **variables)
    found = rendered(family, special, ASKED, **variables)
    assert found.text == special.apply_chat_template(ASKED, **options)
    assert '"unit": null' in found.text
    assert ('"default": null' in found.text) == bool(variables)


def counted_text(tokens, counted, model):
    ends = np.flatnonzero(np.diff(np.concatenate([[0], counted, [0]])))
    return ["".join(model.convert_ids_to_tokens(tokens[a:b])) for a, b in ends.reshape(-1, 2)]


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
CALLED = [*TALK[1:2], CALL, {"role": "tool", "content": "4"}, TALK[4]]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
SHOWS_KWARGS = "{{ style }}{{ tools }}" + CHATML


QWEN3_TURNS = ["b<|im_end|>\n", "d e<|im_end|>\n", "<think>\n\n</think>\n\n  g\n<|im_end|>\n"]
THOUGHT = ["Four ß ünd<|im_end|>\n", "<think>\nhm\n</think>\n\nYes.<|im_end|>\n"]
ANALYSIS = ["<|channel|>analysis hm<|end|><|channel|>final Four ß ünd<|return|>"]
FIRST, SECOND = "Four ß ünd<|im_end|>\n", "Yes.<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "record", "expected"),
    [
        (CHATML, {"messages": TALK}, [FIRST, SECOND]),
        (MARKED, {"messages": TALK}, ["Four ß ünd<|endoftext|>", "Yes.<|endoftext|>"]),
        (TEMPLATES["chatml"], {"messages": CALLED, "tools": TOOLS}, None),
        # Tables hold tools as a text, and give all messages the same keys.
        (TEMPLATES["chatml"], {"messages": CALLED, "tools": json.dumps(TOOLS)}, None),
        (TEMPLATES["chatml"], {"messages": json.dumps(CALLED)}, None),
        (
            TEMPLATES["chatml"],
            {"messages": [{"content": None, "tool_calls": None, **x} for x in CALLED]},
            None,
        ),
        (TEMPLATES["qwen3"], {"messages": CALLED}, ["<call>look</call><|im_end|>\n", None]),
        (TEMPLATES["qwen3"], {"messages": CONVERSATIONS["turns"]}, QWEN3_TURNS),
        (TEMPLATES["qwen3"], {"messages": [*TALK[1:4], TALK[4] | {"reasoning": "hm"}]}, THOUGHT),
        (TEMPLATES["gpt_oss"], {"messages": [TALK[1], TALK[2] | {"reasoning": "hm"}]}, ANALYSIS),
        (SHOWS_KWARGS, {"messages": TALK, "chat_template_kwargs": {"style": "terse"}}, None),
        (SHOWS_KWARGS, {"messages": TALK, "chat_template_kwargs": '{"style": "terse"}'}, None),
        ("{{ messages | tojson }}" + MARKED, {"messages": [TALK[0] | {"x": 1}, *TALK[1:]]}, None),
        (CHATML, {"messages": [*TALK[:2], TALK[2] | {"train": False}, *TALK[3:]]}, [SECOND]),
        (CHATML, {"messages": [*TALK[:4], TALK[4] | {"weight": 0}]}, [FIRST]),
        (MARKED, {"messages": [*TALK[:4], TALK[4] | {"weight": 0}]}, ["Four ß ünd<|endoftext|>"]),
    ],
)
def test_what_a_record_says_is_used(source, record, expected, tmp_path, tokenizer):
    model = of_family(source, tmp_path)
    tokens, counted = example_of(record, tmp_path, tokenizer)
    read = {key: json.loads(x) if isinstance(x, str) else x for key, x in record.items()}
    messages = [
        {k: v for k, v in x.items() if k not in ("train", "weight")} for x in read["messages"]
    ]
    rendered = model.apply_chat_template(
        messages, tools=read.get("tools"), tokenize=False, **read.get("chat_template_kwargs", {})
    )
    assert "".join(model.convert_ids_to_tokens(tokens)) == rendered
    found = counted_text(tokens, counted, model)
    if expected is not None:
        assert len(found) == len(expected)
        assert all(wanted in (None, text) for text, wanted in zip(found, expected, strict=True))


SHAREGPT = [
    {"from": "human", "value": "Two and two?"},
    {"from": "gpt", "value": "Four ß ünd"},
    {"from": "human", "value": "Sure?"},
    {"from": "gpt", "value": "Yes."},
]
LOOKED = [
    {"from": "human", "value": "Rain?"},
    {"from": "function_call", "value": json.dumps({"name": "look", "arguments": {"a": 1}})},
    {"from": "observation", "value": "4"},
    {"from": "gpt", "value": "Yes.", "weight": 1},
]
CALLED_TOO = [
    {"role": "user", "content": "Rain?"},
    CALL | {"tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "4"},
    TALK[4],
]
ASK = [{"role": "user", "content": "Add.\n2 2"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("record", "messages", "options"),
    [
        ({"conversations": TALK}, TALK, {"messages": "conversations"}),
        ({"conversations": SHAREGPT}, TALK[1:], {"messages": "conversations"}),
        ({"conversations": json.dumps(SHAREGPT)}, TALK[1:], {"messages": "conversations"}),
        ({"messages": SHAREGPT, "system": "Be brief."}, TALK, {}),
        ({"chat": LOOKED, "tools": TOOLS}, CALLED_TOO, {"messages": "chat"}),
        ({"instruction": "Add.", "input": "2 2", "output": "4"}, ASK, {}),
        ({"instruction": "Add.\n2 2", "input": "", "output": "4"}, ASK, {}),
        ({"instruction": "Two and two?", "output": "Four ß ünd", "system": "Be brief."},
         TALK[:3], {}),
    ],
)  # fmt: skip
def test_conversations_in_other_forms_have_the_same_tokens(
    record, messages, options, tmp_path, tokenizer
):
    of_family(TEMPLATES["chatml"], tmp_path)
    found = example_of(record, tmp_path, tokenizer, **options)
    same = {"messages": messages} | ({"tools": TOOLS} if "tools" in record else {})
    for x, y in zip(found, example_of(same, tmp_path, tokenizer), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("record", "words", "options"),
    [
        ({"conversations": SHAREGPT}, "of a conversation: --data.messages conversations", {}),
        ({"a": TALK, "messages": TALK}, "must be one of a, system, tools", {"messages": "a"}),
        ({"instruction": 3, "output": "4"}, "must be texts; got instruction=3", {}),
        ({"instruction": "a", "output": "b", "topic": "c"}, "--data.ignored-keys topic", {}),
        ({"messages": [*SHAREGPT[:1], {"from": "function_call", "value": "look"}]},
         "must be JSON of a call", {}),
        ({"messages": [*SHAREGPT[:3], {"from": "narrator", "value": "a"}, *SHAREGPT[1:2]]},
         "the content of message 4 of role 'narrator'", {}),
        ({"messages": SHAREGPT, "system": ["a"]}, "system must be a text", {}),
    ],
)  # fmt: skip
def test_forms_that_are_not_understood_raise(record, words, options, tmp_path, tokenizer):
    of_family(FAMILIES["qwen"], tmp_path)
    with refused(InputError, words):
        example_of(record, tmp_path, tokenizer, **options)


def test_template_for_tools_is_taken_if_there_are_tools(tmp_path, tokenizer):
    named = [{"name": "default", "template": CHATML}]
    named += [{"name": "tool_use", "template": "{{ tools[0].function.name }}" + CHATML}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.find(tokenizer, None)
    assert template.render(TALK, "", tools=TOOLS).text.startswith("look<|im_start|>")
    assert template.render(TALK, "").text.startswith("<|im_start|>")
    named[0]["name"] = "other"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with refused(InputError, "no default specified", "'here'"):
        ChatTemplate.find(tokenizer, None).render(TALK, "here")


NULL_CALLS = (
    "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls }}{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(
    "row",
    [
        (None, {"text": "a"}, 'must be {"messages"', "got {'text': 'str'} in ", "a.jsonl:1"),
        (None, {"prompt": "a", "completion": 3}, "got {'prompt': 'str', 'completion': 'int'}"),
        (None, {"messages": TALK}, "need the chat template of a tokenizer; got none"),
        (None, ["a"], "must be a JSON object; got list in "),
        (
            None,
            {"prompt": "", "completion": ""},
            "must have an answer after its first token",
            ":1'",
        ),
        (None, {"prompt": "a", "completion": "\ud800"}, "must be Unicode; got the lone surrogate"),
        *[
            (CHATML, {"messages": messages}, named)
            for messages, named in (
                (TALK[:2], "'system'"),
                ([{"content": "a"}], "'content'"),
                ("hello", "'hello'"),
                ([{"role": "assistant"}], "'assistant'"),
                ([ANSWER | {"content": [{"text": "a"}]}], "content of a message must be a te"),
                ([ANSWER | {"weight": 0}], "train=false or weight=0"),
                ([ANSWER | {"train": False}], "train=false or weight=0"),
                ([ANSWER | {"weight": 0.5}], "weight 0 or 1"),
                ([ANSWER | {"train": True, "weight": 0}], "say the same"),
                ([*TALK, TALK[1] | {"train": True}], "messages of the assistant on"),
                ([*TALK[:2], TALK[2] | {"mask": True}], "the keys ['mask']"),
                ([*TALK[:2], TALK[2] | {"reasoning": "so"}], "the keys ['reasoning']"),
            )
        ],
        (CHATML, {"tools": TOOLS}, "the keys ['tools']"),
        (CHATML, {"tools": "look"}, "tools must be a list"),
        (CHATML, {"tools": {"name": "look"}}, "tools must be a list"),
        (CHATML, {"documents": "{}"}, "documents must be a list"),
        (CHATML, {"chat_template_kwargs": {"style": "terse"}}, "the keys ['style']"),
        (CHATML, {"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
        (CHATML, {"chat_template_kwargs": {"messages": []}}, "must not set"),
        (CHATML, {"id": 7, "a b": 1}, "--data.ignored-keys id 'a b'"),
        (CHATML, {"prompt": "a"}, "--data.ignored-keys prompt"),
        (CHATML, {"messages": CALLED[:2]}, "the keys ['tool_calls']"),
        # Asks for a null, and there is no content: the call would vanish.
        (NULL_CALLS, {"messages": CALLED[:2]}, "the call of 'look' in message 2 of role 'assi"),
        (
            TEMPLATES["qwen3"],
            {"messages": [TALK[1], TALK[2] | {"reasoning": "hm"}, *TALK[3:]]},
            "of the first 2 messages",
        ),
        (
            TEMPLATES["gpt_oss"],
            {"messages": [TALK[1], TALK[2] | {"train": False, "thinking": "so"}, *TALK[3:]]},
            "3 parts for 2 messages",
        ),
    ],
)
def test_record_that_is_no_example_or_says_something_in_vain_raises(row, tmp_path, tokenizer):
    source, record, *words = row
    if source is not None:
        of_family(source, tmp_path)
        record = {"messages": TALK} | record
    with refused(InputError, *words):
        example_of(record, tmp_path, tokenizer if source else None)


def test_ignored_keys_are_left_out(tmp_path, tokenizer):
    of_family(CHATML, tmp_path)
    record = {"messages": TALK, "id": 3, "prompt": "Two and two?"}
    tokens, _ = example_of(record, tmp_path, tokenizer, ignored_keys=("id", "prompt"))
    expected, _ = example_of({"messages": TALK}, tmp_path, tokenizer)
    np.testing.assert_array_equal(tokens, expected)
    with refused(InputError, "data.ignored_keys must be left out", loss=None):
        open_corpora(
            DataConfig(path=(write(tmp_path / "c.jsonl"),), ignored_keys=("id",)), vocab_size=256
        )

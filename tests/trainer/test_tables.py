"""Tables as data: Parquet and Arrow files give the tokens that JSONL gives."""

import json
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.data.files import find_files
from trainer.errors import MissingPackageError
from trainer.gpt.chat.corpus import open_examples
from trainer.gpt.config import DataConfig
from trainer.gpt.corpus import open_corpora

ROWS = [{"text": f"the {i}th text, ünd ß" * (i % 3), "id": i} for i in range(600)]
ENDINGS = {"jsonl": "jsonl", "parquet": "parquet", "stream": "arrow", "file": "arrow"}


def write(path, rows, form):
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    else:
        table = pa.Table.from_pylist(rows)
        new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    return path


def of(path, **changes):
    (opened,) = open_corpora(DataConfig(path=(path,), **changes), vocab_size=256)
    return opened


@pytest.mark.quick
@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
def test_rows_give_the_tokens_that_lines_give(form, tmp_path):
    held_out = write(tmp_path / "others.jsonl", ROWS[:3], "jsonl")
    expected, found = (
        of(write(tmp_path / f"a.{ENDINGS[x]}", ROWS, x), validation_path=held_out)
        for x in ("jsonl", form)
    )
    np.testing.assert_array_equal(found.train[0].tokens, expected.train[0].tokens)
    # Held-out rows are those of a hash of their numbers, whatever the rest.
    path = tmp_path / f"a.{ENDINGS[form]}"
    few = write(tmp_path / f"b.{ENDINGS[form]}", ROWS[:100], form)
    before = of(path)
    assert len(before.held_out[0]) > len(of(few).held_out[0]) > 0
    # Data that are replaced in place have another hash.
    assert of(path).digest == before.digest
    rows = [*ROWS[:-1], {**ROWS[-1], "text": ROWS[-1]["text"].upper()}]
    after = of(write(path, rows, form))
    assert len(after.train[0]) == len(before.train[0])
    assert after.digest != before.digest


CHATS = [
    {"messages": [{"role": "user", "content": f"q{i}"},
                  {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
                  {"role": "assistant", "content": f"a{i}"}]}
    for i in range(40)
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls is defined %}"
    "{{ m.tool_calls | tojson }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("form", ["parquet", "stream"])
def test_conversations_in_rows_are_those_in_lines(form, tmp_path):
    tokenizer = characters(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    parts = []
    for x in ("jsonl", form):
        held_out = write(tmp_path / f"val.{ENDINGS[x]}", CHATS[:2], x)
        path = write(tmp_path / f"chats.{ENDINGS[x]}", CHATS, x)
        config = DataConfig(
            path=(path,), validation_path=held_out, tokenizer=tokenizer, loss="answers"
        )
        (data,) = open_examples(
            config, Layout("contiguous", 1), vocab_size=256, seq_len=200, cache=tmp_path / "cache"
        )
        parts.append(data.train[0])
    for expected, found in zip(*parts, strict=True):
        np.testing.assert_array_equal(found, expected)


def characters(path):
    letters = {x: i for i, x in enumerate(["<eos>", *map(chr, range(32, 127))])}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    built.add_special_tokens(["<eos>"])
    built.save(str(path))
    return path


@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        # A snapshot of a repository of the Hub.
        (
            "README.md data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet "
            "data/validation-00000-of-00001.parquet data/test-00000-of-00001.parquet",
            "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet",
            "data/validation-00000-of-00001.parquet",
        ),
        ("train/books.parquet train/web.parquet test/web.parquet",
         "train/books.parquet train/web.parquet", "test/web.parquet"),
        # No name says anything of a split, though some have its letters.
        ("books.parquet interval.parquet web/0.parquet",
         "books.parquet interval.parquet web/0.parquet", ""),
        ("test-0.parquet validation-0.parquet", None, None),
    ],
)  # fmt: skip
def test_splits_of_a_folder_are_its_parts(names, train, held_out, tmp_path):
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, ROWS[:3], "parquet" if name.endswith("parquet") else "jsonl")
    check_parts(tmp_path, names, train, held_out)


def check_parts(folder, names, train, held_out):
    if train is None:  # There is none to train on.
        with refused(InputError, "must have a split 'train', or one split alone", str(folder)):
            find_files(folder, "data.path")
        return
    files = find_files(folder, "data.path")
    assert list(files.paths) == train.split()
    assert list(files.validation.paths if files.validation else ()) == held_out.split()
    left_out = len(names.split()) - len(train.split()) - len(held_out.split())
    assert files.remark.startswith(f"; {left_out} other files left out (" if left_out else "")


@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        *[
            (f"train.{form} {name}.{form}", f"train.{form}", f"{name}.{form}")
            for form in ("jsonl", "npy", "parquet", "txt")
            for name in ("validation", "valid", "val", "dev", "eval", "test")
        ],
        *[
            (f"a.{form} b.{form} test.{form}", f"a.{form} b.{form}", f"test.{form}")
            for form in ("jsonl", "bin", "parquet")
        ],
        # The validation split comes before that of tests, which nobody sees.
        ("dev.jsonl test.jsonl train.jsonl", "train.jsonl", "dev.jsonl"),
        ("test/a.jsonl train/a.jsonl train/b.jsonl", "train/a.jsonl train/b.jsonl", "test/a.jsonl"),
        ("data/Train/a.md data/Test/b.md", "data/Train/a.md", "data/Test/b.md"),
        ("eval_00.jsonl.gz train_00.jsonl.gz train_01.jsonl.gz",
         "train_00.jsonl.gz train_01.jsonl.gz", "eval_00.jsonl.gz"),
        ("books.parquet test/a.parquet web.parquet", "books.parquet web.parquet", "test/a.parquet"),
        ("notes.jsonl test.jsonl val.jsonl", "notes.jsonl", "val.jsonl"),
        # One split alone, and none to train on.
        ("test.jsonl", "test.jsonl", ""),
        ("test.parquet", "test.parquet", ""),
        ("test.jsonl val.jsonl", None, None),
        # Of a program, or of a part of a word.
        ("main.py test/test_main.py", "main.py test/test_main.py", ""),
        ("essay.txt test.txt", "essay.txt test.txt", ""),
        ("contest.jsonl latest.jsonl testimony.jsonl", "contest.jsonl latest.jsonl testimony.jsonl",
         ""),
    ],
)  # fmt: skip
def test_names_say_what_is_held_out_in_every_form(names, train, held_out, tmp_path):
    for name in names.split():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if path.suffix == ".parquet":
            write(path, ROWS[:3], "parquet")
    check_parts(tmp_path, names, train, held_out)


def test_saved_dataset_has_the_rows_that_it_names(tmp_path):
    """Not those of the caches that lie beside them."""
    rows = datasets.Dataset.from_list(ROWS[:50])
    rows.save_to_disk(tmp_path / "one")
    datasets.load_from_disk(str(tmp_path / "one")).map(lambda row: {"text": row["text"] * 2})
    assert len(list((tmp_path / "one").glob("*.arrow"))) == 2
    opened = of(tmp_path / "one", validation_fraction=0.2)
    assert "other files left out" in opened.description
    assert (
        sum(np.count_nonzero(part[0].tokens == 0) for part in (opened.train, opened.held_out)) == 50
    )
    datasets.DatasetDict(train=rows, test=rows.select(range(7))).save_to_disk(tmp_path / "two")
    opened = of(tmp_path / "two")
    counts = [np.count_nonzero(part[0].tokens == 0) for part in (opened.train, opened.held_out)]
    assert counts == [50, 7]


@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
def test_broken_tables_raise_and_are_named(form, tmp_path, monkeypatch):
    path = write(tmp_path / f"a.{ENDINGS[form]}", ROWS, form)
    content = path.read_bytes()
    for damaged in (b"", b"no table\n" * 9, content[: len(content) // 2]):
        path.write_bytes(damaged)
        with refused(InputError, str(path)):
            of(path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(MissingPackageError, path.name, "[hf]"):
        of(path)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"body": "x"}], "['body']"),
        ([{"text": "x"}, {"text": None}], ":2'"),
        ([{"text": 1}], "int"),
        ([{"text": b"x"}], "bytes"),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "stream"])
def test_fields_that_are_no_text_raise_and_are_named(rows, named, form, tmp_path):
    with refused(InputError, named, f"a.{ENDINGS[form]}"):
        of(write(tmp_path / f"a.{ENDINGS[form]}", rows, form))

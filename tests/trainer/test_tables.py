"""Tables as data: Parquet, Arrow and ArrayRecord files give the tokens that JSONL gives."""

import json
import sys
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.data import array_records
from trainer.data.files import find_files
from trainer.errors import MissingPackageError
from trainer.gpt.chat.corpus import open_examples
from trainer.gpt.config import DataConfig
from trainer.gpt.corpus import open_corpus

ROWS = [{"text": f"the {i}th text, ünd ß" * (i % 3), "id": i} for i in range(600)]
UUID = "1c7d2e9a-3f48-4b1e-9a57-0d6c5b8e7f21"
ENDINGS = {"jsonl": "jsonl", "parquet": "parquet", "stream": "arrow", "file": "arrow",
           "json": "array_record", "example": "arrayrecord"}  # fmt: skip


def write(path, rows, form):
    """Writes rows in one of the forms of `ENDINGS`."""
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    elif form in ("stream", "file"):
        table = pa.Table.from_pylist(rows)
        new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    else:
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for row in rows:
            writer.write(json.dumps(row).encode() if form == "json" else example(row))
        writer.close()
    return path


def example(row):
    """A tf.train.Example; its numbers are an int64_list, which is not read."""
    made = array_records._example_type()()
    for name, value in row.items():
        if isinstance(value, str):
            made.features.feature[name].bytes_list.value.append(value.encode())
        else:
            made.features.feature[name].MergeFromString(b"\x1a\x03\x0a\x01" + bytes([value % 128]))
    return made.SerializeToString(deterministic=True)


def of(path, **changes):
    return open_corpus(DataConfig(path=path, **changes), vocab_size=256)


@pytest.mark.quick
@pytest.mark.parametrize("form", [x for x in ENDINGS if x != "jsonl"])
def test_rows_give_the_tokens_that_lines_give(form, tmp_path):
    held_out = write(tmp_path / "others.jsonl", ROWS[:3], "jsonl")
    expected, found = (
        of(write(tmp_path / f"a.{ENDINGS[x]}", ROWS, x), validation_path=held_out)
        for x in ("jsonl", form)
    )
    np.testing.assert_array_equal(found.train[0].tokens, expected.train[0].tokens)
    assert found.digest != expected.digest  # The hash knows the kind of the file.
    # Held-out rows are those of a hash of their numbers, whatever the rest.
    path = write(tmp_path / f"a.{ENDINGS[form]}", ROWS, form)
    few = write(tmp_path / f"b.{ENDINGS[form]}", ROWS[:100], form)
    assert len(of(path).held_out[0]) > len(of(few).held_out[0]) > 0


@pytest.mark.parametrize("form", ["parquet", "stream", "example"])
def test_data_replaced_in_place_have_another_hash(form, tmp_path):
    path = tmp_path / f"a.{ENDINGS[form]}"
    before = of(write(path, ROWS, form))
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
    "{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("form", ["parquet", "stream", "json"])
def test_conversations_in_rows_are_those_in_lines(form, tmp_path):
    tokenizer = characters(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    parts = []
    for x in ("jsonl", form):
        held_out = write(tmp_path / f"val.{ENDINGS[x]}", CHATS[:2], x)
        path = write(tmp_path / f"chats.{ENDINGS[x]}", CHATS, x)
        config = DataConfig(
            path=path, validation_path=held_out, tokenizer=tokenizer, loss_on="completion"
        )
        data = open_examples(
            config, Layout("contiguous", 1), vocab_size=256, seq_len=200, cache=tmp_path / "cache"
        )
        parts.append(data.train[0])
    for expected, found in zip(*parts, strict=True):
        np.testing.assert_array_equal(found, expected)


def characters(path):
    """A tokenizer whose tokens are characters."""
    import tokenizers

    letters = {x: i for i, x in enumerate(["<eos>", *map(chr, range(32, 127))])}
    tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])).save(str(path))
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
        # DatasetDict.save_to_disk, without a validation split.
        (
            "dataset_dict.json train/data-00000-of-00001.arrow train/dataset_info.json "
            "train/state.json test/data-00000-of-00001.arrow test/dataset_info.json",
            "train/data-00000-of-00001.arrow",
            "test/data-00000-of-00001.arrow",
        ),
        # Dataset.save_to_disk.
        (
            "data-00000-of-00002.arrow data-00001-of-00002.arrow dataset_info.json state.json",
            "data-00000-of-00002.arrow data-00001-of-00002.arrow",
            "",
        ),
        ("default/train/0000.parquet default/train/0001.parquet",
         "default/train/0000.parquet default/train/0001.parquet", ""),
        ("c4-train.array_record-00000-of-00002 c4-validation.array_record-00000-of-00001",
         "c4-train.array_record-00000-of-00002",
         "c4-validation.array_record-00000-of-00001"),
        # One config of several, whose others have tables by other names.
        ("data/A/train-0.parquet data/A/dev-0.parquet data/B/corpus-0.parquet",
         "data/A/train-0.parquet", "data/A/dev-0.parquet"),
        # Spark.
        (f"_SUCCESS part-00000-{UUID}-c000.snappy.parquet part-00001-{UUID}-c000.snappy.parquet",
         f"part-00000-{UUID}-c000.snappy.parquet part-00001-{UUID}-c000.snappy.parquet", ""),
        (f"train/part-00000-{UUID}-c000.snappy.parquet test/part-00000-{UUID}-c000.parquet",
         f"train/part-00000-{UUID}-c000.snappy.parquet", f"test/part-00000-{UUID}-c000.parquet"),
        (f"train-00000-{UUID}-c000.snappy.parquet train-00001-{UUID}-c000.snappy.parquet",
         f"train-00000-{UUID}-c000.snappy.parquet train-00001-{UUID}-c000.snappy.parquet", ""),
        ("train0.parquet train1.parquet val0.parquet",
         "train0.parquet train1.parquet", "val0.parquet"),
        # No name says anything of a split, though some have its letters.
        ("batch0.parquet batch1.parquet latest/shard00.parquet latest/shard01.parquet",
         "batch0.parquet batch1.parquet latest/shard00.parquet latest/shard01.parquet", ""),
        ("books.parquet interval.parquet web/0.parquet",
         "books.parquet interval.parquet web/0.parquet", ""),
        ("train/books.parquet train/web.parquet val/web.parquet",
         "train/books.parquet train/web.parquet", "val/web.parquet"),
        # What lies in the folder of a split belongs to it.
        ("train/shard0/0.parquet train/shard1/0.parquet val/0.parquet",
         "train/shard0/0.parquet train/shard1/0.parquet", "val/0.parquet"),
    ],
)  # fmt: skip
def test_splits_of_a_folder_are_its_parts(names, train, held_out, tmp_path):
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files = find_files(tmp_path, "data.path")
    assert list(files.paths) == train.split()
    assert list(files.validation.paths if files.validation else ()) == held_out.split()
    left_out = len(names.split()) - len(train.split()) - len(held_out.split())
    assert files.remark.startswith(f"; {left_out} other files left out (" if left_out else "")


@pytest.mark.parametrize(
    ("names", "named"),
    [
        ("train_sft-0.parquet test_sft-0.parquet", "'train_sft'"),
        (
            "A/train-0.parquet A/test-0.parquet B/train/0.parquet B/validation/0.parquet",
            "--data.path",
        ),
        ("data/train-0.parquet data/B/train-0.parquet", "'data/B'"),
        ("books.parquet testset.parquet", "'books.parquet'"),
        ("train-0.parquet notes.txt", "'notes.txt'"),
        ("train-0.parquet val-0.arrow", "'val-0.arrow'"),
        ("a.parquet.gz", "parquet.gz"),
    ],
)
def test_folders_that_are_not_clear_raise(names, named, tmp_path):
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with refused(InputError, named):
        find_files(tmp_path, "data.path")


@pytest.mark.parametrize("form", ["parquet", "stream", "file", "json", "example"])
@pytest.mark.parametrize("damage", ["empty", "text", "cut", "bit", "end"])
def test_broken_tables_raise_and_are_named(form, damage, tmp_path):
    path = write(tmp_path / f"a.{ENDINGS[form]}", ROWS, form)
    content = path.read_bytes()
    # Files of ArrayRecord are filled up with zeros.
    middle = next(i for i in range(len(content) // 2, len(content)) if content[i])
    flipped = content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]
    damaged = {
        "empty": b"",
        "text": b"no table\n" * 9,
        "cut": content[:middle],
        "bit": flipped,
        "end": content[:-8],
    }
    path.write_bytes(damaged[damage])
    if damage == "bit" and ENDINGS[form] in ("parquet", "arrow"):
        # It may be another letter, or a column that is not read. Only ArrayRecord has checksums.
        with suppress(InputError):
            of(path)
        return
    with pytest.raises(ValueError, match=rf"'{path}' must be a whole|in '{path}:\d+'"):
        of(path)


def test_fields_that_are_no_text_raise_and_are_named(tmp_path):
    def raises(message, rows, form="parquet", **changes):
        path = write(tmp_path / f"a.{ENDINGS[form]}", rows, form)
        with pytest.raises(ValueError, match=message):
            of(path, **changes)

    raises(r"got the columns \['body'\] in '.*a.parquet', and none of \['text'\]", [{"body": "x"}])
    rows = [{"text": "x"}, {"text": None}]
    for form in ("parquet", "stream"):
        message = (
            r"must have text under 'text'; got null in column 'text' of '.*:2'. Fill or remove"
        )
        raises(message, rows, form)
    raises(r"must be a string; got int for 'text' in '.*a.arrow:1'", [{"text": 1}], "stream")
    raises(r"got bytes in column 'text' of '.*a.parquet:1'", [{"text": b"x"}])
    raises(r"with the key 'text'; got the keys \['body'\] in '.*d:1'", [{"body": "x"}], "json")


def test_package_that_is_missing_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", ROWS, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused(MissingPackageError, "a.parquet"):
        of(path)

"""The flags that say which of several processes this is."""

import dataclasses
from pathlib import Path

import pytest
import tokenizers

import train
from configs.gpt import gpt_tiny
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import Distributed
from trainer.data.files import find_files
from trainer.dit.config import ImageConfig
from trainer.gpt.config import DataConfig
from trainer.run.settings import save_config

pytestmark = pytest.mark.quick


def given(**changes):
    return Distributed(**{"coordinator": "localhost:7777", "processes": 2, "index": 1, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"index": None},
        {"coordinator": None},
        {"index": 2},
        {"index": -1},
        {"processes": 0, "index": 0},
        {"coordinator": "localhost"},
        {"coordinator": ":7777"},
        {"coordinator": "localhost:http"},
        {"coordinator": "localhost:70000"},
        {"timeout": 0.0},
        {"start_timeout": -1.0},
    ],
    ids=str,
)
def test_processes_that_cannot_be_raise(changes):
    with refused(InputError, **changes):
        given(**changes)


def test_flags_say_which_process_this_is():
    flags = ["--distributed.coordinator", "[::1]:7777", "--distributed.processes", "2"]
    command = train.read_command_line([*flags, "--distributed.index", "0", "--mesh.team", "1"])
    assert command.distributed == given(coordinator="[::1]:7777", index=0)
    assert command.distributed.several
    assert command.distributed.has_literal_address
    assert not given(coordinator="node-7:7777").has_literal_address
    assert command.settings.mesh.team == 1
    assert train.read_command_line(["--distributed"]).distributed == Distributed(on=True)
    assert not train.read_command_line([]).distributed.several
    # It does not change what the run is.
    assert "distributed" not in vars(command.settings)


def test_object_stores_are_refused_with_a_way_out():
    with refused(InputError, "got 'gs://bucket/run'"):
        dataclasses.replace(gpt_tiny(), run_dir=Path("gs://bucket/run"))
    with refused(InputError, "got 's3:/bucket/a'"):
        find_files(Path("s3://bucket/a"), "data.path")
    url = Path("gs://bucket/a")
    for name, value in {"path": (Path("a"), url), "validation_path": url, "tokenizer": url}.items():
        with refused(InputError, f"data.{name} must be on a disk; got 'gs://", "aws s3 sync"):
            DataConfig(**{name: value})
    with refused(InputError, "data.path must be on a disk; got 'gs://"):
        ImageConfig(path=Path("gs://bucket/a"))


@pytest.mark.parametrize(
    ("flags", "vocabulary"),
    [
        ("gpt_tiny --data.tokenizer {}", 4),
        ("llama3_8b --data.tokenizer {}", 4),
        ("llama3_8b --data.tokenizer {} --model.vocab-size 512", 512),
        ("gpt_tiny --data.tokenizer {} --run-dir {run}", 99),
        ("gpt_tiny --data.tokenizer missing.json", 256),
        ("llama3_8b", 128_256),
    ],
)
def test_vocabulary_follows_the_tokenizer_unless_it_is_given(flags, vocabulary, tmp_path):
    words = tokenizers.models.BPE({"a": 0, "b": 1, "<|endoftext|>": 3}, [])
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    former = dataclasses.replace(gpt_tiny().model, vocab_size=99)
    (tmp_path / "run").mkdir()
    save_config(dataclasses.replace(gpt_tiny(), model=former), tmp_path / "run" / "config.json")
    flags = flags.format(tmp_path / "tokenizer.json", run=tmp_path / "run")
    assert train.read_command_line(flags.split()).settings.model.vocab_size == vocabulary


@pytest.mark.parametrize(
    ("flags", "length"),
    [("--seq-len 128", 64), ("--seq-len 300", 256), ("--seq-len 128 --sample.length 100", 100)],
)
def test_sample_is_shorter_than_a_sequence(flags, length):
    settings = train.read_command_line(["gpt_tiny", *flags.split()]).settings
    assert settings.sample.length == length

"""The config of a run survives as JSON, and its settings are given as flags."""

import json
import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import tyro

from configs.dit import dit_digits
from configs.gpt import gpt_tiny
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import MeshConfig
from trainer.gpt.config import DataConfig, GPTTrainConfig, RopeConfig
from trainer.run.settings import (
    flags_of,
    load_config,
    read_kind,
    save_config,
)

pytestmark = pytest.mark.quick


@pytest.fixture
def config(tmp_path):
    return replace(gpt_tiny(), run_dir=tmp_path / "run")


def test_config_survives(config, tmp_path):
    others = replace(
        config,
        model=replace(
            config.model,
            rope=RopeConfig(
                scaling="yarn",
                factor=4.0,
                original_length=64,
                bases=(1e4, "none"),
                stretches="global",
            ),
            windows=(512, "none"),
            dtype="bfloat16",
        ),
        data=DataConfig(path=Path("some/ä.jsonl"), end_of_document=7, mask_documents=False),
        mesh=MeshConfig(data=2, team=1),
        zero=3,
        zero_axes=("ring", "team"),
        profile=(10, 12),
        tile=512,
    )
    path = tmp_path / "config.json"
    for saved in (config, others):
        save_config(saved, path)
        assert load_config(GPTTrainConfig, path) == saved
    assert [x.name for x in tmp_path.iterdir()] == ["config.json"]


def change(path, *keys, value):
    """Sets the value under `keys` in a file of JSON, or removes it if the value is None."""
    content = json.loads(path.read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("keys", "value", "named"),
    [
        (("optimizer", "learning_rat"), 1.0, "optimizer.learning_rat"),
        (("sede",), 1, "GPTTrainConfig's; got sede"),
        (("steps",), "many", "'many'"),
        (("steps",), True, "steps must be int; got True"),
        (("steps",), 1.5, "1.5"),
        (("model", "rope", "base"), "x", "'x'"),
        (("model", "dtype"), "float8", "'bfloat16'"),
        (("zero_axes",), ["ring", "wing"], "'wing'"),
        (("profile",), [1, 2, 3], "must be tuple[int, int]; got [1, 2,"),
        (("mesh",), 8, "got 8"),
        (("run_dir",), 8, "run_dir"),
        (("steps",), None, "a default must be in the file; got none for"),
        (("optimizer", "learning_rate"), None, "optimizer.learning_rate"),
        (("steps",), 0, "steps must be at least 1"),
    ],
)
def test_wrong_config_file_names_the_setting(config, tmp_path, keys, value, named):
    path = tmp_path / "config.json"
    save_config(config, path)
    change(path, *keys, value=value)
    with refused(InputError, named) as caught:
        load_config(GPTTrainConfig, path)
    assert str(caught.value).startswith(f"{path} must hold the config of a run. ")


def test_file_that_is_not_json_or_no_object_raises(tmp_path):
    path = tmp_path / "config.json"
    for text in ('{"steps": 1', "[]"):
        path.write_text(text)
        with refused(InputError, "must hold the config of a run"):
            load_config(GPTTrainConfig, path)


@pytest.mark.parametrize(
    ("text", "what"), [("", "empty"), ("\0\0", "damaged \\(JSONDecodeError: ")]
)
def test_damaged_file_has_a_remedy(tmp_path, text, what):
    path = tmp_path / "config.json"
    path.write_text(text)
    for read in (read_kind, partial(load_config, GPTTrainConfig)):
        with pytest.raises(ValueError, match=rf"It is {what}.*Move it away and start train.py"):
            read(path)


def test_config_is_on_the_disk_before_it_takes_its_place(config, tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file)))
    save_config(config, tmp_path / "config.json")
    # First its content, and then its name, which is in the folder.
    content, folder = (tmp_path / "config.json").stat(), tmp_path.stat()
    assert [x.st_ino for x in flushed] == [content.st_ino, folder.st_ino]
    assert flushed[0].st_size == content.st_size


def test_settings_of_an_older_file_take_their_defaults(config, tmp_path):
    path = tmp_path / "config.json"
    save_config(config, path)
    change(path, "zero_axes", value=None)
    change(path, "optimizer", "beta2", value=None)
    assert load_config(GPTTrainConfig, path) == config


def test_config_of_what_json_cannot_hold_raises(tmp_path):
    @dataclass
    class Odd:
        what: object = field(default_factory=object)

    with pytest.raises(TypeError):
        save_config(Odd(), tmp_path / "config.json")
    assert not (tmp_path / "config.json").exists()


def test_literals_are_not_taken_for_numbers_of_another_type(tmp_path):
    @dataclass
    class Small:
        level: Literal[0, 1] = 0

    path = tmp_path / "config.json"
    path.write_text('{"level": true}')
    with refused(InputError, "must hold the config of a run"):
        load_config(Small, path)


def test_file_names_its_kind(config, tmp_path):
    path = tmp_path / "config.json"
    for saved, kind in ((config, "gpt"), (dit_digits(), "dit")):
        save_config(saved, path)
        assert read_kind(path) == kind
        assert load_config(type(saved), path) == saved
    with refused(InputError, "must hold the config of a run"):
        load_config(GPTTrainConfig, path)


def test_file_that_names_no_kind_is_of_a_gpt(config, tmp_path):
    path = tmp_path / "config.json"
    save_config(config, path)
    change(path, "kind", value=None)
    assert read_kind(path) == "gpt"
    assert load_config(GPTTrainConfig, path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": ["gpt"]}', r"kind must be str; got \['gpt'\]\. Correct the file"),
        ("[1]", r"It must be dict; got \[1\]"),
        ('{"kind": ', r"It is damaged \(JSONDecodeError: Expecting value"),
    ],
)
def test_kind_that_cannot_be_read_raises(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path} must hold the config of a run\. {message}"):
        read_kind(path)


@dataclass
class Inner:
    fast: bool = True
    path: str = "here"


@dataclass
class Settings:
    tokens: int = 3
    two_words: tuple[int, ...] = (1, 2)
    inner: Inner = field(default_factory=Inner)


def test_flags_are_those_of_the_command_line():
    settings = Settings(tokens=5, inner=Inner(fast=False))
    flags = flags_of(settings, but=["inner.path"])
    assert flags == {
        "tokens": "--tokens 5",
        "two_words": "--two-words 1 2",
        "inner.fast": "--inner.no-fast",
    }
    assert tyro.cli(Settings, args=" ".join(flags.values()).split()) == settings

"""The config of a run survives as JSON, and its settings are given as flags."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from configs.dit import dit_digits
from configs.gpt import gpt_tiny
from models.config import RopeConfig
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import MeshConfig
from trainer.gpt.config import DataConfig, GPTTrainConfig, TextSampleConfig
from trainer.run.settings import load_config, read_kind, save_config

pytestmark = pytest.mark.quick


@pytest.fixture
def config(tmp_path):
    return replace(gpt_tiny(), run_dir=tmp_path / "run")


def test_config_survives(config, tmp_path):
    rope = dict(scaling="yarn", factor=4.0, original_length=64, bases=(1e4, "none"))
    rope = RopeConfig(**rope, stretches="global")
    others = replace(
        config,
        model=replace(config.model, rope=rope, windows=(512, "none"), dtype="bfloat16"),
        data=DataConfig(path=(Path("some/ä.jsonl"),), end_of_document=7, mask_documents=False),
        mesh=MeshConfig(data=2, team=1),
        **dict(zero=3, zero_axes=("ring", "team"), profile=(10, 12), tile=512),
    )
    path = tmp_path / "config.json"
    for saved, kind in ((config, "gpt"), (others, "gpt"), (dit_digits(), "dit")):
        save_config(saved, path)
        assert read_kind(path) == kind
        assert load_config(type(saved), path) == saved
    assert [x.name for x in tmp_path.iterdir()] == ["config.json"]


def change(values, changes):
    """Sets values in a tree, and removes those that become None."""
    for key, x in changes.items():
        if isinstance(x, dict):
            change(values[key], x)
        else:
            values[key] = x
            if x is None:
                del values[key]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer": {"learning_rat": 1.0}}, "optimizer.learning_rat"),
        ({"stepz": 8, "steps": None}, "stepz. Use steps"),
        ({"sede": 1}, "GPTTrainConfig's; got sede"),
        ({"steps": "many"}, "'many'"),
        ({"steps": True}, "steps must be int; got True"),
        ({"steps": 1.5}, "1.5"),
        ({"model": {"rope": {"factor": "x"}}}, "'x'"),
        ({"model": {"dtype": "float8"}}, "'bfloat16'"),
        ({"zero": True}, "zero"),
        ({"zero_axes": ["ring", "wing"]}, "'wing'"),
        ({"profile": [1, 2, 3]}, "must be tuple[int, int]; got [1, 2,"),
        ({"mesh": 8}, "got 8"),
        ({"run_dir": 8}, "run_dir"),
        ({"steps": None}, "a default must be in the file; got none for"),
        ({"optimizer": {"learning_rate": None}}, "optimizer.learning_rate"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"kind": "dit"}, "kind"),
    ],
)
def test_wrong_config_file_names_the_setting(config, tmp_path, changes, named):
    path = tmp_path / "config.json"
    save_config(config, path)
    values = json.loads(path.read_text())
    change(values, changes)
    path.write_text(json.dumps(values))
    with refused(InputError, named) as caught:
        load_config(GPTTrainConfig, path)
    assert str(caught.value).startswith(f"{path} must hold the config of a run. ")


@pytest.mark.parametrize(
    ("text", "of_kind", "of_config"),
    [
        ("", *["It is empty."] * 2),
        ("\0\0", *["It is damaged (JSONDecodeError: "] * 2),
        ('{"steps": 1', *["It is damaged (JSONDecodeError: "] * 2),
        ("[1]", "It must be dict; got [1]", "It must be GPTTrainConfig; got [1]"),
        ("[" * 100_000, *["recursion"] * 2),
        ('{"kind": ["gpt"]}', "kind must be str; got ['gpt']. Correct the file", "kind"),
    ],
)
def test_damaged_file_has_a_remedy(tmp_path, text, of_kind, of_config):
    path = tmp_path / "config.json"
    path.write_text(text)
    for read, words in ((read_kind, of_kind), (partial(load_config, GPTTrainConfig), of_config)):
        with refused(InputError, f"{path} must hold the config of a run. ", words) as caught:
            read(path)
        is_damaged = "damaged" in words or "empty" in words
        assert ("Move it away and start train.py" in str(caught.value)) >= is_damaged


def test_settings_of_an_older_file_take_their_defaults(config, tmp_path):
    """Without a kind, it is the file of a GPT."""
    path = tmp_path / "config.json"
    save_config(config, path)
    values = json.loads(path.read_text())
    del values["zero_axes"], values["optimizer"]["beta2"], values["kind"]
    path.write_text(json.dumps(values))
    assert read_kind(path) == "gpt"
    assert load_config(GPTTrainConfig, path) == config


@pytest.mark.parametrize(("former", "loss"), [("all", None), ("completion", "answers")])
def test_loss_of_an_older_file_has_another_name(config, tmp_path, former, loss):
    path = tmp_path / "config.json"
    save_config(config, path)
    values = json.loads(path.read_text())
    change(values, {"data": {"loss": None, "loss_on": former}})
    path.write_text(json.dumps(values))
    assert load_config(GPTTrainConfig, path).data == replace(config.data, loss=loss)


def test_samples_of_an_older_file_have_other_names(config, tmp_path):
    path = tmp_path / "config.json"
    save_config(config, path)
    values = json.loads(path.read_text())
    change(values, {"sample": None, "sample_length": 5, "temperature": 0.5})
    path.write_text(json.dumps(values))
    sample = TextSampleConfig(length=5, temperature=0.5)
    assert load_config(GPTTrainConfig, path) == replace(config, sample=sample)


@pytest.mark.parametrize("former", ["a.jsonl", None])
def test_data_of_an_older_file_have_one_path_or_none(config, tmp_path, former):
    path = tmp_path / "config.json"
    save_config(config, path)
    values = json.loads(path.read_text())
    values["data"]["path"] = former
    path.write_text(json.dumps(values))
    paths = () if former is None else (Path(former),)
    assert load_config(GPTTrainConfig, path).data == replace(config.data, path=paths)


@pytest.mark.parametrize(
    ("peak", "final", "share"), [(3e-4, 3e-5, 0.1), (2e-6, 1e-5, 5), (1, 0, None)]
)
def test_final_learning_rate_of_an_older_file_is_a_share(config, tmp_path, peak, final, share):
    path = tmp_path / "config.json"
    rates = {"learning_rate": peak, "final_learning_rate": final}
    save_config(config, path)
    values = json.loads(path.read_text())
    change(values, {"optimizer": {"final_share": None} | rates})
    path.write_text(json.dumps(values))
    optimizer = replace(config.optimizer, learning_rate=peak, final_share=share)
    assert load_config(GPTTrainConfig, path) == replace(config, optimizer=optimizer)


@pytest.mark.parametrize("saved", [gpt_tiny(), dit_digits()], ids=lambda x: x.kind)
def test_mlflow_of_an_older_file_is_left_out_and_said(saved, tmp_path, capsys):
    path = tmp_path / "config.json"
    save_config(saved, path)
    values = json.loads(path.read_text())
    for unset in ({"experiment": None, "uri": None}, {}):
        path.write_text(json.dumps({**values, "mlflow": unset}))
        assert load_config(type(saved), path) == saved
    assert not capsys.readouterr().err
    given = {"experiment": "e", "uri": "http://me:secret@host"}
    path.write_text(json.dumps({**values, "mlflow": given}))
    assert load_config(type(saved), path) == saved
    said = capsys.readouterr().err
    assert "metrics of this run went to MLflow, and no longer do. Use --wandb.project" in said
    assert "secret" not in said


def test_config_is_on_the_disk_before_it_takes_its_place(config, tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file)))
    save_config(config, tmp_path / "config.json")
    # First its content, and then its name, which is in the folder.
    content, folder = (tmp_path / "config.json").stat(), tmp_path.stat()
    assert [x.st_ino for x in flushed] == [content.st_ino, folder.st_ino]
    assert flushed[0].st_size == content.st_size

"""Files that appear while a run trains, and folders that it exports meanwhile; kills in between."""

import dataclasses
import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

import pretrained
import train
from configs.gpt import gpt_tiny
from models.config import GPTConfig
from programs import (
    REPOSITORY,
    SMALL,
    interrupt_after,
    records_of,
    run_python,
    saved_steps,
    shared_programs,
)
from refusals import refused
from rollout_cases import make_pairs, make_rollouts, write_rollouts
from startrail_jax.errors import InputError
from trainer.config import CheckpointConfig, LoraConfig, OptimizerConfig
from trainer.data import arriving
from trainer.gpt.config import DataConfig, ExportConfig, TextSampleConfig
from trainer.gpt.export.writing import export_run
from trainer.gpt.objectives.policy import Policy
from trainer.run.settings import save_config

NAMES = ["step_8.jsonl", "step_9.jsonl", "step_10.jsonl", "step_011.jsonl"]


def config_of(tmp_path, data=(), **changes):
    settings = dict(
        model=GPTConfig(**SMALL), objective="policy", policy=Policy(mean="sequence"),
        optimizer=OptimizerConfig(learning_rate=1e-2), devices=2, seq_len=32, batch_size=8, steps=4,
        data=DataConfig(**dict(path=(tmp_path / "rollouts",), follow=True) | dict(data)),
        log_every=1, sample=TextSampleConfig(), tensorboard=False, run_dir=tmp_path / "run",
        checkpoint=CheckpointConfig(every=2, keep=9),
    )  # fmt: skip
    return dataclasses.replace(gpt_tiny(), **settings | changes)


def write_file(folder, name, seed, count=10):
    folder.mkdir(exist_ok=True)
    write_rollouts(folder / ".part", make_rollouts(count=count, longest=20, seed=seed))
    os.rename(folder / ".part", folder / name)


def write_files(tmp_path, names=NAMES):
    for seed, name in enumerate(names):
        write_file(tmp_path / "rollouts", name, seed)


def result_of(run_dir, step=None):
    """The losses of a run, and the weights that its last checkpoint gives."""
    losses = [x["train_loss"] for x in records_of(run_dir) if "train_loss" in x]
    config = train.load_train_config(run_dir / "config.json")
    out = run_dir.with_name(f"{run_dir.name}_weights")
    shutil.rmtree(out, ignore_errors=True)
    export_run(run_dir, config, out, step=step, note=lambda text: None)
    return losses, load_file(out / "model.safetensors")


def check_equal(got, want):
    assert got[0] == want[0]
    assert got[1].keys() == want[1].keys()
    for name, x in want[1].items():
        np.testing.assert_array_equal(got[1][name], x, err_msg=name)


@pytest.fixture(autouse=True, scope="module")
def programs_of_all():
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of a run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    write_files(folder)
    assert train.train(config_of(folder)).is_whole
    return result_of(folder / "run")


def test_each_file_is_a_step_in_the_order_of_names(tmp_path, whole):
    losses, weights = whole
    assert len(losses) == len(NAMES)
    # Other names in the same order, some of which are packed or no files of records.
    write_files(tmp_path, [f"{x}.jsonl" for x in ("a", "b", "b1", "c")])
    (tmp_path / "rollouts" / ".d.jsonl").write_text("{")
    (tmp_path / "rollouts" / "a0.jsonl.tmp").write_text("{")
    (tmp_path / "rollouts" / "old.jsonl").mkdir()
    train.train(config_of(tmp_path, run_dir=tmp_path / "again"))
    check_equal(result_of(tmp_path / "again"), (losses, weights))
    # The first step is that of a batch of the whole file.
    one = DataConfig(path=(tmp_path / "rollouts" / "a.jsonl",))
    config = config_of(tmp_path, data=vars(one), steps=1, batch_size=3)
    train.train(dataclasses.replace(config, run_dir=tmp_path / "one"))
    (loss,) = (x["train_loss"] for x in records_of(tmp_path / "one"))
    assert abs(loss - losses[0]) < 1e-5


def test_files_come_while_the_run_waits(tmp_path, monkeypatch, capsys, whole):
    (tmp_path / "rollouts").mkdir()
    config = config_of(tmp_path)
    monkeypatch.setattr(arriving, "SECONDS_TO_SAY", 0.0)
    waits = threading.Event()
    sleep = time.sleep

    def waiting(seconds):
        waits.set()
        sleep(min(seconds, 0.01))

    monkeypatch.setattr(arriving.time, "sleep", waiting)

    def engine():
        for seed, name in enumerate(NAMES):
            waits.clear()
            assert waits.wait(60)
            if name == NAMES[3]:
                write_file(tmp_path / "rollouts", "step_3.jsonl", seed)
                waits.clear()
                assert waits.wait(60)
            write_file(tmp_path / "rollouts", name, seed)

    thread = threading.Thread(target=engine)
    thread.start()
    train.train(config)
    thread.join()
    check_equal(result_of(config.run_dir), whole)
    said = capsys.readouterr().out
    assert f"waiting for a file *.jsonl in {tmp_path / 'rollouts'}\n" in said
    assert f"waiting for a file *.jsonl after 'step_9.jsonl' in {tmp_path / 'rollouts'}" in said
    assert "got 'step_3.jsonl' after 'step_10.jsonl', and nothing is trained on them" in said


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_run_goes_on_with_the_next_file(tmp_path, monkeypatch, step, whole):
    write_files(tmp_path)
    config = config_of(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_after(patch, step)
        assert not train.train(config).is_whole
    assert saved_steps(config.run_dir)[-1] == step
    for name in NAMES[:step]:  # Files that are done may go.
        (tmp_path / "rollouts" / name).unlink()
    train.train(config)
    check_equal(result_of(config.run_dir), whole)


def signal_when_waiting(monkeypatch):
    sleep = time.sleep

    def stop(seconds):
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(0.001)

    monkeypatch.setattr(arriving.time, "sleep", stop)


def test_sigterm_ends_the_wait(tmp_path, monkeypatch, capsys, whole):
    write_files(tmp_path, NAMES[:3])
    config = config_of(tmp_path)
    with monkeypatch.context() as patch:
        signal_when_waiting(patch)
        assert not train.train(config).is_whole
    assert saved_steps(config.run_dir) == [2, 3]
    assert "interrupted after step 3, which is saved" in capsys.readouterr().out
    write_file(tmp_path / "rollouts", NAMES[3], 3)
    train.train(config)
    check_equal(result_of(config.run_dir), whole)
    # Before the first file there is nothing to save.
    (tmp_path / "empty").mkdir()
    config = config_of(tmp_path, data={"path": (tmp_path / "empty",)}, run_dir=tmp_path / "other")
    signal_when_waiting(monkeypatch)
    assert not train.train(config).is_whole
    assert "interrupted before the first step" in capsys.readouterr().out


def epochs_of(tmp_path, **changes):
    data = {"epochs_a_file": 2}
    return config_of(tmp_path, data=data, batch_size=2, **changes)


def test_files_are_trained_on_several_times(tmp_path, monkeypatch):
    """Of three files, each row twice; and a stop within a file changes nothing."""
    write_files(tmp_path, NAMES[:2])
    rows = []
    collate = arriving.ArrivingBatches._numbers

    def noted(self, file, batch):
        numbers = collate(self, file, batch)
        rows.append((file.name, numbers))
        return numbers

    monkeypatch.setattr(arriving.ArrivingBatches, "_numbers", noted)
    config = epochs_of(tmp_path, steps=8)
    train.train(config)
    for name in NAMES[:2]:
        of_file = [x for file, numbers in rows for x in numbers if file == name and x >= 0]
        count = max(of_file) + 1
        assert sorted(of_file) == sorted([*range(count)] * 2)
        half = len(of_file) // 2
        assert sorted(of_file[:half]) == [*range(count)]
    assert [name for name, _ in rows] == [NAMES[0]] * 4 + [NAMES[1]] * 4
    assert sum(-1 in numbers for _, numbers in rows) == 4  # Four rows of a file, in threes.
    want = result_of(config.run_dir)
    config = dataclasses.replace(config, run_dir=tmp_path / "stopped")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        train.train(config)
    (tmp_path / "rollouts" / NAMES[0]).unlink()
    kept = (tmp_path / "rollouts" / NAMES[1]).read_bytes()
    for change in (lambda path: path.write_bytes(kept + b"\n"), lambda path: path.unlink()):
        change(tmp_path / "rollouts" / NAMES[1])
        with refused(InputError, NAMES[1]):
            train.train(config)
    (tmp_path / "rollouts" / NAMES[1]).write_bytes(kept)
    train.train(config)
    check_equal(result_of(config.run_dir), want)


def test_mistakes_in_a_file_are_mended_and_the_run_goes_on(tmp_path, whole):
    write_files(tmp_path)
    config, path = config_of(tmp_path), tmp_path / "rollouts" / NAMES[2]
    kept = path.read_bytes()
    record = json.loads(kept.splitlines()[0])
    record["logprobs"].append(0.0)
    path.write_text(json.dumps(record))
    with refused(InputError, f"{path}:1"):
        train.train(config)
    assert saved_steps(config.run_dir) == [2]
    path.write_bytes(kept)
    train.train(config)
    check_equal(result_of(config.run_dir), whole)
    write_file(tmp_path / "rollouts", "step_012.jsonl", 5, count=40)
    with refused(InputError, "A file is one step, and must fit a batch", "batch_size=8"):
        train.train(dataclasses.replace(config, steps=5, allow_changes=True))


def test_pairs_and_tokens_appear_too(tmp_path):
    """Pairs with something held out; and rollouts for next-token training."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for number in range(2):
        write_rollouts(folder / f"{number}.jsonl", make_pairs(4, references=False, seed=number))
    held = write_rollouts(tmp_path / "held.jsonl", make_pairs(3, references=False, seed=7))
    model = GPTConfig(**SMALL | {"vocab_size": 256, "scores": True})
    config = config_of(
        tmp_path, objective="reward", policy=Policy(), model=model, seq_len=100, steps=2,
        data={"validation_path": held},
    )  # fmt: skip
    assert train.train(config).validation is not None
    assert {"validation_accuracy", "accuracy"} <= records_of(config.run_dir)[-1].keys()
    shutil.rmtree(folder)
    write_files(tmp_path, NAMES[:2])
    config = config_of(
        tmp_path, objective="next_token", policy=Policy(), steps=2, run_dir=tmp_path / "tokens",
        sample=TextSampleConfig(length=4),
    )  # fmt: skip
    assert train.train(config).is_whole


SETTINGS = {
    "paths": (dict(path=()), "needs one folder as data.path"),
    "documents": (dict(batches="documents"), "batches='documents'"),
    "fraction": (dict(validation_fraction=0.3), "validation_fraction=0.3, follow=True"),
    "loss": (dict(loss="answers"), "data.loss='answers'"),
    "alone": (dict(follow=False, epochs_a_file=2), "needs data.follow; got epochs_a_file=2"),
    "none": (dict(epochs_a_file=0), "data.epochs_a_file must be at least 1"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_do_not_suit_arriving_files_are_refused(tmp_path, setting):
    settings, message = SETTINGS[setting]
    with refused(InputError, message):
        config_of(tmp_path, data=settings)
    with refused(InputError, "export.keep needs export.every; got keep='2' alone"):
        ExportConfig(keep=2)
    write_rollouts(tmp_path / "rollouts", make_rollouts())
    with refused(InputError, "data.follow needs a folder as data.path"):
        train.train(config_of(tmp_path))


# Exports.


def test_weights_are_exported_as_from_a_checkpoint(tmp_path):
    write_files(tmp_path)
    folder = tmp_path / "weights"
    config = config_of(tmp_path, export=ExportConfig(every=2, dir=folder, dtype="bfloat16"), zero=3)
    train.train(config)
    assert sorted(x.name for x in folder.iterdir()) == ["step_000000", "step_000002", "step_000004"]
    for step in (2, 4):
        out = tmp_path / f"of_{step}"
        export_run(config.run_dir, config, out, step=step, dtype="bfloat16", note=lambda text: None)
        names = sorted(x.name for x in out.iterdir())
        assert sorted(x.name for x in (folder / f"step_00000{step}").iterdir()) == names
        for name in names:
            same = (out / name).read_bytes() == (folder / f"step_00000{step}" / name).read_bytes()
            assert same, name


def test_only_the_newest_exports_are_kept_and_adapters_alone(tmp_path):
    write_files(tmp_path)
    config = dataclasses.replace(
        pretrained.config_of(pretrained.REFERENCES / "qwen3"), objective="policy",
        data=DataConfig(path=(tmp_path / "rollouts",), follow=True), lora=LoraConfig(rank=2),
        export=ExportConfig(every=1, keep=2), seq_len=32, batch_size=8, steps=4, devices=2,
        tensorboard=False, run_dir=tmp_path / "run",
    )  # fmt: skip
    train.train(config)
    folder = config.run_dir / "exported"
    assert sorted(x.name for x in folder.iterdir()) == ["step_000003", "step_000004"]
    names = sorted(x.name for x in (folder / "step_000004").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    with refused(InputError, "export.every needs init_from for adapters"):
        dataclasses.replace(config, init_from=None)


def test_a_step_that_is_done_again_gives_the_same_export(tmp_path):
    write_files(tmp_path)
    config = config_of(tmp_path, export=ExportConfig(every=1))
    train.train(config)
    folder = config.run_dir / "exported"
    for step in (3, 4):
        shutil.rmtree(config.run_dir / "checkpoints" / str(step), ignore_errors=True)
    left = folder / ".step_000004.part-1234"
    left.mkdir()
    train.train(config)
    assert not left.exists()
    shutil.rmtree(config.run_dir / "checkpoints" / "4")
    other = load_file(folder / "step_000001" / "model.safetensors")
    assert other
    shutil.copy(
        folder / "step_000001" / "model.safetensors", folder / "step_000003" / "model.safetensors"
    )
    with refused(InputError, "got another model.safetensors than in", "step_000003"):
        train.train(config)


# Kills. Each phase is a place in a function, before its n-th call.

PHASES = {
    "waiting": ("trainer.data.arriving.ArrivingBatches.wait", 3),
    "reading": ("trainer.gpt.rollouts.store.read_rollout", 25),
    "reported": ("trainer.run.metrics.Reporter.advance", 3),
    "exporting": ("trainer.gpt.export.writing.write_merged", 4),
    "flushing": ("trainer.durable.flush_files", 4),
    "exported": ("trainer.loop.Loop._read_metrics", 9),
    "removing": ("trainer.gpt.export.during.remove", 2),
    "saving": ("trainer.checkpoints.checkpoint.Checkpoints.save", 1),
    "saved": ("trainer.checkpoints.checkpoint.Checkpoints.wait", 4),
}
KILLED = """
import importlib, os, signal, sys
name, number = sys.argv[1], int(sys.argv[2])
import train
from trainer.config import TrainConfig
module, _, function = name.rpartition(".")
try:
    place = importlib.import_module(module)
except ImportError:
    module, _, kind = module.rpartition(".")
    place = getattr(importlib.import_module(module), kind)
before, calls = getattr(place, function), []
def counted(*args, **options):
    calls.append(1)
    if len(calls) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return before(*args, **options)
setattr(place, function, counted)
train.train(train.load_train_config(__import__("pathlib").Path(sys.argv[3])))
"""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.slow_except_every(9)
def test_kills_in_each_phase_change_nothing(tmp_path, phase, whole):
    name, number = PHASES[phase]
    write_files(tmp_path)
    config = config_of(tmp_path, export=ExportConfig(every=1, keep=3))
    config.run_dir.mkdir()
    save_config(config, tmp_path / "config.json")
    done = run_python(
        "-c", KILLED, name, str(number), str(tmp_path / "config.json"), cwd=REPOSITORY
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    folder = config.run_dir / "exported"
    seen = [x for x in folder.iterdir() if x.name.startswith("step_")] if folder.exists() else []
    for found in seen:
        assert (found / "config.json").is_file()
        assert load_file(found / "model.safetensors")
    train.train(config)
    check_equal(result_of(config.run_dir), whole)
    names = sorted(x.name for x in folder.iterdir())
    assert names == [f"step_00000{step}" for step in (2, 3, 4)]

"""Reward models: beside NumPy and transformers, on every mesh, in and out of folders."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

import programs
import sample
import score
import startrail_jax as st
import train
from configs.gpt import gpt_tiny
from models.config import GPTConfig
from models.parts.experts import ExpertsConfig
from models.parts.gated_delta import LinearConfig
from pretrained import write_reward_model
from programs import (
    REPOSITORY,
    SMALL,
    check_same_gradients,
    make_config,
    make_program,
    placed,
    records_of,
    run_python,
    save_run,
    whole_batch,
)
from refusals import refused, usage_error
from rollout_cases import bytes_of_pair, make_pairs, reward_loss, write_rollouts
from startrail_jax.errors import InputError, UnsupportedError
from trainer.config import LoraConfig, OptimizerConfig
from trainer.data.order import PartBatches
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.gpt.export.writing import export_run
from trainer.gpt.objectives.reward import Reward
from trainer.gpt.pretrained.config_json import describe
from trainer.gpt.pretrained.defaults import pretrained
from trainer.gpt.pretrained.families.table import FAMILIES, scoring_class
from trainer.gpt.task import GPTTask

PARITY = REPOSITORY / "tests" / "parity"
RECORDS = make_pairs(references=False)
MODEL = SMALL | {"vocab_size": 256, "scores": True}
KINDS = {
    "plain": {},
    "hybrid": dict(
        mixers=("linear", "attention"),
        linear=LinearConfig(heads=4, key_heads=2, key_dim=4),
    ),
    "experts": dict(feed_forwards=("experts", "mlp"), experts=ExpertsConfig(count=4, width=8)),
}


@functools.cache
def folder():
    path = Path(tempfile.mkdtemp())
    write_rollouts(path / "pairs.jsonl", RECORDS)
    write_rollouts(path / "held.jsonl", RECORDS[:3])
    return path


def config_of(kind="plain", data=(), centre=0.05, **changes):
    files = dict(path=(folder() / "pairs.jsonl",), validation_path=folder() / "held.jsonl")
    settings = dict(
        objective="reward",
        reward=Reward(centre=centre),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        data=DataConfig(**files, **dict(data)),
        seq_len=100,
        batch_size=8,
        run_dir=folder() / "run",
    )
    return make_config(MODEL | KINDS[kind], **settings | changes)


@functools.cache
def program_of(degrees, kind="plain", data=(), **changes):
    return make_program(config_of(kind, data, **changes), degrees)


@functools.cache
def initial_weights(kind):
    return jax.device_get(program_of(st.Degrees(), kind).initialise().weights)


def gradients_of(program, batch, kind="plain"):
    return programs.gradients_of(program, initial_weights(kind), batch)


@functools.cache
def one_device(kind="plain"):
    program = program_of(st.Degrees(), kind)
    return gradients_of(program, whole_batch(program), kind)


def check_alike(got, want):
    check_same_gradients(got, want, rtol=1e-5, atol=1e-5)


def hidden_of_ends():
    """Float64 hidden states [pairs, 2, width] of the last token of both answers of each pair, and
    the kernel of the head [width, 1]."""
    program = program_of(st.Degrees(), data=(("share_prefix", False),))
    batch = whole_batch(program, alone=True)
    weights = placed(initial_weights("plain"), program.state_shapes.weights)
    run = program._model.on_each_device(
        lambda weights, batch: program.objective.hidden(program._model.local(weights), batch),
        in_specs=(jax.tree.map(lambda x: x.sharding.spec, batch),),
        out_specs=program.batch_sharding.spec,
    )
    hidden = np.asarray(jax.jit(run)(weights, batch), np.float64)
    found = []
    for row, record in enumerate(RECORDS):
        end, both = 0, []
        for tokens, _ in bytes_of_pair(record):
            start, end = end, end + len(tokens)
            np.testing.assert_array_equal(batch.tokens[row, start:end], tokens)
            assert np.flatnonzero(batch.weights[row, start:end]).tolist() == [len(tokens) - 1]
            both.append(hidden[row, end - 1])
        found.append(both)
    return np.array(found), np.asarray(weights["score"]["kernel"][...], np.float64)


def test_loss_and_gradients_are_those_of_numpy():
    loss, metrics, gradients = one_device()
    hidden, kernel = hidden_of_ends()
    rewards = (hidden @ kernel)[..., 0]
    assert abs(loss - reward_loss(rewards, centre=0.05)) < 1e-6
    margins = rewards[:, 0] - rewards[:, 1]
    np.testing.assert_allclose(metrics["margin"], margins.mean(), atol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], (margins > 0).mean(), atol=1e-6)
    np.testing.assert_allclose(metrics["chosen_reward"], rewards[:, 0].mean(), atol=1e-5)
    np.testing.assert_allclose(metrics["rejected_reward"], rewards[:, 1].mean(), atol=1e-5)
    (of_head,) = jax.tree.leaves(gradients["score"])
    rng = np.random.default_rng(0)
    for _ in range(3):
        direction = rng.normal(size=kernel.shape)
        up, down = (
            reward_loss((hidden @ (kernel + step * direction))[..., 0], centre=0.05)
            for step in (1e-5, -1e-5)
        )
        assert abs(np.sum(of_head * direction) - (up - down) / 2e-5) < 1e-5


MESHES = {
    "ring": (st.Degrees(ring=4), {}),
    "startrail": (st.Degrees.startrail(8, c=2), dict(zero=3, tile=7)),
    "attention_2d": (st.Degrees(head=2, ring=2, data=2), dict(zero=1)),
    "tensor": (st.Degrees(tensor=2, ring=3), dict(tile=5, zero=2)),
    "accumulated": (st.Degrees(data=2), dict(gradient_accumulation=4)),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow_except_every(2)
def test_loss_and_gradients_do_not_depend_on_the_mesh(mesh):
    degrees, changes = MESHES[mesh]
    program = program_of(degrees, **changes)
    check_alike(gradients_of(program, whole_batch(program)), one_device())


@pytest.mark.parametrize("kind", ["hybrid", "experts"])
def test_hybrids_and_experts_learn_rewards_on_every_mesh(kind):
    program = program_of(st.Degrees.startrail(4, c=2), kind, zero=3)
    check_alike(gradients_of(program, whole_batch(program), kind), one_device(kind))


@pytest.mark.slow  # Those of a preference go the same way.
def test_pairs_alone_and_on_few_devices_have_the_loss_of_those_in_rows():
    program = program_of(st.Degrees(ring=2))
    check_alike(gradients_of(program, whole_batch(program, alone=True)), one_device())
    documents = (("batches", "documents"), ("draw", 64))
    program = program_of(st.Degrees(ring=4), data=documents, batch_size=16)
    data = GPTTask().open_data(program.config, program.attention.layout)
    series = PartBatches(program.parts, data, seed=0)
    batch = next(series)
    series.close()
    check_alike(gradients_of(program, program.parts.place(batch)), one_device())


def model_of_rewards(tmp_path):
    return write_reward_model(tmp_path / "rewards", np.load(PARITY / "scores.npz")["head"])


def lines_of_tokens():
    stored = np.load(PARITY / "scores.npz")
    lines = np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
    return [{"tokens": line.tolist()} for line in lines], stored["rewards"]


def rewards_of(source, data, out, *flags):
    score.score([str(x) for x in (source, data, out, *flags)])
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("mesh", ["--devices 1", "--devices 8 --mesh.c 2 --zero 3"])
def test_rewards_are_those_of_transformers(tmp_path, mesh, capsys):
    """50 lines of 3 to 900 tokens, packed into rows of 1,000, in float32."""
    records, wanted = lines_of_tokens()
    data = write_rollouts(tmp_path / "lines.jsonl", records)
    flags = f"{mesh} --seq-len 1000 --dtype float32".split()
    source = model_of_rewards(tmp_path)
    found = rewards_of(source, data, tmp_path / "out.jsonl", *flags)
    assert [x.keys() for x in found] == [{"tokens": 0, "reward": 0}.keys()] * 50
    np.testing.assert_allclose([x["reward"] for x in found], wanted, atol=1e-5)
    assert f"50 records, mean reward {wanted.mean():.5g}" in capsys.readouterr().err
    # Of a part of the targets, the last that counts has the reward.
    part = dict(records[9], weights=[*([0, 1, 1, 1]), *([0] * (len(records[9]["tokens"]) - 4))])
    short = {"tokens": records[9]["tokens"][:5]}
    data = write_rollouts(tmp_path / "parts.jsonl", [part, short])
    one, other = rewards_of(source, data, tmp_path / "parts_out.jsonl", *flags)
    assert abs(one["reward"] - other["reward"]) < 1e-5
    again = write_rollouts(tmp_path / "again.jsonl", [{**one, "reward": 1.0}])
    with refused(InputError, "must not have the key that is written; got reward in"):
        rewards_of(source, again, tmp_path / "again_out.jsonl", *flags)
    none = write_rollouts(tmp_path / "none.jsonl", [{**short, "weights": [0] * 5}])
    with refused(InputError, "the last of which gets the reward; got none in"):
        rewards_of(source, none, tmp_path / "none_out.jsonl", *flags)
    with refused(InputError, "gives rewards, and no probabilities; got top_k=4"):
        rewards_of(source, data, tmp_path / "top.jsonl", *flags, "--top-k", 4)


def test_a_model_learns_rewards_and_goes_through_a_folder(tmp_path, capsys):
    """Training from a model of words, whose head is left out; export; scores of both."""
    pairs = write_rollouts(tmp_path / "pairs.jsonl", make_pairs(24, references=False))
    words = make_config(
        SMALL | {"vocab_size": 256, "qk_norm": True}, steps=1, run_dir=tmp_path / "words"
    )
    save_run(words, {1: make_program(words, st.Degrees()).initialise()})
    export_run(words.run_dir, words, tmp_path / "base", note=lambda text: None)
    flags = (
        f"--init-from {tmp_path / 'base'} --objective reward --data.path {pairs} --devices 2 "
        f"--steps 30 --seq-len 100 --batch-size 4 --optimizer.learning-rate 1e-2 --log-every 1 "
        f"--run-dir {tmp_path / 'run'} --no-tensorboard --data.validation-fraction 0.3"
    )
    config = train.read_command_line(flags.split()).settings
    assert config.model.scores
    assert config.sample.length == 0
    train.train(config)
    said = capsys.readouterr().out
    assert "without 1 tensors lm_head.*" in said
    assert "score/kernel is new, and 0 at first" in said
    assert "per pair" in said
    records = records_of(config.run_dir)
    assert abs(records[0]["train_loss"] - np.log(2)) < 1e-6  # All rewards are 0.
    assert records[29]["train_loss"] < 0.3
    assert {"validation_margin", "validation_accuracy"} <= records[-1].keys()
    with refused(InputError, "sample.py continues text"):
        sample.sample([str(config.run_dir), "--prompt", "a"])
    out = tmp_path / "exported"
    export_run(config.run_dir, config, out, note=lambda text: None)
    values = json.loads((out / "config.json").read_text())
    assert values["architectures"] == ["Qwen3ForSequenceClassification"]
    assert transformers.AutoConfig.from_pretrained(out).num_labels == 1
    assert "score.weight" in load_file(out / "model.safetensors")
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    flags = ("--seq-len", 100, "--devices", 2)
    of_run, of_folder = (
        rewards_of(source, pairs, tmp_path / f"{source.name}.jsonl", *flags)
        for source in (config.run_dir, out)
    )
    assert of_run == of_folder
    assert np.mean([x["chosen_reward"] > x["rejected_reward"] for x in of_run]) > 0.9
    # What was exported is trained on, as a reward model without being asked.
    assert pretrained(out).objective == "reward"


def test_an_end_that_transformers_takes_for_padding_is_not_exported(tmp_path):
    source, said = model_of_rewards(tmp_path), []
    config = dataclasses.replace(
        pretrained(source), run_dir=tmp_path / "run", steps=1, batch_size=1, seq_len=32,
        data=DataConfig(end_of_document=0),
    )  # fmt: skip
    program = make_program(config, st.Degrees())
    save_run(config, {1: program.initialise()})
    with GPTTask().initial_weights(
        dataclasses.replace(config, run_dir=tmp_path / "other"), program.state_shapes.weights
    ) as initial:
        initial.keep(config.run_dir)
    export_run(config.run_dir, config, tmp_path / "out", note=said.append)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["pad_token_id"] is None
    assert any("has no pad_token_id: answers end with the token 0" in text for text in said)


def test_classes_are_those_of_transformers():
    """Read in a process of its own: without PyTorch, the library warns."""
    program = (
        "import json; from transformers.models.auto.modeling_auto import "
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as names; print(json.dumps(dict(names)))"
    )
    names = json.loads(run_python("-c", program).stdout.splitlines()[-1])
    for model_type in FAMILIES:
        assert scoring_class(model_type) == names.get(model_type), model_type


def test_what_is_no_reward_model_is_refused(tmp_path):
    values = json.loads((model_of_rewards(tmp_path) / "config.json").read_text())
    assert describe(values, "x").model.scores
    with refused(UnsupportedError, "must have one label, the reward; got 2"):
        describe({**values, "id2label": {"0": "A", "1": "B"}}, "x")
    others = {name: x for name, x in values.items() if "label" not in name}
    with refused(UnsupportedError, "must have one label, the reward; got 2"):
        describe(others, "x")
    with refused(UnsupportedError, "architectures must be ['Qwen3ForCausalLM'] or ['Qwen3ForSeq"):
        describe({**values, "architectures": ["Qwen3ForTokenClassification"]}, "x")


SETTINGS = {
    "no scores": (dict(model=GPTConfig(**MODEL | {"scores": False})), "need each other"),
    "no reward": (dict(objective="next_token", reward=Reward()), "scores=True. Use --objective"),
    "sample": (dict(sample=TextSampleConfig(length=8)), "continues no text; got sample.length=8"),
    "adapters": (dict(lora=LoraConfig(rank=2)), "which adapters would freeze"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_do_not_suit_rewards_are_refused(setting):
    changes, message = SETTINGS[setting]
    with refused(InputError, message):
        dataclasses.replace(config_of(), **changes)
    with refused(InputError, "reward.centre must be at least 0"):
        Reward(centre=-1.0)


def test_flags_make_any_recipe_a_reward_model(tmp_path, capsys):
    flags = f"gpt_tiny --objective reward --data.path {folder() / 'pairs.jsonl'}"
    config = train.read_command_line(flags.split()).settings
    assert gpt_tiny().sample.length
    assert (config.model.scores, config.sample.length) == (True, 0)
    # A reward model stays one; anything else needs another model.
    flags = f"--init-from {model_of_rewards(tmp_path)} --seq-len 64"
    assert train.read_command_line(flags.split()).settings.objective == "reward"
    said = usage_error(capsys, train.read_command_line, [*flags.split(), "--objective", "policy"])
    assert "need each other; got objective='policy', scores=True" in said

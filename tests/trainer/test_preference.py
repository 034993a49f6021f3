"""Preferences: beside NumPy, on every mesh, packed in any way; and mistakes in pairs."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from test_chat import CHATML, tokenizer  # noqa: F401  A fixture.

import programs
import score
import startrail_jax as st
import train
from configs.gpt import gpt_tiny
from models.config import GPTConfig
from programs import (
    SMALL,
    check_same_gradients,
    make_config,
    make_program,
    placed,
    records_of,
    save_run,
    whole_batch,
)
from refusals import refused
from rollout_cases import PREFERENCES, bytes_of_pair, make_pairs, preference_loss, write_rollouts
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.config import OptimizerConfig
from trainer.data.order import PartBatches
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.gpt.objectives.preference import Preference
from trainer.gpt.task import GPTTask

RECORDS = make_pairs()
NATURAL = Layout("contiguous", 1)
MODEL = SMALL | {"vocab_size": 256}
SEPARATE = (("share_prefix", False),)


@functools.cache
def folder():
    path = Path(tempfile.mkdtemp())
    write_rollouts(path / "pairs.jsonl", RECORDS)
    write_rollouts(path / "held.jsonl", RECORDS[:3])
    return path


def config_of(preference="dpo", data=None, **changes):
    data = DataConfig(
        path=(folder() / "pairs.jsonl",), validation_path=folder() / "held.jsonl", **data or {}
    )
    settings = dict(
        objective="preference",
        preference=Preference(**PREFERENCES[preference]),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        data=data,
        seq_len=100,
        batch_size=8,
        run_dir=folder() / "run",
    )
    return make_config(MODEL, **settings | changes)


@functools.cache
def program_of(degrees, preference="dpo", data=(), **changes):
    return make_program(config_of(preference, dict(data), **changes), degrees)


@functools.cache
def initial_weights():
    return jax.device_get(program_of(st.Degrees()).initialise().weights)


def gradients_of(program, batch):
    return programs.gradients_of(program, initial_weights(), batch)


def check_alike(got, want):
    check_same_gradients(got, want, rtol=1e-5, atol=1e-5)


@functools.cache
def one_device(preference):
    program = program_of(st.Degrees(), preference)
    return gradients_of(program, whole_batch(program))


@functools.cache
def logits_of_pairs():
    """Float64 logits [n, vocab] of both answers of each pair, of a row for each pair."""
    program = program_of(st.Degrees(), data=SEPARATE)
    batch = whole_batch(program, alone=True)
    weights = placed(initial_weights(), program.state_shapes.weights)
    logits = np.asarray(jax.jit(program.outputs)(weights, batch), np.float64)
    found = []
    for row, record in enumerate(RECORDS):
        end, both = 0, []
        for tokens, _ in bytes_of_pair(record):
            start, end = end, end + len(tokens) - 1
            np.testing.assert_array_equal(batch.tokens[row, start:end], tokens[:-1])
            both.append(logits[row, start:end])
        found.append(both)
    return found


@pytest.mark.parametrize("preference", PREFERENCES)
def test_loss_is_that_of_numpy(preference):
    loss, metrics, _ = one_device(preference)
    want, margin = preference_loss(RECORDS, logits_of_pairs(), **PREFERENCES[preference])
    assert abs(loss - want) < 1e-6 * max(abs(want), 1)
    assert abs(metrics["margin"] - margin) < 1e-5
    assert abs(metrics["chosen_reward"] - metrics["rejected_reward"] - margin) < 1e-5


@pytest.mark.parametrize("preference", PREFERENCES)
def test_gradients_are_those_of_numpy(preference):
    """Of the head along random directions, beside differences of float64."""
    program = program_of(st.Degrees(), preference, data=SEPARATE)
    batch = whole_batch(program, alone=True)
    weights = placed(initial_weights(), program.state_shapes.weights)
    gradients = one_device(preference)[2]
    part = "head" if "head" in gradients else "embedding"
    assert part == "head"
    (kernel,) = jax.tree.leaves(gradients[part])

    def hidden_of(weights, batch):
        objective = program.objective
        model = program._model.local(weights)
        return objective.hidden(model, batch)

    run = program._model.on_each_device(
        hidden_of,
        in_specs=(jax.tree.map(lambda x: x.sharding.spec, batch),),
        out_specs=program.batch_sharding.spec,
    )
    hidden = np.asarray(jax.jit(run)(weights, batch), np.float64)
    rng = np.random.default_rng(0)
    for _ in range(3):
        direction = rng.normal(size=kernel.shape) / 10

        def loss_at(step, direction=direction):
            moved = []
            for row, (record, both) in enumerate(zip(RECORDS, logits_of_pairs(), strict=True)):
                moved.append([])
                end = 0
                for tokens, logits in zip(bytes_of_pair(record), both, strict=True):
                    start, end = end, end + len(tokens[0]) - 1
                    moved[-1].append(logits + step * hidden[row, start:end] @ direction)
            return preference_loss(RECORDS, moved, **PREFERENCES[preference])[0]

        want = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
        assert abs(np.sum(kernel * direction) - want) < 1e-5 * max(abs(want), 1)


MESHES = {
    "ring": (st.Degrees(ring=4), {}),
    "startrail": (st.Degrees.startrail(8, c=2), dict(zero=3, tile=7)),
    "attention_2d": (st.Degrees(head=2, ring=2, data=2), dict(zero=1)),
    "tensor": (st.Degrees(tensor=2, ring=3), dict(tile=5, zero=2)),
    "accumulated": (st.Degrees(data=2), dict(gradient_accumulation=4)),
}


@pytest.mark.parametrize("preference", ["dpo", "simpo"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow_except_every(2)
def test_loss_and_gradients_do_not_depend_on_the_mesh(mesh, preference):
    degrees, changes = MESHES[mesh]
    program = program_of(degrees, preference, **changes)
    check_alike(gradients_of(program, whole_batch(program)), one_device(preference))


def test_pairs_alone_and_on_few_devices_have_the_loss_of_those_in_rows():
    program = program_of(st.Degrees(ring=2), "smooth")
    check_alike(gradients_of(program, whole_batch(program, alone=True)), one_device("smooth"))
    documents = (("batches", "documents"), ("draw", 64))
    program = program_of(st.Degrees(ring=4), "smooth", data=documents, batch_size=16)
    data = GPTTask().open_data(program.config, program.attention.layout)
    series = PartBatches(program.parts, data, seed=0)
    batch = next(series)
    series.close()
    check_alike(gradients_of(program, program.parts.place(batch)), one_device("smooth"))


def opened(tmp_path, records):
    path = write_rollouts(tmp_path / "pairs.jsonl", records)
    data = DataConfig(path=(path,), validation_path=folder() / "held.jsonl")
    config = dataclasses.replace(config_of(run_dir=tmp_path / "run"), data=data)
    return GPTTask().open_data(config, NATURAL)


def test_conversations_count_what_follows_their_common_messages(tmp_path, tokenizer):  # noqa: F811
    before = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Sure?"},
    ]
    answers = {
        x: [{"role": "assistant", "content": y}] for x, y in (("chosen", "Yes"), ("rejected", "No"))
    }
    whole = {name: [*before, *said] for name, said in answers.items()}
    rows = []
    (tmp_path / "chatml.jinja").write_text(CHATML)
    for record in ({"prompt": before, **answers}, whole):
        path = write_rollouts(tmp_path / "pairs.jsonl", [record])
        write_rollouts(tmp_path / "held.jsonl", [record])
        data = DataConfig(
            path=(path,), validation_path=tmp_path / "held.jsonl", tokenizer=tokenizer,
            chat_template=tmp_path / "chatml.jinja",
        )  # fmt: skip
        config = config_of("simpo", run_dir=tmp_path / "run", seq_len=300, batch_size=1)
        found = GPTTask().open_data(dataclasses.replace(config, data=data), NATURAL)
        rows.append(found.collate([found.train[0]], [0]))
        decode = found.corpus.decode
    for x, y in zip(*map(jax.tree.leaves, rows), strict=True):
        np.testing.assert_array_equal(x, y)
    row = rows[0]
    counted = row.weights[0] > 0
    for side, text in enumerate(("Yes", "No")):
        here = counted & (row.segment_ids[0] == side)
        # What the template writes after an answer is part of it, as in fine-tuning.
        assert decode(row.targets[0][here]).replace(" ", "") == f"{text}<|im_end|>\n"
    np.testing.assert_allclose(row.weights.sum(), 1, rtol=1e-6)


MISTAKES = {
    "no rejected": (lambda x: x.pop("rejected"), "got no rejected in {place}"),
    "no reference": (lambda x: x.pop("ref_chosen_logps"), "got no ref_chosen_logps in {place}"),
    "text and messages": (lambda x: x.update(chosen=[{"role": "assistant"}]), "got {{'prompt'"),
    "no prompt": (lambda x: x.pop("prompt"), "must have texts under prompt"),
    "unknown key": (lambda x: x.update(score_chosen=5), "got score_chosen in {place}"),
    "not finite": (lambda x: x.update(ref_chosen_logps="-3"), "finite number; got '-3' in {place}"),
    "long": (lambda x: x.update(chosen="a" * 200), "with seq_len=100"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_pair_is_named(tmp_path, mistake):
    change, message = MISTAKES[mistake]
    wrong = json.loads(json.dumps(RECORDS[0]))
    change(wrong)
    place = repr(f"{tmp_path / 'pairs.jsonl'}:2")
    with refused(InputError, message.format(place=place), place):
        opened(tmp_path, [RECORDS[0], wrong])


SETTINGS = {
    "smoothing": (dict(smoothing=0.6), "below 0.5; got smoothing=0.6"),
    "owner": (dict(gamma=1.0), "needs preference.loss='simpo'; got gamma=1.0"),
    "normalised": (dict(loss="simpo", normalised=True), "what SimPO is anyway"),
    "beta": (dict(beta=0.0), "preference.beta must be above 0"),
    "sft": (dict(sft_weight=-1.0), "preference.sft_weight must be at least 0"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_do_not_fit_each_other_are_refused(setting):
    settings, message = SETTINGS[setting]
    with refused(InputError, message):
        Preference(**settings)


def test_a_reference_is_scored_and_a_policy_learns_from_it(tmp_path):
    """score.py, then DPO: at the first step the policy is the reference, and the loss log 2."""
    settings = dict(
        model=GPTConfig(**MODEL), seq_len=100, devices=2, run_dir=tmp_path / "first",
        sample=TextSampleConfig(), tensorboard=False, batch_size=4, steps=12, log_every=1,
    )  # fmt: skip
    config = dataclasses.replace(gpt_tiny(), **settings)
    program = make_program(config, st.Degrees())
    save_run(config, {1: program.initialise()})
    pairs = write_rollouts(tmp_path / "pairs.jsonl", make_pairs(references=False))
    score.score([str(x) for x in (tmp_path / "first", pairs, tmp_path / "scored.jsonl")])
    with refused(InputError, "score.py writes it"):
        opened(tmp_path, make_pairs(references=False))
    data = DataConfig(path=(tmp_path / "scored.jsonl",), validation_fraction=0.3)
    config = dataclasses.replace(
        config, objective="preference", data=data, run_dir=tmp_path / "second",
        optimizer=OptimizerConfig(learning_rate=3e-3),
    )  # fmt: skip
    train.train(config)
    records = records_of(config.run_dir)
    assert abs(records[0]["train_loss"] - np.log(2)) < 1e-5
    assert abs(records[0]["margin"]) < 1e-5
    assert records[11]["train_loss"] < 0.6
    assert records[11]["accuracy"] == 1
    assert {"validation_loss", "validation_margin", "validation_accuracy"} <= records[-1].keys()

"""Distillation: beside NumPy, on every mesh; teachers that score.py has written; and mistakes."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    records_of,
    save_run,
    whole_batch,
)
from refusals import refused
from rollout_cases import (
    DISTILLATIONS,
    VOCAB,
    distill_loss,
    make_rollouts,
    targets_of,
    with_teacher,
    write_rollouts,
)
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.config import OptimizerConfig
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.gpt.objectives.distill import TEACHER, Distill
from trainer.gpt.task import GPTTask

RECORDS = with_teacher(make_rollouts())
SEQ_LEN = 36


def distill_of(name):
    return Distill(**dict(top_k=6) | DISTILLATIONS[name])


@functools.cache
def folder():
    path = Path(tempfile.mkdtemp())
    write_rollouts(path / "held.jsonl", RECORDS[:2])
    write_rollouts(path / "teacher.jsonl", RECORDS)
    return path


def config_of(distill="forward", **changes):
    settings = dict(
        objective="distill",
        distill=distill_of(distill),
        data=DataConfig(
            path=(folder() / "teacher.jsonl",), validation_path=folder() / "held.jsonl"
        ),
        seq_len=SEQ_LEN,
        batch_size=8,
        run_dir=folder() / "run",
    )
    return make_config(SMALL, **settings | changes)


@functools.cache
def program_of(degrees, distill="forward", **changes):
    return make_program(config_of(distill, **changes), degrees)


@functools.cache
def gradients_of(degrees, distill, **changes):
    program = program_of(degrees, distill, **changes)
    weights = jax.device_get(program_of(st.Degrees()).initialise().weights)
    return programs.gradients_of(program, weights, whole_batch(program))


MESHES = {
    "startrail": (st.Degrees.startrail(8, c=2), dict(zero=3, tile=7)),
    "tensor": (st.Degrees(tensor=2, ring=3), dict(tile=5)),
    "accumulated": (st.Degrees(data=2, head=2), dict(gradient_accumulation=2)),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("distill", ["forward", "few"])
@pytest.mark.slow_except_every(2)
def test_loss_and_gradients_do_not_depend_on_the_mesh(mesh, distill):
    degrees, changes = MESHES[mesh]
    got, want = gradients_of(degrees, distill, **changes), gradients_of(st.Degrees(), distill)
    check_same_gradients(got, want, rtol=1e-5)


@pytest.mark.parametrize("distill", DISTILLATIONS)
def test_numbers_are_those_of_numpy(distill):
    """Of random logits, and their gradient along random directions."""
    loss, rng = distill_of(distill), np.random.default_rng(0)
    data = GPTTask().open_data(config_of(distill), Layout("contiguous", 1))
    rows = [[x] for number in range(len(data.train)) for x in data.train[number]]
    kept = [record for record in RECORDS if any(record["weights"])]
    batch = jax.tree.map(jnp.asarray, data.collate(rows, [*range(len(rows))]))
    logits = [rng.normal(size=(len(x["tokens"]), VOCAB)) for x in kept]

    def in_rows(several):
        whole = np.zeros((len(kept), SEQ_LEN, VOCAB))
        for row, x in enumerate(several):
            whole[row, : len(x)] = x
        return whole

    def mean(logits):
        numbers = loss.numbers(logits, batch)
        losses, _ = loss.losses(jnp.where(batch.weights[..., None] > 0, numbers, 0), batch, None)
        return jnp.sum(losses * batch.weights) / batch.weights.sum()

    value, gradient = jax.value_and_grad(mean)(jnp.asarray(in_rows(logits), jnp.float32))
    settings = dict(top_k=6) | DISTILLATIONS[distill]
    assert abs(value - distill_loss(kept, logits, **settings)) < 1e-6
    for _ in range(3):
        direction = [rng.normal(size=x.shape) for x in logits]
        ahead, behind = (
            distill_loss(
                kept, [x + h * d for x, d in zip(logits, direction, strict=True)], **settings
            )
            for h in (1e-6, -1e-6)
        )
        got = np.sum(np.asarray(gradient, np.float64) * in_rows(direction))
        assert abs(got - (ahead - behind) / 2e-6) < 1e-5


def test_a_student_that_is_its_teacher_has_nothing_to_learn(tmp_path):
    """score.py, then distillation: a divergence of 0 at first, and of another student less and
    less."""
    settings = dict(
        model=GPTConfig(**SMALL), seq_len=SEQ_LEN, devices=2, run_dir=tmp_path / "teacher",
        sample=TextSampleConfig(), tensorboard=False, batch_size=4, steps=12, log_every=1,
    )  # fmt: skip
    config = dataclasses.replace(gpt_tiny(), **settings)
    save_run(config, {1: make_program(config, st.Degrees()).initialise()})
    tokens = write_rollouts(tmp_path / "tokens.jsonl", make_rollouts())
    words = (tmp_path / "teacher", tokens, tmp_path / "scored.jsonl", "--top-k", 8)
    with refused(InputError, "got ref_logprobs in"):
        score.score([*map(str, words)])
    records = [{k: x for k, x in r.items() if k != "ref_logprobs"} for r in make_rollouts()]
    write_rollouts(tokens, records)
    score.score([*map(str, words)])
    data = DataConfig(path=(tmp_path / "scored.jsonl",), validation_fraction=0.3)
    found = {}
    for seed in (config.seed, 7):
        run = dataclasses.replace(
            config, objective="distill", distill=Distill(top_k=8), data=data, seed=seed,
            run_dir=tmp_path / f"student{seed}", optimizer=OptimizerConfig(learning_rate=1e-2),
        )  # fmt: skip
        train.train(run)
        found[seed] = records_of(run.run_dir)
    assert abs(found[config.seed][0]["kl"]) < 1e-6
    assert found[config.seed][0]["agreement"] == 1
    assert found[7][0]["kl"] > 1e-3
    assert found[7][11]["kl"] < 0.7 * found[7][0]["kl"]
    assert "validation_kl" in found[7][-1]


MISTAKES = {
    "no teacher": (lambda x: x.pop("teacher"), "got no teacher in {place}"),
    "lists": (lambda x: x["teacher"]["ids"].pop(), "for 16 tokens in {place}"),
    "few": (lambda x: x["teacher"]["ids"][14].pop(), "for token 14 in {place}, with top_k=6"),
    "id": (
        lambda x: x["teacher"]["ids"][14].__setitem__(0, 48),
        "each once",
    ),
    "twice": (lambda x: x["teacher"]["ids"][14].__setitem__(0, x["teacher"]["ids"][14][1]), "once"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_teacher_is_named(tmp_path, mistake):
    change, message = MISTAKES[mistake]
    wrong = json.loads(json.dumps(RECORDS[2]))
    assert len(wrong["tokens"]) == 16
    assert wrong["weights"][14]
    change(wrong)
    path = write_rollouts(tmp_path / "teacher.jsonl", [RECORDS[0], wrong])
    data = DataConfig(path=(path,), validation_path=folder() / "held.jsonl")
    config = dataclasses.replace(config_of(run_dir=tmp_path / "run"), data=data)
    place = repr(f"{path}:2")
    with refused(InputError, message.format(place=place), place):
        GPTTask().open_data(config, Layout("contiguous", 1))


def test_only_the_likeliest_of_a_teacher_are_kept():
    data = GPTTask().open_data(config_of("few"), Layout("contiguous", 1))
    example = data.train[0][0]
    ids, logprobs, rest = (example.numbers[name] for name in TEACHER)
    assert ids.shape == logprobs.shape == (len(example.tokens), 3)
    place = int(np.flatnonzero(example.weights)[0])
    given = RECORDS[0]["teacher"]
    order = np.argsort(-np.array(given["logprobs"][place]))[:3]
    np.testing.assert_array_equal(ids[place], np.array(given["ids"][place])[order])
    np.testing.assert_allclose(np.exp(logprobs[place]).sum() + np.exp(rest[place]), 1, rtol=1e-6)
    assert example.targets[place] == targets_of(RECORDS[0])[place]

"""Policy gradients: beside NumPy, on every mesh, packed in any way; and mistakes in rollouts."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import programs
import startrail_jax as st
from programs import SMALL, check_same_gradients, make_config, placed, whole_batch
from rollout_cases import POLICIES, VOCAB, make_rollouts, policy_loss, write_rollouts
from startrail_jax.tokens.layout import Layout
from trainer.config import OptimizerConfig
from trainer.data.batches import place
from trainer.data.order import PartBatches
from trainer.gpt.batches import in_layout_order, rows_of
from trainer.gpt.config import DataConfig
from trainer.gpt.objectives.policy import Policy
from trainer.gpt.task import GPTTask
from trainer.parallel.checks import make_attention
from trainer.parallel.step import Program

RECORDS = make_rollouts()
SEQ_LEN = 36
CONFIG = make_config(
    SMALL,
    objective="policy",
    optimizer=OptimizerConfig(learning_rate=1e-2),
    seq_len=SEQ_LEN,
    batch_size=8,
)


@functools.cache
def file_of_rollouts():
    import tempfile

    folder = Path(tempfile.mkdtemp())
    return write_rollouts(folder / "rollouts.jsonl", RECORDS)


def config_of(policy="ppo", data=None, **changes):
    data = DataConfig(path=(file_of_rollouts(),), **data or {})
    settings = dict(
        data=data, policy=Policy(**POLICIES[policy]), run_dir=file_of_rollouts().parent / "run"
    )
    return dataclasses.replace(CONFIG, **settings | changes)


@functools.cache
def program_of(degrees, policy="ppo", layout="zigzag", data=(), **changes):
    config = config_of(policy, dict(data), **changes)
    mesh = st.make_mesh(degrees, axis_type="auto", devices=jax.devices()[: degrees.num_devices])
    objective = GPTTask().make_objective(config)
    attention = dataclasses.replace(make_attention(mesh, config, objective), layout=layout)
    return Program(config, attention, objective)


@functools.cache
def initial_weights():
    """Of one device, a bit away from the beginning."""
    weights = jax.device_get(program_of(st.Degrees()).initialise().weights)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape).astype(x.dtype), weights)


def gradients_of(program, batch):
    return programs.gradients_of(program, initial_weights(), batch)


def check_alike(got, want):
    check_same_gradients(got, want, loss_atol=1e-7, rtol=2e-6, atol=1e-6)


@functools.cache
def one_device(policy):
    program = program_of(st.Degrees(), policy)
    return gradients_of(program, whole_batch(program))


@functools.cache
def logits_of_rollouts():
    """Logits [n, vocab] of each rollout, of a row of its own on one device."""
    program = program_of(st.Degrees(), batch_size=16)
    batch = whole_batch(program, alone=True)
    weights = placed(initial_weights(), program.state_shapes.weights)
    logits = np.asarray(jax.jit(program.outputs)(weights, batch), np.float64)
    found, row = [], 0
    for record in RECORDS:
        if any(record["weights"]):
            length = int(np.flatnonzero(record["weights"])[-1]) + 1
            np.testing.assert_array_equal(batch.tokens[row, :length], record["tokens"][:length])
            rest = np.zeros(
                (len(record["tokens"]) - length, VOCAB)
            )  # Left out, and counts nothing.
            found.append(np.concatenate([logits[row, :length], rest]))
            row += 1
        else:
            found.append(np.zeros((len(record["tokens"]), VOCAB)))
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_loss_is_that_of_numpy(policy):
    want = policy_loss(RECORDS, logits_of_rollouts(), **POLICIES[policy])
    assert abs(one_device(policy)[0] - want) < 1e-6 * max(abs(want), 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradient_of_logits_is_that_of_numpy(policy):
    """Along random directions, beside differences of float64."""
    loss, logits = Policy(**POLICIES[policy]), logits_of_rollouts()
    data = GPTTask().open_data(config_of(policy), Layout("contiguous", 1))
    rows = [[x] for number in range(len(data.train)) for x in data.train[number]]
    batch = jax.tree.map(jnp.asarray, rows_of(rows, SEQ_LEN, loss.arrays))
    kept = [number for number, record in enumerate(RECORDS) if any(record["weights"])]

    def of_rows(several):
        x = np.zeros((len(kept), SEQ_LEN, VOCAB))
        for row, number in enumerate(kept):
            x[row, : len(several[number])] = several[number][:SEQ_LEN]
        return x

    def mean(logits):
        counted = batch.weights > 0
        numbers = jnp.where(counted[..., None], loss.numbers(logits, batch), 0)

        def sums(x, ids):
            return jnp.broadcast_to(jnp.where(counted, x, 0).sum(1, keepdims=True), x.shape)

        losses, _ = loss.losses(numbers, batch, sums)
        return jnp.sum(jnp.where(counted, losses, 0) * batch.weights) / batch.weights.sum()

    gradient = np.asarray(jax.grad(mean)(of_rows(logits).astype(np.float32)), np.float64)
    rng = np.random.default_rng(1)
    for _ in range(4):
        direction = [rng.normal(size=x.shape) for x in logits]
        ahead, behind = (
            policy_loss(
                RECORDS,
                [x + sign * 1e-6 * d for x, d in zip(logits, direction, strict=True)],
                logits,
                **POLICIES[policy],
            )
            for sign in (1, -1)
        )
        want = (ahead - behind) / 2e-6
        assert abs(np.sum(gradient * of_rows(direction)) - want) < 1e-5 * max(abs(want), 1)


MESHES = {
    "ring": (st.Degrees(ring=4), {}),
    "startrail": (st.Degrees.startrail(8, c=2), dict(zero=3, tile=7)),
    "attention_2d": (st.Degrees(head=2, ring=2), dict(layout="contiguous")),
    "ulysses": (st.Degrees(head=2, data=4), dict(zero=1)),
    "tensor": (st.Degrees(tensor=2, ring=3), dict(tile=5, zero=2)),
    "accumulated": (st.Degrees(data=2), dict(gradient_accumulation=4)),
    "data": (st.Degrees(data=8), {}),
}


@pytest.mark.parametrize("policy", ["grpo", "gspo", "dr_grpo"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow_except_every(3)
def test_loss_and_gradients_do_not_depend_on_the_mesh(mesh, policy):
    degrees, changes = MESHES[mesh]
    program = program_of(degrees, policy, **changes)
    check_alike(gradients_of(program, whole_batch(program)), one_device(policy))


@pytest.mark.parametrize("policy", ["grpo", "gspo"])
def test_rollouts_alone_have_the_loss_of_those_in_rows(policy):
    program = program_of(st.Degrees(ring=2), policy, batch_size=16)
    check_alike(gradients_of(program, whole_batch(program, alone=True)), one_device(policy))


@pytest.mark.parametrize(
    "degrees", [st.Degrees(ring=4), st.Degrees(data=2, head=2, tensor=2)], ids=str
)
def test_whole_rollouts_have_the_loss_of_those_in_rows(degrees):
    """Each on as few devices as hold it, so that devices are in several rows at a time."""
    program = program_of(
        degrees, "gspo", data=(("batches", "documents"), ("draw", 64)), batch_size=16
    )
    data = GPTTask().open_data(program.config, program.attention.layout)
    series = PartBatches(program.parts, data, seed=0)
    batch = next(series)
    series.close()
    got = gradients_of(program, program.parts.place(batch))
    if degrees.ring == 4:
        assert len({*batch.split[: batch.count].tolist()}) > 1
    total = sum(
        np.count_nonzero(np.asarray(batch.parts.weights)[k]) for k in range(int(batch.count))
    )
    whole = sum(np.count_nonzero(record["weights"]) for record in RECORDS)
    assert total == whole
    check_alike(got, one_device("gspo"))


@pytest.mark.parametrize("border", range(0, 12))
def test_a_border_may_be_anywhere(border):
    """Two rollouts whose border goes through a row that four devices share; little counts."""
    program = program_of(st.Degrees(ring=4), "gspo", seq_len=12, batch_size=1)
    reference = program_of(st.Degrees(), "gspo", seq_len=12, batch_size=1)
    rng = np.random.default_rng(border)
    loss = program.config.policy
    data = GPTTask().open_data(config_of("gspo"), Layout("contiguous", 1))
    longest = max(
        (x for n in range(len(data.train)) for x in data.train[n]), key=lambda x: len(x.tokens)
    )

    def part(n, first):
        here = slice(first, first + n)
        numbers = {name: x[here] for name, x in longest.numbers.items()}
        counted = (rng.random(n) < 0.4).astype(np.float32)
        counted[-1:] = 1
        return longest._replace(
            tokens=longest.tokens[here],
            targets=longest.targets[here],
            weights=counted / max(counted.sum(), 1),
            numbers=numbers,
        )

    rows = [[x for x in (part(border, 0), part(12 - border, border)) if len(x.tokens)]]

    def batch(program):
        made = rows_of(rows, 12, loss.arrays)
        return place(in_layout_order(made, program.attention.layout), program.batch_sharding)

    check_alike(gradients_of(program, batch(program)), gradients_of(reference, batch(reference)))

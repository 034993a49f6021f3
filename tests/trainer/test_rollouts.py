"""Rollouts in files: what is read of them, how they are packed, and mistakes."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import train
from configs.gpt import gpt_tiny
from models.config import GPTConfig
from programs import SMALL, interrupt_after, make_config, records_of
from refusals import refused
from rollout_cases import grpo_advantages, make_rollouts, write_rollouts
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.gpt.objectives.policy import Policy
from trainer.gpt.rollouts.records import advantages_of
from trainer.gpt.task import GPTTask

NATURAL = Layout("contiguous", 1)
RECORD = {
    "tokens": [5, 6, 7, 8],
    "weights": [0, 1, 1, 0],
    "logprobs": [0, -1.5, -2.5, 0],
    "reward": 1.0,
    "group": "a",
}


def opened(tmp_path, records, seq_len=12, policy=None, data=None, layout=NATURAL, **changes):
    path = write_rollouts(tmp_path / "rollouts.jsonl", records)
    config = make_config(
        SMALL,
        objective="policy",
        policy=policy or Policy(),
        data=DataConfig(path=(path,), cache=tmp_path / "cache", **data or {}),
        seq_len=seq_len,
        run_dir=tmp_path / "run",
        **changes,
    )
    return GPTTask().open_data(config, layout)


def row_of(data, number=0):
    return data.collate([data.train[number]], [0])


def test_lists_belong_to_the_targets(tmp_path):
    second = RECORD | {"reward": 3.0, "targets": [9, 10, 11, 12], "weights": [0, 0, 2, 1]}
    batch = row_of(opened(tmp_path, [RECORD, second]))
    assert batch.tokens.tolist() == [[5, 6, 7, 5, 6, 7, 8, 0, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [[6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0, 0]]
    assert batch.weights.tolist() == [[0, 1, 1, 0, 0, 2, 1, 0, 0, 0, 0, 0]]
    assert batch.positions.tolist()[0][:7] == [0, 1, 2, 0, 1, 2, 3]
    assert batch.segment_ids.tolist() == [[0] * 3 + [1] * 4 + [-1] * 5]
    numbers = {name: x.tolist()[0][:7] for name, x in batch.numbers.items()}
    assert numbers["logprobs"] == [0, -1.5, -2.5, 0, 0, -2.5, 0]
    assert numbers["rewards"] == [1] * 3 + [3] * 4
    half = np.float32(np.sqrt(0.5))
    np.testing.assert_allclose(numbers["advantages"], [-half] * 3 + [half] * 4, rtol=1e-4)


def group_line():
    return {
        "prompt": [5, 6, 7],
        "completions": [[8, 9], [10], [11, 12, 13]],
        "logprobs": [[-1.0, -2.0], [-3.0], [-1.5, -2.5, -3.5]],
        "rewards": [1.0, 0.0, 0.5],
    }


@pytest.mark.parametrize("share", [True, False])
def test_a_line_with_several_answers_is_a_rollout_of_each(tmp_path, share):
    """Lists have a number for each token of an answer; the line is a group."""
    lines = []
    for number, (answer, logprobs) in enumerate(
        zip(group_line()["completions"], group_line()["logprobs"], strict=True)
    ):
        tokens, n = [5, 6, 7, *answer], len(answer)
        line = {"tokens": tokens, "weights": [0, 0, *[1] * n, 0], "group": "g"}
        lines.append(line | {"logprobs": [0, 0, *logprobs, 0], "reward": [1.0, 0.0, 0.5][number]})
    others = [RECORD, RECORD | {"reward": 0.0}]
    data = {"share_prefix": share}
    policy = Policy(ratio="sequence")
    one, several = (
        row_of(opened(tmp_path, [*others, *records], seq_len=24, policy=policy, data=data))
        for records in ([group_line()], lines)
    )
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(several), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_fraction_holds_out_lines_with_several_answers_whole(tmp_path):
    lines = [group_line() for _ in range(20)]
    data = opened(tmp_path, lines, data={"validation_fraction": 0.3, "share_prefix": False})
    for part in (data.train, data.held_out):
        assert sum(len(part[row]) for row in range(len(part))) % 3 == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"completions": [[8, 9], [], [10]]}, "none of which is empty"),
        ({"prompt": "a text"}, "token ids"),
        ({"prompt": None}, "no prompt"),
        ({"rewards": [1.0]}, "rewards of a group must have an entry for each of completions"),
        ({"logprobs": [[-1.0], [-3.0], [-1.5, -2.5, -3.5]]}, "got 1 numbers for 2 tokens"),
        ({"tokens": [1, 2]}, "tokens"),
    ],
)
def test_a_mistake_in_a_line_with_several_answers_is_named(tmp_path, change, named):
    with refused(InputError, named):
        opened(tmp_path, [group_line() | change])


def test_weights_of_a_mean_over_rollouts_add_up_to_one_for_each(tmp_path):
    policy = Policy(mean="constant", length=4.0, deviation=False)
    records = [RECORD, RECORD | {"weights": [0, 0.5, 1, 0]}, RECORD | {"weights": [0, 0, 0, 0]}]
    data = opened(tmp_path, records, policy=policy)
    batch = row_of(data)
    np.testing.assert_allclose(batch.weights[0, :6], [0, 0.5, 0.5, 0, 1 / 3, 2 / 3])
    assert batch.numbers["counts"][0, :6].tolist() == [2] * 3 + [1.5] * 3
    assert "1 left out, of which no token counts" in data.description
    assert "1 groups, 1 of them with equal rewards, which teach nothing" in data.description


def test_advantages_are_those_of_grpo(tmp_path):
    records = make_rollouts()
    rewards = np.array([x["reward"] for x in records])
    groups = np.array([x["group"] for x in records])
    for deviation in (True, False):
        got = advantages_of(rewards, groups, deviation=deviation)
        np.testing.assert_allclose(got, grpo_advantages(records, deviation), rtol=1e-5)
    # A file of its own has groups of its own, whatever their names.
    for name in ("a", "b"):
        write_rollouts(tmp_path / f"{name}.jsonl", [RECORD | {"reward": 5.0 * (name == "b")}] * 2)
    config = make_config(SMALL, objective="policy", data=DataConfig(path=(tmp_path,)))
    data = GPTTask().open_data(config, NATURAL)
    assert "2 groups, 2 of them with equal rewards" in data.description
    given = opened(tmp_path / ".", [RECORD | {"advantages": x} for x in (2, [0, 1, -1, 0])])
    assert row_of(given).numbers["advantages"].tolist()[0][:6] == [0, 2, 2, 0, 1, -1]


MISTAKES = {
    "no tokens": (lambda x: x.pop("tokens"), "got no tokens in {place}, which has weights"),
    "text": (lambda x: x.update(tokens="abc"), "tokens must be a list of token ids"),
    "unknown id": (lambda x: x["tokens"].append(48), "got 48 in tokens of {place} with vocab_size"),
    "short list": (lambda x: x["logprobs"].pop(), "got 3 in logprobs and 4 tokens in {place}"),
    "not shifted": (
        lambda x: x.update(weights=[0, 0, 1, 1]),
        "got weight 1 for token 3 of 4 in {place}, which has none. Entry i of a list belongs to "
        "the target of token i, which is the token after it: shift lists",
    ),
    "no logprobs": (lambda x: x.pop("logprobs"), "got no logprobs in {place}"),
    "null": (lambda x: x["logprobs"].__setitem__(1, None), "got nan for token 1 of 4 in {place}"),
    "probability": (lambda x: x["logprobs"].__setitem__(2, 0.5), "got 0.5 for token 2 in {place}"),
    "no group": (lambda x: x.pop("group"), "got reward=1.0, group=None in {place}"),
    "some advantages": (lambda x: x.update(advantages=1), "got some in {place}, unlike"),
    "unknown key": (lambda x: x.update(logprob=[]), "got logprob in {place}. Leave"),
    "negative weight": (
        lambda x: x.update(weights=[0, -1, 1, 0]),
        "got [0.0, -1.0, 1.0, 0.0] in {place}",
    ),
    "reward": (lambda x: x.update(reward="good"), "finite number; got 'good' in {place}"),
    "group": (lambda x: x.update(group=[1]), "group must be a text or an integer; got [1] in"),
    "targets": (lambda x: x.update(targets=[1, 2, 3]), "got 3 in targets and 4 tokens in {place}"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_rollout_is_named(tmp_path, mistake):
    change, message = MISTAKES[mistake]
    wrong = json.loads(json.dumps(RECORD))
    change(wrong)
    place = repr(f"{tmp_path / 'rollouts.jsonl'}:2")
    with refused(InputError, message.format(place=place), place):
        opened(tmp_path, [RECORD, wrong])


def test_data_that_do_not_fit_the_run_are_refused(tmp_path):
    with refused(InputError, "got 3 tokens up to the last that counts", seq_len=2):
        opened(tmp_path, [RECORD], seq_len=2)
    with refused(InputError, "got 0 in train"):
        opened(tmp_path, [RECORD | {"weights": [0] * 4}])
    with refused(InputError, "got 2 in train and 0 in val", "--data.validation-path"):
        opened(tmp_path, [RECORD] * 2, data={"validation_fraction": 0.001})
    with refused(InputError, "got no ref_logprobs", "score.py"):
        opened(tmp_path, [RECORD], policy=Policy(kl_weight=0.1))
    with refused(InputError, "data.loss='answers'"):
        opened(tmp_path, [RECORD], data={"loss": "answers"})
    with refused(InputError, "data.text_key must be left out"):
        opened(tmp_path, [RECORD], data={"text_key": "words"})
    with refused(InputError, "mask_documents=False"):
        opened(tmp_path, [RECORD], data={"mask_documents": False})
    (tmp_path / "words.txt").write_text("words")
    config = make_config(SMALL, objective="policy", data=DataConfig(path=(tmp_path / "words.txt",)))
    with refused(InputError, "Rollouts must be JSONL or tables; got text files"):
        GPTTask().open_data(config, NATURAL)
    with refused(InputError, "trains on rollouts; got no data.path"):
        GPTTask().open_data(dataclasses.replace(config, data=DataConfig()), NATURAL)


def test_groups_are_held_out_whole_if_a_fraction_is_asked_for(tmp_path):
    records = make_rollouts(40)
    group_of = {np.float32(x["reward"]): x["group"] for x in records}
    data = opened(tmp_path, records, 32, data={"validation_fraction": 0.3})

    def groups(source):
        examples = (x for number in range(len(source)) for x in source[number])
        return {group_of[x.numbers["rewards"][0]] for x in examples}

    held, rest = groups(data.held_out), groups(data.train)
    assert held
    assert held | rest == {0, 1, 2, 3}
    assert not held & rest


def test_settings_of_another_objective_are_refused():
    with refused(InputError, "policy.ratio needs objective='policy'; got objective='next_token'"):
        make_config(SMALL, policy=Policy(ratio="sequence"))


SETTINGS = {
    "clip": (dict(clip=(1.1, 0.2)), "got clip=1.1 0.2"),
    "constant": (dict(mean="constant"), "got mean='constant', length=None"),
    "length": (dict(length=4.0), "got mean='batch', length=4.0"),
    "cispo": (dict(surrogate="cispo", clip=None), "Give --policy.clip"),
    "truncate": (dict(truncate=2.0), "got truncate=2.0. Use --policy.old current"),
    "kl": (dict(kl="k1"), "got kl='k1', kl_weight=0"),
    "weight": (dict(kl_weight=-1.0), "policy.kl_weight must be at least 0"),
    "temperature": (dict(temperature=0.0), "policy.temperature must be above 0"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_do_not_fit_each_other_are_refused(setting):
    settings, message = SETTINGS[setting]
    with refused(InputError, message):
        Policy(**settings)


def test_next_token_training_takes_rollouts_too(tmp_path):
    """Tokens and weights, without any other number."""
    records = [{"tokens": [5, 6, 7, 8], "weights": [0, 0.5, 1, 0]}, {"tokens": [1, 2, 3]}]
    path = write_rollouts(tmp_path / "tokens.jsonl", records)
    data = DataConfig(path=(path,), validation_path=path.with_name("held.jsonl"))
    write_rollouts(data.validation_path, records)
    config = make_config(SMALL, data=data, seq_len=8, run_dir=tmp_path / "run")
    batch = row_of(GPTTask().open_data(config, NATURAL))
    assert batch.numbers is None
    assert batch.tokens.tolist() == [[5, 6, 7, 1, 2, 0, 0, 0]]
    assert batch.weights.tolist() == [[0, 0.5, 1, 1, 1, 0, 0, 0]]


def test_a_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    path = write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts())

    def run(name):
        config = dataclasses.replace(
            gpt_tiny(),
            model=GPTConfig(**SMALL),
            objective="policy",
            data=DataConfig(path=(path,)),
            seq_len=32,
            batch_size=4,
            steps=6,
            log_every=1,
            run_dir=tmp_path / name,
            sample=TextSampleConfig(),
            tensorboard=False,
            devices=4,
        )
        return train.train(config), [x for x in records_of(config.run_dir) if "train_loss" in x]

    whole, records = run("whole")
    assert whole.is_whole
    assert whole.validation is None  # Nothing is held out.
    assert {"ratio", "clipped", "approx_kl", "entropy", "reward", "advantage"} <= records[0].keys()
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        first, _ = run("parts")
    second, _ = run("parts")
    assert (first.is_whole, second.is_whole) == (False, True)
    assert len(second.train) >= 2
    assert first.train + second.train == whole.train

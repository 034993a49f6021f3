"""score.py: beside transformers, on every mesh, for every kind of record; and mistakes."""

import dataclasses
import json
import re

import numpy as np
import pytest

import score
import startrail_jax as st
from configs.gpt import gpt_tiny
from models.config import GPTConfig
from programs import REPOSITORY, SMALL, make_program, save_run
from refusals import refused, usage_error
from rollout_cases import log_softmax, make_rollouts, write_rollouts
from startrail_jax.errors import InputError
from trainer.data.batches import place
from trainer.gpt.batches import TokenExample, in_layout_order, rows_of
from trainer.gpt.config import TextSampleConfig

PARITY = REPOSITORY / "tests" / "parity"
REFERENCES = PARITY / "references"
QWEN3 = REFERENCES / "qwen3"
SCORES, EXPERTS = (PARITY / f"{name}.npz" for name in ("scores", "experts"))


def scored(tmp_path, records, *flags, source=QWEN3, name="out.jsonl"):
    data = tmp_path / "data.jsonl"
    if not data.exists():
        write_rollouts(data, records)
    score.score([*map(str, (source, data, tmp_path / name, *flags))])
    return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]


@pytest.mark.parametrize(
    "mesh",
    ["--devices 1", "--devices 8 --mesh.c 2", "--devices 8 --mesh.data 2 --mesh.tensor 2 --zero 3"],
)
def test_scores_are_those_of_transformers(tmp_path, mesh):
    """50 lines of 3 to 900 tokens, packed into rows of 1,000, in float32."""
    stored = np.load(SCORES)
    ends = np.cumsum(stored["lengths"])
    lines = np.split(stored["tokens"], ends[:-1])
    wanted = np.split(stored["logprobs"], np.cumsum(stored["lengths"] - 1)[:-1])
    records = [{"tokens": line.tolist(), "id": n} for n, line in enumerate(lines)]
    flags = f"{mesh} --seq-len 1000 --dtype float32 --tile 100 --ignored-keys id".split()
    found = scored(tmp_path, records, *flags)
    assert [x["id"] for x in found] == list(range(50))
    assert len(found) == 50
    for line, want, x in zip(lines, wanted, found, strict=True):
        assert x["tokens"] == line.tolist()
        assert x["ref_logprobs"][-1] == 0  # Without a target.
        np.testing.assert_allclose(x["ref_logprobs"][:-1], want, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize(
    "mesh",
    ["--devices 1", "--devices 8 --mesh.c 2", "--devices 4 --mesh.data 2 --mesh.tensor 2 --zero 3"],
)
@pytest.mark.slow_except_every(3)
def test_scores_with_given_experts_are_those_of_transformers(tmp_path, mesh, family):
    """With random experts, and with those of the router, which are given or not."""
    stored = np.load(EXPERTS)

    def lines_of(name, missing=0):
        """The entries of each line, which lacks so many of its tokens."""
        lengths = stored["lengths"] - missing
        return np.split(stored[f"{family} {name}"], np.cumsum(lengths)[:-1])

    flags = f"{mesh} --seq-len 100 --dtype float32 --tile 50".split()
    for way, experts in (("", "experts"), ("own_", "own_experts"), ("own_", None)):
        folder = tmp_path / f"{way}{experts}"
        folder.mkdir()
        records, replay = [{"tokens": x.tolist()} for x in lines_of("tokens")], ()
        if experts is not None:
            replay = ("--replay-experts",)
            for record, x in zip(records, lines_of(experts), strict=True):
                record["experts"] = [*x[:-1].tolist(), None]
        found = scored(folder, records, *flags, *replay, source=REFERENCES / family)
        for record, want, x in zip(records, lines_of(f"{way}logprobs", 1), found, strict=True):
            assert x.get("experts") == record.get("experts")
            np.testing.assert_allclose(x["ref_logprobs"][:-1], want, rtol=0, atol=1e-5)


def test_experts_that_nothing_names_are_refused(tmp_path):
    for family, record, message in (
        ("qwen3", {"tokens": [1, 2]}, "replay_experts needs layers of experts"),
        ("qwen3_moe", {"tokens": [1, 2]}, "got no experts in"),
        ("qwen3_moe", {"text": "words"}, "replay_experts needs rollouts"),
    ):
        (tmp_path / "data.jsonl").unlink(missing_ok=True)
        with refused(InputError, message):
            flags = ("--devices", 1, "--replay-experts")
            scored(tmp_path, [record], *flags, source=REFERENCES / family)


def test_rollouts_keep_what_they_have(tmp_path, capsys):
    records = make_rollouts()
    for record in records:
        del record["ref_logprobs"]
    found = scored(tmp_path, records, "--devices", 4, "--seq-len", 64, "--entropy", "--top-k", 48)
    for record, x in zip(records, found, strict=True):
        assert {name: x[name] for name in record} == record
        targets = np.array(record.get("targets", [*record["tokens"][1:], -1]))
        n = np.count_nonzero(targets >= 0)
        logprobs = np.zeros((n, 48))
        np.put_along_axis(
            logprobs, np.array(x["teacher"]["ids"])[:n], np.array(x["teacher"]["logprobs"])[:n], 1
        )
        np.testing.assert_allclose(np.exp(logprobs).sum(-1), 1, rtol=1e-5)
        own = logprobs[np.arange(n), targets[:n]]
        np.testing.assert_allclose(x["ref_logprobs"][:n], own, atol=1e-5)
        entropy = -(np.exp(logprobs) * logprobs).sum(-1)
        np.testing.assert_allclose(x["entropy"][:n], entropy, atol=1e-5)
        assert (np.diff(x["teacher"]["logprobs"], axis=1) <= 0).all()
    counted = [np.array(x["weights"]) > 0 for x in records]
    pairs = list(zip(counted, records, found, strict=True))
    ours = np.concatenate([np.array(x["ref_logprobs"])[c] for c, _, x in pairs])
    theirs = np.concatenate([np.array(r["logprobs"])[c] for c, r, _ in pairs])
    ratios = np.exp(ours - theirs)
    said = capsys.readouterr().err
    assert f"{len(ours)} tokens that count, mean log-probability {ours.mean():.5g}" in said
    mean = re.search(r"mean ratio ([0-9.]+),", said)[1]
    assert abs(float(mean) - ratios.mean()) < 1e-4
    outside = np.mean((ratios < 0.9) | (ratios > 1.1))
    assert f"{outside:.2%} outside 0.9 to 1.1" in said
    worst = np.abs(ours - theirs).argmax()
    lines = [line for line in said.splitlines() if " token " in line]
    assert len(lines) == 10
    assert lines[0].endswith(f": {ours[worst]:.6g}, engine {theirs[worst]:.6g}")


def test_each_answer_of_a_group_has_a_line(tmp_path):
    rng = np.random.default_rng(0)
    prompt, *answers = (rng.integers(8, 40, size=n).tolist() for n in (9, 4, 1, 7))
    logprobs = [(-rng.random(len(x))).tolist() for x in answers]
    group = {"prompt": prompt, "completions": answers, "logprobs": logprobs, "rewards": [1, 0, 2]}
    found = scored(tmp_path, [group], "--seq-len", 64)
    (tmp_path / "data.jsonl").unlink()
    lines = [{"tokens": prompt + x, "weights": [0] * 8 + [1] * len(x) + [0]} for x in answers]
    for number, x in enumerate(scored(tmp_path, lines, "--seq-len", 64, name="lines.jsonl")):
        assert {key: found[number][key] for key in x} == x
        assert found[number]["logprobs"] == [0] * 8 + logprobs[number] + [0]
        assert found[number]["reward"] == [1, 0, 2][number]
        assert found[number]["group"] == found[0]["group"]


def test_temperature_divides_logits(tmp_path):
    records = [{"tokens": [5, 6, 7, 8]}]
    flags = ["--devices", "1", "--seq-len", "8", "--top-k", "48"]
    (plain,) = scored(tmp_path, records, *flags)
    (warm,) = scored(tmp_path, records, *flags, "--temperature", 2, name="warm.jsonl")
    logits = np.zeros((4, 48))
    np.put_along_axis(
        logits, np.array(plain["teacher"]["ids"]), np.array(plain["teacher"]["logprobs"]), 1
    )
    want = log_softmax(logits[:3] / 2)[np.arange(3), [6, 7, 8]]
    np.testing.assert_allclose(warm["ref_logprobs"][:3], want, atol=1e-5)


def test_texts_and_answers_are_scored_as_the_loss_counts_them(tmp_path):
    """Beside the tokens, weights and losses with which train.py would begin."""
    config = dataclasses.replace(
        gpt_tiny(), model=GPTConfig(**SMALL | {"vocab_size": 256}), seq_len=64, devices=1,
        run_dir=tmp_path / "run", sample=TextSampleConfig(),
    )  # fmt: skip
    program = make_program(config, st.Degrees())
    state = program.initialise()
    save_run(config, {1: state})
    records = [{"text": "def f(x):"}, {"prompt": "2 + 3 = ", "completion": "5"}]
    found = scored(tmp_path, records, source=config.run_dir)
    assert bytes(found[0]["tokens"]) == b"def f(x):\0"
    assert bytes(found[1]["tokens"]) == b"2 + 3 = 5\0"
    assert found[0]["weights"] == [1] * 9 + [0]
    assert found[1]["weights"] == [0] * 7 + [1, 1, 0]
    for x in found:
        (tokens,), layout = np.array([x["tokens"]], np.int32), program.attention.layout
        row = rows_of([[TokenExample.of(tokens)]], config.seq_len)
        batch = place(in_layout_order(row, layout), program.batch_sharding)
        loss = float(program.losses(state.result, batch).loss)
        np.testing.assert_allclose(-np.sum(x["ref_logprobs"]), loss, rtol=1e-5)


MISTAKES = {
    "key": ([{"tokens": [1, 2], "ref_logprobs": [0, 0]}], (), "got ref_logprobs in"),
    "long": ([{"tokens": [1] * 9}], (), "got 8 tokens in"),
    "id": ([{"tokens": [1, 99]}], (), "got 99 in tokens of"),
    "no tokens": ([{"words": "abc"}], (), "got words in .*Give --tokenizer"),
    "top_k": ([{"tokens": [1, 2]}], ("--top-k", 49), "top_k must be at most model.vocab_size"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(tmp_path, mistake):
    records, flags, message = MISTAKES[mistake]
    with pytest.raises(InputError, match="(?i)" + message):
        scored(tmp_path, records, "--devices", 1, "--seq-len", 7, *flags)
    assert [x.name for x in tmp_path.iterdir()] == ["data.jsonl"]


def test_no_file_is_overwritten(tmp_path):
    (tmp_path / "out.jsonl").write_text("mine")
    with refused(InputError, "OUT must be a file that does not exist yet"):
        scored(tmp_path, [{"tokens": [1, 2]}], "--devices", 1)
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def test_words_that_are_missing_are_named(capsys):
    said = usage_error(capsys, score.read_command_line, ["runs/gpt_tiny"])
    assert "The first three words must be" in said

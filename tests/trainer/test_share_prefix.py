"""Rollouts and pairs with shared beginnings: each beginning stands in a row once."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import startrail_jax as st
import train
from models.config import ExpertsConfig, LinearConfig
from models.parts.ssd import SSDConfig
from programs import SMALL, check_same_gradients, gradients_of, make_config, whole_batch
from programs import make_program as program_of
from rollout_cases import POLICIES, PREFERENCES, with_teacher
from startrail_jax.errors import InputError
from startrail_jax.tokens.documents import DocumentCost
from trainer.config import AttentionConfig
from trainer.data.batches import place
from trainer.data.order import PartBatches
from trainer.gpt.batches import TokenExample
from trainer.gpt.config import DataConfig
from trainer.gpt.objectives.distill import Distill
from trainer.gpt.objectives.policy import Policy
from trainer.gpt.objectives.preference import Preference
from trainer.gpt.task import GPTTask
from trainer.gpt.trees import TreeLimits, as_trees, joined, merged, trees_within

# Trees -------------------------------------------------------------------------------------------


def drawn_examples(rng, count=12):
    """Examples that continue each other at random places, whose tokens count in stretches."""
    texts = [rng.integers(50, size=20)]
    while len(texts) < count:
        base = texts[rng.integers(len(texts))]
        shared = int(rng.integers(0, len(base) + 1))
        texts.append(np.r_[base[:shared], rng.integers(50, size=rng.integers(2, 15))])
    rng.shuffle(texts)
    found = []
    for number, text in enumerate(texts):
        n = len(text) - 1
        counted = np.repeat(rng.random(n // 3 + 1) < 0.5, 3)[:n]
        counted[-1:] = True
        weights = (counted * rng.uniform(0.5, 2, n)).astype(np.float32)
        numbers = {"logprobs": rng.normal(size=n).astype(np.float32)}
        numbers["advantages"] = np.full(n, number, np.float32)
        tokens = text.astype(np.int32)
        found.append(TokenExample(tokens[:-1], tokens[1:], weights, None, numbers))
    return found


def read_of(examples):
    return lambda i: (examples[i].tokens, examples[i].weights > 0)


def branch(example, place):
    """The places of all tokens up to one that it continues."""
    before = np.arange(place + 1)
    return before[example.ends[: place + 1] > place]


@pytest.mark.parametrize("levels", [None, 1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_every_example_is_a_branch_of_a_tree(seed, levels):
    examples = drawn_examples(np.random.default_rng(seed))
    limits = TreeLimits(tokens=60, levels=levels, shared=3)
    trees = joined(len(examples), read_of(examples), limits)
    assert sorted(number for tree in trees for number in tree.members) == [*range(len(examples))]
    firsts = [min(tree.members) for tree in trees]
    assert firsts == sorted(firsts)
    counted = 0
    for tree in trees:
        row = merged(tree, [examples[i] for i in tree.members])
        if len(tree.members) == 1:
            assert row is examples[tree.members[0]]
            counted += np.count_nonzero(row.weights)
            continue
        assert len(row.tokens) == tree.tokens <= 60
        assert st.branch_levels(row.ends[None]) == tree.levels <= (levels or 9)
        for document, number in enumerate(sorted(tree.members)):
            example = examples[number]
            (own,) = np.nonzero((row.documents == document) & (row.weights > 0))
            at = branch(row, own[-1])
            np.testing.assert_array_equal(row.tokens[at], example.tokens[: len(at)])
            # The last token counts, so that the branch is the whole example.
            assert len(at) == len(example.tokens)
            (there,) = np.nonzero(example.weights)
            np.testing.assert_array_equal(own, at[there])
            np.testing.assert_array_equal(row.targets[own], example.targets[there])
            np.testing.assert_array_equal(row.weights[own], example.weights[there])
            for name, x in row.numbers.items():
                np.testing.assert_array_equal(x[own], example.numbers[name][there])
            counted += len(there)
    assert counted == sum(np.count_nonzero(x.weights) for x in examples)


def example_of(text, counted, **others):
    tokens, weights = np.array(text, np.int32), np.array(counted, np.float32)
    return TokenExample(tokens[:-1], tokens[1:], weights[1:], **others)


def test_a_group_reads_its_prompt_once():
    """All but its last token, whose target is another one in each answer."""
    prompt = [*range(20)]
    examples = [example_of([*prompt, 30 + i, 40 + i], [0] * 20 + [1, 1]) for i in range(8)]
    (tree,) = joined(8, read_of(examples), TreeLimits(tokens=100, levels=2))
    assert tree.tokens == 19 + 8 * 2
    assert tree.levels == 2


def test_turns_whose_histories_agree_are_one_text():
    """Wherever they stand in the file; each counts its own answer, and one is a branch."""
    first = [*range(20)]
    turns = [
        example_of([*first, 30, 31], [0] * 20 + [1, 1]),
        example_of([*range(60, 90)], [0] * 20 + [1] * 10),
        example_of([*first, 30, 31, 32, 33, 34], [0] * 22 + [0, 1, 1]),
        # The history without what the first turn thought.
        example_of([*first, 31, 32, 33, 35], [0] * 20 + [0, 0, 0, 1]),
    ]
    trees = joined(4, read_of(turns), TreeLimits(tokens=100, levels=2))
    assert [sorted(tree.members) for tree in trees] == [[0, 2, 3], [1]]
    # 24 tokens of the longer turn, and those of the branch behind the 20 that they share.
    assert trees[0].tokens == 24 + 3


@pytest.mark.parametrize("levels", [None, 2])
def test_turns_may_be_many(levels):
    """Each continues the one before, and every tenth branches off."""
    text, turns = [*range(20)], []
    for turn in range(2000):
        more = [100 + turn, 7]
        turns.append(example_of([*text, *more], [0] * len(text) + [1, 1]))
        text = [*text, *more] if turn % 10 else [*text, 8, 9]
    turns = turns[:1500] if levels is None else turns[:100]
    tree, *others = joined(len(turns), read_of(turns), TreeLimits(tokens=9000, levels=levels))
    assert not others
    row = merged(tree, [turns[i] for i in tree.members])
    assert len(row.tokens) == tree.tokens < 3 * len(turns)
    assert st.branch_levels(row.ends[None]) == tree.levels == 2


def test_a_pair_shares_its_prompt():
    documents = np.repeat([0, 1], [6, 7]).astype(np.int32)
    tokens = np.array([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 7, 8, 9], np.int32)
    weights = np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1], np.float32)
    pair = TokenExample(tokens, tokens + 1, weights, documents)
    row = as_trees(pair, trees_within(pair, TreeLimits(tokens=50, levels=2, shared=1)))
    assert len(row.tokens) == 13 - 3
    for document in range(2):
        (own,) = np.nonzero((row.documents == document) & (row.weights > 0))
        at = branch(row, own[-1])
        np.testing.assert_array_equal(row.tokens[at], tokens[documents == document])


# Models ------------------------------------------------------------------------------------------


def group_records(groups, answers, prompt, answer, seed=0, vocab=48):
    """Records of groups, whose answers have several lengths."""
    rng = np.random.default_rng(seed)
    records = []
    for group in range(groups):
        beginning = rng.integers(8, vocab, size=prompt).tolist()
        for _ in range(answers):
            n = int(rng.integers(1, 2 * answer))
            text = [*beginning, *rng.integers(8, vocab, size=n).tolist()]
            records.append(
                {
                    "tokens": text,
                    "weights": [0] * (prompt - 1) + [1] * n + [0],
                    "logprobs": (-np.abs(rng.normal(4, 0.3, size=len(text)))).tolist(),
                    "reward": float(rng.normal()),
                    "group": group,
                }
            )
    return records


def written(path, records):
    path.write_text("".join(json.dumps(x) + "\n" for x in records))
    return path


LINEAR = LinearConfig(heads=4, key_heads=2, key_dim=8, value_dim=12, norm_eps=1e-3)
STATES = SSDConfig(heads=4, head_dim=12, groups=2, state_dim=8, least_step=0.001, norm_eps=1e-3)
EXPERTS = ExpertsConfig(count=6, top_k=2, width=8)
MODELS = {
    "GPT": SMALL,
    "Qwen3.5": SMALL | dict(layers=3, mixers=("linear", "linear", "attention"), linear=LINEAR),
    "Mamba hybrid": SMALL | dict(mixers=("ssd", "attention"), ssd=STATES),
    "Qwen3-MoE": SMALL | dict(feed_forwards=("experts",), experts=EXPERTS, qk_norm=True),
    "windows": SMALL | dict(windows=(9, "none")),
}
ORDERS = {"tree": range(4), "rows": range(4), "turned": (2, 0, 3, 1), "back": (3, 2, 1, 0)}
"""Orders of the rollouts of a group: as a tree, and one after another."""


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("degrees", [st.Degrees(), st.Degrees(ring=2, team=2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_group_as_a_tree_has_the_gradients_of_its_rows(name, degrees, tmp_path):
    """Of all weights, beside its rollouts one after another: to 1e-6 of the largest, or to twice
    what float32 makes of other orders of the same rollouts."""
    records, found = group_records(1, 4, 40, 8), {}
    for order, numbers in ORDERS.items():
        path = written(tmp_path / f"{order}.jsonl", [records[number] for number in numbers])
        data = DataConfig(path=(path,), validation_fraction=0.05, share_prefix=order == "tree")
        config = make_config(
            MODELS[name], objective="policy", seq_len=256, batch_size=1, data=data,
            run_dir=tmp_path / "run",
        )  # fmt: skip
        program = program_of(config, degrees)
        opened = GPTTask().open_data(config, program.attention.layout)
        batch = opened.collate([opened.train[0]], [0])
        assert (batch.visible_until is not None) == (order == "tree")
        weights = jax.device_get(program_of(config, st.Degrees()).initialise().weights)
        found[order] = gradients_of(program, weights, place(batch, program.batch_sharding))
    loss, metrics, _ = found["tree"]
    wanted_loss, means, wanted = found["rows"]
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6, atol=1e-7)
    for mean, other in zip(metrics.values(), means.values(), strict=True):
        np.testing.assert_allclose(mean, other, rtol=1e-5, atol=1e-6)

    def apart(one, other):
        pairs = zip(*(jax.tree.leaves(found[order][2]) for order in (one, other)), strict=True)
        return max(np.abs(x - y).max() for x, y in pairs)

    largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    rounding = max(apart("rows", "turned"), apart("rows", "back"), apart("turned", "back"))
    assert rounding < 1e-5 * largest
    assert apart("tree", "rows") <= max(1e-6 * largest, 2 * rounding)


def pairs_of_long_prompts():
    """Pairs, one of whose answers begins the other, and some whose answers begin alike."""
    words = "a ring of teams, and a team of rings; "
    return [
        {
            "prompt": f"{number}: {words * (1 + number % 2)}",
            "chosen": "go" * (1 + number % 3),
            "rejected": "going nowhere"[: 3 + 3 * number],
            "ref_chosen_logps": -20.0 - number,
            "ref_rejected_logps": -25.0,
        }
        for number in range(4)
    ]


def rollouts_of_turns():
    """Rollouts whose histories are those of others, with a teacher of each token."""
    records = group_records(2, 2, 30, 6, seed=1)
    for record in records[::2]:
        n = len(more := [*record["tokens"], *range(10, 18)])
        weights = [0] * (n - 5) + [0.5] * 4 + [0]
        records.append(record | {"tokens": more, "weights": weights, "logprobs": [-3.0] * n})
    return with_teacher(records)


BYTES = SMALL | {"vocab_size": 256}
OBJECTIVES = {
    "policy": (
        SMALL,
        rollouts_of_turns,
        dict(policy=Policy(**POLICIES["grpo"] | {"kl_weight": 0})),
    ),
    "gspo": (SMALL, rollouts_of_turns, dict(objective="policy", policy=Policy(**POLICIES["gspo"]))),
    "distill": (SMALL, rollouts_of_turns, dict(distill=Distill(top_k=6))),
    "preference": (BYTES, pairs_of_long_prompts, {}),
    "simpo": (
        BYTES,
        pairs_of_long_prompts,
        dict(objective="preference", preference=Preference(**PREFERENCES["simpo"])),
    ),
    "reward": (BYTES | {"scores": True}, pairs_of_long_prompts, {}),
}


@pytest.mark.slow_except_every(2)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_has_the_gradients_of_separate_texts(name, tmp_path):
    """Its metrics too; with turns whose histories agree, and with answers that begin alike."""
    model, make_records, settings = OBJECTIVES[name]
    records = make_records()
    if name == "simpo":
        records = [{k: x for k, x in pair.items() if "ref" not in k} for pair in records]
    path = written(tmp_path / "train.jsonl", records)
    held = written(tmp_path / "held.jsonl", records[:2])
    found, tokens = [], []
    for share in (True, False):
        data = DataConfig(path=(path,), validation_path=held, share_prefix=share)
        common = dict(objective=name, seq_len=250, batch_size=8, data=data)
        config = make_config(model, **common | settings, run_dir=tmp_path / "run")
        program = program_of(config, st.Degrees(ring=2, team=2))
        weights = jax.device_get(program_of(config, st.Degrees()).initialise().weights)
        batch = whole_batch(program)
        tokens.append(int((np.asarray(batch.segment_ids) >= 0).sum()))
        found.append(gradients_of(program, weights, batch))
    assert tokens[0] < 0.7 * tokens[1]
    check_same_gradients(*found, rtol=1e-5, atol=1e-6)


def test_whole_groups_have_the_gradients_of_those_in_rows(tmp_path):
    """Each on as few devices as hold it, which have equal work by what is visible."""
    records = group_records(5, 4, 30, 6, seed=2)
    path = written(tmp_path / "groups.jsonl", records)
    held = written(tmp_path / "held.jsonl", records[:4])
    found = []
    for options in ({}, {"batches": "documents", "draw": 64}):
        data = DataConfig(path=(path,), validation_path=held, **options)
        config = make_config(
            SMALL, objective="policy", seq_len=128, batch_size=8, data=data,
            run_dir=tmp_path / "run",
        )  # fmt: skip
        program = program_of(config, st.Degrees(ring=4))
        weights = jax.device_get(program_of(config, st.Degrees()).initialise().weights)
        if not options:
            found.append(gradients_of(program, weights, whole_batch(program)))
            continue
        opened = GPTTask().open_data(config, program.attention.layout)
        cost, documents = DocumentCost(), opened.documents
        for number, pairs in enumerate(documents.sizes.pairs(cost)):
            row = documents.rows([[number]], 128)
            assert pairs == cost.tree_pairs(row.visible_until)
        assert (
            documents.sizes.pairs(cost).sum()
            < 0.9 * cost.visible_pairs(documents.sizes.lengths).sum()
        )
        series = PartBatches(program.parts, opened, seed=0)
        batch = next(series)
        series.close()
        assert len({*batch.split[: batch.count].tolist()}) > 1
        found.append(gradients_of(program, weights, program.parts.place(batch)))
    check_same_gradients(found[1], found[0], rtol=1e-5, atol=1e-6)


# Runs --------------------------------------------------------------------------------------------

RUN = (
    "gpt_tiny --objective policy --steps 30 --batch-size 1 --seq-len 160 --log-every 1 "
    "--model.width 16 --model.layers 1 --model.heads 2 --model.kv-heads 1 --model.head-dim 8 "
    "--model.mlp-width 32 --model.vocab-size 48 --sample.length 0 --policy.old current "
)


def losses_of_run(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [x["train_loss"] for x in map(json.loads, lines) if "train_loss" in x]


def test_thirty_steps_on_trees_are_those_on_rows(tmp_path, capsys):
    """Of groups that fill a row each in both ways."""
    records = group_records(6, 3, 34, 8)
    for group in range(6):
        own = [x for x in records if x["group"] == group]
        missing = 150 - sum(len(x["tokens"]) for x in own)
        own[-1]["tokens"] += [9] * missing
        own[-1]["weights"] = [0] * 33 + [1] * (len(own[-1]["tokens"]) - 34) + [0]
        own[-1]["logprobs"] = [-4.0] * len(own[-1]["tokens"])
    path, found = written(tmp_path / "groups.jsonl", records), {}
    for share in (True, False):
        run_dir = tmp_path / str(share)
        flags = f"--data.path {path} --data.share-prefix {share} --run-dir {run_dir}"
        train.train(train.read_command_line([*RUN.split(), *flags.split()]).settings)
        found[share] = losses_of_run(run_dir), capsys.readouterr().out
    (trees, of_trees), (rows, of_rows) = found.values()
    assert len(trees) == 30
    np.testing.assert_allclose(trees, rows, rtol=1e-5, atol=1e-6)
    assert "shared beginnings leave" in of_trees
    assert "shared beginnings" not in of_rows


def test_trees_are_the_default_where_they_can_be():
    for objective in ("policy", "preference", "distill"):
        assert make_config(SMALL, objective=objective).shares_prefixes
    assert not make_config(SMALL).shares_prefixes
    jla = make_config(SMALL, objective="policy", attention=AttentionConfig(linear_backend="jla"))
    assert not jla.shares_prefixes
    with pytest.raises(InputError, match=r"attention.linear_backend needs separate texts"):
        dataclasses.replace(jla, data=DataConfig(share_prefix=True))
    with pytest.raises(InputError, match=r"needs rollouts or pairs.*next_token"):
        make_config(SMALL, data=DataConfig(share_prefix=True))

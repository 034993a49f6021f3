"""`examples/rl/`: its reward and its files, and a loop of trainer and engine that are killed."""

import importlib
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import pytest

from programs import REPOSITORY, logged_steps, run_python
from trainer.data.documents import Record
from trainer.gpt.rollouts.records import read_rollout

FOLDER = REPOSITORY / "examples" / "rl"
STEPS = 4


@pytest.fixture(scope="module")
def rl():
    """The modules of the example, by name."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            del sys.modules[name]


class Drawn:
    """An engine that answers right, or in the order of the word, or never ends, in turn."""

    def answers(self, words, seed):
        for number, word in enumerate(words):
            right = [*sorted(word.encode()), 0]
            yield [right, [*word.encode(), 0], [*word.encode(), 97]][number % 3]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [(b"gkntv\0", 1), (b"gkntv", 0), (b"gkntvv", 0), (b"gknvt\0", 0), (b"gknt\0", 0), (b"", 0)],
)
def test_reward_is_for_the_letters_in_order_and_the_end(rl, answer, reward):
    assert rl["sorting"].reward("vtkgn", [*answer]) == reward


def test_no_training_reads_words_that_are_held_out(rl):
    sorting = rl["sorting"]
    held_out = sorting.words(300, seed=1, held_out=True)
    seen = {x for seed in (0, 1, 7) for x in sorting.words(3000, seed)}
    assert len({*held_out}) > 290
    assert not seen & {*held_out}


def test_share_of_right_completions_is_the_one_that_is_asked_for(rl):
    sorting, right = rl["sorting"], 0
    examples = [*sorting.examples(2000, right=0.4)]
    for example in examples:
        word, letters = example["prompt"].removesuffix(">"), example["completion"]
        assert sorted(word) == sorted(letters)
        right += sorting.reward(word, [*letters.encode(), 0])
    # Of random orders, about one of 110 is right.
    assert 0.35 < right / len(examples) < 0.45


def test_rollouts_count_the_answers_and_their_ends(rl):
    lines = [*rl["engine"].rollouts(Drawn(), prompts=4, group=3, seed=5)]
    assert [line["reward"] for line in lines] == [1, 0, 0] * 4
    assert len({line["group"] for line in lines}) == 4
    for line, ending in zip(lines, [b"\0", b"\0", b"a"] * 4, strict=True):
        found = read_rollout(Record(key="a", place="a line", fields=line), vocab_size=256)
        counted = bytes(found.targets[found.weights > 0].tolist())
        assert counted[5:] == ending
        assert bytes(line["tokens"]) == line["group"].encode() + b">" + counted


def test_file_appears_when_it_is_whole(rl, tmp_path):
    def lines():
        yield {"a": 1}
        assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == []
        yield {"a": 2}

    rl["sorting"].write_lines(tmp_path / "step_000001.jsonl", lines())
    (path,) = tmp_path.iterdir()
    assert [json.loads(x) for x in path.read_text().splitlines()] == [{"a": 1}, {"a": 2}]


def test_pairs_are_of_answers_that_ended(rl):
    words = ["vtkgn", "abcde"]  # The second one is right in its own order.
    found = [*rl["pairs"].pairs(Drawn(), words, seed=0)]
    assert found == [{"prompt": "vtkgn>", "chosen": "gkntv", "rejected": "vtkgn"}]


def curves_of(text):
    """The shares over the steps of each curve of a picture."""
    assert ElementTree.fromstring(text).tag.endswith("svg")
    named = re.findall(r"<!-- (\w+): (.*) -->", text)
    return {
        name: [(int(x), float(y)) for x, y in (point.split(":") for point in points.split())]
        for name, points in named
    }


def test_picture_has_a_point_for_each_share(rl):
    curves = {"GRPO": [(0, 0.25), (10, 0.5), (20, 1.0)], "DPO": [(0, 0.25), (20, 0.75)]}
    text = "\n".join(rl["measure"].picture(curves))
    assert curves_of(text) == curves
    assert 'points="60,220 370,160 680,40"' in text
    assert 'points="60,220 680,100"' in text


def test_picture_of_the_page_shows_what_the_page_says():
    page = (REPOSITORY / "docs" / "posttraining.md").read_text()
    curves = curves_of((REPOSITORY / "docs" / "learning.svg").read_text())
    assert {*curves} == {"GRPO", "DPO"}
    for name, points in curves.items():
        first, last = points[0][1], points[-1][1]
        assert 0.3 < first < 0.5
        assert last >= 0.9
        assert f"{last:.2f} by {name}" in page
        assert f"from {first:.2f}" in page


@pytest.mark.slow
def test_loop_goes_on_after_kills_of_trainer_and_engine(rl, tmp_path):
    run = rl["run"]
    start = tmp_path / "start.jsonl"
    assert run_python(FOLDER / "sorting.py", start, "--count", "400").returncode == 0
    devices = ["--devices", "1"]
    for command in (
        [*run.supervised(tmp_path, 2).split(), *devices],
        f"-m trainer.gpt.export {tmp_path}/start {tmp_path}/model".split(),
    ):
        done = run_python(*command)
        assert done.returncode == 0, done.stderr
    rollouts, weights = tmp_path / "rollouts", tmp_path / "weights"
    rollouts.mkdir()
    weights.mkdir()
    trainer, engine = (command.split() for command in run.grpo(tmp_path, STEPS))
    trainer += [*devices, "--log-every", "1"]

    def started(command):
        with open(tmp_path / "log", "a") as log:
            options = dict(cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)
            return subprocess.Popen([sys.executable, *command], **options)

    def wait_for(path, *processes):
        until = time.monotonic() + 300
        while not path.exists():
            text = (tmp_path / "log").read_text()
            assert all(process.poll() is None for process in processes), text
            assert time.monotonic() < until, text
            time.sleep(0.05)

    first, second = started(trainer), started(engine)
    try:
        wait_for(rollouts / "step_000001.jsonl", first, second)
        second.kill()
        wait_for(weights / "step_000001", first)
        first.kill()
        assert (first.wait(), second.wait()) == (-9, -9)
        before = {path: path.read_bytes() for path in rollouts.glob("step_*")}
        assert len(before) < STEPS
        first, second = started(trainer), started(engine)
        assert (first.wait(300), second.wait(300)) == (0, 0), (tmp_path / "log").read_text()
    finally:
        first.kill()
        second.kill()
    names = [f"step_{step:06d}" for step in range(STEPS + 1)]
    assert sorted(path.name for path in weights.iterdir()) == names
    assert sorted(path.name for path in rollouts.iterdir()) == [f"{x}.jsonl" for x in names[1:]]
    assert all(path.read_bytes() == content for path, content in before.items())
    assert logged_steps(tmp_path / "grpo") == [*range(1, STEPS + 1)]
    sorting = rl["sorting"]
    for step in range(1, STEPS + 1):
        lines = [
            json.loads(x) for x in (rollouts / f"{names[step]}.jsonl").read_text().splitlines()
        ]
        assert [line["group"] for line in lines[::16]] == sorting.words(64, seed=step)
        for line in lines:
            prompt = sorting.prompt(line["group"])
            answer = line["tokens"][len(prompt) :]
            assert line["tokens"] == prompt + answer
            assert 0 < len(answer) <= sorting.LONGEST
            assert sorting.END not in answer[:-1]
            assert line["reward"] == sorting.reward(line["group"], answer)
        assert len({(*line["tokens"],) for line in lines}) > 64

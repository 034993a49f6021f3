"""How `run.py` trains its tiny model: data, and command lines of train.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.needle.haystack import Case, Words
from trainer.config import MeshConfig
from trainer.gpt.config import GPTTrainConfig
from trainer.run.settings import flag_value

FACTOR = 4
"""The longest rows, in rows of the first training."""
BASE_PER_TOKEN = 10_000 / 4096
"""Base of the rotary positions over the length of the first training, as in Llama 2. A model that
sees so little of its longest wavelengths is lost at other lengths."""
SHORT_ROWS, LONG_ROWS = 32, 8
"""Rows of a batch, in the first training and in the second."""
MOST_ROWS, HELD_OUT_ROWS = 20_000, 64
"""Rows that are made for a training; more steps see them again."""
EASY_CASES = 4
"""Cases in a row of short ones."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of both trainings."""

    length: int
    """Tokens in a row of the first."""
    steps: int
    tuning_steps: int
    needles: int
    """Needles in a case that fills a row, which has as many questions."""
    seed: int

    @property
    def base(self) -> float:
        """Base of the rotary positions."""
        return round(self.length * BASE_PER_TOKEN, 1)


def write_data(words: Words, folder: Path, sizes: Sizes) -> None:
    """Writes tokenizer and rows of both trainings."""
    words.write_tokenizer(folder / "tokenizer")
    for name, length, easy, rows in (
        ("short", sizes.length, True, sizes.steps * SHORT_ROWS),
        ("long", FACTOR * sizes.length, False, sizes.tuning_steps * LONG_ROWS),
    ):
        counts = {"train": min(rows, MOST_ROWS), "val": HELD_OUT_ROWS}
        for number, (part, count) in enumerate(counts.items()):
            rng = np.random.default_rng([sizes.seed, length, count, number])
            cases = cases_of_rows(words, rng, count, length, sizes.needles, easy=easy)
            words.write_rows(folder / "data" / name / f"{part}.jsonl", cases)


def cases_of_rows(
    words: Words, rng: np.random.Generator, rows: int, length: int, needles: int, *, easy: bool
) -> Iterator[Case]:
    """The cases that fill so many rows, with as many questions as needles.

    Args:
        words: the wording.
        rng: random numbers.
        rows: number of rows.
        length: tokens in a row.
        needles: needles in a case that fills a row.
        easy: whether every other row has several short cases with few needles, which do not see
            each other. They teach a model to compare keys, which long cases alone teach slowly.
    """
    few = max(2, (needles + 1) // 3)
    for row in range(rows):
        if easy and row % 2:
            for _ in range(EASY_CASES):
                yield words.case(rng, length=length // EASY_CASES, needles=few, questions=few)
        else:
            yield words.case(rng, length=length, needles=needles, questions=needles)


def commands(
    folder: Path, sizes: Sizes, mesh: MeshConfig, devices: int | None
) -> dict[str, list[str]]:
    """The flags of train.py for each run, by the name of the run."""
    length, steps, tuning_steps = sizes.length, sizes.steps, sizes.tuning_steps
    shared = (
        "--data.loss-on completion --optimizer.weight-decay 0 --optimizer.beta2 0.99 "
        f"--seed {sizes.seed} "
        f"--no-tensorboard --sample-length 0 --validation-sequences {HELD_OUT_ROWS}"
    )
    short = (
        f"gpt_tiny --model.vocab-size {len(Words.vocabulary)} --model.width 64 --model.layers 2 "
        "--model.heads 2 --model.kv-heads 2 --model.head-dim 32 --model.mlp-width 128 "
        f"--model.windows 2 none --model.rope.base {sizes.base:g} "
        f"--seq-len {length} --batch-size {SHORT_ROWS} "
        f"--steps {steps} --optimizer.learning-rate 2e-3 --log-every 100 "
        f"--evaluate-every {steps} --checkpoint.every {steps}"
    )
    longer = (
        f"--zero 0 --remat none --seq-len {FACTOR * length} --batch-size {LONG_ROWS} "
        f"--steps {tuning_steps} --optimizer.learning-rate 1e-3 --log-every 20 "
        f"--evaluate-every {tuning_steps} --checkpoint.every {tuning_steps}"
    )
    yarn = (
        f"--model.rope.scaling yarn --model.rope.factor {FACTOR} "
        f"--model.rope.original-length {length}"
    )
    tokenizer = ["--data.tokenizer", str(folder / "tokenizer" / "tokenizer.json")]
    where = [] if devices is None else ["--devices", str(devices)]
    for name, value in vars(mesh).items():
        if value != getattr(MeshConfig(), name):
            where += [f"--mesh.{name.replace('_', '-')}", *flag_value(value).split()]

    def flags(name: str, data: str, *texts: str) -> list[str]:
        places = ["--data.path", str(folder / "data" / data), "--run-dir", str(folder / name)]
        return [*" ".join(texts).split(), *shared.split(), *where, *places]

    init = ["--init-from", str(folder / "exported")]
    return {
        "short": [*flags("short", "short", short), *tokenizer],
        "tuned": [*init, *flags("tuned", "long", longer, yarn)],
        "control": [*init, *flags("control", "long", longer)],
    }


def train_as(flags: list[str]) -> GPTTrainConfig:
    """Does what `python train.py FLAGS` does; returns the config."""
    from train import read_command_line, train

    config = read_command_line(flags).settings
    assert isinstance(config, GPTTrainConfig), "the flags are those of a GPT"
    if train(config).validation is None:
        sys.exit("interrupted; the same command goes on")
    return config


def export(run_dir: Path, config: GPTTrainConfig, out: Path) -> None:
    """Exports a run, unless it has been exported before."""
    from trainer.gpt.export.writing import export_run

    if not out.exists():
        done = export_run(run_dir, config, out)
        print(f"{out}: the model after step {done.step}")

"""Scores tokens that are there already: log-probabilities of rollouts, texts and conversations.

    python score.py runs/gpt_tiny rollouts.jsonl scored.jsonl           # adds ref_logprobs
    python score.py Qwen3-8B rollouts.jsonl scored.jsonl --key old_logprobs --zero 3
    python score.py Qwen3-8B answers.jsonl teacher.jsonl --top-k 64 --entropy
    python score.py runs/reward rollouts.jsonl rewarded.jsonl           # a reward model: `reward`
    python score.py runs/gpt_tiny rollouts.jsonl scored.jsonl --mesh.c 1 --seq-len 4096
    python score.py runs/gpt_tiny rollouts.jsonl scored.jsonl --help           # all flags

The words are the folder of a run, or of a pretrained model; the data, JSONL or tables; and a new
file, which has the same records in the same order with their scores, and appears only when it is
whole. If records have an engine's `logprobs`, the last lines say how far they are from the model's.
Scores do not depend on the mesh, and no device holds a whole row or its logits.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainer.command_line import Command, exit_with_usage_error, parse
from trainer.data.opening import read_object
from trainer.gpt.config import TOKENIZER, GPTTrainConfig
from trainer.gpt.pretrained.defaults import pretrained, with_beginning, with_ending
from trainer.gpt.scoring.options import ScoreOptions
from trainer.run.settings import CONFIG_FILE, config_of
from trainer.tasks import load_train_config

PROG = "score.py RUN_OR_FOLDER DATA OUT"


class Wanted(NamedTuple):
    """What a command line asks for."""

    source: Path
    data: Path
    out: Path
    config: GPTTrainConfig
    command: Command[ScoreOptions]


def score(arguments: list[str]) -> None:
    """Scores a file, as a command line says."""
    source, data, out, config, command = read_command_line(arguments)
    # Imported here, as they import jax: `--help` and a mistyped flag must be fast.
    from trainer.gpt.scoring.scores import score_file
    from trainer.session import on_mesh_of_flags

    options = command.settings
    flags = options, command.distributed, config, source
    with on_mesh_of_flags(*flags, kind="scores of a GPT") as (session, mesh):
        score_file(source, data, out, config, options, mesh, session)


def read_command_line(arguments: list[str]) -> Wanted:
    """What a command line asks for; on a mistake, prints a message and exits with status 2."""
    words = [x for x in arguments[:3] if not x.startswith("-")]
    if len(words) < 3:
        if {"-h", "--help"} & set(arguments):
            options = ScoreOptions(seq_len=4096)
            parse(["--help"], default=options, prog=PROG, description=__doc__)
        exit_with_usage_error(
            "The first three words must be the folder of a run or of a model, the data and the "
            f"file to write; got {' '.join(words) or 'nothing'}. Use for example: python score.py "
            "runs/gpt_tiny rollouts.jsonl scored.jsonl"
        )
    source, data, out = map(Path, words)
    config = _config_of(source)
    options = ScoreOptions.of_run(config)
    command = parse(arguments[3:], default=options, prog=PROG, description=__doc__)
    return Wanted(source, data, out, config, command)


def _config_of(source: Path) -> GPTTrainConfig:
    """That of a run, or of one that would begin with a pretrained model."""
    file = source / CONFIG_FILE
    if not file.is_file() or "model_type" not in read_object(file):
        config = load_train_config(config_of(source, "The first word"))
        if not isinstance(config, GPTTrainConfig):
            exit_with_usage_error(
                f"The first word must be the folder of a GPT; got {str(source)!r}, a run of kind "
                f"{config.kind!r}."
            )
        return config
    config, tokenizer = pretrained(source), source / TOKENIZER
    # Of pairs, which reward models learn from, the answers count anyway.
    data = replace(
        config.data,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        loss=None if config.model.scores else "answers",
    )
    config = with_beginning(replace(config, data=data), by_user=False)
    return with_ending(config, by_user=False)


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    # Outermost, so that one of several processes ends with the others.
    with exit_on_user_errors():
        score(sys.argv[1:])

"""Does the model of a run find needles in haystacks?

    python benchmarks/needle/run.py --run runs/Qwen3-8B --lengths 32K 128K 1M
    python benchmarks/needle/run.py --run runs/Qwen3-8B --rope.scaling yarn --rope.factor 4 \\
        --rope.original-length 32768 --lengths 128K --mesh.head 8

A needle is a sentence about a city and its secret number, hidden at some depth of a haystack among
needles about other cities; the question comes at the end. A cell of the table is a length and a
depth, and its number is the share of the cases in which the model, which takes the likeliest
tokens, begins its answer with the number.

The newest checkpoint of the run is judged, also one that was only imported (`python -m
trainer.gpt.pretrained FOLDER`): a prompt is split over all devices and prefilled by the attention
of the mesh, and the answer is decoded with the sharded KV cache. `--rope.*` stretches rotary
positions without any training. Haystacks are text, by default the source code of the Python
standard library. All shares are written to needle.json in the folder of the run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

# For a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.needle.haystack import ANSWER_TOKENS, Case, Haystacks
from startrail_jax.errors import InputError
from startrail_jax.planner.quantities import parse_count, show_count
from trainer.command_line import flag_of, parse
from trainer.config import Distributed, check_minimum
from trainer.gpt.config import GPTTrainConfig, RopeConfig
from trainer.run.settings import CONFIG_FILE
from trainer.task import SampleOptions
from trainer.tasks import load_train_config


@dataclass(frozen=True, kw_only=True)
class Options(SampleOptions):
    """What the model of a run is asked, and on which mesh."""

    run: Path
    """Folder of the run."""
    lengths: tuple[str, ...]
    """Lengths to judge, in tokens of everything: 4096, 128K or 1M."""
    depths: int = 6
    """Number of depths at which a needle is hidden, from the beginning to the end."""
    cases: int = 8
    """Number of questions for each length and depth."""
    needles: int = 4
    """Number of needles in a haystack; one of them is asked for."""
    rows: int = 1
    """Number of prompts that are answered at a time."""
    haystack: Path | None = None
    """Text for haystacks, as files of the kinds of `train.py --data.path`. The default is the
    source code of the Python standard library."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer.json. The default is that of the run."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary positions. The defaults are those of the run."""
    zero: Literal[0, 3] = 0
    """ZeRO level. 3 splits the weights over the devices, for models that do not fit one device.
    The default is 3 if the run used 3, else 0."""

    def __post_init__(self) -> None:
        for name in ("depths", "cases", "needles", "rows"):
            check_minimum(name, getattr(self, name), 1)
        for length in self.lengths:
            parse_count(length, "lengths")

    @property
    def num_tokens(self) -> list[int]:
        """The lengths as numbers."""
        return [parse_count(length, "lengths") for length in self.lengths]

    @classmethod
    def of(cls, run: Path, config: GPTTrainConfig) -> Options:
        """The options where the command line gives no others."""
        return cls(
            run=run,
            lengths=(show_count(config.seq_len),),
            rope=config.model.rope,
            devices=config.devices,
            mesh=config.mesh,
            zero=3 if config.zero == 3 else 0,
        )


def judge(
    config: GPTTrainConfig, haystacks: Haystacks, session: Any, options: Options
) -> list[dict[str, float]]:
    """Asks the model of a run, and prints a table.

    Returns:
        For each length and depth, the share of right answers and the number of cases.

    Raises:
        ValueError: if model, lengths and mesh do not fit each other.
        CheckpointError: if there is no checkpoint, or it cannot be read.
    """
    from startrail_jax.attention import Attention
    from trainer.gpt.config import attention_of
    from trainer.gpt.generation import Generator
    from trainer.gpt.lora import restore_model
    from trainer.gpt.token_choice import Sampling

    model = replace(config.model, rope=options.rope)
    generator = Generator(
        replace(config, model=model),
        Attention(session.mesh, causal=True, **attention_of(model)),
        Sampling(temperature=0.0),
        zero=options.zero,
    )
    weights, step = restore_model(options.run, config, generator.weight_shapes, note=session.note)
    session.print(f"\n{options.run}, step {step}")
    depths = np.linspace(0, 1, options.depths).tolist() if options.depths > 1 else [0.5]
    session.print("  length" + "".join(f"{depth:7.2f}" for depth in depths) + "   mean  seconds")
    scores: list[dict[str, float]] = []
    for length in options.num_tokens:
        begun, shares = time.perf_counter(), []
        for number, depth in enumerate(depths):
            rng = np.random.default_rng([0, length, number])
            cases = [
                haystacks.case(rng, length=length, needles=options.needles, depth=depth)
                for _ in range(options.cases)
            ]
            said = answers(generator, weights, cases, options.rows, ANSWER_TOKENS)
            right = [haystacks.is_right(x, y.answer) for x, y in zip(said, cases, strict=True)]
            shares.append(float(np.mean(right)))
            scores.append(
                {"length": length, "depth": depth, "share": shares[-1], "cases": len(cases)}
            )
        session.print(
            f"{show_count(length):>8}"
            + "".join(f"{share:7.0%}" for share in shares)
            + f"{np.mean(shares):7.1%}{time.perf_counter() - begun:9.1f}"
        )
    return scores


def answers(
    generator: Any, weights: Any, cases: Sequence[Case], rows: int, num_tokens: int
) -> Iterator[np.ndarray]:
    """What a model says to the prompts of cases, so many rows at a time."""
    for first in range(0, len(cases), rows):
        part = [case.prompt for case in cases[first : first + rows]]
        # All batches have the same shape, so that one program serves them.
        filled = part + part[:1] * (rows - len(part))
        steps = list(generator(weights, filled, num_tokens=num_tokens))
        yield from np.array(steps, np.int64).T[: len(part)]


def judge_run(options: Options, config: GPTTrainConfig, distributed: Distributed) -> None:
    """Judges the model of a run, and writes the results."""
    from trainer.gpt.sample import tokenizer_of_run
    from trainer.session import joined

    with joined(
        distributed,
        options,
        kind=f"a run of kind {config.kind}",
        call=config.attention_call,
        folder=options.run,
        adapts=(options.devices, options.mesh) == (config.devices, config.mesh),
    ) as session:
        for line in session.description:
            session.note(line)
        path = options.tokenizer or config.data.tokenizer
        tokenizer = tokenizer_of_run(options.run, config, path, note=session.note)
        haystacks = Haystacks(tokenizer, options.haystack, longest=max(options.num_tokens))
        scores = judge(config, haystacks, session, options)
        if session.is_first:
            path = options.run / "needle.json"
            path.write_text(json.dumps(scores, indent=1) + "\n")
            print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; on a mistake, exits with status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    run = flag_of(arguments, "--run")
    path = Path(run or "") / CONFIG_FILE
    if not run or not path.is_file():
        raise InputError(
            f"--run must be the folder of a run, with its {CONFIG_FILE}; got {run!r}. Use the "
            "--run-dir of train.py."
        )
    config = load_train_config(path)
    if not isinstance(config, GPTTrainConfig):
        raise InputError(
            f"--run must be a run of a GPT; got {run!r}, of kind {config.kind}. Give another."
        )
    prog, default = "benchmarks/needle/run.py", Options.of(Path(run), config)
    command = parse(arguments, default=default, prog=prog, description=__doc__)
    judge_run(command.settings, config, command.distributed)


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        main()

"""Finds needles in haystacks: a tiny model that learns it here, or the model of any run.

    pip install -e '.[benchmarks]'
    python benchmarks/needle/run.py                                       # docs/needle.png
    python benchmarks/needle/run.py --run runs/Qwen3-8B --lengths 32K 128K 1M
    python benchmarks/needle/run.py --run runs/Qwen3-8B --rope.scaling yarn --rope.factor 4 \\
        --rope.original-length 32768 --lengths 128K --mesh.head 8

A needle is a sentence with a key and its value, hidden at some depth of a haystack among needles
with other keys; the question comes at the end. A cell of the result is a length and a depth, and
its number is the share of the cases in which the model, which takes the likeliest tokens, begins
its answer with the value.

**Without `--run`**, a tiny GPT learns to find needles in rows of a fixed length of random words,
with `train.py`; the loss counts only the answers. It is exported as it would be for transformers,
and that export is trained briefly on rows that are four times longer, once with YaRN and once
without (`train.py --init-from`, whose flags are printed). Each stage is judged at the trained
length, at twice and at four times that. Runs and data lie in `--folder`; the same command continues
runs that were interrupted, and only judges those that are done.

**With `--run`**, the newest checkpoint of a run is judged, also one that was only imported
(`python -m trainer.gpt.pretrained FOLDER`): a prompt is split over all devices and prefilled by the
attention of the mesh, and the answer is decoded with the sharded KV cache. `--rope.*` stretches
rotary positions without any training. Haystacks are text, by default the source code of the Python
standard library. `--wording words` is for runs that were made without `--run`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.needle.haystack import Case, Sentences, Wording, Words, spread
from benchmarks.needle.report import Score, report
from benchmarks.needle.training import (
    FACTOR,
    Sizes,
    commands,
    export,
    train_as,
    write_data,
)
from startrail_jax.errors import InputError
from startrail_jax.planner.quantities import parse_count, show_count
from trainer.command_line import parse
from trainer.config import Distributed, check_minimum
from trainer.gpt.config import GPTTrainConfig, RopeConfig
from trainer.run.settings import CONFIG_FILE
from trainer.task import SampleOptions
from trainer.tasks import load_train_config

WORDS, SENTENCES = "words", "sentences"
PATIENCE_SECONDS = 10
"""After which a cell is reported before its row is whole."""
STAGES = {
    "short": "trained on short rows",
    "stretched": "with YaRN, not trained further",
    "tuned": "with YaRN, trained further",
    "control": "trained further without YaRN",
}
"""Stages of the small version by the names of their runs."""


@dataclass(frozen=True, kw_only=True)
class Judging(SampleOptions):
    """What a model is asked, and on which mesh."""

    depths: int = 6
    """Number of depths at which a needle is hidden, from the beginning to the end."""
    cases: int = 32
    """Number of questions for each length and depth."""
    needles: int = 8
    """Number of needles in a haystack; one of them is asked for."""
    rows: int = 1
    """Number of prompts that are answered at a time."""
    seed: int = 0
    """Seed of haystacks, needles and questions."""
    figure: Path | None = None
    """The figure. The default is docs/needle.png, and needle.png in the folder of --run."""
    json: Path | None = None
    """A file for the results. The default is needle.json in --folder or in that of --run."""

    def __post_init__(self) -> None:
        for name in ("depths", "cases", "needles", "rows"):
            check_minimum(name, getattr(self, name), 1)
        check_minimum("seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class OfRun(Judging):
    """The model of a run."""

    run: Path
    """Folder of the run."""
    lengths: tuple[str, ...]
    """Lengths to judge, in tokens of everything: 4096, 128K or 1M."""
    wording: Literal["sentences", "words"] = "sentences"
    """What haystacks consist of: text, or the words of the small version."""
    haystack: Path | None = None
    """Text for haystacks, as files of the kinds of `train.py --data.path`. The default is the
    source code of the Python standard library."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer.json. The default is that of the run."""
    cases: int = 8
    """Number of questions for each length and depth."""
    needles: int = 4
    """Number of needles in a haystack; one of them is asked for."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary positions. The defaults are those of the run."""
    zero: Literal[0, 3] = 0
    """ZeRO level. 3 splits the weights over the devices, for models that do not fit one device.
    The default is 3 if the run used 3, else 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for length in self.lengths:
            parse_count(length, "lengths")
        given = [name for name in ("haystack", "tokenizer") if getattr(self, name) is not None]
        if self.wording == WORDS and given:
            raise InputError(
                f"wording='words' has a haystack and a vocabulary of its own; got {given[0]}="
                f"{str(getattr(self, given[0]))!r}. Leave it out, or use --wording sentences."
            )

    @classmethod
    def of(cls, run: Path, config: GPTTrainConfig) -> OfRun:
        """The options where the command line gives no others."""
        return cls(
            run=run,
            lengths=(show_count(config.seq_len),),
            rope=config.model.rope,
            devices=config.devices,
            mesh=config.mesh,
            zero=3 if config.zero == 3 else 0,
        )


@dataclass(frozen=True, kw_only=True)
class Small(Judging):
    """A tiny model that is trained here."""

    folder: Path = Path("runs/needle")
    """Folder for data and runs."""
    seq_len: int = 128
    """Number of tokens in the rows of the first training; the second has four times as many."""
    steps: int = 600
    """Number of steps of the first training."""
    tuning_steps: int = 40
    """Number of steps of the second training."""
    devices: int | None = 1
    """Number of devices to use. Two cores train the tiny model fastest as one device."""
    rows: int = 32
    """Number of prompts that are answered at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "tuning_steps"):
            check_minimum(name, getattr(self, name), 1)


def judge(
    run_dir: Path,
    config: GPTTrainConfig,
    wording: Wording,
    session: Any,
    options: Judging,
    *,
    lengths: Sequence[int],
    stage: str,
    rope: RopeConfig | None = None,
    zero: int = 0,
) -> list[Score]:
    """Asks the model of a run, and prints a table.

    Args:
        run_dir: folder of the run.
        config: its config.
        wording: how haystacks and questions read.
        session: the mesh to ask on.
        options: how many questions are asked.
        lengths: in tokens.
        stage: heading of the table.
        rope: rotary positions; None for those of the run.
        zero: ZeRO level of the weights, 0 or 3.

    Raises:
        ValueError: if model, lengths and mesh do not fit each other.
        CheckpointError: if there is no checkpoint, or it cannot be read.
    """
    from startrail_jax.attention import Attention
    from trainer.gpt.config import attention_of
    from trainer.gpt.generation import Generator
    from trainer.gpt.lora.weights import restore_model
    from trainer.gpt.token_choice import Sampling

    model = config.model if rope is None else replace(config.model, rope=rope)
    generator = Generator(
        model,
        Attention(session.mesh, causal=True, **attention_of(model)),
        Sampling(temperature=0.0),
        lora=config.lora,
        zero=zero,
        zero_axes=config.zero_axes,
        tile=config.tile,
    )
    weights, step = restore_model(run_dir, config, generator.weight_shapes, note=session.note)
    session.print(f"\n{stage} ({run_dir}, step {step})")
    depths = spread(options.depths)
    session.print("  length" + "".join(f"{depth:7.2f}" for depth in depths) + "   mean  seconds")
    scores: list[Score] = []
    for length in lengths:
        row = []
        for number, depth in enumerate(depths):
            begun = time.perf_counter()
            rng = np.random.default_rng([options.seed, length, number])
            cases = [
                wording.case(rng, length=length, needles=options.needles, depth=depth)
                for _ in range(options.cases)
            ]
            said = answers(generator, weights, cases, options.rows, wording.most_answer_tokens)
            right = [
                wording.is_right(x, case.answers[0]) for x, case in zip(said, cases, strict=True)
            ]
            seconds = time.perf_counter() - begun
            if seconds > PATIENCE_SECONDS:
                session.note(f"{length:,} tokens, depth {depth:.2f}: {sum(right)} right")
            row.append(
                Score(
                    stage=stage,
                    length=length,
                    depth=depth,
                    right=sum(right),
                    cases=len(cases),
                    seconds=seconds,
                )
            )
        shares = [score.share for score in row]
        session.print(
            f"{show_count(length):>8}"
            + "".join(f"{x:7.0%}" for x in shares)
            + f"{np.mean(shares):7.1%}{sum(score.seconds for score in row):9.1f}"
        )
        scores += row
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


def judge_run(options: OfRun, config: GPTTrainConfig, distributed: Distributed) -> None:
    """Judges the model of a run, and writes figure and results."""
    from trainer.session import joined

    lengths = [parse_count(length, "lengths") for length in options.lengths]
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
        scores = judge(
            options.run,
            config,
            wording_of(options, config, max(lengths), session.note),
            session,
            options,
            lengths=lengths,
            stage=f"run {options.run}",
            rope=options.rope,
            zero=options.zero,
        )
        if session.is_first:
            report(
                scores,
                figure=options.figure or options.run / "needle.png",
                results=options.json or options.run / "needle.json",
            )


def wording_of(options: OfRun, config: GPTTrainConfig, longest: int, note: Any) -> Wording:
    """The wording that a model understands.

    Raises:
        ValueError: if the model has no text, another vocabulary, or the haystack is too short.
    """
    if options.wording == SENTENCES:
        from trainer.gpt.sample import tokenizer_of_run

        path = options.tokenizer or config.data.tokenizer
        tokenizer = tokenizer_of_run(options.run, config, path, note=note)
        return Sentences(tokenizer, options.haystack, longest=longest)
    if config.model.vocab_size != len(Words.vocabulary):
        raise InputError(
            f"wording='words' needs a model of {len(Words.vocabulary)} words, as this benchmark "
            f"makes; got {str(options.run)!r} with vocab_size={config.model.vocab_size}. Use "
            "--wording sentences."
        )
    return Words()


def judge_small(options: Small) -> None:
    """Trains the tiny model in both ways, judges all stages, and writes figure and results."""
    from trainer.session import joined

    words, folder, length = Words(), options.folder, options.seq_len
    longest = FACTOR * length
    sizes = Sizes(
        length=length,
        steps=options.steps,
        tuning_steps=options.tuning_steps,
        needles=options.needles,
        seed=options.seed,
    )
    begun = time.perf_counter()
    write_data(words, folder, sizes)
    seconds = {"data": time.perf_counter() - begun}
    yarn = RopeConfig(base=sizes.base, scaling="yarn", factor=FACTOR, original_length=length)
    configs: dict[str, GPTTrainConfig] = {}
    for name, flags in commands(folder, sizes, options.mesh, options.devices).items():
        print(f"\npython train.py {' '.join(flags)}", flush=True)
        begun = time.perf_counter()
        configs[name] = train_as(flags)
        seconds[name] = time.perf_counter() - begun
        if name == "short":
            export(folder / name, configs[name], folder / "exported")
    scores: list[Score] = []
    for name, stage in STAGES.items():
        config = configs.get(name, configs["short"])
        kind = f"a run of kind {config.kind}"
        with joined(Distributed(), options, kind=kind, call=config.attention_call) as session:
            scores += judge(
                config.run_dir,
                config,
                words,
                session,
                options,
                lengths=[length, 2 * length, longest],
                stage=stage,
                rope=yarn if name == "stretched" else None,
            )
    print("\nseconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    report(
        scores,
        figure=options.figure or Path("docs/needle.png"),
        results=options.json or folder / "needle.json",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; on a mistake, exits with status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    prog, run = "benchmarks/needle/run.py", _run_of(arguments)
    if run is None:
        command = parse(arguments, default=Small(), prog=prog, description=__doc__)
        if command.distributed != Distributed():
            raise InputError(
                "The tiny model is trained by one process; got flags --distributed without --run. "
                "Leave them out."
            )
        judge_small(command.settings)
        return
    path = run / CONFIG_FILE
    if not path.is_file():
        raise InputError(
            f"--run must be the folder of a run, with its {CONFIG_FILE}; got {str(run)!r}. Use the "
            "--run-dir of train.py."
        )
    config = load_train_config(path)
    if not isinstance(config, GPTTrainConfig):
        raise InputError(
            f"--run must be a run of a GPT; got {str(run)!r}, of kind {config.kind}. Give another."
        )
    command = parse(arguments, default=OfRun.of(run, config), prog=prog, description=__doc__)
    judge_run(command.settings, config, command.distributed)


def _run_of(arguments: Sequence[str]) -> Path | None:
    """The value of --run, on which the other flags depend; None without it."""
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag == "--run":
            return Path(value if equals else (list(arguments[i + 1 : i + 2]) or [""])[0])
    return None


if __name__ == "__main__":
    from trainer.run.exit import exit_on_ctrl_c, exit_on_user_errors

    with exit_on_ctrl_c(), exit_on_user_errors():
        main()

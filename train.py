"""Trains a GPT or a diffusion transformer (DiT) with sequence-parallel attention.

    python train.py                             # gpt_tiny, on any machine
    python train.py dit_digits                                    # then sample.py draws digits
    python train.py --mesh.c 1 --run-dir runs/ring                # Ring Attention
    python train.py llama3_8b --data.path FOLDER --data.tokenizer tokenizer.json
    python train.py gpt_7b --plan show          # which mesh is fastest here? Then --plan use
    python train.py gpt_7b --verify             # is everything right on these devices?
    python train.py runs/gpt_tiny/config.json --steps 2000 --run-dir runs/longer
    python train.py --init-from Qwen3-8B --data.path FOLDER      # goes on from a pretrained model
    python train.py gpt_7b --help               # all flags, with the values of that recipe

The first word is a recipe of configs/ or the config.json of a run. The program uses all real
devices, or 8 simulated ones on a machine that has only a CPU. If a run was stopped, the same
command resumes it, on any number of devices and with any degrees of parallelism. Several processes
share a run with `--distributed`.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import difflib
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import RECIPES
from startrail_jax.errors import InputError
from trainer.command_line import (
    Command,
    exit_with_usage_error,
    flag_of,
    parse_run,
)
from trainer.config import Distributed, TrainConfig
from trainer.places import require_there
from trainer.printable import say
from trainer.run.settings import CHECKPOINTS_FOLDER
from trainer.run.weights_and_biases import require_wandb
from trainer.tasks import TASKS, load_train_config, pretrained

if TYPE_CHECKING:
    from trainer.loop import Losses


def train(config: TrainConfig, distributed: Distributed | None = None) -> Losses:
    """Trains, evaluates and samples as a config says; resumes the run if its folder holds one.

    Args:
        distributed: the processes that share the run; only this process by default. If one of them
            fails, all end at once, with status 1.
    """
    task, processes = TASKS[config.kind], distributed or Distributed()
    if not processes.several:
        _require_inputs(task, config)
    if not config.steps:
        raise InputError(
            "steps must be at least 1 for a run that trains; got steps=0. To import a pretrained "
            "model alone, use python -m trainer.pretrained FOLDER."
        )

    # Modules that import jax are imported here: `--help` and a mistyped flag must be fast.
    from trainer.loop import Losses
    from trainer.mesh import choose_mesh
    from trainer.mirror import Mirror
    from trainer.processes import first_does
    from trainer.run.metrics import Reporter
    from trainer.session import agree, former_mesh_of_first, joined

    # Processes. The first of them copies the run to its mirror.
    with joined(processes, config.devices, config.run_dir, saves_at_sigterm=True) as session:
        former = agree(config, kind=f"a config of kind {config.kind}", folder=config.run_dir)
        url = None if config.plan == "show" or config.verify else config.mirror
        copies = Mirror(
            url if session.is_first else None, config.run_dir, keep=config.checkpoint.keep
        )
        if url is not None:
            first_does(copies.fetch)
            former = former_mesh_of_first(config.run_dir)

        tokens_per_step = config.batch_size * config.num_tokens
        with Reporter(steps=config.steps, tokens_per_step=tokens_per_step) as report:
            for line in session.description:
                report.line(line)
            # Mesh.
            mesh, lines = choose_mesh(config, session.devices, former, task)
            for line in lines:
                report.line(line)
            if config.plan == "show":
                return Losses([], None)
            if processes.several:  # Only now do the others hear of what is missing here.
                _require_inputs(task, config, tracks=session.is_first)
            if config.verify:
                from trainer.verify.run import verify

                return Losses([], None, verified=verify(config, mesh, report.line))
            return _run(config, mesh, session, copies, report)


def _run(config: TrainConfig, mesh: Any, session: Any, copies: Any, report: Any) -> Losses:
    """Trains on a mesh. Whatever does not fit it is refused before there is a run folder."""
    import jax

    from trainer.checkpoints.checkpoint import Checkpoints
    from trainer.data.batches import Feed
    from trainer.loop import Loop
    from trainer.parallel.checks import make_attention
    from trainer.parallel.step import Program
    from trainer.processes import gather, require_same_data
    from trainer.run.folder import open_run
    from trainer.run.interruption import interruption

    # Program.
    task = TASKS[config.kind]
    objective = task.make_objective(config)
    program = Program(config, make_attention(mesh, config, objective), objective)
    if config.remat == "auto":
        report.line(f"remat: {program.remat}")

    # Initial weights: their files are compared with the model before text is tokenised.
    with task.initial_weights(config, program.state_shapes.base) as initial:
        # Data. The layout orders the tokens of a batch on the host.
        with report.phase("reading the data"):
            data = task.open_data(config, program.attention.layout)
            require_same_data(data)
        report.line(f"data: {data.description}")
        feed = Feed(
            data,
            sharding=program.batch_sharding,
            shape=program.tokens_shape,
            seed=config.seed,
            num_held_out=config.validation_sequences,
            parts=program.parts,
            gather=gather,
            note=report.line,
        )
        for line in feed.lines:
            report.line(line)

        # Loop, from the newest checkpoint or from the initial weights.
        with (
            open_run(config, writes=session.is_first) as run_dir,
            interruption(several=jax.process_count() > 1) as interrupted,
            copies,
            Checkpoints(
                run_dir / CHECKPOINTS_FOLDER,
                keep=config.checkpoint.keep,
                strict=config.checkpoint.strict,
                note=report.line,
                when_whole=copies.add,
                is_held=copies.holds,
            ) as checkpoints,
            closing(feed),
        ):
            if session.is_first:
                data.keep(run_dir)
            sampler, exporter = task.sampler(program, data), task.exporter(config, report.line)
            loop = Loop(program, feed, checkpoints, report, interrupted, initial, sampler, exporter)
            done = loop.begin()
            copies.begin(done)
            return loop.run(done)


def _require_inputs(task: Any, config: TrainConfig, *, tracks: bool = True) -> None:
    """Raises unless files and packages are there that are needed after the program is compiled, or
    that take long to open."""
    if config.plan != "show":
        for name, path in task.inputs(config):
            require_there(name, path)
        if tracks and not config.verify:
            require_wandb(config)


def read_command_line(arguments: list[str]) -> Command[TrainConfig]:
    """What a command line asks for; on a mistake, prints a message and exits with status 2."""
    name, folder = "gpt_tiny", flag_of(arguments, "--init-from")
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
    elif folder is not None:
        name = "pretrained"
    if name == "pretrained" and folder is not None:
        default = pretrained(Path(folder))
    elif name in RECIPES:
        default = RECIPES[name]()
    elif Path(name).is_file():
        default = load_train_config(Path(name))
        if flag_of(arguments, "--mirror") is None and default.mirror is None:
            _say_if_new(Path(name).parent, flag_of(arguments, "--run-dir"))
    else:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        exit_with_usage_error(
            f"The first word must be a recipe or a config.json; got {name!r}. "
            f"{f'Did you mean {near[0]}? ' if near else ''}Recipes: {', '.join(RECIPES)}."
        )
    task, prog = TASKS[default.kind], "train.py [RECIPE | config.json]"
    return parse_run(task, arguments, default=default, prog=prog, description=__doc__)


def _say_if_new(settings_of: Path, run_dir: str | None) -> None:
    """Says that a run begins anew with the settings of another one, if it does."""
    is_run = (settings_of / CHECKPOINTS_FOLDER).is_dir()
    if run_dir and is_run and not (Path(run_dir) / CHECKPOINTS_FOLDER).is_dir():
        say(
            f"NOTE: {run_dir} is a new run, from step 0, with the settings of {settings_of}. To go "
            "on with that run, leave out --run-dir."
        )


if __name__ == "__main__":
    from trainer.run.curve import show_results
    from trainer.run.exit import exit_on_user_errors

    # Outermost, so that one of several processes ends with the others.
    with exit_on_user_errors():
        wanted = read_command_line(sys.argv[1:])
        losses = train(wanted.settings, wanted.distributed)
        if wanted.settings.verify and not losses.verified:
            sys.exit(1)
        if losses.is_whole:
            show_results(wanted.settings.run_dir)

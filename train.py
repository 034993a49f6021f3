"""Trains a GPT or a diffusion transformer (DiT) with sequence-parallel attention.

    python train.py                             # gpt_tiny, on any machine
    python train.py dit_digits                                    # then sample.py draws digits
    python train.py --mesh.c 1 --run-dir runs/ring                # Ring Attention
    python train.py llama3_8b --data.path FOLDER --data.tokenizer tokenizer.json
    python train.py gpt_7b --plan show          # which mesh is fastest here? Then --plan use
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
import itertools
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

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
from trainer.run.commands import command
from trainer.run.settings import CHECKPOINTS_FOLDER, CONFIG_FILE
from trainer.run.trackers import require_packages
from trainer.tasks import TASKS, load_train_config, pretrained


class Losses(NamedTuple):
    """The losses of a run: means over tokens."""

    train: list[float]
    """Loss of every step that this program did, before its update."""
    validation: float | None
    """Loss after the last step; None if the run was interrupted."""


def train(config: TrainConfig, distributed: Distributed | None = None) -> Losses:
    """Trains, evaluates and samples as a config says; resumes the run if its folder holds one.

    Args:
        distributed: the processes that share the run; only this process by default. If one of them
            fails, all end at once, with status 1.
    """
    task, options = TASKS[config.kind], distributed or Distributed()
    if not options.several:
        _require_inputs(task, config)

    # Modules that import jax are imported here: `--help` and a mistyped flag must be fast.
    import jax

    from trainer.checkpoints.checkpoint import Checkpoints
    from trainer.data.batches import Feed
    from trainer.loop import Loop
    from trainer.mesh import choose_mesh
    from trainer.mirror import Mirror
    from trainer.parallel.checks import make_attention
    from trainer.parallel.step import Program
    from trainer.processes import require_same_data
    from trainer.run.folder import open_run
    from trainer.run.interruption import interruption
    from trainer.run.metrics import Reporter
    from trainer.run.settings import CHECKPOINTS_FOLDER
    from trainer.session import joined

    if not config.steps:
        raise InputError(
            "steps must be at least 1 for a run that trains; got steps=0. To import a pretrained "
            "model alone, use python -m trainer.pretrained FOLDER."
        )

    kind = f"a config of kind {config.kind}"
    tokens_per_step = config.batch_size * config.num_tokens

    fetches = config.mirror is not None and config.plan != "show"

    def mirror(copies: bool) -> Mirror:
        url = config.mirror if copies else None
        return Mirror(url, config.run_dir, keep=config.checkpoint.keep)

    with (
        joined(
            options,
            config,
            kind=kind,
            folder=config.run_dir,
            prepare=(lambda: mirror(True).fetch()) if fetches else None,
            saves_at_sigterm=True,
        ) as session,
        Reporter(steps=config.steps, tokens_per_step=tokens_per_step) as report,
        ExitStack() as files,
    ):
        for line in session.description:
            report.line(line)
        # Mesh.
        mesh, lines = choose_mesh(config, session.devices, session.former, task)
        for line in lines:
            report.line(line)
        if config.plan == "show":
            return Losses([], None)
        if options.several:  # Only now do the others hear of what is missing here.
            _require_inputs(task, config, tracks=session.is_first)

        # Program. Whatever does not fit the mesh is refused now, before there is a run folder.
        objective = task.make_objective(config)
        attention = make_attention(mesh, config, objective)
        program = Program(config, attention, objective)
        if config.remat == "auto":
            report.line(f"remat: {program.remat}")

        # Initial weights. Their files are compared with the model before text is tokenised.
        initial = files.enter_context(task.initial_weights(config, program.state_shapes.base))

        # Data. The layout orders the tokens of a batch on the host.
        with report.phase("reading the data"):
            data = task.open_data(config, attention.layout)
            require_same_data(data)
        report.line(f"data: {data.description}")
        feed = Feed(
            data,
            sharding=program.batch_sharding,
            shape=program.tokens_shape,
            seed=config.seed,
            num_held_out=config.validation_sequences,
            parts=program.parts,
        )
        for line in feed.lines:
            report.line(line)

        with (
            open_run(config, writes=session.is_first) as run_dir,
            interruption(several=jax.process_count() > 1) as interrupted,
            mirror(session.is_first) as copies,
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
            # State: that of the newest checkpoint, or a new one.
            sampler = task.sampler(program, data)
            loop = Loop(program, feed, checkpoints, report, interrupted, initial, sampler)
            done = loop.begin()
            copies.begin(done)

            # Loop, over the steps that are not done yet.
            if not _run_steps(loop, done):
                return Losses(loop.losses, None)

            # Result.
            report.line(f"validation loss {loop.validation_loss:.4f} {data.loss_unit}")
            later = itertools.count(config.steps + 1)
            loop.sample(config.steps, lambda: interrupted(next(later)))
    return Losses(loop.losses, loop.validation_loss)


def _require_inputs(task: Any, config: TrainConfig, *, tracks: bool = True) -> None:
    """Raises unless files and packages are there that are needed after the program is compiled, or
    that take long to open."""
    if config.plan != "show":
        for name, path in task.inputs(config):
            require_there(name, path)
        if tracks:
            require_packages(config)


def _run_steps(loop: Any, done: int) -> bool:
    """Trains, evaluates and saves; returns whether all is done, False after an interruption."""
    import jax

    config, interrupted = loop.config, loop.interrupted
    with ExitStack() as trace:
        step = done
        while step < config.steps:
            step += 1
            if config.profile and step == max(config.profile[0], done + 1):
                loop.read_metrics(all_steps=True)
                trace.enter_context(jax.profiler.trace(config.run_dir / "profile"))
            loop.step(step)
            is_last = step == config.steps
            if (step % config.validation_every == 0 or is_last) and not interrupted(step):
                loop.evaluate(step)
                if not interrupted(step):
                    loop.read_metrics(all_steps=True, validation_loss=loop.validation_loss)
            loop.read_metrics()
            if loop.samples_after(step) and not interrupted(step):
                loop.read_metrics(all_steps=True)
                loop.sample(step)
            if config.profile and step == config.profile[1]:
                loop.read_metrics(all_steps=True)
                trace.close()
            stop = interrupted(step)
            if step % config.checkpoint.every == 0 or is_last or stop:
                loop.save(step)
            if is_last and not stop:
                loop.require_finite_evaluation(step)
            if stop:
                loop.checkpoints.wait()
                loop.report.line(
                    f"to go on: {command('train.py', config.run_dir / CONFIG_FILE)}, or the same "
                    "command as before"
                )
                loop.report.line(
                    f"interrupted after step {loop.checkpoints.latest or 0}, which is saved in "
                    f"{config.run_dir}"
                )
                return False
    if done == config.steps:
        loop.report.line(
            f"{config.run_dir} holds all {done} steps; another --run-dir starts a new run"
        )
        loop.evaluate(done)
        return not interrupted(done)
    return True


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
        if train(wanted.settings, wanted.distributed).validation is not None:
            show_results(wanted.settings.run_dir)

"""Imports a pretrained model: a run of no steps, whose checkpoint holds the weights of the model.

    python -m trainer.pretrained Qwen3-8B                        # runs/Qwen3-8B
    python -m trainer.pretrained Qwen3-8B --run-dir runs/mine --devices 8
    python -m trainer.pretrained Wan2.1-T2V-1.3B-Diffusers --size 21 60 104
    python -m trainer.pretrained Qwen3-8B --help    # all flags, which are those of train.py

FOLDER is a model in the format of Hugging Face (config.json, *.safetensors and tokenizer.json), or
a Wan in that of diffusers. sample.py and the exports take the run. To train the model, give it to
train.py --init-from.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError
from trainer.command_line import Command, exit_with_usage_error, parse_run
from trainer.config import SHARDED_AXES, Distributed, TrainConfig
from trainer.printable import printable
from trainer.tasks import TASKS, pretrained


def read_command_line(arguments: list[str]) -> Command[TrainConfig]:
    """Reads a command line; on a mistake, prints a message and exits with status 2."""
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            print(printable(__doc__ or ""))
            sys.exit()
        first = repr(arguments[0]) if arguments else "nothing"
        exit_with_usage_error(f"The first word must be the folder of a model; got {first}.")
    folder, *flags = arguments
    default = replace(pretrained(Path(folder)), steps=0)
    flags = ["--init-from", folder, *flags]
    task, prog = TASKS[default.kind], "python -m trainer.pretrained FOLDER"
    return parse_run(task, flags, default=default, prog=prog, description=__doc__)


def import_pretrained(config: TrainConfig, distributed: Distributed | None = None) -> None:
    """Imports the pretrained model of a config, which has no steps; mesh and devices may be any.
    The `distributed` processes share the work; only this process by default."""
    from trainer.mesh import mesh_of_flags
    from trainer.run.metrics import Reporter
    from trainer.session import agree, joined

    if config.steps:
        raise InputError(
            f"An import must have no steps; got steps={config.steps}. Leave --steps out: train.py "
            "--init-from trains a pretrained model."
        )
    processes = distributed or Distributed()
    with joined(processes, config.devices, config.run_dir) as session:
        former = agree(config, kind="an import", folder=config.run_dir)
        mesh, lines = mesh_of_flags(config.mesh, session.devices, former, config.attention_call)
        with Reporter(steps=0, tokens_per_step=0) as report:
            for line in (*session.description, *lines):
                report.line(line)
            _import_weights(config, mesh, session, report)


def _import_weights(config: TrainConfig, mesh: Any, session: Any, report: Any) -> None:
    """Makes a run folder whose checkpoint, of step 0, holds the weights of a pretrained model. They
    are split over all devices, whatever `config.zero` says, without an optimizer: the checkpoint
    does not depend on that."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from trainer.checkpoints.checkpoint import Checkpoints, save_frozen
    from trainer.parallel.checks import make_attention
    from trainer.parallel.partition import Partition, join_frozen, split_adapters, split_frozen
    from trainer.parallel.sharded_model import ShardedModel
    from trainer.parallel.state import TrainState
    from trainer.run.commands import command
    from trainer.run.folder import FROZEN_FOLDER, open_run, record_versions, save_degrees
    from trainer.run.settings import CHECKPOINTS_FOLDER, CONFIG_FILE, result_flags, save_config

    task = TASKS[config.kind]
    objective = task.make_objective(config)
    attention = make_attention(mesh, config, objective)
    partition = Partition(mesh, objective.weights, 3, SHARDED_AXES, jnp.float32)
    model = ShardedModel(
        lambda attention_fn, hooks: objective.make_model(
            attention_fn, hooks, nnx.Rngs(config.seed)
        ),
        attention,
        partition,
        tile=None,
    )
    adapters, shapes = split_adapters(model.weight_shapes)
    trained, frozen = split_frozen(model.weight_shapes, config.frozen)
    with (
        task.initial_weights(config, shapes) as initial,
        open_run(config, writes=session.is_first) as run_dir,
        Checkpoints(
            run_dir / CHECKPOINTS_FOLDER,
            keep=config.checkpoint.keep,
            in_little_memory=trained,
            note=report.line,
        ) as checkpoints,
    ):
        checkpoints.begin_after()
        if initial is None or checkpoints.latest is not None:
            report.line(f"{run_dir} holds a checkpoint of step {checkpoints.latest} already")
        else:
            report.line(initial.description)
            checkpoints.check_space(trained)
            with report.phase("reading the weights"):
                weights = initial.read(shapes)
                jax.block_until_ready(weights)
            if session.is_first:
                initial.keep(run_dir)
                record_versions(run_dir, 0)
                save_degrees(run_dir, vars(attention.degrees))
                save_config(config, run_dir / CONFIG_FILE)
            with report.phase("saving the weights"):
                if adapters:  # They begin as in training, where they add nothing yet.
                    shardings = jax.tree.map(lambda x: x.sharding, adapters)
                    make = jax.jit(
                        lambda: split_adapters(nnx.state(model.make()))[0], out_shardings=shardings
                    )
                    weights = join_frozen(make(), weights)
                weights, fixed = split_frozen(weights, config.frozen)
                save_frozen(run_dir / FROZEN_FOLDER, frozen, fixed, note=report.line)
                checkpoints.save(0, TrainState(weights, ()), {}, result_flags(config))
                checkpoints.wait()
        report.line(f"next: {command('sample.py', run_dir)}")
        report.line(
            f"next: {command('train.py', run_dir / CONFIG_FILE)} --steps 1000 --data.path FOLDER "
            "--run-dir ANOTHER"
        )


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        parsed = read_command_line(sys.argv[1:])
        import_pretrained(parsed.settings, parsed.distributed)

"""A run of no steps: the weights of a pretrained model, as a checkpoint."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from startrail_jax.errors import InputError
from trainer.checkpoints.checkpoint import Checkpoints, save_frozen
from trainer.config import SHARDED_AXES, Distributed
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.objective import NextToken
from trainer.gpt.pretrained.initial import open_pretrained
from trainer.parallel.checks import make_attention
from trainer.parallel.partition import Partition, split_frozen
from trainer.parallel.sharded_model import ShardedModel
from trainer.parallel.state import TrainState
from trainer.run.commands import command
from trainer.run.folder import FROZEN_FOLDER, open_run, record_versions, save_degrees
from trainer.run.metrics import Reporter
from trainer.run.settings import CHECKPOINTS_FOLDER, CONFIG_FILE, result_flags, save_config
from trainer.session import Session, joined


def import_pretrained(config: GPTTrainConfig, distributed: Distributed | None = None) -> None:
    """Imports the pretrained model of a config, which has no steps; mesh and devices may be any.
    The `distributed` processes share the work; only this process by default."""
    if config.steps:
        raise InputError(
            f"An import must have no steps; got steps={config.steps}. Leave --steps out: train.py "
            "--init-from trains a pretrained model."
        )
    with (
        joined(
            distributed or Distributed(),
            config,
            kind="an import",
            call=config.attention_call,
            folder=config.run_dir,
        ) as session,
        Reporter(steps=0, tokens_per_step=0) as report,
    ):
        for line in session.description:
            report.line(line)
        _import_weights(config, session, report)


def _import_weights(config: GPTTrainConfig, session: Session, report: Reporter) -> None:
    """Makes a run folder whose checkpoint, of step 0, holds the weights of a pretrained model. They
    are split over all devices, whatever `config.zero` says, without an optimizer: the checkpoint
    does not depend on that."""
    objective = NextToken(config)
    attention = make_attention(session.mesh, config, objective)
    partition = Partition(session.mesh, 3, SHARDED_AXES, jnp.float32)
    model = ShardedModel(
        lambda attention_fn, hooks: objective.make_model(
            attention_fn, hooks, nnx.Rngs(config.seed)
        ),
        attention,
        partition,
        tile=None,
    )
    adapters, frozen = split_frozen(model.weight_shapes)
    shapes = adapters if frozen is None else frozen
    with (
        open_pretrained(config, shapes) as initial,
        open_run(config, writes=session.is_first) as run_dir,
        Checkpoints(
            run_dir / CHECKPOINTS_FOLDER,
            keep=config.checkpoint.keep,
            in_little_memory=adapters,
            note=report.line,
        ) as checkpoints,
    ):
        checkpoints.begin_after()
        if checkpoints.latest is not None:
            report.line(f"{run_dir} holds a checkpoint of step {checkpoints.latest} already")
        else:
            report.line(initial.description)
            checkpoints.check_space(adapters)
            with report.phase("reading the weights"):
                weights = initial.read(shapes)
                jax.block_until_ready(weights)
            if session.is_first:
                initial.keep(run_dir)
                record_versions(run_dir, 0)
                save_degrees(run_dir, vars(attention.degrees))
                save_config(config, run_dir / CONFIG_FILE)
            with report.phase("saving the weights"):
                save_frozen(run_dir / FROZEN_FOLDER, frozen, weights, note=report.line)
                if frozen is not None:
                    weights = _new_adapters(model, adapters)
                checkpoints.save(0, TrainState(weights, ()), {}, result_flags(config))
                checkpoints.wait()
        report.line(f"next: {command('sample.py', run_dir)}")
        report.line(
            f"next: {command('train.py', run_dir / CONFIG_FILE)} --steps 1000 --data.path FOLDER "
            "--run-dir ANOTHER"
        )


def _new_adapters(model: ShardedModel, shapes: Any) -> Any:
    """The adapters with which training would begin, which add nothing yet."""
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    make = jax.jit(lambda: split_frozen(nnx.state(model.make()))[0], out_shardings=shardings)
    return make()

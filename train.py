"""Trains a GPT or a diffusion transformer (DiT) with sequence-parallel attention.

    python train.py                             # gpt_tiny: StarTrail with C = 2, on any machine
    python train.py dit_digits                                    # draws digits: see sample.py
    python train.py --mesh.team 1 --run-dir runs/ring             # Ring Attention
    python train.py gpt_8b_gqa --data.path FOLDER --data.tokenizer tokenizer.json
    python train.py runs/gpt_tiny/config.json --steps 2000 --run-dir runs/longer
    python train.py gpt_7b --help               # all flags, with that recipe's values

The first word is a recipe of configs/ or the config.json of a run. Runs on all real devices,
or on 8 simulated ones where there is only a CPU. The same command again goes on with a run that was
stopped, on as many devices and with as many degrees as it says. Several processes share a run with
`--distributed`: see the README.
"""

from __future__ import annotations

import difflib
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import tyro

from configs import RECIPES
from trainer.config import TrainConfig
from trainer.gpt.config import GPTTrainConfig
from trainer.processes.distributed import start
from trainer.processes.options import Distributed
from trainer.tasks import make_objective

Config = TypeVar("Config", bound=TrainConfig)

# Settings that may differ among the processes of a run.
OF_ONE_MACHINE = (
    *("data.path", "data.tokenizer", "data.validation_path"),
    *("run_dir", "allow_changes"),
)


@dataclass(frozen=True, kw_only=True)
class Command(Generic[Config]):
    """What a command line asks for."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    """The run."""
    distributed: Distributed = field(default_factory=Distributed)
    """The processes that share it."""


class Losses(NamedTuple):
    """What a run came to: means over tokens."""

    train: list[float]
    """Of every step that this program did, before its update."""
    validation: float | None
    """After the last step; None if the run was interrupted."""


def train(config: TrainConfig, distributed: Distributed | None = None) -> Losses:
    """Trains, evaluates and samples as `config` says, from where its run folder stands.

    Args:
        config: the run.
        distributed: the processes that share it; this one alone by default. If one of several
            fails, all end at once, with status 1.

    Raises:
        ValueError: if mesh, data, model or the run found do not fit each other.
        OSError: if the run folder or the data cannot be used.
        FloatingPointError: if a loss or a gradient is not finite and `non_finite` is "stop".
        CheckpointError: if a checkpoint cannot be saved or read.
        RuntimeError: if another program trains in the run folder, or processes do not meet.
    """
    # Not at the top of the file: `--help` and a mistyped flag need none of this.
    from trainer.processes.devices import (
        require_divisible,
        select_devices,
    )
    from trainer.processes.heartbeat import heartbeat
    from trainer.run.settings import flags_of

    distributed = distributed or Distributed()
    require_divisible(config.devices, distributed.known_processes)
    start(distributed)
    devices = select_devices(config.devices, processes=distributed.known_processes)
    flags = {"kind": f"a config of kind {config.kind}", **flags_of(config, but=OF_ONE_MACHINE)}
    with heartbeat(distributed, flags) as agree:
        return _train(config, devices, agree)


def _train(config: TrainConfig, devices: list[Any], agree: Callable[[bool], bool]) -> Losses:
    """Trains on these devices; `agree` makes of a wish to stop one of all processes."""
    import jax
    import numpy as np

    import startrail_jax as st
    from trainer.data.batches import (
        TrainingBatches,
        local_rows,
        place,
        validation_batches,
    )
    from trainer.gpt.text import continue_text
    from trainer.parallel.degrees import (
        choose_degrees,
        describe_degrees,
    )
    from trainer.parallel.flops import peak_flops
    from trainer.parallel.footprint import describe_memory
    from trainer.parallel.step import Program
    from trainer.run.checkpoint import Checkpoints
    from trainer.run.folder import (
        CHECKPOINTS_FOLDER,
        CONFIG_FILE,
        open_run,
    )
    from trainer.run.interruption import interruption
    from trainer.run.metrics import Reporter
    from trainer.run.settings import save_config
    from trainer.tasks import open_data

    # Mesh and program. Auto axes: what the optimizer does, outside of `shard_map`, is left to the
    # compiler. What does not fit is refused now, not when the first step is compiled.
    degrees = choose_degrees(config.mesh, len(devices))
    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    attention = st.Attention(mesh, causal=config.causal)
    program = Program(config, attention, make_objective(config))
    report = Reporter(steps=config.steps, tokens_per_step=config.batch_size * config.num_tokens)
    shared = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    report.line(f"devices: {len(devices)} x {devices[0].device_kind}{shared}")
    report.line(f"mesh: {describe_degrees(config.mesh, degrees)}")

    # Data. The layout puts tokens in order on the host.
    data = open_data(config, attention.layout)
    report.line(f"data: {data.description}")
    rows = local_rows(program.batch_sharding, program.tokens_shape)
    reading = {"collate": data.collate, "batch_size": config.batch_size, "rows": rows}
    batches = TrainingBatches(data.train, seed=config.seed, **reading)
    place_rows = partial(
        place, sharding=program.batch_sharding, batch_size=config.batch_size, rows=rows
    )
    held_out = validation_batches(data.held_out, count=config.validation_sequences, **reading)

    with (
        open_run(config, writes=jax.process_index() == 0) as run_dir,
        interruption(agree) as interrupted,
        Checkpoints(run_dir / CHECKPOINTS_FOLDER, keep=config.checkpoint.keep) as checkpoints,
        closing(batches),
        ExitStack() as trace,
    ):
        # State: the latest checkpoint's, or a new one, made where it is to lie.
        checkpoints.check_space(program.state_shapes)
        done = checkpoints.begin_after()
        if done:
            state, position = checkpoints.restore(program.state_shapes)
            batches.set_state(position, new_order=config.allow_changes)
            report.line(f"going on with {run_dir} after step {done}")
        else:
            state, position = program.initialise(), batches.get_state()
        if config.profile and done >= config.profile[1]:
            raise ValueError(
                "profile must name steps that are yet to be done; got "
                f"profile={config.profile} after step {done}. Use --profile {done + 1} {done + 2}."
            )
        num_weights = sum(x.size for x in jax.tree.leaves(state.weights))
        report.line(f"model: {num_weights / 1e6:,.2f} million parameters")
        if whole := program.partition.unsplit(state.weights):
            report.line(f"whole on every device, as ZeRO cannot split them: {', '.join(whole)}")
        train_step = program.train_step.lower(state, place_rows(held_out[0])).compile()
        report.line(f"memory of a device: {describe_memory(train_step.memory_analysis())}")
        peak = peak_flops(devices[0].device_kind)
        report.open(
            run_dir,
            first_step=done,
            tensorboard=config.tensorboard,
            flops_per_token=program.objective.flops_per_token,
            peak_flops=None if peak is None else peak * len(devices),
        )

        # Loop. On GPUs the next step is under way while the metrics of one are read. Programs of
        # simulated devices share the host's threads, and wait for each other.
        ahead = 0 if devices[0].platform == "cpu" else 1
        unread: deque = deque()
        losses, recent = [], []

        def save_settings() -> None:
            if jax.process_index() == 0:
                lasting = replace(config, allow_changes=False, profile=None)
                save_config(lasting, run_dir / CONFIG_FILE)

        def save(step: int) -> None:
            """With its settings: those of a run that goes on hold from its first save on."""
            read_metrics(leave=0)
            save_settings()
            checkpoints.save(step, state, position)

        def evaluate() -> float:
            """Mean loss of a held-out token; NaN if a signal came meanwhile."""
            jax.block_until_ready(state)
            with report.pause():
                # One at a time: programs of simulated devices wait for each other.
                sums = [0.0, 0.0]
                for batch in held_out:
                    if interrupted():
                        return float("nan")
                    new = program.losses(state.result, place_rows(batch))
                    sums = [x + float(y) for x, y in zip(sums, new, strict=True)]
                return sums[0] / sums[1]

        def read_metrics(*, leave: int, **also: float) -> None:
            """Waits for all steps but the last `leave`; reports them, and `also` with the last."""
            while len(unread) > leave:
                step, metrics = unread.popleft()
                loss, norm = float(metrics.loss), float(metrics.gradient_norm)
                losses.append(loss)
                if metrics.finite:
                    recent.append(loss)
                else:
                    what = f"loss {loss}, gradient norm {norm}"
                    if config.non_finite == "stop":
                        checkpoints.wait()
                        raise FloatingPointError(_non_finite(step, what, checkpoints.latest))
                    report.line(f"step {step} skipped: {what}")
                measured = {} if unread else also
                if step % config.log_every == 0 and recent:
                    measured = {
                        "train_loss": float(np.mean(recent)),
                        "gradient_norm": norm,
                        "learning_rate": float(metrics.learning_rate),
                        **measured,
                    }
                    recent.clear()
                report.advance(step, measured or None)

        if not done:
            save_settings()
        validation_loss = None
        with report:
            for step in range(done + 1, config.steps + 1):
                if config.profile and step == max(config.profile[0], done + 1):
                    read_metrics(leave=0)
                    trace.enter_context(jax.profiler.trace(run_dir / "profile"))
                try:
                    batch = place_rows(next(batches))
                except Exception:
                    # A save takes all processes, and the others are in this step.
                    if step > 1 and jax.process_count() == 1:
                        save(step - 1)
                    raise
                state, metrics = train_step(state, batch)
                position = batches.get_state()
                unread.append((step, metrics))
                last = step == config.steps
                if (step % config.evaluate_every == 0 or last) and not interrupted():
                    validation_loss = evaluate()
                    if not interrupted():
                        read_metrics(leave=0, validation_loss=validation_loss)
                read_metrics(leave=ahead)
                if config.profile and step == config.profile[1]:
                    read_metrics(leave=0)
                    trace.close()
                stop = interrupted()
                if step % config.checkpoint.every == 0 or last or stop:
                    save(step)
                if stop:
                    checkpoints.wait()
                    report.line(f"interrupted after step {step}, which is saved in {run_dir}")
                    return Losses(losses, None)
        if validation_loss is None:
            report.line(f"{run_dir} holds all {config.steps} steps; another --run-dir starts anew")
            validation_loss = evaluate()
            if interrupted():
                return Losses(losses, None)
        report.line(f"validation loss {validation_loss:.4f} {data.loss_unit}")
        if isinstance(config, GPTTrainConfig) and config.sample_length:
            prompt, text = continue_text(
                program, state.result, data.corpus, interrupted=interrupted
            )
            report.line(f"--- held-out text\n{prompt}")
            report.line(f"--- continued by the model\n{text}")
    return Losses(losses, validation_loss)


def _non_finite(step: int, what: str, saved: int | None) -> str:
    way_back = "There is no checkpoint yet" if saved is None else f"Step {saved} is saved"
    return (
        f"Loss and gradient must be finite; got {what} in step {step}. {way_back}; steps "
        f"{(saved or 0) + 1} to {step} lead from there to here. Go on from there with the same "
        "command and --non-finite skip, which leaves such steps out, or with a lower "
        "--optimizer.learning-rate and --allow-changes."
    )


def read_command_line(arguments: list[str]) -> Command[TrainConfig]:
    """What a command line asks for; on a mistake, says so and exits with status 2."""
    from trainer.tasks import load_train_config

    name = "gpt_tiny"
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
    if name in RECIPES:
        default = RECIPES[name]()
    elif Path(name).is_file():
        default = load_train_config(Path(name))
    else:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        print(
            f"The first word must be a recipe or a config.json; got {name!r}. "
            f"{f'Did you mean {near[0]}? ' if near else ''}Recipes: {', '.join(RECIPES)}.",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        return tyro.cli(
            Command[type(default)],
            prog="train.py [RECIPE | config.json]",
            default=Command(config=default),
            args=arguments,
            description=__doc__,
        )
    except ValueError as error:  # Of the config as a whole: tyro reports those of its parts.
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        command = read_command_line(sys.argv[1:])
        train(command.config, command.distributed)

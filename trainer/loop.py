"""The training loop: the state of a run, and what is done with it between steps."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from startrail_jax.devices.nodes import slowest_first
from startrail_jax.errors import InputError
from trainer.checkpoints.checkpoint import Checkpoints, save_frozen
from trainer.checkpoints.reading import restore_frozen
from trainer.data.batches import Feed
from trainer.errors import NonFiniteError
from trainer.parallel.flops import peak_flops
from trainer.parallel.state import TrainState, describe_memory, describe_state, step_bytes
from trainer.parallel.step import Evaluation, Program, StepMetrics
from trainer.run.commands import command
from trainer.run.divergence import Watch
from trainer.run.folder import (
    FROZEN_FOLDER,
    read_mesh,
    record_versions,
    save_degrees,
    writing,
)
from trainer.run.metrics import Reporter, describe_viewer
from trainer.run.settings import CONFIG_FILE, result_flags, save_config
from trainer.run.weights_and_biases import open_wandb
from trainer.task import Exporter, InitialWeights, Sampler


class _Step(NamedTuple):
    """A step whose metrics are not read yet."""

    number: int
    position: dict[str, Any]
    """Position in the data after it."""
    metrics: StepMetrics


class Losses(NamedTuple):
    """The losses of a run: means over tokens."""

    train: list[float]
    """Loss of every step that this program did, before its update."""
    validation: float | None
    """Loss after the last step; None if the run was interrupted, or nothing is held out."""
    is_whole: bool = False
    """Whether all steps of the run are done."""
    verified: bool = False
    """Whether `--verify`, in place of steps, has found nothing wrong."""


class Loop:
    """A run while it trains: `begin`, then `run`.

    On GPUs, the next step runs while `read_metrics` waits for those of the step before. On
    simulated devices it must not, since their programs share the threads of the host and would wait
    for each other.
    """

    def __init__(
        self,
        program: Program,
        feed: Feed[Any],
        checkpoints: Checkpoints,
        report: Reporter,
        interrupted: Callable[[int], bool],
        initial: InitialWeights | None = None,
        sampler: Sampler | None = None,
        exporter: Exporter | None = None,
    ) -> None:
        """Prepares the loop; `begin` makes its state, with random weights if `initial` is None.
        `interrupted` tells whether to stop after a step: see `trainer.run.interruption`."""
        self._config = program.config
        self._checkpoints = checkpoints
        self._report = report
        self._interrupted = interrupted
        # Weights and optimizer after the last step.
        self._state: Any = None
        # Training loss of every step whose metrics are read.
        self._losses: list[float] = []
        # Result of the last evaluation; NaN if there was none or it was interrupted.
        self._validation_loss: float = math.nan
        self._settings = result_flags(program.config)
        self._program = program
        self._feed = feed
        self._initial = initial
        self._sampler = sampler
        self._exporter = exporter
        # Position in the data after the last step: a batch that cannot be read may change that of
        # the feed.
        self._position = feed.get_state()
        self._unread: deque[_Step] = deque()
        self._watch = Watch(program.config)
        # Since the last report.
        self._since_report: list[float] = []
        self._skipped = 0
        # By the structure of a batch: images of another size have another program.
        self._train_steps: dict[Any, Any] = {}
        self._memory_bytes = 0
        mesh: Any = program.attention.mesh
        self._devices: list[Any] = list(mesh.devices.flat)
        self._ahead = 0 if self._devices[0].platform == "cpu" else 1

    def begin(self) -> int:
        """Compiles the step, and makes the state or reads it; returns the number of steps done."""
        config, program, report = self._config, self._program, self._report
        self._checkpoints.check_space(program.state_shapes.changing)
        done = self._checkpoints.begin_after()
        if done:
            with report.phase("reading the checkpoint"):
                state, self._position = self._checkpoints.restore(
                    program.state_shapes.changing, {} if config.allow_changes else self._settings
                )
                frozen = restore_frozen(
                    config.run_dir / FROZEN_FOLDER, program.state_shapes.frozen, note=report.line
                )
                self._state = state._replace(frozen=frozen)
            done = self._checkpoints.restored or 0  # Newer ones may be damaged.
            self._feed.set_state(self._position, new_order=config.allow_changes)
            report.line(f"going on with {config.run_dir} after step {done}")
        else:
            if self._initial is not None:
                report.line(self._initial.description)
            with report.phase("initialising"):
                self._state = self._initial_state()
        if config.profile and done >= config.profile[1]:
            raise InputError(
                "profile must name steps that are yet to be done; got "
                f"profile={config.profile} after step {done}. Use --profile {done + 1} {done + 2}."
            )
        for line in describe_state(self._state):
            report.line(line)
        if whole := program.partition.unsplit(self._state.model):
            report.line(f"whole on every device, since ZeRO cannot split them: {', '.join(whole)}")
        train_step: Any = program.train_step
        # Whether rows have segment ids is said by the data alone: files of tokens may have none.
        batches = self._feed.kinds() if program.parts is None else [program.batch_shapes]
        with report.phase("compiling"):
            for batch in batches:
                compiled = train_step.lower(self._state, batch).compile()
                self._train_steps[jax.tree.structure(batch)] = compiled
        analyses = [compiled.memory_analysis() for compiled in self._train_steps.values()]
        analysis = max(analyses, key=step_bytes)
        self._memory_bytes = step_bytes(analysis)
        report.line(f"memory of a device: {describe_memory(analysis)}")
        batches = self._feed.description
        peak = peak_flops(self._devices[0].device_kind)
        with writing(config.run_dir):
            report.open(
                config.run_dir,
                first_step=done,
                tensorboard=config.tensorboard,
                wandb=partial(open_wandb, config),
                flops_per_token=program.objective.flops_per_token
                if batches is None
                else program.objective.flops_at(batches.mean_length),
                tokens_per_step=None if batches is None else batches.tokens_per_batch,
                peak_flops=None if peak is None else peak * len(self._devices),
            )
            if config.tensorboard:
                report.line(describe_viewer(config.run_dir))
            if jax.process_index() == 0 and (note := record_versions(config.run_dir, done)):
                report.line(note)
            if not done:
                if self._initial is not None and jax.process_index() == 0:
                    self._initial.keep(config.run_dir)
                self._save_settings()
                if self._state.frozen is not None:
                    with report.phase("saving the frozen weights"):
                        save_frozen(
                            config.run_dir / FROZEN_FOLDER,
                            program.state_shapes.frozen,
                            self._state.frozen,
                            note=report.line,
                        )
        report.training()
        return done

    def _initial_state(self) -> TrainState:
        program = self._program
        if self._initial is None:
            return program.initialise()
        return program.begin_with(self._initial.read(program.state_shapes.base))

    def run(self, done: int) -> Losses:
        """Does the steps after `done`; evaluates, samples and saves on the way and at the end. An
        interruption ends it after a step, which is saved."""
        config, interrupted = self._config, self._interrupted
        self._export(done)
        with ExitStack() as trace:
            for step in range(done + 1, config.steps + 1):
                if config.profile and step == max(config.profile[0], done + 1):
                    self._read_metrics(all_steps=True)
                    trace.enter_context(jax.profiler.trace(config.run_dir / "profile"))
                if not self._step(step):
                    if step - 1 not in (0, done):
                        self._save(step - 1)
                    self._say_how_to_go_on()
                    return Losses(self._losses, None)
                self._export(step)
                is_last = step == config.steps
                is_due = self._feed.holds_out and (step % config.validation_every == 0 or is_last)
                if is_due and not interrupted(step):
                    measured = self._evaluate(step)
                    if not interrupted(step):
                        self._read_metrics(all_steps=True, **measured)
                self._read_metrics()
                if self._samples_after(step) and not interrupted(step):
                    self._read_metrics(all_steps=True)
                    self._sample(step)
                if config.profile and step == config.profile[1]:
                    self._read_metrics(all_steps=True)
                    trace.close()
                stops = interrupted(step)
                if step % config.checkpoint.every == 0 or is_last or stops:
                    self._save(step)
                if stops:
                    self._say_how_to_go_on()
                    return Losses(self._losses, None)
        if done >= config.steps:
            self._report.line(
                f"{config.run_dir} holds all {done} steps; another --run-dir starts a new run"
            )
        validation = None
        if self._feed.holds_out:
            if done < config.steps:
                self._require_finite_evaluation(config.steps)
            else:
                self._evaluate(done)
                if interrupted(done):
                    return Losses(self._losses, None)
            validation = self._validation_loss
            self._report.line(f"validation loss {validation:.4f} {self._feed.loss_unit}")
        later = itertools.count(config.steps + 1)
        self._sample(config.steps, lambda: interrupted(next(later)))
        return Losses(self._losses, validation, is_whole=True)

    def _say_how_to_go_on(self) -> None:
        self._checkpoints.wait()
        run_dir, saved = self._config.run_dir, self._checkpoints.latest or 0
        self._report.line(
            f"to go on: {command('train.py', run_dir / CONFIG_FILE)}, or the same command as before"
        )
        if saved:
            self._report.line(f"interrupted after step {saved}, which is saved in {run_dir}")
        else:
            self._report.line("interrupted before the first step")

    def _step(self, step: int) -> bool:
        """Trains on the next batch; False if interrupted while it waits for that."""
        try:
            if self._feed.arrives and not self._wait(step - 1):
                return False
            batch = self._feed.next()
        except Exception:
            # All processes must take part in a save, and the others are in this step already.
            if step > 1 and jax.process_count() == 1:
                self._save(step - 1)
            raise
        train_step = self._train_steps[jax.tree.structure(batch)]
        self._state, metrics = train_step(self._state, batch)
        self._position = self._feed.get_state()
        self._unread.append(_Step(step, self._position, metrics))
        return True

    def _wait(self, step: int) -> bool:
        """Waits for the data that follow a step; False if interrupted before."""
        self._read_metrics(all_steps=True)
        with self._report.pause("waiting for data"):
            return self._feed.wait(lambda: self._interrupted(step))

    def _evaluate(self, step: int) -> dict[str, float]:
        """Measures the mean loss of a held-out token, `validation_loss`, and the other means of the
        objective, unless interrupted."""
        self._validation_loss = math.nan
        jax.block_until_ready(self._state)
        with self._report.pause():
            # One batch at a time: programs of simulated devices would wait for each other.
            sums: list[Evaluation] = []
            for batch in self._feed.held_out():
                if self._interrupted(step):
                    return {}
                new = self._program.losses(self._state.result, batch)
                sums.append(jax.tree.map(float, new))
        total: Evaluation = jax.tree.map(lambda *x: sum(x), *sums)
        self._validation_loss = total.loss / total.weight
        means = {f"validation_{name}": x / total.weight for name, x in total.sums.items()}
        return {"validation_loss": self._validation_loss, **_known(means)}

    def _samples_after(self, step: int) -> bool:
        """Whether samples are due after a step; those of the last step come at the end."""
        every = self._config.steps_between_samples
        return every is not None and step % every == 0 and step < self._config.steps

    def _sample(self, step: int, interrupted: Callable[[], bool] | None = None) -> None:
        """Prints samples of the model after a step, unless interrupted."""
        if self._sampler is None:
            return
        jax.block_until_ready(self._state)
        with self._report.pause("sampling"):
            stops = interrupted or (lambda: self._interrupted(step))
            if step < self._config.steps:
                self._report.line(f"samples after step {step}:")
            for line in self._sampler(self._state.result, step, stops):
                self._report.line(line)

    def _export(self, step: int) -> None:
        """Writes the weights after a step, if that is due."""
        if self._exporter is None or not self._exporter.is_due(step):
            return
        self._read_metrics(all_steps=True)
        jax.block_until_ready(self._state)
        with self._report.pause("exporting"):
            self._exporter(self._state.result, step)

    def _read_metrics(self, *, all_steps: bool = False, **measured: float) -> None:
        """Waits for the metrics of the steps (with `all_steps`, of the last one too), and reports
        them. Those `measured` otherwise are reported with the last step."""
        while len(self._unread) > (0 if all_steps else self._ahead):
            step = self._unread.popleft()
            self._read(step, {} if self._unread else measured)

    def _read(self, step: _Step, measured: dict[str, float]) -> None:
        number, metrics = step.number, step.metrics
        loss, norm = float(metrics.loss), float(metrics.gradient_norm)
        self._losses.append(loss)
        finite, saved = bool(metrics.finite), None
        if not finite:
            self._checkpoints.wait()
            saved = self._checkpoints.latest
        if self._watch.judge(number, loss, norm, finite=finite, saved=saved):
            self._since_report.append(loss)
        else:
            self._skipped += 1
            self._report.line(f"step {number} skipped: loss {loss}, gradient norm {norm}")
        if number % self._config.steps_between_reports == 0 and self._since_report:
            measured = {
                "train_loss": float(np.mean(self._since_report)),
                "gradient_norm": norm,
                "learning_rate": float(metrics.learning_rate),
                **_known({name: float(value) for name, value in metrics.others.items()}),
                "memory_bytes": self._memory_bytes,
                **({"steps_skipped": self._skipped} if self._skipped else {}),
                **self._checkpoints.take_costs(),
                **measured,
            }
            self._since_report.clear()
            self._skipped = 0
        self._report.advance(number, measured or None)

    def _save(self, step: int) -> None:
        """Saves the state and the settings; returns before the files are complete. The weights are
        finite, since no step takes an update that is not."""
        self._read_metrics(all_steps=True)
        self._save_settings()
        self._report.flush()
        self._checkpoints.save(step, self._state.changing, self._position, self._settings)

    def _require_finite_evaluation(self, step: int) -> None:
        """Raises NonFiniteError if the last evaluation of a run gave no finite loss."""
        if not math.isfinite(self._validation_loss):
            self._checkpoints.wait()
            raise NonFiniteError(
                "The loss of held-out data must be finite after the last step; got "
                f"{self._validation_loss} after step {step}. Remove the checkpoint of that step, "
                "and go on from an earlier one with a lower --optimizer.learning-rate and "
                "--allow-changes."
            )

    def _save_settings(self) -> None:
        """Writes mesh.json and config.json; new settings hold from the first save of a run."""
        if jax.process_index() == 0:
            lasting = replace(self._config, allow_changes=False, profile=None)
            # First: a folder with a config.json alone is that of a run which did not note it.
            attention, run_dir = self._program.attention, self._config.run_dir
            # Whether this program planned the mesh or goes on with one that was planned.
            degrees, former = vars(attention.degrees), read_mesh(run_dir)
            goes_on = former is not None and former.order is not None
            planned = self._config.plan == "use" or goes_on
            order = slowest_first(attention.mesh) if planned else None
            with writing(run_dir):
                save_degrees(run_dir, degrees, order)
                save_config(lasting, run_dir / CONFIG_FILE)


def _known(metrics: dict[str, float]) -> dict[str, float]:
    """Without those that are NaN, as the data do not tell them."""
    return {name: x for name, x in metrics.items() if not math.isnan(x)}

"""The training loop: the state of a run, and what is done with it between steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from startrail_jax.errors import InputError
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.data.batches import Feed
from trainer.errors import NonFiniteError
from trainer.parallel.flops import peak_flops
from trainer.parallel.footprint import describe_memory
from trainer.parallel.step import Program, StepMetrics
from trainer.run.folder import CONFIG_FILE, result_flags
from trainer.run.mesh import save_degrees
from trainer.run.metrics import Reporter, describe_viewer
from trainer.run.settings import save_config
from trainer.run.versions import record_versions


class Loop:
    """A run while it trains. `train.py` calls its methods in the order in which they stand here.

    On GPUs, the next step runs while the metrics of the step before are read: `read_metrics` lags
    behind `step`. On simulated devices it must not, since their programs share the threads of the
    host and would wait for each other.
    """

    def __init__(
        self,
        program: Program,
        feed: Feed[Any],
        checkpoints: Checkpoints,
        report: Reporter,
        interrupted: Callable[[], bool],
    ) -> None:
        """Prepares the loop; `begin` makes its state.

        Args:
            program: the compiled functions of the run.
            feed: the batches of the run.
            checkpoints: the checkpoints of the run.
            report: the log and the metrics of the run.
            interrupted: tells whether to stop. All processes must call it equally often.
        """
        self.config = program.config
        self.checkpoints = checkpoints
        self.report = report
        self.interrupted = interrupted
        self.state: Any = None
        """Weights and optimizer after the last step."""
        self.losses: list[float] = []
        """Training loss of every step whose metrics are read."""
        self.validation_loss: float = math.nan
        """Result of the last evaluation; NaN if there was none or it was interrupted."""
        self._settings = result_flags(program.config)
        self._program = program
        self._feed = feed
        # Position in the data after the last step: a batch that cannot be read may change that of
        # the feed.
        self._position = feed.get_state()
        self._unread: deque[tuple[int, StepMetrics]] = deque()
        self._since_report: list[float] = []
        self._train_step: Any = None
        mesh: Any = program.attention.mesh
        devices = list(mesh.devices.flat)
        self._devices = devices
        self._ahead = 0 if devices[0].platform == "cpu" else 1

    def begin(self) -> int:
        """Makes the state, and compiles the training step.

        The state is that of the newest checkpoint, if there is one.

        Returns:
            The number of steps that are done.

        Raises:
            CheckpointError: if the checkpoint cannot be read, or the disk has too little space.
            ValueError: if the checkpoint does not fit the model or the data, or all steps of
                `config.profile` are done.
        """
        config, program, report = self.config, self._program, self.report
        self.checkpoints.check_space(program.state_shapes)
        done = self.checkpoints.begin_after()
        if done:
            with report.phase("reading the checkpoint"):
                self.state, self._position = self.checkpoints.restore(
                    program.state_shapes, {} if config.allow_changes else self._settings
                )
            done = self.checkpoints.restored or 0  # Newer ones may be damaged.
            self._feed.set_state(self._position, new_order=config.allow_changes)
            report.line(f"going on with {config.run_dir} after step {done}")
        else:
            with report.phase("initialising"):
                self.state = program.initialise()
        if config.profile and done >= config.profile[1]:
            raise InputError(
                "profile must name steps that are yet to be done; got "
                f"profile={config.profile} after step {done}. Use --profile {done + 1} {done + 2}."
            )
        num_weights = sum(x.size for x in jax.tree.leaves(self.state.weights))
        report.line(f"model: {num_weights / 1e6:,.2f} million parameters")
        if whole := program.partition.unsplit(self.state.weights):
            report.line(f"whole on every device, since ZeRO cannot split them: {', '.join(whole)}")
        train_step: Any = program.train_step
        batch = next(self._feed.held_out())
        with report.phase("compiling"):
            self._train_step = train_step.lower(self.state, batch).compile()
        report.line(f"memory of a device: {describe_memory(self._train_step.memory_analysis())}")
        peak = peak_flops(self._devices[0].device_kind)
        report.open(
            config.run_dir,
            first_step=done,
            tensorboard=config.tensorboard,
            flops_per_token=program.objective.flops_per_token,
            peak_flops=None if peak is None else peak * len(self._devices),
        )
        if config.tensorboard:
            report.line(describe_viewer(config.run_dir))
        if jax.process_index() == 0 and (note := record_versions(config.run_dir, done)):
            report.line(note)
        if not done:
            self.save_settings()
        report.training()
        return done

    def step(self, step: int) -> None:
        """Trains on the next batch.

        Raises:
            ValueError: if the data cannot be read. The steps before are saved first.
        """
        try:
            batch = self._feed.next()
        except Exception:
            # All processes must take part in a save, and the others are in this step already.
            if step > 1 and jax.process_count() == 1:
                self.save(step - 1)
            raise
        self.state, metrics = self._train_step(self.state, batch)
        self._position = self._feed.get_state()
        self._unread.append((step, metrics))

    def evaluate(self) -> None:
        """Measures the mean loss of a held-out token, `validation_loss`, unless interrupted."""
        self.validation_loss = math.nan
        jax.block_until_ready(self.state)
        with self.report.pause():
            # One batch at a time: programs of simulated devices would wait for each other.
            total, weight = 0.0, 0.0
            for batch in self._feed.held_out():
                if self.interrupted():
                    return
                new = self._program.losses(self.state.result, batch)
                total, weight = total + float(new[0]), weight + float(new[1])
        self.validation_loss = total / weight

    def read_metrics(self, *, all_steps: bool = False, **measured: float) -> None:
        """Waits for the metrics of the steps, and reports them.

        Args:
            all_steps: whether to wait for the last step too.
            measured: other metrics, which are reported with those of the last step.

        Raises:
            FloatingPointError: if a loss or gradient is not finite and `non_finite` is "stop".
        """
        while len(self._unread) > (0 if all_steps else self._ahead):
            step, metrics = self._unread.popleft()
            self._read(step, metrics, {} if self._unread else measured)

    def _read(self, step: int, metrics: StepMetrics, measured: dict[str, float]) -> None:
        loss, norm = float(metrics.loss), float(metrics.gradient_norm)
        self.losses.append(loss)
        if metrics.finite:
            self._since_report.append(loss)
        else:
            what = f"loss {loss}, gradient norm {norm}"
            if self.config.non_finite == "stop":
                self.checkpoints.wait()
                raise NonFiniteError(_not_finite(step, what, self.checkpoints.latest))
            self.report.line(f"step {step} skipped: {what}")
        if step % self.config.log_every == 0 and self._since_report:
            measured = {
                "train_loss": float(np.mean(self._since_report)),
                "gradient_norm": norm,
                "learning_rate": float(metrics.learning_rate),
                **self.checkpoints.take_costs(),
                **measured,
            }
            self._since_report.clear()
        self.report.advance(step, measured or None)

    def save(self, step: int) -> None:
        """Saves the state and the settings; returns before the files are complete.

        Raises:
            CheckpointError: if an earlier save has failed.
        """
        self.read_metrics(all_steps=True)
        self.save_settings()
        self.checkpoints.save(step, self.state, self._position, self._settings)

    def save_settings(self) -> None:
        """Writes mesh.json and config.json.

        If a resumed run has new settings, they hold from its first save.
        """
        if jax.process_index() == 0:
            lasting = replace(self.config, allow_changes=False, profile=None)
            # First: a folder with a config.json alone is that of a run which did not note it.
            save_degrees(self.config.run_dir, vars(self._program.attention.degrees))
            save_config(lasting, self.config.run_dir / CONFIG_FILE)


def _not_finite(step: int, what: str, saved: int | None) -> str:
    way_back = "There is no checkpoint yet" if saved is None else f"Step {saved} is saved"
    return (
        f"Loss and gradient must be finite; got {what} in step {step}. {way_back}; steps "
        f"{(saved or 0) + 1} to {step} lead from there to here. Go on from there with the same "
        "command and --non-finite skip, which leaves such steps out, or with a lower "
        "--optimizer.learning-rate and --allow-changes."
    )

"""What a run measures: on the terminal, in metrics.jsonl, for TensorBoard and for W&B."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column
from rich.text import Text
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore

from trainer import durable
from trainer.errors import StorageError
from trainer.places import short
from trainer.printable import duration, printable
from trainer.run.commands import command
from trainer.run.folder import METRICS_FILE, drop_after, writing
from trainer.run.weights_and_biases import WandbRun

TENSORBOARD_FOLDER = "tensorboard"


class PatientConsole(Console):
    """A console that falls silent when its reader is gone, as `tee` is after Ctrl-C."""

    def on_broken_pipe(self) -> None:
        """Ignores the end of the reader; rich itself would end the program."""
        with suppress(SystemExit):
            super().on_broken_pipe()


class Reporter:
    """Prints and writes what is measured, in the first process only. A context manager. A terminal
    shows lines above a progress bar; a log file has the lines alone."""

    def __init__(self, *, steps: int, tokens_per_step: int) -> None:
        """Prepares a progress bar, which `__enter__` shows and `__exit__` removes. To be created
        after the devices are set up, as it asks jax which process this is."""
        self._writes = jax.process_index() == 0
        quiet = not self._writes
        # No wrapping: a line of a log file is as long as it is.
        self._console = PatientConsole(highlight=False, soft_wrap=True, quiet=quiet)
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
            TextColumn(
                "{task.completed:.0f}/{task.total:.0f} {task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            ),
            console=self._console,
            # In a file the bar would appear only once, when all is over.
            disable=quiet or not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=steps)
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._mfu_per_rate: float | None = None
        # When the first step was done and when the last report was made, each as a step and the
        # seconds on a clock that stands still in `pause`.
        self._begun: tuple[int, float] | None = None
        self._reported: tuple[int, float] | None = None
        self._paused = 0.0
        self._path: Path | None = None
        self._events: EventsWriter | None = None
        self._wandb: WandbRun | None = None

    def open(
        self,
        folder: Path,
        *,
        first_step: int = 0,
        tensorboard: bool = True,
        wandb: Callable[[], WandbRun | None] = lambda: None,
        flops_per_token: float = 0.0,
        tokens_per_step: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        """Begins to write metrics to files too; to be called before the first step.

        Metrics of steps after `first_step` are removed from the files: a killed program wrote them,
        and those steps will be done again. `wandb` opens a run in Weights & Biases, in the process
        that writes. `tokens_per_step` is a mean where steps differ (None for
        what was said at the beginning); `peak_flops` is FLOP/s of all devices together (None leaves
        MFU out).
        """
        self._tokens_per_step = tokens_per_step or self._tokens_per_step
        self._mfu_per_rate = flops_per_token / peak_flops if peak_flops else None
        self._bar.update(self._task, completed=first_step)
        if not self._writes:
            return
        self._path = folder / METRICS_FILE
        if tensorboard:
            (folder / TENSORBOARD_FOLDER).mkdir(exist_ok=True)
            # Not SummaryWriter: its thread would die when the disk is full, and the run would wait
            # for its queue for ever.
            self._events = EventsWriter(str(folder / TENSORBOARD_FOLDER / "events"))
        if broken := drop_after(self._path, first_step):
            self.line(
                f"WARNING: {broken} lines of {self._path} could not be read: they are left out"
            )
        # TensorBoard drops the earlier events from this step on.
        start = SessionLog(status=SessionLog.START)
        self._write_event(Event(step=first_step + 1, session_log=start))
        self._wandb = wandb()

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._bar.stop()
        if self._events is not None:
            self._events.close()
        has_failed = error is not None and kind is not KeyboardInterrupt
        self._track(lambda run: run.finish(failed=has_failed))

    def line(self, text: str) -> None:
        """Prints a line above the bar, without interpreting markup or control characters in it."""
        self._console.print(Text(printable(text)))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Says beside the bar what its body does, such as "compiling"."""
        before = self._bar.tasks[0].description
        self._bar.update(self._task, description=printable(name))
        try:
            yield
        finally:
            self._bar.update(self._task, description=before)

    def training(self) -> None:
        """Says beside the bar that the steps run, until they have metrics."""
        self._bar.update(self._task, description="training")

    def advance(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Reports that a step is done, counted from 1, and the metrics that were measured in it.

        To be called once for each step, with all its metrics, as the file has one line for a step.
        Tokens/s and MFU since the last report are added; these leave out compilation, which ends
        with the first step, and all that is done in `pause`. If steps run asynchronously, metrics
        must come from values of `step` that have been waited for.
        """
        now = time.perf_counter() - self._paused
        if self._begun is None:
            self._begun = self._reported = (step, now)
        self._bar.update(self._task, completed=step)
        if metrics is None:
            return
        rate = _rate(self._reported, (step, now)) * self._tokens_per_step
        mfu = None if self._mfu_per_rate is None else rate * self._mfu_per_rate
        self._reported = (step, now)
        status = self._status(step, now, metrics, rate, mfu)
        self._bar.update(self._task, description=status)
        self.line(f"step {step}/{self._steps}  {status}")
        speeds = {"tokens_per_second": rate or None, "mfu": mfu or None}
        self._write(step, {**metrics, **speeds})

    @contextmanager
    def pause(self, name: str = "evaluating") -> Iterator[None]:
        """A phase, such as an evaluation or a sample, that tokens/s and MFU leave out."""
        since = time.perf_counter()
        try:
            with self.phase(name):
                yield
        finally:
            self._paused += time.perf_counter() - since

    def _status(
        self, step: int, now: float, metrics: Mapping[str, float], rate: float, mfu: float | None
    ) -> str:
        parts = [
            f"{name.replace('_', ' ')} {value:.4f}"
            for name, value in metrics.items()
            if name.endswith("loss")
        ]
        if rate:
            parts.append(f"{rate:,.0f} tokens/s")
        if mfu:
            parts.append(f"MFU {mfu:.1%}")
        pace = _rate(self._begun, (step, now))
        if pace:
            parts.append(f"{duration((self._steps - step) / pace)} left")
        return "  ".join(parts)

    def _write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        if self._path is None:
            return
        values = {name: x for name, x in metrics.items() if x is not None and math.isfinite(x)}
        self._track(lambda run: run.log(step, values))
        # JSON knows neither NaN nor infinity.
        finite = {**dict.fromkeys(metrics), **values}
        record = {"step": step, "time": round(time.time(), 3), **finite}
        try:
            # It is opened each time, so that nothing waits in a buffer.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
            summary = [Summary.Value(tag=name, simple_value=x) for name, x in values.items()]
            self._write_event(Event(step=step, summary=Summary(value=summary)))
        except OSError as error:
            if self._events is not None:
                with suppress(OSError):  # It would be the same error.
                    self._events.close()
                self._events = None
            raise StorageError(
                f"Metrics could not be written to {self._path.parent}: {error.strerror}. Free "
                "space there or fix that; then the same command goes on."
            ) from error

    def flush(self) -> None:
        """Waits until the metrics so far are on the disk, as a checkpoint of the step will be."""
        if self._path is not None and self._path.exists():
            with writing(self._path.parent):
                for path in (self._path, self._path.parent):
                    durable.flush(path)

    def _track(self, what: Callable[[WandbRun], None]) -> None:
        """Does something with the run in W&B. If it fails, it gets no more, and training goes
        on."""
        if self._wandb is None:
            return
        try:
            what(self._wandb)
        except Exception as error:
            self._wandb = None
            self.line(
                f"WARNING: Weights & Biases gets no more metrics: {short(error)}. The run goes on, "
                f"and {METRICS_FILE} has them all"
            )

    def _write_event(self, event: Event) -> None:
        if self._events is not None:
            event.wall_time = time.time()
            self._events.write_event(event)
            self._events.flush()


def describe_viewer(run_dir: Path) -> str:
    """A line for the log: the command that shows the metrics of a run in a browser."""
    viewer = command("tensorboard.main", "--logdir", run_dir / TENSORBOARD_FOLDER)
    if importlib.util.find_spec("tensorboard") is None:
        viewer = f"{command('pip', 'install', 'tensorboard')} && {viewer}"
    return f"metrics in a browser: {viewer}"


def _rate(since: tuple[int, float] | None, now: tuple[int, float]) -> float:
    """Steps per second between two moments; 0 if there is no step between them."""
    if since is None or now[0] <= since[0]:
        return 0.0
    return (now[0] - since[0]) / (now[1] - since[1])

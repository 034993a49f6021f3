"""What a run tells the person who watches it: a bar on a terminal, lines that stay, and files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore

from trainer.errors import StorageError

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class _Console(Console):
    """Falls silent where nobody reads any more: a `tee` ends at the Ctrl-C that makes us save."""

    def on_broken_pipe(self) -> None:
        # Rich would end the program.
        with suppress(SystemExit):
            super().on_broken_pipe()


class Reporter:
    """Prints and writes what is measured, in the first process only. A context manager."""

    def __init__(self, *, steps: int, tokens_per_step: int) -> None:
        """Prepares a bar; it is shown from `__enter__` on, and lines can be printed before.

        For after the devices are set up: it asks jax which process this is.

        Args:
            steps: steps of the run.
            tokens_per_step: tokens in a batch.
        """
        self._writes = jax.process_index() == 0
        # No wrapping: a line of a log file is as long as it is.
        self._console = _Console(highlight=False, soft_wrap=True, quiet=not self._writes)
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._mfu_per_rate: float | None = None
        # When the first step was done, and the last report was made: (step, seconds of training).
        self._begun: tuple[int, float] | None = None
        self._reported: tuple[int, float] | None = None
        self._paused = 0.0
        self._path: Path | None = None
        self._events: EventsWriter | None = None
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
        # Without a terminal the lines alone do: a bar would only be drawn when all is over.
        shown = self._writes and self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, disable=not shown, transient=True)
        self._task = self._bar.add_task("train", total=steps, status="compiling")

    def open(
        self,
        folder: Path,
        *,
        first_step: int = 0,
        tensorboard: bool = True,
        flops_per_token: float = 0.0,
        peak_flops: float | None = None,
    ) -> None:
        """From now on metrics go to files too. For before `__enter__`.

        What a killed run wrote of steps after `first_step`, which will be done again, is dropped.

        Args:
            folder: of the run; gets metrics.jsonl and, for TensorBoard, a folder.
            first_step: steps that were done when this program took the run up.
            tensorboard: whether to write for TensorBoard.
            flops_per_token: of the model, forward and backward.
            peak_flops: FLOP/s of all devices together; None where unknown, and MFU is left out.
        """
        self._mfu_per_rate = flops_per_token / peak_flops if peak_flops else None
        self._bar.update(self._task, completed=first_step)
        if not self._writes:
            return
        self._path = folder / METRICS_FILE
        _drop_after(self._path, first_step)
        if tensorboard:
            (folder / TENSORBOARD_FOLDER).mkdir(exist_ok=True)
            # What lies beneath SummaryWriter, whose thread would die of a full disk and leave the
            # run waiting for its queue.
            self._events = EventsWriter(str(folder / TENSORBOARD_FOLDER / "events"))
            # Events of earlier files from this step on are void.
            start = SessionLog(status=SessionLog.START)
            self._write_event(Event(step=first_step + 1, session_log=start))

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if self._events is not None:
            self._events.close()

    def line(self, text: str) -> None:
        """Prints a line above the bar, as it is."""
        self._console.print(Text(text))

    def advance(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Reports that `step` steps are done and, where there are `metrics`, what they measured.

        Once a step, with all that is measured there, so that the file has one line for it.
        The metrics go on a line that stays and to the files, with tokens/s and MFU since the last
        report. Compilation, which is over when the first step is, does not count, nor does what is
        done in `pause`. Where steps run ahead of this, metrics must come from values of `step`
        that were waited for.

        Args:
            step: counts from 1 at the beginning of the run.
            metrics: by name: "train_loss", "validation_loss", "learning_rate" and the like.

        Raises:
            OSError: if the files cannot be written.
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
        self._bar.update(self._task, status=status)
        self.line(f"step {step}/{self._steps}  {status}")
        speeds = {"tokens_per_second": rate or None, "mfu": mfu or None}
        self._write(step, {**metrics, **speeds})

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves what is done in it out of tokens/s and MFU: evaluation, a sample."""
        since = time.perf_counter()
        try:
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
            minutes, seconds = divmod(round((self._steps - step) / pace), 60)
            hours, minutes = divmod(minutes, 60)
            left = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
            parts.append(f"{left} left")
        return "  ".join(parts)

    def _write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        # JSON has no NaN and no infinity.
        finite = {
            name: None if value is None or not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        if self._path is None:
            return
        record = {"step": step, "time": round(time.time(), 3), **finite}
        try:
            # Opened each time, so that nothing waits in a buffer.
            with self._path.open("a") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
            values = [
                Summary.Value(tag=name, simple_value=value)
                for name, value in finite.items()
                if value is not None
            ]
            self._write_event(Event(step=step, summary=Summary(value=values)))
        except OSError as error:
            if self._events is not None:
                with suppress(OSError):  # It would be the same one.
                    self._events.close()
                self._events = None
            raise StorageError(
                f"Metrics could not be written to {self._path.parent}: {error.strerror}. Free "
                "space there or mend that; then the same command goes on."
            ) from error

    def _write_event(self, event: Event) -> None:
        if self._events is not None:
            event.wall_time = time.time()
            self._events.write_event(event)
            self._events.flush()


def _rate(since: tuple[int, float] | None, now: tuple[int, float]) -> float:
    """Steps per second between two moments; 0 where there is no step between them."""
    if since is None or now[0] <= since[0]:
        return 0.0
    return (now[0] - since[0]) / (now[1] - since[1])


def _drop_after(path: Path, last_step: int) -> None:
    """Keeps the lines of a metrics file up to a step, and none that a kill cut short."""
    if not path.exists():
        return
    part = path.with_name(f"{path.name}.part")
    with path.open() as old, part.open("w") as new:
        for line in old:
            if line.endswith("}\n") and json.loads(line)["step"] <= last_step:
                new.write(line)
    part.replace(path)

"""What a run tells the person who watches it: a bar on a terminal, and lines that stay."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text


class Reporter:
    """Step, loss, tokens per second and time left. Use as a context manager round the loop."""

    def __init__(self, *, steps: int, tokens_per_step: int) -> None:
        """Prepares a bar of `steps` steps; nothing is shown before `__enter__`."""
        self.console = Console(highlight=False, soft_wrap=True)
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._timed_from: tuple[int, float] | None = None
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
        # Without a terminal the lines alone do: a bar would only be drawn when all is over.
        self._bar = Progress(
            *columns, console=self.console, disable=not self.console.is_terminal, transient=True
        )
        self._task = self._bar.add_task("train", total=steps, status="compiling")

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

    def line(self, text: str) -> None:
        """Prints a line above the bar, as it is."""
        self.console.print(Text(text))

    def advance(self, step: int, loss: float, *, line: bool) -> None:
        """Reports that `step` steps are done, on the bar and, with `line`, on a line that stays."""
        now = time.perf_counter()
        if self._timed_from is None:
            self._timed_from = (step, now)  # What came before is compilation.
        first, since = self._timed_from
        status = f"train loss {loss:.4f}"
        if step > first:
            pace = (now - since) / (step - first)
            left = int(pace * (self._steps - step))
            status += f"  {self._tokens_per_step / pace:,.0f} tokens/s"
            status += f"  {left // 60}:{left % 60:02d} left"
        self._bar.update(self._task, completed=step, status=status)
        if line:
            self.line(f"step {step}/{self._steps}  {status}")

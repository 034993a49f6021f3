"""What a run shows on a terminal, or writes to a log: lines that stay, above a progress bar."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.printable import printable

WIDEST_BAR = 40
NARROWEST_BAR = 10


class PatientConsole(Console):
    """A console that falls silent when its reader is gone, as `tee` is after Ctrl-C."""

    def on_broken_pipe(self) -> None:
        """Ignores the end of the reader; rich itself would end the program."""
        with suppress(SystemExit):
            super().on_broken_pipe()


class StepBar(Progress):
    """A bar with the number of steps and a text, always in one line.

    On a narrow terminal the bar gives way to the text; then the text is cut. The bar of rich itself
    would break into several lines, of which a terminal keeps some.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        """The line as it is drawn, some times a second."""
        for task in self.tasks:
            text = Text(f"{task.completed:.0f}/{task.total:.0f} {task.fields['status']}")
            since = task.fields["since"]
            if since is not None:
                text.append(f" {time.monotonic() - since:.0f} s")
            room = self.console.width
            bar_width = min(room - text.cell_len - 1, WIDEST_BAR)
            if bar_width < NARROWEST_BAR:
                text.truncate(room, overflow="ellipsis")
                yield text
                continue
            line = Table.grid(padding=(0, 1))
            line.add_row(ProgressBar(task.total, task.completed, width=bar_width), text)
            yield line


class Terminal:
    """A progress bar and lines above it. Without a terminal only the lines are written."""

    def __init__(self, *, steps: int, quiet: bool) -> None:
        """Prepares the bar. Lines may be printed before it is started.

        Args:
            steps: number of steps of the run.
            quiet: whether to show nothing at all.
        """
        # No wrapping: a line of a log file is as long as it is.
        self._console = PatientConsole(highlight=False, soft_wrap=True, quiet=quiet)
        # In a file the bar would appear only once, when all is over.
        shown = not quiet and self._console.is_terminal
        self._bar = StepBar(console=self._console, disable=not shown, transient=True)
        self._task = self._bar.add_task("", total=steps, status="starting", since=None)

    def start(self) -> None:
        """Shows the bar."""
        self._bar.start()

    def stop(self) -> None:
        """Removes the bar."""
        self._bar.stop()

    def line(self, text: str) -> None:
        """Prints a line above the bar, without interpreting markup or control characters in it."""
        self._console.print(Text(printable(text)))

    @property
    def status(self) -> str:
        """The text beside the bar."""
        return self._bar.tasks[0].fields["status"]

    def update(
        self, step: int | None = None, status: str | None = None, *, waits: bool = False
    ) -> None:
        """Changes what is given of the bar.

        Args:
            step: the number of steps that are done.
            status: the text beside the bar.
            waits: whether the text is for something that takes a while; its seconds are counted.
        """
        fields = {}
        if status is not None:
            fields = {"status": printable(status), "since": time.monotonic() if waits else None}
        self._bar.update(self._task, completed=step, **fields)

"""What a run shows on a terminal, or writes to a log: lines that stay, above a progress bar."""

from __future__ import annotations

from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column
from rich.text import Text

from trainer.printable import printable


class PatientConsole(Console):
    """A console that falls silent when its reader is gone, as `tee` is after Ctrl-C."""

    def on_broken_pipe(self) -> None:
        """Ignores the end of the reader; rich itself would end the program."""
        with suppress(SystemExit):
            super().on_broken_pipe()


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
        return self._bar.tasks[0].description

    def update(self, step: int | None = None, status: str | None = None) -> None:
        """Changes the number of steps that are done, or the text beside the bar."""
        shown = None if status is None else printable(status)
        self._bar.update(self._task, completed=step, description=shown)

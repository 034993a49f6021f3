"""What a run shows on a terminal, or writes to a log: lines that stay, above a progress bar."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text


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
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
        # In a file the bar would appear only once, when all is over.
        shown = not quiet and self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, disable=not shown, transient=True)
        self._task = self._bar.add_task("train", total=steps, status="compiling")

    def start(self) -> None:
        """Shows the bar."""
        self._bar.start()

    def stop(self) -> None:
        """Removes the bar."""
        self._bar.stop()

    def line(self, text: str) -> None:
        """Prints a line above the bar, without interpreting markup in it."""
        self._console.print(Text(text))

    def update(self, step: int, status: str | None = None) -> None:
        """Moves the bar to a step, and replaces the text beside it if one is given."""
        fields: dict[str, Any] = {} if status is None else {"status": status}
        self._bar.update(self._task, completed=step, **fields)

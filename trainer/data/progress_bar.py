"""The progress of reading files: a bar on a terminal, and a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.printable import printable, say

SECONDS_BEFORE_LINE = 2.0
SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def shown_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows on standard error how much is read, by calls of what it yields, in bytes."""
    console = Console(stderr=True)
    # A path may hold what looks like markup.
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    began = time.monotonic()
    next_line = began + SECONDS_BEFORE_LINE
    done = 0
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(printable(what), total=total)

        def advance(size: int) -> None:
            nonlocal done, next_line
            done += size
            progress.update(task, completed=done)
            now = time.monotonic()
            if not console.is_terminal and now > next_line:
                next_line = now + SECONDS_BETWEEN_LINES
                say(f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

        yield advance
    if (seconds := time.monotonic() - began) >= SECONDS_BEFORE_LINE:
        say(f"{what}: {done / 1e6:,.1f} MB in {seconds:,.1f} s")

"""Says that a process waits for another, again and again until it need not."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.printable import printable

SECONDS_BEFORE_LINE, SECONDS_BETWEEN_LINES = 3.0, 10.0


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Prints a line after 3 s and every 10 s while its body runs, to standard error, in a thread.

    Args:
        what: who waits for whom: "process 1 waits for process 0".
    """
    began = time.monotonic()
    over = threading.Event()

    def remind() -> None:
        pause = SECONDS_BEFORE_LINE
        while not over.wait(pause):
            pause = SECONDS_BETWEEN_LINES
            seconds = time.monotonic() - began
            print(printable(f"{what}, for {seconds:.0f} s so far"), file=sys.stderr, flush=True)

    threading.Thread(target=remind, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        over.set()

"""A request to stop, as a flag that the training loop asks when it suits it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STANDARD_ERROR = 2


@contextmanager
def interruption(agree: Callable[[bool], bool] = bool) -> Iterator[Callable[[], bool]]:
    """Holds SIGTERM and the first SIGINT back, so that the loop can finish a step and save.

    For the main thread, round the loop.

    Args:
        agree: what makes of the wish of one process the answer of all; `heartbeat` gives one.

    Yields:
        A function that says whether a signal has come; with `agree`, to any process. All must then
        call it equally often.

    Raises:
        KeyboardInterrupt: at a SIGINT that is not the first signal: who insists, need not wait.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if number == signal.SIGINT:
            # Who reads it may be gone, by the same Ctrl-C. Not by way of `sys.stderr`, which
            # the signal may have found in mid-write.
            with suppress(OSError):
                os.write(STANDARD_ERROR, b"stopping after this step; Ctrl-C again stops at once\n")

    previous = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield lambda: agree(bool(received))
    finally:
        for number, handler in previous.items():
            # None stands for a handler that was not set from Python, which cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

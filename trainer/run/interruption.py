"""SIGTERM and Ctrl-C as a flag, which the training loop looks at between steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STANDARD_ERROR = 2
CLEAR_LINE = b"\r\x1b[2K"
MESSAGE = b"stopping after this step; Ctrl-C again stops at once\n"


@contextmanager
def interruption(agree: Callable[[bool], bool] = bool) -> Iterator[Callable[[], bool]]:
    """Turns SIGTERM and the first SIGINT into a flag, so that the loop can finish a step and save.

    To be used in the main thread, around the loop.

    Args:
        agree: function that turns the wish of any process to stop into the answer of all; see
            `heartbeat`.

    Yields:
        A function that tells whether a signal has come; with `agree`, to any process. All processes
        must then call it equally often.

    Raises:
        KeyboardInterrupt: at a SIGINT that is not the first signal, as the user insists.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if number == signal.SIGINT:
            # The same Ctrl-C may have ended the reader of the output. `sys.stderr` is avoided: the
            # signal may have come while it was being written to.
            with suppress(OSError):
                # On a terminal the message takes the line of the progress bar, which moves down.
                begin = CLEAR_LINE if os.isatty(STANDARD_ERROR) else b""
                os.write(STANDARD_ERROR, begin + MESSAGE)

    previous = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield lambda: agree(bool(received))
    finally:
        for number, handler in previous.items():
            # None stands for a handler that was not set from Python. It cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

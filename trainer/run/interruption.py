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
def interruption(*, several: bool = False) -> Iterator[Callable[[int], bool]]:
    """Turns SIGTERM and the first SIGINT into a flag, so that the loop can finish a step and save.

    To be used in the main thread, around the loop. Yields a function that tells after a step
    whether a signal has come to any process; all must call it for the same steps, and get the same
    answer. If `several` share the run, jax's preemption service, which `trainer.processes.together`
    starts, has the handler of SIGTERM.
    """
    received: list[int] = []
    agreed = False

    def is_interrupted(step: int) -> bool:
        from jax.experimental import multihost_utils

        nonlocal agreed
        if not several:
            return bool(received)
        # jax answers True for one step alone. When orbax saves, it asks jax for the same step.
        agreed = agreed or multihost_utils.reached_preemption_sync_point(step)
        return agreed

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
            if several:
                signal.raise_signal(signal.SIGTERM)

    signals = (signal.SIGINT,) if several else SIGNALS
    previous = {number: signal.signal(number, note) for number in signals}
    try:
        yield is_interrupted
    finally:
        for number, handler in previous.items():
            # None stands for a handler that was not set from Python. It cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

"""Work that goes on beside training, and how its errors are found out."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

POLL_SECONDS = 1.0

# Causes for which space must be freed: by number, and as tensorstore and XLA name them.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_NAMES = ("RESOURCE_EXHAUSTED", "No space left", "quota exceeded", "File too large")


class OrbaxLog(logging.Filter):
    """Keeps the log of orbax off the terminal, and remembers the last error in it.

    orbax logs a failure in each thread that sees it, with its traceback, and raises it as well. It
    also warns of old checkpoints that a kill left half deleted, which the next save removes.
    """

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:
            return True
        if record.levelno >= logging.ERROR and record.exc_info:
            self.error = record.exc_info[1]
        return False


orbax_log = OrbaxLog()


def quiet_unread_errors(record: logging.LogRecord) -> bool:
    """Keeps errors off the terminal that orbax leaves behind when it has raised another.

    It reads arrays beside each other. If one cannot be read it raises, and asyncio complains of the
    others later on.
    """
    message = record.getMessage()
    return "orbax" not in message and "tensorstore" not in message


def listen_to_orbax() -> None:
    """Sets up both filters; once or many times."""
    logging.getLogger("absl").addFilter(orbax_log)
    logging.getLogger("asyncio").addFilter(quiet_unread_errors)


def of_space(error: BaseException) -> bool:
    """Whether a save has failed because a disk is full, or a limit on its use is reached."""
    is_full = isinstance(error, OSError) and error.errno in FULL
    return is_full or any(name in str(error) for name in FULL_NAMES)


def finish(result: Callable[..., object]) -> None:
    """Waits until a save is done or has failed.

    If one of several processes cannot write its part, orbax would raise only after 20 minutes: that
    process waits for the others in one place, and they wait for it in another.
    """
    while True:
        since = time.monotonic()
        try:
            result(timeout=POLL_SECONDS)
            return
        except TimeoutError:
            if orbax_log.error is not None:
                raise orbax_log.error from None
            if time.monotonic() - since < POLL_SECONDS:  # The timeout of the save itself.
                raise


def in_background(work: Callable[[], dict[str, float]]) -> Future[dict[str, float]]:
    """Calls a function in a thread which the end of the program does not wait for."""
    future: Future[dict[str, float]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future

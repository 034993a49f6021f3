"""How a program ends on an error."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from startrail_jax.errors import UserError
from trainer.printable import printable

CTRL_C_STATUS = 130


@contextmanager
def exit_on_user_errors() -> Iterator[None]:
    """Ends the program with status 1 and the message alone when a `UserError` reaches it.

    Ctrl-C ends it with status 130; every other error is a fault of the program or of a library, and
    keeps its traceback. A program whose checkpoint could not be saved ends at once: threads of
    orbax may wait for minutes for a folder that does not exist.
    """
    try:
        yield
    except KeyboardInterrupt:
        # Threads that still write may keep the program a while; one more Ctrl-C then ends it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with suppress(OSError):
            print(file=sys.stderr)
        sys.exit(CTRL_C_STATUS)
    except Exception as error:
        if getattr(error, "ends_at_once", False):
            end_now(describe(error))
        if not isinstance(error, UserError):
            raise
        sys.exit(printable(describe(error)))


def describe(error: BaseException) -> str:
    """The type and message of an error, after its traceback unless the error is for the user."""
    if isinstance(error, KeyboardInterrupt):
        return type(error).__name__
    if isinstance(error, UserError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def end_now(message: str) -> NoReturn:
    """Prints a message and ends this process with status 1, from any thread. Nothing of what Python
    does when it exits is done: jax would wait there for processes that hang."""
    # A progress bar that was cut short has hidden the cursor.
    if sys.stdout.isatty():
        print("\x1b[?25h", end="")
    try:
        sys.stdout.flush()
        print(printable(message), file=sys.stderr, flush=True)
    finally:
        os._exit(1)

"""How a program ends on an error that says by itself what to do."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def exit_on_own_errors() -> Iterator[None]:
    """Ends the program with status 1 and the message alone, if our own code raised the error.

    What comes out of a library keeps its traceback. One of several processes does not wait for the
    others, which may never come to their ends: on Ctrl-C neither.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        if _is_one_of_several():
            end_now(describe(error))
        if not isinstance(error, Exception) or not _is_own(error):
            raise
        sys.exit(describe(error))


def describe(error: BaseException) -> str:
    """The message alone, if our own code raised the error; else with its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return type(error).__name__
    if _is_own(error):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def end_now(message: str) -> NoReturn:
    """Prints a message and ends this process with status 1, from any thread.

    Nothing of what Python does at an end: jax would wait there for processes that hang.
    """
    # A bar that was cut short has hidden the cursor.
    if sys.stdout.isatty():
        print("\x1b[?25h", end="")
    try:
        sys.stdout.flush()
        print(message, file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _is_own(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    path = Path(frames[-1].filename)
    return REPOSITORY in path.parents and "site-packages" not in path.parts


def _is_one_of_several() -> bool:
    # Errors of the command line come before jax is imported.
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()

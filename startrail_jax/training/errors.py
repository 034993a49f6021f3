"""How a program ends on an error that says by itself what to do."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def exit_on_own_errors() -> Iterator[None]:
    """Ends the program with status 1 and the message alone, if our own code raised the error.

    What comes out of a library keeps its traceback.
    """
    try:
        yield
    except Exception as error:
        *_, raised_in = traceback.extract_tb(error.__traceback__)
        path = Path(raised_in.filename)
        if REPOSITORY not in path.parents or "site-packages" in path.parts:
            raise
        sys.exit(f"{type(error).__name__}: {error}")

"""Commands that a program advises, as they can be typed where it was started. Imports no jax."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def command(program: str, *arguments: str | Path) -> str:
    """A command that runs a program by the same Python, which need not be that of the shell."""
    words = [_from_here(CHECKOUT / program)] if program.endswith(".py") else ["-m", program]
    return shlex.join([_python(), *words, *map(str, arguments)])


def _python() -> str:
    """The Python that runs this, by its shortest name."""
    for name in ("python", "python3"):
        if shutil.which(name) == sys.executable:
            return name
    return _from_here(Path(sys.executable))


def _from_here(path: Path) -> str:
    """A path relative to the current folder if it lies below, else as it is."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)

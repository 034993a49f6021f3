"""The lines of metrics.jsonl, of which any may be damaged. Imports no jax."""

from __future__ import annotations

import json
from pathlib import Path

from trainer import durable


def drop_after(path: Path, last_step: int) -> int:
    """Keeps the lines of a metrics file up to a step, and drops one that a kill cut short.

    The file is on the disk when this returns.

    Returns:
        The number of other lines that cannot be read, as after a power failure, and are dropped.
    """
    if not path.exists():
        return 0
    part = path.with_name(f"{path.name}.part")
    broken = 0
    with path.open(errors="replace") as old, part.open("w") as new:
        for line in old:
            step = step_of_line(line)
            if step is None:
                # A kill leaves no NULs; a power failure does.
                broken += line.endswith("\n") or "\0" in line
            elif step <= last_step and line.endswith("\n"):
                new.write(line)
    durable.flush(part)
    durable.rename(part, path)
    return broken


def step_of_line(line: str) -> int | None:
    """The step of a line of a metrics file; None if the line cannot be read."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if type(step) is int else None

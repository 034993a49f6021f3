"""What crash.py and failures.py share: how a check ends them, and the folder of a run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


class CheckFailed(Exception):
    """Something that a benchmark checks does not hold."""


def exit_status(benchmark: Callable[[Path], object]) -> int:
    """Runs a benchmark in a folder of its own: 1 if something that it checks does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            benchmark(Path(folder))
        except CheckFailed as failure:
            print(f"FAILED: {failure}", file=sys.stderr)
            return 1
    return 0


def newest_whole(run_dir: Path) -> int:
    """The step of the newest whole checkpoint; 0 if there is none."""
    return max((int(name) for name in _checkpoints(run_dir) if name.isdecimal()), default=0)


def unfinished(run_dir: Path) -> tuple[str, ...]:
    """Names of the folders of unfinished checkpoints: only a whole one is named by its step."""
    return tuple(name for name in _checkpoints(run_dir) if not name.isdecimal())


def _checkpoints(run_dir: Path) -> list[str]:
    folder = run_dir / "checkpoints"
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.exists() else []

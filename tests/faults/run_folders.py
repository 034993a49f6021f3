"""What crash.py and failures.py share: the environment of train.py, and the folder of its run."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


class CheckFailed(Exception):
    """Something that a benchmark checks does not hold."""


def environment(compiled: Path) -> dict[str, str]:
    """The environment of a training process on simulated devices.

    Args:
        compiled: folder for compiled programs. The first process fills it, which makes the start of
            all others a few times faster.
    """
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }


def newest_whole(run_dir: Path) -> int:
    """The step of the newest whole checkpoint; 0 if there is none."""
    return max((int(name) for name in _checkpoints(run_dir) if name.isdecimal()), default=0)


def unfinished(run_dir: Path) -> tuple[str, ...]:
    """Names of the folders of unfinished checkpoints: only a whole one is named by its step."""
    return tuple(name for name in _checkpoints(run_dir) if not name.isdecimal())


def _checkpoints(run_dir: Path) -> list[str]:
    folder = run_dir / "checkpoints"
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.exists() else []

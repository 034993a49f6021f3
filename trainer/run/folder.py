"""The folder of a run: who trains in it, with which mesh and versions, and its metrics.

Imports no jax.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError
from trainer import durable
from trainer.config import ROLES, TrainConfig
from trainer.durable import replace_text
from trainer.errors import RunError, StorageError
from trainer.printable import say
from trainer.run.commands import CHECKOUT
from trainer.run.settings import check_same_run

FROZEN_FOLDER = "frozen"
"""What the checkpoints of a run with frozen weights lack: those weights, once."""
KEPT_FOLDER = "pretrained"
"""What an export needs of the pretrained model with which a run began."""
METRICS_FILE = "metrics.jsonl"
CHECKSUMS_FILE = "checksums.json"
"""In the folder of a checkpoint."""
LOCK_FILE = "lock"
MESH_FILE = "mesh.json"
VERSIONS_FILE = "versions.json"

PACKAGES = ("startrail-jax", "jax", "jaxlib", "flax", "optax")
COMMIT = "commit"


@contextmanager
def open_run(config: TrainConfig, *, writes: bool = True) -> Iterator[Path]:
    """Makes or reopens the folder of a run and keeps other programs from training in it.

    The config is compared with config.json if there is a checkpoint. Without `writes`, which only
    the first process has, nothing is locked or written.
    """
    folder = config.run_dir
    require_writable(folder)
    with locked(folder) if writes else nullcontext():
        check_same_run(config)
        yield folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other programs from training in a folder."""
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            # Until the file is closed, which the end of the process does too, however it ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunError(
                f"One program at a time may train in a folder; got {folder}, where process "
                f"{file.read()} does. Wait for it, stop it, or use another --run-dir."
            ) from error
        except OSError as error:
            if error.errno not in durable.NO_LOCKS:
                raise
            warnings.warn(
                f"The file system of {folder} has no locks: nothing keeps a second program out.",
                stacklevel=2,
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def require_writable(folder: Path) -> None:
    """Makes a folder if it does not exist, and writes to it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns an error of the operating system, as of a full disk, into one that says what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"The folder of a run must be one that can be written; got {folder}: "
            f"{error.strerror}. Fix that, or use another --run-dir."
        ) from error


# The mesh ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FormerMesh:
    """The mesh with which a run trained last."""

    degrees: dict[str, int]
    order: tuple[str, ...] | None = None
    """The order of the axes over the nodes, if the planner chose it."""

    def __str__(self) -> str:
        planned = "" if self.order is None else f", planned in the order {' '.join(self.order)}"
        return f"{self.degrees}{planned}"


def save_degrees(
    run_dir: Path, degrees: dict[str, int], order: Sequence[str] | None = None
) -> None:
    """Notes in the folder of a run with which mesh it trains now: see `FormerMesh`."""
    planned = {} if order is None else {"order": list(order)}
    replace_text(run_dir / MESH_FILE, json.dumps({"degrees": degrees, **planned}))


def read_mesh(run_dir: Path) -> FormerMesh | None:
    """The mesh with which a run trained last; None if there is no note of it."""
    path = run_dir / MESH_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
        degrees, order = dict(values["degrees"]), values.get("order")
        if all(type(x) is int and x >= 1 for x in degrees.values()) and (
            order is None or sorted(order) == sorted(ROLES)
        ):
            return FormerMesh(degrees, None if order is None else tuple(order))
        wrong = None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        wrong = error
    raise InputError(
        f"{path} must hold the degrees of a run, positive integers by their names. Delete it, and "
        "the run goes on with degrees chosen anew."
    ) from wrong


# Versions ----------------------------------------------------------------------------------------


@functools.cache
def current_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on, and the commit of the checkout."""
    versions = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if commit := _commit(CHECKOUT):
        versions[COMMIT] = commit
    return versions


def record_versions(run_dir: Path, step: int) -> str | None:
    """Notes in the folder of a run which versions train it from a step on, and only if they change.
    Returns a line for the log if the steps before were done with others."""
    path = run_dir / VERSIONS_FILE
    now, before, entries = current_versions(), None, []
    try:
        if step and path.exists():
            entries = list(json.loads(path.read_bytes()))
            before = dict(entries[-1]["versions"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        entries = []
        say(f"WARNING: {path} is damaged ({type(error).__name__}: {error}): it is begun anew")
    if before == now:
        return None
    entries.append({"after_step": step, "versions": now})
    replace_text(path, json.dumps(entries, indent=2))
    if before is None:
        return None
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    changes = (f"{x} {before.get(x, 'unknown')} there, {now.get(x, 'unknown')} now" for x in names)
    return f"NOTE: other versions than those that the run began with: {'; '.join(changes)}"


def _commit(folder: Path) -> str | None:
    """The commit of a checkout, with "-dirty" if files are changed; None if it is not one."""
    if not (folder / ".git").exists():  # git would find a repository around the folder.
        return None
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


# Metrics -----------------------------------------------------------------------------------------


def drop_after(path: Path, last_step: int) -> int:
    """Keeps the lines of a metrics file up to a step, and drops one that a kill cut short. The file
    is on the disk when this returns the number of other lines that cannot be read, as after a power
    failure, and are dropped."""
    if not path.exists():
        return 0
    part = path.with_name(f"{path.name}.part")
    broken = 0
    with (
        path.open(encoding="utf-8", errors="replace") as old,
        part.open("w", encoding="utf-8") as new,
    ):
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


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, each with its "step". Unreadable ones are left out: a run that
    trains may be writing the last one."""
    path = run_dir / METRICS_FILE
    lines = (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    )
    return [json.loads(line) for line in lines if step_of_line(line) is not None]


def step_of_line(line: str) -> int | None:
    """The step of a line of a metrics file; None if the line cannot be read."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if type(step) is int else None

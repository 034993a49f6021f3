"""Reads one checkpoint, and finds out whether it is whole: all processes come to one answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Shaped
from orbax.checkpoint import v1 as ocp

from startrail_jax.errors import InputError, UserError
from trainer.checkpoints.checksums import Checksums, describe, digest

LISTED_DIFFERENCES = 3
LISTS_BEFORE_NONE = 3

# The folder of a step holds one tree: the arrays by name, which can be read without the classes of
# the program that saved them, and the position in the data as a string.
ARRAYS = "arrays"
DATA = "data"

# Causes that a damaged checkpoint does not have: as tensorstore and XLA name them, and as Python.
PASSING_CAUSES = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
PASSING_ERRORS = (PermissionError, MemoryError)

Result = TypeVar("Result")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint could not be saved or read. Earlier whole checkpoints are intact."""

    def __init__(self, message: str, *, ends_at_once: bool = False) -> None:
        """Takes the message, and whether the program must not wait for its threads."""
        super().__init__(message)
        self.ends_at_once = ends_at_once


class DamagedError(CheckpointError):
    """A checkpoint does not hold what was saved."""


def whole_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, ascending: no other is named by its step."""
    # While a folder is listed, a run may save a new checkpoint and then remove the old one, so that
    # the list has neither.
    for _ in range(LISTS_BEFORE_NONE):
        names = [path.name for path in folder.glob("*") if path.is_dir()]
        if steps := [int(name) for name in names if name.isascii() and name.isdecimal()]:
            return sorted(steps)
    return []


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with the names under which they are saved: "model/norm/scale"."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def newest_first(folder: Path) -> list[int]:
    """The steps of the whole checkpoints that process 0 sees, descending, in all processes."""
    steps = whole_steps(folder)[::-1]
    if jax.process_count() == 1:
        return steps
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    mine = np.array((steps + [0] * count)[:count], np.int32)
    return [int(step) for step in multihost_utils.broadcast_one_to_all(mine)]


def read_checkpoint(
    path: Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct] | Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    owner: str,
    settings: Mapping[str, str],
    advice: str,
) -> tuple[dict[str, Shaped[Array, "..."]], str]:
    """Reads a checkpoint and compares it with its checksums. All processes must call it.

    Args:
        path: folder of the checkpoint, whose name is its step.
        wanted: the arrays to read, with shardings; or a function that chooses them from a mapping
            of all names, and then the others are not read.
        owner: what the arrays must belong to, for the message.
        settings: settings to compare with those that the checkpoint was saved with, as flags.
        advice: what to do if the arrays or the settings are others.

    Returns:
        The arrays by name, and the position in the data.

    Raises:
        DamagedError: if it is damaged.
        CheckpointError: if it cannot be read, although it may be whole.
        ValueError: if its arrays or its settings are others.
    """
    saved, checksums = _together(path, lambda: (_read_metadata(path), Checksums.read(path)))
    listed = {name: kind for name, (kind, _) in checksums.arrays.items()}
    if checksums.step != int(path.name):
        raise _damaged(path, f"it was saved as step {checksums.step}")
    if listed != {name: describe(x) for name, x in saved.items()}:
        raise _damaged(path, "its arrays are not those that were saved")
    is_part = callable(wanted)
    chosen = wanted(saved) if callable(wanted) else wanted
    kinds = {name.split("/")[0] for name in chosen}
    there = {name: x for name, x in saved.items() if not is_part or name.split("/")[0] in kinds}
    if differences := _differences(there, chosen):
        raise InputError(
            f"The checkpoint must be of {owner}; got {path}, "
            f"{_list_differences(differences)}\n{advice}"
        )
    _compare_settings(path, checksums.settings, settings, advice)
    arrays, data = _together(path, lambda: _load(path, chosen, partial=is_part))
    if digest(data) != checksums.data:
        raise _damaged(path, "the checksum of its position in the data is another")
    # This is a program of all processes, and their answer is the same.
    differing = _together(path, lambda: checksums.differing(arrays))
    if differing:
        more = f" and {len(differing) - 1} more arrays" if differing[1:] else ""
        raise _damaged(path, f"the checksum of {differing[0]}{more} is another")
    return arrays, data


def _together(path: Path, read: Callable[[], Result]) -> Result:
    """Calls a function in all processes, and raises an error in all if it fails in one."""
    result: Any = None
    error: Exception | None = None
    try:
        result = read()
    except Exception as caught:  # orbax, tensorstore and threads raise many types of errors.
        error = caught
    passes = isinstance(error, PASSING_ERRORS) or any(x in str(error) for x in PASSING_CAUSES)
    outcome = 0 if error is None else 2 if passes else 1
    if jax.process_count() > 1:
        outcome = int(np.max(multihost_utils.process_allgather(np.int32(outcome))))
    if not outcome:
        return result
    why = "another process could not read it" if error is None else _shorten(error)
    if outcome == 1:
        raise _damaged(path, why) from error
    raise CheckpointError(
        f"The checkpoint {path} may be whole, but {why}. Correct that; then the same command goes "
        "on from it."
    ) from error


def _shorten(error: Exception) -> str:
    text = str(error)
    known = isinstance(error, InputError) and text.startswith("its ")
    return text if known else f"it could not be read ({type(error).__name__})"


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(f"The checkpoint {path} is damaged: {why}.")


def _alone() -> ocp.Context:
    """orbax waits for no other process: one that cannot read its part says so in `_together`."""
    context = ocp.Context()
    if jax.process_count() > 1:
        process = jax.process_index()
        context.multiprocessing.primary_host = None
        context.multiprocessing.active_processes = {process}
        context.multiprocessing.barrier_sync_key_prefix = f"process_{process}"
    return context


def _read_metadata(path: Path) -> Mapping[str, Any]:
    """Shape and type of every array of a checkpoint, by name."""
    with _alone():
        saved: Any = ocp.metadata(str(path)).metadata
    arrays = saved[ARRAYS]
    for array in arrays.values():
        describe(array)
    return arrays


def _load(path: Path, wanted: Mapping[str, Any], *, partial: bool) -> tuple[dict[str, Any], str]:
    context = _alone()
    context.pytree.loading.partial_load = partial
    with context:
        restored: Any = ocp.load(str(path), {ARRAYS: dict(wanted), DATA: str})
    return {name: restored[ARRAYS][name] for name in wanted}, restored[DATA]


def _compare_settings(
    path: Path, saved: Mapping[str, str], now: Mapping[str, str], advice: str
) -> None:
    # A setting that only one of them has came with another version of the program.
    changed = [name for name in now if name in saved and saved[name] != now[name]]
    if changed:
        lines = "\n".join(f"  {saved[name]} there, {now[name]} now" for name in changed)
        raise InputError(
            f"The settings must be those that the checkpoint was saved with; got {path}, with "
            f"others:\n{lines}\nIf they were not changed, the config.json of the run is damaged: "
            f"correct it. {advice}"
        )


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for every array that is missing in one of the trees or has another shape or type."""

    def kind(leaves: Mapping[str, Any], name: str) -> str:
        return describe(leaves[name]) if name in leaves else "missing"

    return [
        f"{name}: {kind(saved, name)} in the checkpoint, {kind(wanted, name)} now"
        for name in {**wanted, **saved}
        if kind(saved, name) != kind(wanted, name)
    ]


def _list_differences(differences: list[str]) -> str:
    listed = "\n".join(f"  {line}" for line in differences[:LISTED_DIFFERENCES])
    return f"which differs in {len(differences)} arrays:\n{listed}"

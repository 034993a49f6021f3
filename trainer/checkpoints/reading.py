"""Reads checkpoints, and finds out which are whole: all processes come to one answer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
from jaxtyping import Array, PyTree, Shaped
from orbax.checkpoint import v1 as ocp

from startrail_jax.errors import InputError, UserError
from trainer.checkpoints.checksums import Checksums, describe, digest
from trainer.processes import gather

LISTED_DIFFERENCES = 3
LISTS_BEFORE_NONE = 3

# The folder of a step holds one tree: the arrays by name, which can be read without the classes of
# the program that saved them, and the position in the data as a string.
ARRAYS = "arrays"
DATA = "data"
# Fields of the state; the names of its arrays begin with them. The frozen weights lie elsewhere.
WEIGHTS, AVERAGE = "weights", "average"
FROZEN = "frozen"

# Causes that a damaged checkpoint does not have: as tensorstore and XLA name them, and as Python.
PASSING_CAUSES = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
PASSING_ERRORS = (PermissionError, MemoryError)

Result = TypeVar("Result")


class OrbaxLog(logging.Filter):
    """Keeps the log of orbax off the terminal, and remembers the last error in it. orbax logs a
    failure in each thread that sees it, and raises it as well; and it warns of old checkpoints that
    a kill left half deleted, which the next save removes."""

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:
            return True
        if record.levelno >= logging.ERROR and record.exc_info:
            self.error = record.exc_info[1]
        return False


_OF_OLDER_RUNS = ("--model.windows None", "--model.rope.bases None")


def _is_of_others(record: logging.LogRecord) -> bool:
    """Not an error that orbax leaves behind when it has raised another: it reads several arrays
    beside each other, and asyncio complains of the others later on."""
    message = record.getMessage()
    return "orbax" not in message and "tensorstore" not in message


orbax_log = OrbaxLog()
logging.getLogger("absl").addFilter(orbax_log)
logging.getLogger("asyncio").addFilter(_is_of_others)


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
    return gather(whole_steps(folder)[::-1])[0]


def read_newest(
    folder: Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct] | Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    owner: str,
    settings: Mapping[str, str] | None,
    advice: str,
    otherwise: str,
    step: int | None = None,
    strict: bool = False,
) -> tuple[int, dict[str, Shaped[Array, "..."]], str, dict[int, DamagedError]]:
    """Reads the newest checkpoint that is whole. All processes must call it.

    `wanted` are arrays with shardings, or a function that chooses them from all names. `owner` is
    what they must belong to, for the message; `step` is the only one to read (None for any).
    Returned are its step, its arrays by name in the order of `wanted`, its position in the data,
    and the newer ones that are damaged. A run may be adding checkpoints to the folder.
    """
    damaged: dict[int, DamagedError] = {}
    while left := [x for x in newest_first(folder) if x not in damaged and step in (None, x)]:
        found, path = left[0], folder.resolve() / str(left[0])
        try:
            arrays, data = _read_checkpoint(
                path, wanted, owner=owner, settings=settings or {}, advice=advice
            )
            newer = {bad: error for bad, error in damaged.items() if bad > found}
            return found, arrays, data, newer
        except DamagedError as error:
            # Otherwise the run has meanwhile saved a newer checkpoint and deleted this one.
            if found in newest_first(folder):
                damaged[found] = error
                if strict and left[1:]:
                    otherwise = (
                        "Without --checkpoint.strict, the same command goes on from step "
                        f"{left[1]} if that is whole."
                    )
                if strict:
                    break
    if damaged:
        raise CheckpointError(f"{' '.join(map(str, damaged.values()))} {otherwise}")
    there = ", ".join(map(str, newest_first(folder))) or "none"
    raise CheckpointError(
        f"There must be a checkpoint to read{'' if step is None else f', of step {step}'}; got "
        f"{there} in {folder}. {otherwise}"
    )


def restore_weights(
    folder: Path,
    weights: PyTree[jax.ShapeDtypeStruct],
    settings: Mapping[str, str] | None = None,
    *,
    step: int | None = None,
    kind: str | None = None,
    note: Callable[[str], object] = warnings.warn,
) -> tuple[PyTree[Shaped[Array, "..."]], int]:
    """Reads only the weights of a checkpoint (None for the newest whole one), and tells its step.

    They are the average if the run keeps one, or arrays whose names begin with `kind`. It writes
    nothing and touches no unfinished checkpoint, so the run may still be training. `weights` has
    shapes, types and shardings; `settings`, as flags, must be those of the checkpoint.
    """

    def choose(saved: Mapping[str, Any]) -> Mapping[str, Any]:
        of_average = any(name.startswith(f"{AVERAGE}/") for name in saved)
        return dict(named_leaves({kind or (AVERAGE if of_average else WEIGHTS): weights}))

    found, arrays, _, damaged = read_newest(
        folder,
        choose,
        owner="the model that config.json beside it says",
        settings=settings,
        advice="Give the folder of a run whose files are its own.",
        otherwise="Wait for the next one of the run, or give another folder or step.",
        step=step,
    )
    for error in damaged.values():
        note(f"WARNING: {error} The checkpoint of step {found} is used.")
    return jax.tree.unflatten(jax.tree.structure(weights), arrays.values()), found


def restore_frozen(folder: Path, shapes: Any, *, note: Callable[[str], object]) -> Any:
    """Reads what `checkpoint.save_frozen` has saved; None if there is nothing."""
    if shapes is None:
        return None
    if not (folder / "0").is_dir():
        raise CheckpointError(
            f"The frozen weights of a run must be in its folder; got none in {folder}. "
            "Copy them from where the run was, or begin another one."
        )
    return restore_weights(folder, shapes, kind=FROZEN, note=note)[0]


def _read_checkpoint(
    path: Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct] | Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    owner: str,
    settings: Mapping[str, str],
    advice: str,
) -> tuple[dict[str, Shaped[Array, "..."]], str]:
    """Reads a checkpoint, whose name is its step, and compares it with its checksums."""
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
    kind = [{name: describe(x) for name, x in arrays.items()} for arrays in (there, chosen)]
    lines = [
        f"  {name}: {kind[0].get(name, 'missing')} in the checkpoint, "
        f"{kind[1].get(name, 'missing')} now"
        for name in {**chosen, **there}
        if kind[0].get(name) != kind[1].get(name)
    ]
    if lines:
        listed = "\n".join(lines[:LISTED_DIFFERENCES])
        raise InputError(
            f"The checkpoint must be of {owner}; got {path}, which differs in {len(lines)} arrays:"
            f"\n{listed}\n{advice}"
        )
    # A setting that only one of them has came with another version of the program.
    # Two settings were None where another one said the same for all layers.
    before = {x: flag for x, flag in checksums.settings.items() if flag not in _OF_OLDER_RUNS}
    changed = [name for name in settings if before.get(name, settings[name]) != settings[name]]
    if changed:
        listed = "\n".join(f"  {before[name]} there, {settings[name]} now" for name in changed)
        raise InputError(
            f"The settings must be those that the checkpoint was saved with; got {path}, with "
            f"others:\n{listed}\nIf they were not changed, the config.json of the run is damaged: "
            f"correct it. {advice}"
        )
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
    outcome = max(gather(0 if error is None else 2 if passes else 1))
    if not outcome:
        return result
    why = f"it could not be read ({type(error).__name__})"
    if error is None:
        why = "another process could not read it"
    elif isinstance(error, InputError) and str(error).startswith("its "):
        why = str(error)
    if outcome == 1:
        raise _damaged(path, why) from error
    raise CheckpointError(
        f"The checkpoint {path} may be whole, but {why}. Correct that; then the same command goes "
        "on from it."
    ) from error


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

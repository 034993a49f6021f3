"""Checkpoints of a run: saved while training goes on, restored onto any mesh."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree, Shaped
from orbax.checkpoint import v1 as ocp

from startrail_jax.errors import InputError, UserError
from trainer.run.folder import require_writable

LISTED_DIFFERENCES = 3
POLL_SECONDS = 1.0

# The folder of a step holds one tree, so that either all of it is whole or nothing: the arrays by
# name, which can be read without the classes of the program that saved them, and the position in
# the data as a string.
ARRAYS = "arrays"
DATA = "data"
# Fields of the state; the names of its arrays begin with them.
WEIGHTS = "weights"
AVERAGE = "average"


class CheckpointError(UserError, RuntimeError):
    """A checkpoint could not be saved or read. Earlier whole checkpoints are intact."""


class Checkpoints:
    """The newest checkpoints of a run, with a folder for each step. A context manager.

    After a save that failed it cannot be used any more, since threads may still be writing. A new
    instance clears what they leave.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Opens or makes `folder`, and removes unfinished checkpoints that a killed run left.

        Args:
            folder: the folder of the checkpoints, which all processes of a run share.
            keep: number of checkpoints to keep. The oldest is removed when a new one is whole.

        Raises:
            OSError: if the folder cannot be written.
        """
        self._folder = folder.resolve()
        self._keep = keep
        self._saving: tuple[int, ocp.AsyncResponse[bool]] | None = None
        self._failed = False
        require_writable(self._folder)
        logging.getLogger("absl").addFilter(_orbax_log)
        newest: Any = ocp.training.preservation_policies.LatestN(keep)
        self._checkpointer = ocp.training.Checkpointer(
            str(self._folder),
            preservation_policy=newest,
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for the save in progress.

        Raises:
            CheckpointError: if that save failed.
        """
        self.wait()
        if not self._failed:  # Otherwise closing would raise the same error again.
            self._checkpointer.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending. A checkpoint being saved does not count."""
        return _whole_steps(self._folder)

    @property
    def latest(self) -> int | None:
        """The last step with a whole checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def begin_after(self) -> int:
        """The step that a run goes on from, 0 at its beginning. All processes must call it.

        Raises:
            CheckpointError: if this process does not see the folder that process 0 sees.
        """
        step, is_first = self.latest or 0, jax.process_index() == 0
        mark = np.int32(secrets.randbits(31))
        own_mark = self._mark(mark)
        if is_first:
            own_mark.touch()
        seen = self._mark(multihost_utils.broadcast_one_to_all(mark)).exists()
        first_step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        if is_first:  # The second broadcast has shown that all processes have looked.
            own_mark.unlink()
        if not seen or step != first_step:
            here = f"step {step} as the newest here, and step {first_step} in process 0"
            raise CheckpointError(
                "All processes must see the same folder of checkpoints; got "
                f"{here if seen else 'another one in process 0'}, in {self._folder}. Use a "
                "--run-dir on a file system that all machines share."
            )
        return step

    def _mark(self, number: Any) -> Path:
        return self._folder / f"seen_by_all_{int(number)}"

    def check_space(self, state: PyTree[jax.ShapeDtypeStruct]) -> None:
        """Raises an error before training if its checkpoints would fill the disk.

        Args:
            state: shapes and types of the state that will be saved.

        Raises:
            CheckpointError: if there is no room for `keep` checkpoints and one more, which is
                written before the oldest is removed.
        """
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        missing = max(self._keep + 1 - len(self.steps), 1)
        free = shutil.disk_usage(self._folder).free
        if free < missing * size:
            raise CheckpointError(
                f"There must be space for {missing} more checkpoints of {size / 1e9:.3g} GB each "
                f"in {self._folder}; got {free / 1e9:.3g} GB free. Free some, lower "
                "--checkpoint.keep, or use a --run-dir on another disk."
            )

    def save(
        self, step: int, state: PyTree[Shaped[Array, "..."]], data_state: Mapping[str, Any]
    ) -> None:
        """Copies the state off the devices and writes it in the background.

        The arrays may be donated or deleted as soon as this returns. It waits for an earlier save,
        and does nothing if the step is saved already.

        Args:
            step: number of steps that are done.
            state: the training state, with any sharding.
            data_state: position in the data, as values of JSON; the same on all processes.

        Raises:
            CheckpointError: if the earlier save failed.
        """
        self.wait()
        if step in self.steps:
            return
        tree = {ARRAYS: dict(_named_leaves(state)), DATA: json.dumps(data_state)}
        _orbax_log.error = None
        try:
            response = self._checkpointer.save_async(step, tree, force=True)
        except OSError as error:
            raise self._save_failed(step, error) from error
        assert response is not None, "force=True saves whatever the policy"
        self._saving = (step, response)

    def wait(self) -> None:
        """Waits for the save in progress, if there is one.

        Raises:
            CheckpointError: if the save failed.
        """
        if self._saving is None:
            return
        (step, response), self._saving = self._saving, None
        try:
            _finish(response.result)
        except Exception as error:  # Threads that write raise many types of errors.
            raise self._save_failed(step, error) from error

    def restore(
        self, state: PyTree[jax.ShapeDtypeStruct]
    ) -> tuple[PyTree[Shaped[Array, "..."]], dict[str, Any]]:
        """Reads the latest checkpoint, after it has waited for a save in progress.

        Args:
            state: shapes, types and shardings to restore to. The mesh may differ from the one that
                the checkpoint was saved from.

        Returns:
            The state, a tree like `state`; and the position in the data.

        Raises:
            CheckpointError: if there is no checkpoint, it cannot be read, or that save failed.
            ValueError: if it belongs to another model or optimizer.
        """
        self.wait()
        step = self.latest
        if step is None:
            raise CheckpointError(
                f"There must be a checkpoint to restore; got none in {self._folder}. "
                "Start a new run."
            )
        wanted = dict(_named_leaves(state))
        saved = self._read_metadata(step)
        differences = _differences(saved, wanted)
        if differences:
            raise InputError(
                f"The checkpoint must be of this model and optimizer; got {self._path(step)}, "
                f"{_list_differences(differences)}\n"
                "Use another --run-dir for a new run, or the flags of that run: they are in its "
                "config.json."
            )
        try:
            restored = self._checkpointer.load(step, {ARRAYS: wanted, DATA: str})
            data_state = json.loads(restored[DATA])
        except Exception as error:  # As in `wait`.
            raise self._unreadable(step, error) from error
        leaves = [restored[ARRAYS][name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(state), leaves), data_state

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _read_metadata(self, step: int) -> Mapping[str, Any]:
        """Shape and type of every array of a checkpoint, by name."""
        try:
            return self._checkpointer.metadata(step).metadata[ARRAYS]
        except Exception as error:  # As in `wait`.
            raise self._unreadable(step, error) from error

    def _save_failed(self, step: int, error: Exception) -> CheckpointError:
        self._failed = True
        latest = self.latest
        intact = (
            "There is no earlier one."
            if latest is None
            else f"The last whole one, of step {latest}, is intact."
        )
        return CheckpointError(
            f"The checkpoint of step {step} could not be saved: {error}. {intact} Free space in "
            f"{self._folder} or fix the error above; then the same command goes on from "
            f"step {latest or 0}."
        )

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        earlier = max((other for other in self.steps if other < step), default=0)
        return CheckpointError(
            f"The checkpoint {self._path(step)} could not be read ({type(error).__name__}). If it "
            f"is damaged, delete that folder: the same command then goes on from step {earlier}."
        )


def restore_weights(
    folder: Path, weights: PyTree[jax.ShapeDtypeStruct]
) -> tuple[PyTree[Shaped[Array, "..."]], int]:
    """Reads only the weights of the latest checkpoint: their average if the run keeps one.

    It writes nothing and touches no unfinished checkpoint, so the run may still be training.

    Args:
        folder: the folder of the checkpoints.
        weights: shapes, types and shardings to restore to.

    Returns:
        A tree like `weights`; and the step at which it was saved.

    Raises:
        CheckpointError: if there is no checkpoint, or it cannot be read.
        ValueError: if it belongs to another model.
    """
    logging.getLogger("absl").addFilter(_orbax_log)
    steps = _whole_steps(folder)
    if not steps:
        raise CheckpointError(
            f"There must be a checkpoint to read; got none in {folder}. Wait for the first one of "
            "the run, or give the folder of another."
        )
    partial = ocp.options.PyTreeOptions(
        loading=ocp.options.PyTreeOptions.Loading(partial_load=True)
    )
    path = str(folder.resolve() / str(steps[-1]))
    try:
        saved: Any = ocp.metadata(path).metadata
        saved = saved[ARRAYS]
        of_average = any(name.startswith(f"{AVERAGE}/") for name in saved)
        kind = AVERAGE if of_average else WEIGHTS
        wanted = dict(_named_leaves({kind: weights}))
        there = {name: x for name, x in saved.items() if name.startswith(f"{kind}/")}
        differences = _differences(there, wanted)
        if not differences:
            with ocp.Context(pytree_options=partial):
                restored: Any = ocp.load(path, {ARRAYS: wanted})
    except Exception as error:  # orbax and tensorstore raise many types of errors.
        if _whole_steps(folder)[-1:] != steps[-1:]:
            # Meanwhile the run has saved a newer checkpoint and deleted this one.
            return restore_weights(folder, weights)
        raise CheckpointError(
            f"The checkpoint {path} could not be read ({type(error).__name__}). If it is damaged, "
            "delete that folder: an earlier one is read then."
        ) from error
    if differences:
        raise InputError(
            f"The checkpoint must be of the model that config.json beside it says; got {path}, "
            f"{_list_differences(differences)}\nGive the folder of a run whose files are its own."
        )
    leaves = [restored[ARRAYS][name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves), steps[-1]


def _whole_steps(folder: Path) -> list[int]:
    names = ocp.path.step.standard_name_format()
    return sorted(checkpoint.step for checkpoint in names.find_all(folder))


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with the names under which they are saved: "model/norm/scale"."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for every array that is missing in one of the trees or has another shape or type."""

    def describe(leaves: Mapping[str, Any], name: str) -> str:
        if name not in leaves:
            return "missing"
        return f"{leaves[name].dtype}{list(leaves[name].shape)}"

    lines = []
    for name in {**wanted, **saved}:
        there, here = describe(saved, name), describe(wanted, name)
        if there != here:
            lines.append(f"{name}: {there} in the checkpoint, {here} now")
    return lines


def _list_differences(differences: list[str]) -> str:
    listed = "\n".join(f"  {line}" for line in differences[:LISTED_DIFFERENCES])
    return f"which differs in {len(differences)} arrays:\n{listed}"


class _OrbaxLog(logging.Filter):
    """Keeps the log of orbax off the terminal, and remembers the last error in it.

    orbax logs a failure in each thread that sees it, with its traceback, and raises it as well. It
    also warns of old checkpoints that a kill left half deleted, which the next save removes.
    """

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:
            return True
        if record.levelno >= logging.ERROR and record.exc_info:
            self.error = record.exc_info[1]
        return False


_orbax_log = _OrbaxLog()


def _finish(result: Callable[..., bool]) -> None:
    """Waits until a save is done or has failed.

    If one of several processes cannot write its part, orbax would raise only after 20 minutes: that
    process waits for the others in one place, and they wait for it in another.
    """
    while True:
        since = time.monotonic()
        try:
            result(timeout=POLL_SECONDS)
            return
        except TimeoutError:
            if _orbax_log.error is not None:
                raise _orbax_log.error from None
            if time.monotonic() - since < POLL_SECONDS:  # The timeout of the save itself.
                raise

"""Checkpoints of a run: saved while training goes on, restored onto any mesh."""

from __future__ import annotations

import itertools
import json
import math
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, PyTree, Shaped
from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

from trainer import durable
from trainer.checkpoints.checksums import Checksums
from trainer.checkpoints.reading import (
    ARRAYS,
    DATA,
    FROZEN,
    CheckpointError,
    named_leaves,
    orbax_log,
    read_newest,
    whole_steps,
)
from trainer.processes import gather
from trainer.run.folder import CHECKSUMS_FILE, require_writable

MOST_SECONDS = 1200
"""How long a process waits for the others to flush their files."""
POLL_SECONDS = 1.0
LEAST_LIMIT = 16 << 20
"""Bytes that are compressed at a time even if the state is small."""
FRACTION = 16
"""In little memory, a larger state is compressed in about so many parts."""

# Names of folders that are no whole checkpoint: one is being written, or has all its files, some of
# which are not on the disk yet.
WRITTEN_BY_ORBAX = ".orbax-checkpoint-tmp"
UNFLUSHED = "unflushed"

# Every barrier has a name of its own. All processes wait equally often.
_numbers = itertools.count()


class Checkpoints:
    """The newest checkpoints of a run, with a folder for each step. A context manager.

    After a save that failed it is unusable, since threads may still be writing; a new instance
    clears what they leave.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        strict: bool = False,
        in_little_memory: PyTree[jax.ShapeDtypeStruct] | None = None,
        note: Callable[[str], object] = warnings.warn,
        when_whole: Callable[[int], object] = lambda step: None,
        is_held: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """Opens or makes `folder`, and removes unfinished checkpoints that a killed run left.

        When a checkpoint is whole, `when_whole` is told its step. Then only the newest `keep` stay,
        and those that `is_held` names. With `strict`, `restore` refuses a damaged checkpoint, and
        does not use an older one. `in_little_memory` has the shapes, types and shardings of what
        will be saved, if writing it must take little memory beside it. `note` is told what the
        user must know.
        """
        self._folder = folder.resolve()
        self._keep = keep
        self.restored: int | None = None
        """The step of the checkpoint that `restore` has read."""
        self._strict = strict
        self._limit = None if in_little_memory is None else write_limit(in_little_memory)
        self._failed = False
        self._note = note
        self._when_whole, self._is_held = when_whole, is_held
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[dict[str, float]]] | None = None
        self._costs: dict[str, float] = {}
        require_writable(self._folder)
        if jax.process_index() == 0:
            # A power failure would lose what is in a folder whose own name is not on the disk.
            for path in (self._folder, self._folder.parent):
                durable.flush(path.parent)
            for path in self._folder.iterdir():
                if path.name.startswith(f"{UNFLUSHED}_") or path.name.endswith(
                    (WRITTEN_BY_ORBAX, durable.REMOVED)
                ):
                    durable.remove(path)
        _wait_for_all()  # No process may take what is being removed for its own.
        self._checkpointer = self._new_checkpointer()

    def _new_checkpointer(self) -> ocp.training.Checkpointer:
        # Without a limit, orbax compresses all arrays before it writes the first byte, in one
        # transaction of its database: random numbers in bfloat16 take their memory once more. With
        # a limit there are as many transactions as arrays have parts. The files are more, and read
        # alike.
        memory = ocp.options.MemoryOptions(write_concurrent_bytes=self._limit)
        return ocp.training.Checkpointer(
            str(self._folder),
            step_name_format=ocp.path.step.standard_name_format(step_prefix=UNFLUSHED),
            context=ocp.Context(memory_options=memory),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *raised: object) -> None:
        """Waits for the save in progress."""
        self.wait()
        if not self._failed:  # Otherwise closing would raise the same error again.
            self._checkpointer.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending. A checkpoint being saved does not count."""
        return whole_steps(self._folder)

    @property
    def latest(self) -> int | None:
        """The last step with a whole checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def begin_after(self) -> int:
        """The step that a run goes on from, 0 at its beginning. All processes must call it."""
        step, is_first = self.latest or 0, jax.process_index() == 0
        number = secrets.randbits(31)
        if is_first:
            self._mark(number).touch()
        first_number, first_step = gather([number, step])[0]
        seen = self._mark(first_number).exists()
        _wait_for_all()
        if is_first:
            self._mark(number).unlink()
        if not seen or step != first_step:
            here = f"step {step} as the newest here, and step {first_step} in process 0"
            raise CheckpointError(
                "All processes must see the same folder of checkpoints; got "
                f"{here if seen else 'another one in process 0'}, in {self._folder}. Use a "
                "--run-dir on a file system that all machines share."
            )
        return step

    def _mark(self, number: int) -> Path:
        return self._folder / f"seen_by_all_{number}"

    def check_space(self, state: PyTree[jax.ShapeDtypeStruct]) -> None:
        """Raises an error before training if its checkpoints would fill the disk."""
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
        self,
        step: int,
        state: PyTree[Shaped[Array, "..."]],
        data_state: Mapping[str, Any],
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Copies the state off the devices and writes it in the background.

        The arrays may be donated or deleted as soon as this returns. It waits for an earlier save,
        and does nothing if the step is saved already. `data_state`, the position in the data, has
        values of JSON, the same on all processes.
        """
        self.wait()
        if step in self.steps:
            return
        since = time.perf_counter()
        arrays, data = dict(named_leaves(state)), json.dumps(data_state)
        orbax_log.error = None
        try:
            response = self._checkpointer.save_async(step, {ARRAYS: arrays, DATA: data}, force=True)
        except OSError as error:
            raise self._save_failed(step, error) from error
        assert response is not None, "force=True saves whatever the policy"
        # While orbax writes, beside the training program.
        handed_over = time.perf_counter()
        checksums = Checksums.of(step, arrays, data, settings or {})
        costs = {"checkpoint_checksum_seconds": time.perf_counter() - handed_over}

        def complete() -> dict[str, float]:
            _finish(response.result)
            flushing = time.perf_counter()
            durable.flush_files(self._part(step), jax.process_index())
            self._complete(checksums)
            now = time.perf_counter()
            costs["checkpoint_flush_seconds"] = now - flushing
            return {**costs, "checkpoint_seconds": now - since}

        self._saving = (step, self._thread.submit(complete))

    def _complete(self, checksums: Checksums) -> None:
        """Turns what all processes have written into a whole checkpoint; removes older ones."""
        process = jax.process_index()
        part = self._part(checksums.step)
        _wait_for_all()
        if process == 0:
            checksums.write(part)
            durable.flush(part / CHECKSUMS_FILE)
            durable.flush(part)
            durable.rename(part, self._path(checksums.step))
        _wait_for_all()
        if process == 0:
            self._when_whole(checksums.step)
            for step in self.steps[: -self._keep]:
                if not self._is_held(step):
                    durable.remove(self._path(step))

    def wait(self) -> None:
        """Waits for the save in progress, if there is one."""
        if self._saving is None:
            return
        (step, saved), self._saving = self._saving, None
        try:
            self._costs = saved.result()
        except Exception as error:  # Threads that write raise many types of errors.
            raise self._save_failed(step, error) from error

    def take_costs(self) -> dict[str, float]:
        """What the last save took, in seconds, once: empty if no save has ended since."""
        if self._saving is not None and self._saving[1].done():
            self.wait()
        costs, self._costs = self._costs, {}
        return costs

    def restore(
        self,
        state: PyTree[jax.ShapeDtypeStruct],
        settings: Mapping[str, str] | None = None,
    ) -> tuple[PyTree[Shaped[Array, "..."]], dict[str, Any]]:
        """Reads the newest checkpoint that is whole: its state, and its position in the data.

        It waits for a save in progress. Damaged ones are removed when an earlier one is read,
        unless `strict`. `restored` tells which one was read. `state` has shapes, types and
        shardings to restore to, on any mesh; `settings`, as flags, must be those of the checkpoint.
        """
        self.wait()
        step, arrays, data, damaged = read_newest(
            self._folder,
            dict(named_leaves(state)),
            owner="this model and optimizer",
            settings=settings,
            advice="Use another --run-dir for a new run, or the flags of that run: they are in its "
            "config.json.",
            otherwise="Restore a whole one from a copy, or use another --run-dir for a new run.",
            strict=self._strict,
        )
        for bad, error in damaged.items():
            self._note(
                f"WARNING: {error} It is removed, and the checkpoint of step {step} is used: steps "
                f"{step + 1} to {bad} are lost, and done again."
            )
        if damaged:
            if jax.process_index() == 0:
                for bad in damaged:
                    durable.remove(self._path(bad))
            _wait_for_all()
            self._checkpointer.close()  # It believes that these steps are saved.
            self._checkpointer = self._new_checkpointer()
        self.restored = step
        return jax.tree.unflatten(jax.tree.structure(state), arrays.values()), json.loads(data)

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _part(self, step: int) -> Path:
        return self._folder / f"{UNFLUSHED}_{step}"

    def _save_failed(self, step: int, error: Exception) -> CheckpointError:
        self._failed = True
        latest, intact = self.latest, "There is no earlier one."
        if latest is not None:
            intact = f"The last whole one, of step {latest}, is intact."
        return CheckpointError(
            f"The checkpoint of step {step} could not be saved: {error}. {intact} Mend that, or "
            f"free space in {self._folder}; then the same command goes on from step {latest or 0}.",
            ends_at_once=True,
        )


def save_frozen(folder: Path, shapes: Any, weights: Any, *, note: Callable[[str], object]) -> None:
    """Saves weights that no step changes, once for all checkpoints; all processes must call it.

    They are on the disk, with checksums, when it returns, so that checkpoints can be used whatever
    becomes of the model that the run began with. `shapes` has types and shardings too, or is None.
    """
    if shapes is None:
        return
    # What is there is of a run that was stopped before its first checkpoint.
    if jax.process_index() == 0 and (folder / "0").exists():
        durable.remove(folder / "0")
    with Checkpoints(folder, keep=0, in_little_memory=shapes, note=note) as checkpoints:
        checkpoints.check_space(shapes)
        checkpoints.save(0, {FROZEN: weights}, {})


def write_limit(state: PyTree[jax.ShapeDtypeStruct]) -> int:
    """Bytes to compress at a time so that a save takes little memory beside the state."""
    parts = [
        (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize, x.sharding)
        for x in jax.tree.leaves(state)
    ]
    local = sum(size * len(sharding.addressable_devices) for size, sharding in parts)
    # orbax compresses the part of a device as a whole, and demands a limit above its size.
    largest = max((size for size, _ in parts), default=0)
    return max(LEAST_LIMIT, largest + 1, local // FRACTION)


def _finish(result: Callable[..., object]) -> None:
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
            if orbax_log.error is not None:
                raise orbax_log.error from None
            if time.monotonic() - since < POLL_SECONDS:  # The timeout of the save itself.
                raise


def _wait_for_all() -> None:
    """Waits until all processes are here; unlike a collective, in any thread."""
    wait: Any = multihost.get_barrier_sync_fn()
    wait(key=f"checkpoints_{next(_numbers)}", timeout_ms=MOST_SECONDS * 1000)

"""The processes of `run.py`: shared programs, and rounds that time all rows."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils, serialize_executable

from benchmarks.cluster.links import port_bytes


@dataclass
class Timed:
    """A program that is timed."""

    name: str
    """Its row in the table."""
    what: str
    """Which pass or step it is."""
    run: Callable[[], Any]
    """Runs it; returns when this process is done."""
    expected: float
    """Bytes that the busiest port should receive; NaN if that is not known."""
    error: float | None = None
    """Largest error of its results, relative to the largest value of each; None if unknown."""
    tolerance: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Losses of the training steps so far."""
    seconds: list[float] = field(default_factory=list)
    """Time of the slowest process, in each round."""
    received: list[float] = field(default_factory=list)
    """Bytes that the busiest port received, in each round."""
    sent: list[float] = field(default_factory=list)
    """Bytes that it sent."""


class Processes:
    """What the processes of the cluster do together.

    Args:
        shared: a folder that all processes see; None if there is none.
        port: the network interface whose bytes are counted; None for none.
    """

    def __init__(self, *, shared: Path | None, port: str | None) -> None:
        self._shared = shared
        self._port = port
        self._times = 0

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which prints."""
        return jax.process_index() == 0

    def say(self, text: str) -> None:
        """Prints text in process 0."""
        if self.is_first:
            print(text, flush=True)

    def compile(
        self, function: Any, arguments: tuple[Any, ...], out: Any
    ) -> tuple[Callable[..., Any], str]:
        """Compiles a jitted function: on one machine in process 0 alone, since cores are few.

        Args:
            function: what `jax.jit` returned.
            arguments: its arguments.
            out: a tree like that of its results.

        Returns:
            The program, and in process 0 its text; "" in the others.
        """
        text = ""

        def build() -> Any:
            nonlocal text
            compiled = function.lower(*arguments).compile()
            text = compiled.as_text() if self.is_first else ""
            return compiled

        if self._shared is None:
            return build(), text
        payload = self.once(lambda: serialize_executable.serialize(build())[0])
        trees = jax.tree.structure((arguments, {})), jax.tree.structure(out)
        # In the order of the mesh: the default is that of `jax.devices()`.
        devices = list(jax.tree.leaves(arguments)[0].sharding.mesh.devices.flat)
        loaded = serialize_executable.deserialize_and_load(
            payload, *trees, execution_devices=devices
        )
        return loaded, text

    def once(self, compute: Callable[[], Any]) -> Any:
        """What a function returns: computed in process 0 alone if all are on one machine.

        Args:
            compute: the function. What it returns can be pickled.
        """
        if self._shared is None:
            return compute()
        path = self._shared / f"once{self._times}"
        self._times += 1
        if self.is_first:
            path.write_bytes(pickle.dumps(compute()))
        multihost_utils.sync_global_devices(path.name)
        return pickle.loads(path.read_bytes())

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all processes."""
        found = multihost_utils.process_allgather(np.asarray(values, np.float32))
        return np.asarray(found).reshape(-1, len(values)).max(0).tolist()

    def run_rounds(self, timed: Sequence[Timed], rounds: int) -> None:
        """Times all programs in turn, so many times over, and adds the results to them."""
        nothing = [self._once(lambda: None) for _ in range(3)]
        idle = [int(np.median([x[i] for x in nothing])) for i in (1, 2)]
        samples: dict[int, list[tuple[float, int, int]]] = {i: [] for i in range(len(timed))}
        for number in range(rounds):
            # Back and forth, so that a drift of the machine favours no row.
            order = range(len(timed)) if number % 2 == 0 else reversed(range(len(timed)))
            for index in order:
                samples[index].append(self._once(timed[index].run))
        for index, row in enumerate(timed):
            values = np.asarray(self.largest(np.ravel(samples[index]).tolist())).reshape(-1, 3)
            row.seconds += values[:, 0].tolist()
            row.received += (values[:, 1] - idle[0]).tolist()
            row.sent += (values[:, 2] - idle[1]).tolist()

    def _once(self, run: Callable[[], Any]) -> tuple[float, int, int]:
        """Seconds of one run, and the bytes that came and went meanwhile."""
        before = self._counted()
        multihost_utils.sync_global_devices("go")
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        multihost_utils.sync_global_devices("done")
        after = self._counted()
        return seconds, after[0] - before[0], after[1] - before[1]

    def _counted(self) -> tuple[int, int]:
        return port_bytes(self._port) if self._port else (0, 0)

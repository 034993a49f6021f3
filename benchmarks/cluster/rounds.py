"""The processes of `run.py`: shared programs, rounds that time all rows, and the table of these."""

from __future__ import annotations

import math
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils, serialize_executable

from benchmarks.cluster.links import received_bytes
from benchmarks.cluster.nodes import SHARED


@dataclass(kw_only=True)
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
    error: float
    """Largest error of its results, relative to the largest value of each; NaN if unknown."""
    tolerance: float
    """The largest error that is allowed."""
    seconds: list[float] = field(default_factory=list)
    """Time of the slowest process, in each round."""
    received: list[float] = field(default_factory=list)
    """Bytes that the busiest port received, in each round; NaN if they are not counted."""

    @property
    def is_wrong(self) -> bool:
        """Whether a result was too far from the reference."""
        return self.error > self.tolerance

    def line(self, yardstick: float) -> str:
        """Its row of the table; `yardstick` are the seconds of the first."""
        seconds, received = statistics.median(self.seconds), statistics.median(self.received)
        spread = (max(self.seconds) - min(self.seconds)) / seconds
        over = received / self.expected - 1 if self.expected > 0 else math.nan
        numbers = f"{received / 1e6:10.3f}{self.expected / 1e6:10.3f}{over:+8.1%}{self.error:10.1e}"
        return (
            f"{self.name:<32}{seconds:9.3f}{spread:8.0%}{yardstick / seconds:9.2f}"
            f"{numbers.replace('+nan%', '    -').replace('nan', '  -')}"
            f"{' WRONG' if self.is_wrong else ''}"
        )


HEADER = (
    f"{'':<32}{'s':>9}{'spread':>8}{'x first':>9}{'port MB':>10}{'expected':>10}{'over':>8}"
    f"{'error':>10}"
)
LEGEND = """
s         median over the rounds of the time of the slowest process
spread    longest minus shortest round, over the median
x first   time of the first row over that of this one
port MB   bytes that the busiest port of an emulated node received, by the kernel's count, less
          those of an idle round
expected  the same by st.communication with the algorithms of NCCL, or of gloo on CPUs; for a
          training step, by the collectives of the compiled program
over      port MB over expected: what headers and acknowledgements add
error     largest difference from dense float64 attention, relative to the largest value; for a
          training step, difference of the first loss from that of the first row"""


def table(rows: Sequence[Timed]) -> str:
    """The table of some rows, pass by pass."""
    lines: list[str] = []
    for what in dict.fromkeys(row.what for row in rows):
        chosen = [row for row in rows if row.what == what]
        yardstick = statistics.median(chosen[0].seconds)
        lines += ["", what, HEADER, *(row.line(yardstick) for row in chosen)]
    return "\n".join([*lines, LEGEND])


class Processes:
    """What the processes of the cluster do together.

    Args:
        emulated: whether they are on one machine, where they share a folder, and count the bytes of
            their ports.
    """

    def __init__(self, *, emulated: bool) -> None:
        self._emulated = emulated
        self._times = 0

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
            text = compiled.as_text() if jax.process_index() == 0 else ""
            return compiled

        if not self._emulated:
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
        """What a function returns: computed in process 0 alone if all are on one machine."""
        if not self._emulated:
            return compute()
        path = SHARED / f"once{self._times}"
        self._times += 1
        if jax.process_index() == 0:
            path.write_bytes(pickle.dumps(compute()))
        multihost_utils.sync_global_devices(path.name)
        return pickle.loads(path.read_bytes())

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all processes."""
        found = multihost_utils.process_allgather(np.asarray(values, np.float32))
        return np.asarray(found).reshape(-1, len(values)).max(0).tolist()

    def run_rounds(self, timed: Sequence[Timed], rounds: int) -> None:
        """Times all programs in turn, so many times over, and adds the results to them."""
        idle = statistics.median(self._once(lambda: None)[1] for _ in range(3))
        for number in range(rounds):
            # Back and forth, so that a drift of the machine favours no row.
            for row in timed if number % 2 == 0 else timed[::-1]:
                seconds, received = self._once(row.run)
                row.seconds.append(seconds)
                row.received.append(received - idle)
        for row in timed:
            row.seconds, row.received = self.largest(row.seconds), self.largest(row.received)

    def _once(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of one run, and the bytes that came meanwhile."""
        count = received_bytes if self._emulated else lambda: math.nan
        before = count()
        multihost_utils.sync_global_devices("go")
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        multihost_utils.sync_global_devices("done")
        return seconds, count() - before

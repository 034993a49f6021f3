"""The processes of `run.py`: shared programs, rounds that time all rows, and the table of these."""

from __future__ import annotations

import math
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils, serialize_executable

from benchmarks.cluster.links import received_bytes


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
    error: float = math.nan
    """Largest error of its results, relative to the largest value of each; NaN if unknown."""
    tolerance: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Losses of the training steps so far."""
    seconds: list[float] = field(default_factory=list)
    """Time of the slowest process, in each round."""
    received: list[float] = field(default_factory=list)
    """Bytes that the busiest port received, in each round."""

    @property
    def is_wrong(self) -> bool:
        """Whether a result was too far from the reference."""
        return self.error > self.tolerance

    def line(self, yardstick: float) -> str:
        """Its row of the table; `yardstick` are the seconds of the first."""
        seconds, received = statistics.median(self.seconds), statistics.median(self.received)
        spread = (max(self.seconds) - min(self.seconds)) / seconds
        over = received / self.expected - 1 if min(received, self.expected) > 0 else math.nan
        columns = (
            f"{received / 1e6:10.3f}" if received > 0 else f"{'-':>10}",
            f"{self.expected / 1e6:10.3f}",
            f"{over:+8.1%}",
            f"{self.error:10.1e}",
        )
        text = "".join(columns).replace("+nan%", "    -").replace("nan", "  -")
        return (
            f"{self.name:<32}{seconds:9.3f}{spread:8.0%}{yardstick / seconds:9.2f}{text}"
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
port MB   bytes that the busiest port received, by the kernel's count, less those of an idle round
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
        idle = statistics.median(self._once(lambda: None)[1] for _ in range(3))
        for number in range(rounds):
            # Back and forth, so that a drift of the machine favours no row.
            for row in timed if number % 2 == 0 else timed[::-1]:
                seconds, received = self._once(row.run)
                row.seconds.append(seconds)
                row.received.append(received - idle)
        for row in timed:
            row.seconds, row.received = self.largest(row.seconds), self.largest(row.received)

    def _once(self, run: Callable[[], Any]) -> tuple[float, int]:
        """Seconds of one run, and the bytes that came meanwhile."""
        before = self._received()
        multihost_utils.sync_global_devices("go")
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        multihost_utils.sync_global_devices("done")
        return seconds, self._received() - before

    def _received(self) -> int:
        return received_bytes(self._port) if self._port else 0

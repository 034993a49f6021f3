"""Rounds that time all rows of `run.py`, and the table of these."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.experimental import multihost_utils


@dataclass(kw_only=True)
class Timed:
    """A program that is timed."""

    name: str
    """Its row in the table."""
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

    @property
    def is_wrong(self) -> bool:
        """Whether a result was too far from the reference."""
        return self.error > self.tolerance

    def line(self, yardstick: float) -> str:
        """Its row of the table; `yardstick` are the seconds of the first."""
        seconds = statistics.median(self.seconds)
        spread = (max(self.seconds) - min(self.seconds)) / seconds
        numbers = f"{self.expected / 1e6:10.3f}{self.error:10.1e}"
        return (
            f"{self.name:<32}{seconds:9.3f}{spread:8.0%}{yardstick / seconds:9.2f}"
            f"{numbers.replace('nan', '  -')}"
            f"{' WRONG' if self.is_wrong else ''}"
        )


HEADER = f"{'':<32}{'s':>9}{'spread':>8}{'x first':>9}{'port MB':>10}{'error':>10}"
LEGEND = """
s         median over the rounds of the time of the slowest process
spread    longest minus shortest round, over the median
x first   time of the first row over that of this one
port MB   bytes that the busiest node receives by st.communication, with the algorithms of NCCL, or
          of gloo on CPUs
error     largest difference from dense float64 attention, relative to the largest value"""


def table(rows: Sequence[Timed]) -> str:
    """The table of some rows, of which the first is the yardstick."""
    yardstick = statistics.median(rows[0].seconds)
    return "\n".join(["", HEADER, *(row.line(yardstick) for row in rows), LEGEND])


def run_rounds(timed: Sequence[Timed], rounds: int) -> None:
    """Times all programs in turn, so many times over, and adds the results to them."""
    for number in range(rounds):
        # Back and forth, so that a drift of the machine favours no row.
        for row in timed if number % 2 == 0 else timed[::-1]:
            multihost_utils.sync_global_devices("go")
            start = time.perf_counter()
            row.run()
            row.seconds.append(time.perf_counter() - start)
    for row in timed:
        row.seconds = largest(row.seconds)


def largest(values: Sequence[float]) -> list[float]:
    """The largest of each value over all processes."""
    found = multihost_utils.process_allgather(np.asarray(values, np.float32))
    return np.asarray(found).reshape(-1, len(values)).max(0).tolist()

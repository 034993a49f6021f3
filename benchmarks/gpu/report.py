"""Compiles, runs and times programs side by side on one device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

import startrail_jax as st
from startrail_jax.xla.compiler import quick_options

SAMPLE_SECONDS, MOST_CALLS = 0.03, 200
"""Least duration of a sample. A shorter program is called several times in a row, so that Python
starts each call while the one before it runs."""


@dataclass
class Report:
    """The device, and until when rows are measured."""

    mesh: Mesh
    """A mesh of the one device."""
    tiny: bool
    """Whether this is a trial on a CPU."""
    deadline: float = 0.0

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options of our programs; in a trial, options that compile fast."""
        return quick_options() if self.tiny else st.compiler_options(self.mesh)


class Program:
    """A function with its arguments, compiled, and the samples of its time."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        options: dict[str, Any] | None = None,
    ) -> None:
        self.arguments = arguments
        self.error = ""
        """First line of the error that ended the program; "" if it ran."""
        self.calls = 1
        """Calls in one sample."""
        self.samples: list[float] = []
        """Seconds of one call, a mean over `calls`."""
        try:
            lowered = jax.jit(function).lower(*arguments)
            self.compiled: Any = lowered.compile(compiler_options=options)
        except Exception as error:
            self.error = first_line(error)

    @property
    def seconds(self) -> float:
        """Median time of one call."""
        return statistics.median(self.samples)

    @property
    def planned_bytes(self) -> int:
        """Bytes of arguments, results and temporaries, as compiled."""
        memory = self.compiled.memory_analysis()
        arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
        return arguments + results + memory.temp_size_in_bytes - memory.alias_size_in_bytes

    def run(self) -> Any:
        """The results; None, with an `error`, if there are none."""
        result = None
        if not self.error:
            start = time.perf_counter()
            try:
                for _ in range(self.calls):
                    result = self.compiled(*self.arguments)
                jax.block_until_ready(result)
                self.samples.append((time.perf_counter() - start) / self.calls)
            except Exception as error:
                self.error = first_line(error)
        return result


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def time_in_turn(programs: Sequence[Program], samples: int, seconds: float) -> None:
    """Takes samples of all programs in turn, so that all of them meet the device in the same state:
    fewer than `samples` if the seconds are up, but one at least."""
    for program in programs:
        program.run()
        program.run()
        if not program.error:
            program.calls = min(MOST_CALLS, math.ceil(SAMPLE_SECONDS / program.samples[-1]))
    turn = sum(x.calls * x.samples[-1] for x in programs if not x.error)
    for program in programs:
        program.samples = []
    for _ in range(max(1, min(samples, int(seconds / max(turn, 1e-9))))):
        for program in programs:
            program.run()

"""Part 2 of `run.py`: speed beside jax's cuDNN attention."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import startrail_jax as st
from benchmarks.gpu import rehearsal
from benchmarks.gpu.report import (
    Program,
    Report,
    compile_all,
    first_line,
    prepare,
    random_arrays,
    time_in_turn,
    warm_up,
)
from startrail_jax.rings.schedule import Schedule

JAX = "(a) jax.nn, cuDNN"
OURS = "(b) Attention, one device"
SETTINGS = {
    "(c) Ring Attention, P=8": st.Degrees.ring_attention(8),
    "(c) StarTrail, P=8, C=2": st.Degrees.startrail(8, c=2),
    "(c) Ring Attention, P=64": st.Degrees.ring_attention(64),
    "(c) StarTrail, P=64, C=4": st.Degrees.startrail(64, c=4),
    "(c) team 8, ring 8, P=64": st.Degrees(team=8, ring=8),
}
TINY_SETTINGS = {
    "(c) Ring Attention, P=4": st.Degrees.ring_attention(4),
    "(c) StarTrail, P=4, C=2": st.Degrees.startrail(4, c=2),
}

FORWARD, BOTH = "fwd", "fwd+bwd"
# Of each row, and how long those of one problem may take.
SAMPLES, SAMPLING_SECONDS = 7, 20.0

GUESSED_RATE = 2e14
"""FLOP/s of a slow GPU, from which the time of a row is estimated."""

COLUMNS = ("unit", "ms", "TFLOP/s", "x (a)", "at", "GiB")


@dataclass(frozen=True)
class Problem:
    """One attention over a whole sequence."""

    seq_len: int
    causal: bool = True
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128

    def __str__(self) -> str:
        return f"{tokens(self.seq_len)} {self.kind}"

    @property
    def kind(self) -> str:
        """The properties that two problems must share to be compared."""
        mask = "causal" if self.causal else "full"
        return f"{mask} {self.heads}/{self.kv_heads}x{self.head_dim}"

    def flops(self, step: str, devices: int = 1) -> float:
        """Useful floating-point operations of one device among several."""
        n = self.seq_len
        pairs = n * (n + 1) // 2 if self.causal else n * n
        return (1 if step == FORWARD else 3.5) * 4 * pairs * self.heads * self.head_dim / devices

    def shapes(self, devices: int = 1) -> list[jax.ShapeDtypeStruct]:
        """Shapes of q, k, v and dout of one device among several."""
        length = self.seq_len // devices
        return [
            jax.ShapeDtypeStruct((1, length, n, self.head_dim), jnp.bfloat16)
            for n in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]


# In the order of their importance.
PROBLEMS = (
    Problem(65536),
    Problem(262144),
    Problem(65536, kv_heads=4),
    Problem(65536, causal=False),
    Problem(16384),
    Problem(131072, kv_heads=4),
)
TINY_PROBLEMS = (Problem(128, heads=2, kv_heads=1, head_dim=16),)


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    setting: str
    problem: Problem
    step: str
    unit: int
    """Tokens in a query unit."""
    devices: int = 1

    def __str__(self) -> str:
        return f"{self.setting}, {self.problem}, {self.step}"

    @property
    def flops(self) -> float:
        return self.problem.flops(self.step, self.devices)


def rows_of(problem: Problem, settings: dict[str, st.Degrees]) -> Iterator[Row]:
    for step in (FORWARD, BOTH):
        yield Row(JAX, problem, step, problem.seq_len)
        yield Row(OURS, problem, step, problem.seq_len)
        for name, degrees in settings.items():
            devices = degrees.sequence
            yield Row(name, problem, step, problem.seq_len // devices * degrees.team, devices)


def measure(report: Report) -> None:
    """Measures and prints all rows, one problem after another."""
    tiny = report.args.tiny
    problems = TINY_PROBLEMS if tiny else PROBLEMS
    bench = Bench(report, TINY_SETTINGS if tiny else SETTINGS, "xla" if tiny else "cudnn")
    widths = (7, 10, 11, 7, 6, 10)
    columns = "".join(f"{name:>{n}}" for name, n in zip(COLUMNS, widths, strict=True))
    report.write(f"\n{'':<28}{'tokens, mask, heads':<24}{'step':<8}{columns}")
    for problem in problems:
        rows = report.wanted(list(rows_of(problem, bench.settings)))
        # Two calls to warm up, and some samples.
        seconds = sum(row.flops for row in rows) / GUESSED_RATE * (2 + 3)
        if seconds + bench.setup_seconds * len(rows) > report.seconds_left:
            report.left_out += [f"speed: {row}" for row in rows]
        elif rows:
            try:
                bench.measure(rows)
            except Exception as error:
                line = f"{rows[0].problem}: {first_line(error)}"
                report.write(line, part="speed", row=str(rows[0].problem), error=first_line(error))


@dataclass
class Bench:
    """Measures the rows of one problem in turn."""

    report: Report
    settings: dict[str, st.Degrees]
    backend: str
    setup_seconds: float = 3.0
    """Seconds before the first run of a row: a guess at first, then as in the previous problem."""
    rates: dict[tuple[str, str], dict[int, float]] = dataclasses.field(default_factory=dict)
    """(kind of problem, step) -> tokens -> TFLOP/s of (a)."""

    def measure(self, rows: list[Row]) -> None:
        start = time.monotonic()
        whole = tuple(random_arrays(rows[0].problem.shapes()))
        programs = {row: prepare(self.program, row, whole) for row in rows}
        everything = list(programs.values())
        compile_all(everything)
        self.setup_seconds = (time.monotonic() - start) / len(rows)
        warm_up(everything, self.report.memory_limit)
        time_in_turn(everything, SAMPLES, min(SAMPLING_SECONDS, self.report.seconds_left / 4))
        for row, program in programs.items():
            if row.setting == JAX and not program.error:
                rates = self.rates.setdefault((row.problem.kind, row.step), {})
                rates[row.problem.seq_len] = row.flops / program.seconds / 1e12
        for row, program in programs.items():
            self.print_row(row, program)

    def program(self, row: Row, whole: tuple[jax.Array, ...]) -> Program:
        options = self.report.options
        backward = row.step == BOTH
        if row.devices > 1:
            schedule, shapes = self.device(row)
            received = rehearsal.arrivals(schedule, *shapes, backward=backward)
            # What arrives in float32 is lse, and what is added to gradients.
            arrays = random_arrays([*shapes, *received], float32=math.log(row.problem.seq_len))
            arguments = rehearsal.middle(schedule), arrays[4:], *arrays[:4]
            return Program(rehearsal.alone(schedule, backward=backward), arguments, options)
        attend: Callable[..., Any]
        if row.setting == JAX:
            options = {}
            attend = functools.partial(
                jax.nn.dot_product_attention,
                is_causal=row.problem.causal,
                implementation="cudnn" if self.backend == "cudnn" else "xla",
            )
        else:
            mesh = self.report.mesh
            attend = st.Attention(mesh, causal=row.problem.causal, backend=self.backend)

        def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
            out, vjp = jax.vjp(attend, q, k, v)
            return out, vjp(dout)

        forward = lambda q, k, v, dout: attend(q, k, v)  # noqa: E731
        return Program(both if backward else forward, whole, options)

    def device(self, row: Row) -> tuple[Schedule, list[jax.ShapeDtypeStruct]]:
        """Schedule of (c), and the shapes of the shards of a device."""
        causal = row.problem.causal
        layout = "zigzag" if causal else "contiguous"
        options = dict(causal=causal, layout=layout, backend=self.backend)
        schedule = rehearsal.schedule_of(self.settings[row.setting], self.report.mesh, **options)
        schedule.layout.check_length(row.problem.seq_len)
        return schedule, row.problem.shapes(row.devices)

    def print_row(self, row: Row, program: Program) -> None:
        line = f"{row.setting:<28}{row.problem!s:<24}{row.step:<8}{row.unit:>7}"
        record: dict[str, Any] = dict(
            part="speed", row=str(row), setting=row.setting, step=row.step, unit_tokens=row.unit,
            devices=row.devices, dtype="bfloat16", **dataclasses.asdict(row.problem),
        )  # fmt: skip
        if program.error:
            self.report.write(f"{line}  {program.error}", error=program.error, **record)
            return
        rate = row.flops / program.seconds / 1e12
        rates = self.rates.get((row.problem.kind, row.step), {})
        at = row.problem.seq_len if row.problem.seq_len in rates else max(rates, default=0)
        ratio = rate / rates[at] if at else None
        self.report.write(
            f"{line}{1e3 * program.seconds:10.3f}{rate:11.4g}"
            f"{'-' if ratio is None else f'{ratio:.3f}':>7}{tokens(at) if at else '-':>6}"
            f"{program.planned_bytes / 2**30:>10.2f}",
            **record, ms=1e3 * program.seconds, samples_ms=[1e3 * x for x in program.samples],
            calls_per_sample=program.calls, useful_flops=row.flops, tflops_per_second=rate,
            ratio=ratio, ratio_at_tokens=at or None, planned_bytes=program.planned_bytes,
        )  # fmt: skip


def tokens(number: int) -> str:
    return f"{number // 1024}K" if number % 1024 == 0 else str(number)

"""Part 2 of `run.py`: speed beside jax's cuDNN attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import startrail_jax as st
from benchmarks.gpu import rehearsal
from benchmarks.gpu.report import Program, Report, compile_all, first_line, prepare, time_in_turn

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

GUESSED_RATE, GUESSED_SETUP = 2e14, 3.0
"""FLOP/s of a slow GPU, and seconds to compile a row, from which the time of a row is estimated."""


@dataclass(frozen=True)
class Problem:
    """One attention over a whole sequence."""

    seq_len: int
    causal: bool = True
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128

    def __str__(self) -> str:
        length = f"{self.seq_len // 1024}K" if self.seq_len % 1024 == 0 else str(self.seq_len)
        mask = "causal" if self.causal else "full"
        return f"{length} {mask} {self.heads}/{self.kv_heads}x{self.head_dim}"

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
    degrees: st.Degrees = st.Degrees()  # noqa: RUF009 - frozen

    def __str__(self) -> str:
        return f"{self.setting}, {self.problem}, {self.step}"

    @property
    def unit(self) -> int:
        """Tokens in a query unit."""
        return self.problem.seq_len // self.degrees.sequence * self.degrees.team

    @property
    def flops(self) -> float:
        return self.problem.flops(self.step, self.degrees.sequence)


def rows_of(problem: Problem, settings: dict[str, st.Degrees]) -> Iterator[Row]:
    for step in (FORWARD, BOTH):
        yield Row(JAX, problem, step)
        yield Row(OURS, problem, step)
        for name, degrees in settings.items():
            yield Row(name, problem, step, degrees)


def measure(report: Report) -> None:
    """Measures and prints all rows, one problem after another."""
    tiny = report.args.tiny
    print(f"\n{'':<28}{'tokens, mask, heads':<24}{'step':<8}{'unit':>7}{'ms':>10}"
          f"{'TFLOP/s':>11}{'x (a)':>7}{'GiB':>10}")  # fmt: skip
    for problem in TINY_PROBLEMS if tiny else PROBLEMS:
        rows = report.wanted(list(rows_of(problem, TINY_SETTINGS if tiny else SETTINGS)))
        # Two calls to warm up, and some samples.
        seconds = sum(row.flops for row in rows) / GUESSED_RATE * (2 + 3)
        if seconds + GUESSED_SETUP * len(rows) > report.seconds_left:
            report.left_out += [f"speed: {row}" for row in rows]
        elif rows:
            try:
                measure_rows(report, rows)
            except Exception as error:
                print(f"{problem}: {first_line(error)}")


def measure_rows(report: Report, rows: Sequence[Row]) -> None:
    """Measures the rows of one problem in turn."""
    whole = tuple(random_arrays(rows[0].problem.shapes()))
    programs = {row: prepare(program_of, report, row, whole) for row in rows}
    everything = list(programs.values())
    compile_all(everything)
    seconds = min(SAMPLING_SECONDS, report.seconds_left / 4)
    time_in_turn(everything, SAMPLES, seconds, report.memory_limit)
    of_jax: dict[str, float] = {}
    for row, program in programs.items():
        line = f"{row.setting:<28}{row.problem!s:<24}{row.step:<8}{row.unit:>7}"
        if program.error:
            print(f"{line}  {program.error}")
            continue
        rate = row.flops / program.seconds / 1e12
        if row.setting == JAX:
            of_jax[row.step] = rate
        ratio = f"{rate / of_jax[row.step]:.3f}" if row.step in of_jax else "-"
        print(f"{line}{1e3 * program.seconds:10.3f}{rate:11.4g}{ratio:>7}"
              f"{program.planned_bytes / 2**30:>10.2f}", flush=True)  # fmt: skip


def program_of(report: Report, row: Row, whole: tuple[jax.Array, ...]) -> Program:
    """The program of a row; `whole` are q, k, v and dout of the whole sequence."""
    causal, backward = row.problem.causal, row.step == BOTH
    options, backend = report.options, "xla" if report.args.tiny else "cudnn"
    if row.degrees.sequence > 1:
        layout = "zigzag" if causal else "contiguous"
        own = dict(causal=causal, layout=layout, backend=backend)
        schedule = rehearsal.schedule_of(row.degrees, report.mesh, **own)
        schedule.layout.check_length(row.problem.seq_len)
        shapes = row.problem.shapes(row.degrees.sequence)
        received = rehearsal.arrivals(schedule, *shapes, backward=backward)
        # What arrives in float32 is lse, and what is added to gradients.
        arrays = random_arrays([*shapes, *received], float32=math.log(row.problem.seq_len))
        arguments = rehearsal.middle(schedule), arrays[4:], *arrays[:4]
        return Program(rehearsal.alone(schedule, backward=backward), arguments, options)
    attend: Callable[..., Any] = st.Attention(report.mesh, causal=causal, backend=backend)
    if row.setting == JAX:
        options = {}
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=causal, implementation=backend
        )

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(dout)

    forward = lambda q, k, v, dout: attend(q, k, v)  # noqa: E731
    return Program(both if backward else forward, whole, options)


def random_arrays(
    shapes: Sequence[jax.ShapeDtypeStruct], float32: float | None = None
) -> list[jax.Array]:
    """Arrays of normal numbers, made in one program, as to compile one for each takes long.

    Args:
        float32: what float32 arrays hold instead.
    """

    @jax.jit
    def fill(key: jax.Array) -> list[jax.Array]:
        return [
            jnp.full(x.shape, float32, x.dtype)
            if x.dtype == jnp.float32 and float32 is not None
            else jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype)
            for i, x in enumerate(shapes)
        ]

    return fill(jax.random.key(0))

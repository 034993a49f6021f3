"""Part 2 of `run.py`: speed beside jax's cuDNN attention."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import startrail_jax as st
from benchmarks.gpu.errors import HAS_FA4
from benchmarks.gpu.report import Program, Report, time_in_turn

JAX, OURS, FA4 = "(a) jax.nn, cuDNN", "(b) Attention", "(c) backend fa4"
FORWARD, BOTH = "fwd", "fwd+bwd"
# Of each row, and how long those of one problem may take.
SAMPLES, SAMPLING_SECONDS = 7, 20.0

GUESSED_RATE, GUESSED_SETUP = 2e14, 5.0
"""FLOP/s of a slow GPU, and seconds to compile a row, from which the time of a row is estimated."""


@dataclass(frozen=True)
class Problem:
    """One attention over whole sequences."""

    seq_len: int
    causal: bool = True
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    value_head_dim: int = 128
    window: int | None = None
    documents: int = 0
    """Mean length of the documents that lie packed in the rows; 0 for rows without documents."""
    rows: int = 1

    def __str__(self) -> str:
        length = f"{self.seq_len // 1024}K" if self.seq_len % 1024 == 0 else str(self.seq_len)
        mask = "causal" if self.causal else "full"
        mask += f" window {self.window}" if self.window else ""
        mask += f" documents {self.documents}" if self.documents else ""
        rows = f"{self.rows} x " if self.rows > 1 else ""
        return f"{rows}{length} {mask} {self.heads}/{self.kv_heads}x{self.head_dim}" + (
            f"/{self.value_head_dim}" if self.value_head_dim != self.head_dim else ""
        )

    @property
    def ids(self) -> np.ndarray | None:
        """Segment ids [rows, seq_len] of documents of exponentially distributed lengths."""
        if not self.documents:
            return None
        fresh = np.random.default_rng(0).random((self.rows, self.seq_len)) < 1 / self.documents
        return fresh.cumsum(1).astype(np.int32)

    def flops(self, step: str) -> float:
        """Useful floating-point operations: those of visible pairs."""
        n, ids = self.seq_len, self.ids
        seen = np.full((self.rows, n), n)
        if self.causal:
            seen[:] = np.arange(1, n + 1)
            if ids is not None:
                seen -= np.stack([np.searchsorted(x, x) for x in ids])
            seen = np.minimum(seen, self.window or n)
        pairs = int(seen.sum())
        products = (1, 1) if step == FORWARD else (4, 3)
        channels = products[0] * self.head_dim + products[1] * self.value_head_dim
        return 2 * pairs * self.heads * channels

    def arrays(self) -> tuple[jax.Array, ...]:
        """Normal q, k, v and dout."""
        keys = jax.random.split(jax.random.key(0), 4)
        sizes = (
            (self.heads, self.head_dim),
            (self.kv_heads, self.head_dim),
            (self.kv_heads, self.value_head_dim),
            (self.heads, self.value_head_dim),
        )
        return tuple(
            jax.random.normal(key, (self.rows, self.seq_len, *size), jnp.bfloat16)
            for key, size in zip(keys, sizes, strict=True)
        )


# In the order of their importance. A device of a mesh attends to units, which are shorter than the
# sequence: the last rows show how the kernels serve these.
PROBLEMS = (
    Problem(65536),
    Problem(131072, heads=4, kv_heads=1, window=512),
    Problem(4096, heads=32, kv_heads=8, rows=8, documents=1000),
    Problem(131072, heads=4, kv_heads=1, documents=4000),
    Problem(16384, heads=32, kv_heads=8, documents=2000, window=1024),
    Problem(65536, causal=False),
    Problem(16384),
    Problem(8192, causal=False),
    Problem(1024, causal=False),
    Problem(65536, kv_heads=4),
    Problem(131072, kv_heads=4),
    Problem(262144),
    Problem(32768, head_dim=192),
    Problem(32768, kv_heads=4, head_dim=256, value_head_dim=256),
)
TINY_PROBLEMS = (Problem(128, heads=2, kv_heads=1, head_dim=16, value_head_dim=16),)


def measure(report: Report) -> None:
    """Measures and prints all rows, one problem after another."""
    print(f"\n{'':<20}{'tokens, mask, heads':<44}{'step':<8}{'ms':>10}{'TFLOP/s':>11}{'x (a)':>7}"
          f"{'GiB':>10}")  # fmt: skip
    for problem in TINY_PROBLEMS if report.tiny else PROBLEMS:
        # Two calls to warm up, and some samples, of both rows.
        seconds = 2 * (problem.flops(FORWARD) + problem.flops(BOTH)) / GUESSED_RATE * (2 + 3)
        if seconds + 4 * GUESSED_SETUP > report.seconds_left:
            print(f"left out, as the time was up: {problem}")
        else:
            measure_rows(report, problem)


def measure_rows(report: Report, problem: Problem) -> None:
    arrays = problem.arrays()
    with_fa4 = HAS_FA4 and not (report.tiny or problem.window)
    names = (JAX, OURS, FA4) if with_fa4 else (JAX, OURS)
    programs = {
        (name, step): program_of(report, problem, name, step, arrays)
        for step in (FORWARD, BOTH)
        for name in names
    }
    time_in_turn(list(programs.values()), SAMPLES, min(SAMPLING_SECONDS, report.seconds_left / 4))
    for (name, step), program in programs.items():
        line = f"{name:<20}{problem!s:<44}{step:<8}"
        if program.error:
            print(f"{line}  {program.error}")
            continue
        rate, of_jax = problem.flops(step) / program.seconds / 1e12, programs[JAX, step]
        ratio = np.nan if of_jax.error else of_jax.seconds / program.seconds
        print(f"{line}{1e3 * program.seconds:10.3f}{rate:11.4g}{ratio:>7.3f}"
              f"{program.planned_bytes / 2**30:>10.2f}", flush=True)  # fmt: skip


def program_of(
    report: Report, problem: Problem, name: str, step: str, arrays: tuple[jax.Array, ...]
) -> Program:
    """The program of a row on q, k, v and dout; that of jax leaves documents out."""
    causal, window = problem.causal, problem.window
    usual: Literal["xla", "cudnn"] = "xla" if report.tiny else "cudnn"
    backend = "fa4" if name == FA4 else usual
    attention = st.Attention(report.mesh, causal=causal, window=window, backend=backend)
    of_jax = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=causal,
        local_window_size=window and (window - 1, 0),
        implementation=usual,
    )

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, *ids: jax.Array) -> Any:
        if name == JAX:
            return of_jax(q, k, v)
        return attention(q, k, v, segment_ids=ids[0] if ids else None)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, *ids: jax.Array) -> Any:
        out, vjp = jax.vjp(lambda q, k, v: forward(q, k, v, dout, *ids), q, k, v)
        return out, vjp(dout)

    if problem.ids is not None:
        arrays = *arrays, jnp.asarray(problem.ids)
    options = None if name == JAX else report.options
    return Program(both if step == BOTH else forward, arrays, options)

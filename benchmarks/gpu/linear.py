"""Part 3 of `run.py`: linear attention by its backends, beside float32 in plain XLA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import startrail_jax as st
from benchmarks.gpu.errors import errors
from benchmarks.gpu.report import Program, Report, time_in_turn
from startrail_jax.linear.vjp import BLOCKS

NAMES = ("out", "dq", "dk", "dv", "ddecay", "dbeta")
SAMPLES, SECONDS = 7, 4.0


@dataclass(frozen=True)
class Row:
    """One linear attention over a whole sequence."""

    rule: str
    seq_len: int
    heads: int
    key_heads: int
    key_dim: int = 128
    value_dim: int = 128
    documents: int = 0
    """Mean length of packed documents; 0 for none."""

    def __str__(self) -> str:
        dims = f"{self.heads}/{self.key_heads}x{self.key_dim}/{self.value_dim}"
        documents = f" documents {self.documents}" if self.documents else ""
        return f"{self.rule} {self.seq_len} tokens {dims}{documents}"

    def arrays(self) -> tuple[Array, ...]:
        """Query, key, value, decay, beta, the gradient of the output, and segment ids if packed."""
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal((1, self.seq_len, *shape), np.float32)

        query, key = (normal(self.key_heads, self.key_dim) for _ in range(2))
        query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
        value, dout = (normal(self.heads, self.value_dim) for _ in range(2))
        channels = (self.key_dim,) if self.rule == "kda" else ()
        decay = -np.exp(normal(self.heads, *channels) - 2)
        beta = 1 / (1 + np.exp(-normal(self.heads)))
        wide = tuple(jnp.asarray(x, jnp.bfloat16) for x in (query, key, value))
        ids = rng.random((1, self.seq_len)) < 1 / max(self.documents, 1)
        ids = (jnp.asarray(ids.cumsum(1), jnp.int32),) if self.documents else ()
        return *wide, jnp.asarray(decay), jnp.asarray(beta), jnp.asarray(dout, jnp.bfloat16), *ids


ROWS = (
    Row("gated_delta", 16384, 32, 16),
    Row("gated_delta", 16384, 32, 16, documents=1000),
    Row("kda", 16384, 32, 32),
    Row("ssd", 16384, 64, 8, value_dim=64),
    Row("gated_delta", 131072, 32, 16),
)
TINY_ROWS = (Row("gated_delta", 128, 2, 1, 16, 16, documents=40),)


def measure(report: Report) -> None:
    """Measures and prints all rows, until the time is up."""
    print(f"\n{'relative errors':<66}" + "".join(f"{name:>9}" for name in NAMES)
          + f"{'fwd ms':>10}{'both ms':>10}{'GiB':>8}")  # fmt: skip
    for row in TINY_ROWS if report.tiny else ROWS:
        if report.seconds_left < 0:
            print(f"left out, as the time was up: {row}")
            continue
        arrays = row.arrays()
        exact = (*(x.astype(jnp.float32) for x in arrays[:6]), *arrays[6:])
        found = Program(program_of(report, row, "xla", backward=True), exact, report.options).run()
        backends = ("xla",) if report.tiny else tuple(BLOCKS)
        programs = {
            (backend, backward): Program(
                program_of(report, row, backend, backward=backward), arrays, report.options
            )
            for backend in backends
            for backward in (False, True)
        }
        results = {name: programs[name, True].run() for name in backends}
        time_in_turn([*programs.values()], SAMPLES, SECONDS)
        for name in backends:
            forward, both = programs[name, False], programs[name, True]
            line = f"{f'{name}, {row}':<66}"
            if both.error or forward.error or found is None:
                print(line, both.error or forward.error)
                continue
            line += "".join(f"{error:9.1e}" for error in errors(results[name], found))
            print(f"{line}{1e3 * forward.seconds:10.3f}{1e3 * both.seconds:10.3f}"
                  f"{both.planned_bytes / 2**30:8.2f}", flush=True)  # fmt: skip


def program_of(report: Report, row: Row, backend: str, *, backward: bool) -> Any:
    """The output, and the gradients of query, key, value, decay and beta."""
    attention = st.LinearAttention(report.mesh, rule=row.rule, backend=backend)

    def compute(*arrays: Array) -> Any:
        *given, dout = arrays[:6]
        ids = arrays[6] if row.documents else None
        if not backward:
            return attention(*given, segment_ids=ids)
        out, pull = jax.vjp(lambda *given: attention(*given, segment_ids=ids), *given)
        return out, *pull(dout)

    return compute

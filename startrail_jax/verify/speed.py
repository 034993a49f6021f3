"""Bytes of compiled programs beside the closed form, and their times."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from startrail_jax.analysis.hlo import read_traffic
from startrail_jax.errors import UserError
from startrail_jax.verify.cases import PASSES, Case
from startrail_jax.verify.schemes import Scheme
from startrail_jax.xla.compiler import compiler_options

# XLA's CPU compiler drops the barriers that keep it from merging messages of the backward pass with
# those of the forward pass that they repeat. Nothing of these programs is run.
_COUNTED_ON_CPU: dict[str, Any] = {
    "xla_disable_hlo_passes": "cse_barrier_expander",
    "xla_backend_optimization_level": 0,
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One pass of one scheme."""

    received_bytes: int | None
    """Bytes that the device that receives the most receives, as the compiled program says; None if
    the program has collectives that cannot be counted."""
    closed_form_bytes: int
    """The same, as `startrail_jax.communication` says."""
    mergeable_bytes: int
    """Bytes that XLA may spare of packed rows: in a ring of two, the backward pass sends segment
    ids as the forward pass did. As `Traffic.row_bytes` of the forward pass."""
    repeated_bytes: int
    """Bytes that parts of the heads (`head_chunks`) may send again, where the closed form counts
    them once: segment ids. As `Traffic.row_bytes` of the pass, for each part but one."""
    seconds: float
    """Median time of a call, of the slowest process."""
    flops: float | None
    """Useful FLOPs of one device; None if they are not known."""

    @property
    def ok(self) -> bool:
        """Whether the program receives what it must."""
        if self.received_bytes is None:
            return False
        more = self.received_bytes - self.closed_form_bytes
        return -self.mergeable_bytes <= more <= self.repeated_bytes

    @property
    def gigabytes_per_second(self) -> float:
        """Received bytes over the time of the pass, in which kernels run too."""
        return self.closed_form_bytes / self.seconds / 1e9

    @property
    def teraflops_per_second(self) -> float | None:
        """Useful FLOPs of one device over the time; None if they are not known."""
        return None if self.flops is None else self.flops / self.seconds / 1e12

    def as_json(self) -> dict[str, Any]:
        """The measurement as JSON."""
        return {
            **asdict(self),
            "milliseconds": 1e3 * self.seconds,
            "gigabytes_per_second": self.gigabytes_per_second,
            "teraflops_per_second": self.teraflops_per_second,
            "ok": self.ok,
        }


def measure(case: Case, scheme: Scheme, samples: int) -> dict[str, Measurement]:
    """Bytes and time of both of `PASSES`, by name."""
    attention, expected = case.timed(scheme), case.closed_form(scheme)
    options: dict[str, Any] | None = dict(compiler_options(attention.mesh)) or None
    ids = None if case.ids is None else attention.shard(case.ids)
    arrays = case.draw(attention, case.dtype)
    found, repeats = {}, case.options.get("head_chunks", 1) - 1
    for which in PASSES:
        program = jax.jit(case.function(attention, which))
        compiled = program.lower(ids, *arrays).compile(compiler_options=options)
        counted: Any = compiled
        if case.on_cpu and (case.documents or case.byte_dtype != case.dtype):
            shapes = case.arguments(attention, case.byte_dtype).values()
            counted = program.lower(ids, *shapes).compile(compiler_options=_COUNTED_ON_CPU)
        passed = expected.forward if which == "forward" else expected.total
        flops = case.flops(which)
        found[which] = Measurement(
            received_bytes=_received_bytes(counted),
            closed_form_bytes=passed.received_bytes,
            mergeable_bytes=expected.forward.row_bytes if case.documents else 0,
            repeated_bytes=repeats * passed.row_bytes if case.documents else 0,
            seconds=median_seconds(compiled, (ids, *arrays), samples),
            flops=None if flops is None else flops / len(case.devices),
        )
    return found


def _received_bytes(compiled: Any) -> int | None:
    try:
        return read_traffic(compiled.as_text()).received_bytes
    except UserError:
        return None


def median_seconds(compiled: Any, arguments: tuple[Any, ...], samples: int) -> float:
    """Median time of a call, of the slowest process; two calls go before."""
    for _ in range(2):
        jax.block_until_ready(compiled(*arguments))
    taken = []
    for _ in range(samples):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        taken.append(time.perf_counter() - start)
    median = statistics.median(taken)
    return float(np.max(multihost_utils.process_allgather(np.float32(median))))

"""Part 1 of `run.py`: errors of every block backend beside those of jax's own attention.

The reference is dense attention in float32 at highest precision, forward and backward. It is
computed on the same device from the same inputs, and shares no code with the package. Errors are
relative in the 2-norm over the whole array: |x - reference| / |reference|.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

import startrail_jax as st
from benchmarks.gpu import rehearsal
from benchmarks.gpu.report import Program, Report, compile_all, first_line, prepare

NAMES = ("out", "dq", "dk", "dv", "lse")

MOST_RATIO = 1.4
"""Largest error that is allowed, as a multiple of that of jax's attention in the same dtype."""

MOST_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest error in float32, for which jax's attention has no full precision to compare with."""

MOST_LSE_ERROR = 1e-4
"""Largest error of the log-sum-exp in 16 bits: jax rounds its own to the dtype of q."""

# Of a row that sees no key.
_EMPTY = -1e30


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table: a backend, and what it has to compute."""

    backend: str
    dtype: str = "bfloat16"
    causal: bool = True
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    seq_len: int = 4096
    window: int | None = None
    packed: bool = False
    degrees: st.Degrees = st.Degrees()  # noqa: RUF009 - frozen
    """Degrees of a mesh; the work of its devices is done one after another."""

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        mask += f", window {self.window}" if self.window else ""
        mask += ", packed" if self.packed else ""
        heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        text = f"{self.backend}, {self.dtype}, {mask}, {heads}, {self.seq_len} tokens"
        if self.degrees.sequence > 1:
            sizes = ", ".join(
                f"{axis} {size}"
                for axis in ("group", "ring", "team")
                if (size := getattr(self.degrees, axis)) > 1
            )
            text += f", {sizes} in turn"
        return text

    @property
    def yardstick(self) -> str:
        """Which implementation of `jax.nn.dot_product_attention` to compare with, if any."""
        if self.dtype == "float32":
            return ""
        return "xla" if self.packed or self.window or self.backend == "xla" else "cudnn"

    def inputs(self) -> tuple[Array, ...]:
        """Random q, k, v and dout, and segment ids."""
        rng = np.random.default_rng(0)
        arrays = (
            rng.standard_normal((1, self.seq_len, n, self.head_dim), np.float32)
            for n in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        )
        arrays = (jnp.asarray(x.astype(jnp.dtype(self.dtype))) for x in arrays)
        return (*arrays, self.documents())

    def documents(self) -> Array:
        """Segment ids [1, T]; if `packed`, five documents of uneven lengths and then padding."""
        ends = jnp.asarray([0.07, 0.31, 0.32, 0.6, 0.93]) * self.seq_len
        ids = (jnp.arange(self.seq_len)[:, None] >= ends[None]).sum(1)
        ids = jnp.where(ids == 5, -1, ids) if self.packed else jnp.zeros_like(ids)
        return ids[None].astype(jnp.int32)

    def visible(self, ids: Array, rows: Array) -> Array:
        """Which keys the queries at positions `rows` see: [B, rows, S]."""
        keys = jnp.arange(self.seq_len)
        seen = jnp.take(ids, rows, axis=1)[:, :, None] == ids[:, None, :]
        seen &= ids[:, None, :] >= 0
        if self.causal:
            seen &= (keys[None, :] <= rows[:, None])[None]
        if self.window is not None:
            seen &= (keys[None, :] > rows[:, None] - self.window)[None]
        return seen


# In the order of their importance.
CHECKS = (
    Check(backend="cudnn"),
    Check(backend="cudnn", causal=False, kv_heads=2, head_dim=64),
    Check(backend="cudnn", degrees=st.Degrees.startrail(8, c=2)),
    Check(backend="tiled", packed=True, kv_heads=2, seq_len=8192),
    Check(backend="cudnn", window=3000, kv_heads=2, seq_len=8192),
    Check(backend="cudnn", window=500, seq_len=8192, degrees=st.Degrees(ring=4)),
    Check(backend="cudnn", dtype="float16", kv_heads=2, degrees=st.Degrees(team=4, ring=2)),
    Check(backend="xla", dtype="float32", packed=True, window=700, seq_len=2048),
)
TINY_CHECKS = tuple(
    dataclasses.replace(check, backend="xla", heads=2, kv_heads=1, head_dim=16, seq_len=128)
    for check in (
        Check(backend="xla", window=30),
        Check(backend="xla", dtype="float32", packed=True),
        Check(backend="xla", degrees=st.Degrees.startrail(4, c=2)),
    )
)

# Checks that are compiled together.
BATCH = 4


def measure(report: Report, until: float) -> None:
    """Measures and prints all rows, while the time is before `until`."""
    checks = report.wanted(TINY_CHECKS if report.args.tiny else CHECKS)
    columns = "".join(f"{name:>18}" for name in NAMES)
    report.write(f"{'relative errors (over those of jax)':<64}{columns}")
    references: dict[Check, Program] = {}
    for batch in (checks[i : i + BATCH] for i in range(0, len(checks), BATCH)):
        if time.monotonic() > until:
            report.left_out += [f"errors: {check}" for check in batch]
            continue
        programs = [(check, _programs(report, check, references)) for check in batch]
        compile_all([program for _, named in programs for program in named.values()])
        for check, named in programs:
            try:
                judge(report, check, named)
            except Exception as error:
                _fail(report, check, first_line(error))


def _programs(report: Report, check: Check, references: dict[Check, Program]) -> dict[str, Program]:
    """The programs of one row: the reference, ours and jax's."""
    inputs = check.inputs()
    # In float32 all backends and dtypes have the same reference, with inputs of their own.
    alike = dataclasses.replace(check, backend="", dtype="float32", degrees=st.Degrees())
    if alike not in references:
        # To look for the fastest kernels would take longer than it saves.
        options = {"xla_gpu_autotune_level": 0}
        references[alike] = Program(reference(alike), _exact(inputs), options)
    programs = {
        "reference": references[alike],
        "ours": prepare(lambda: Program(ours(check, report.mesh), inputs, report.options)),
    }
    if check.yardstick:
        programs["jax"] = Program(jax_attention(check, check.yardstick), inputs)
    return programs


def _exact(inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    return (*(x.astype(jnp.float32) for x in inputs[:4]), inputs[4])


def judge(report: Report, check: Check, programs: dict[str, Program]) -> None:
    """Runs the programs of one row, and prints it."""
    programs["reference"].arguments = _exact(check.inputs())
    results: dict[str, Any] = {name: None if x.error else x.run() for name, x in programs.items()}
    for name in ("reference", "ours"):
        if programs[name].error:
            _fail(report, check, f"{name}: {programs[name].error}")
            return
    own = errors(results["ours"], results["reference"])
    of_jax = errors(results.get("jax") or {}, results["reference"])
    ratios = {name: own[name] / x for name, x in of_jax.items()}
    wrong = faults(check, own, of_jax)
    report.failed |= bool(wrong)
    columns = ""
    for name in NAMES:
        columns += f"{own[name]:10.1e}" + (f" ({ratios[name]:5.2f})" if name in ratios else " " * 8)
    beside = f"beside jax.nn {check.yardstick}" if check.yardstick else "beside nothing"
    if "jax" in programs and programs["jax"].error:
        beside = f"without jax.nn {check.yardstick}, {programs['jax'].error}"
    report.write(
        f"{check!s:<64}{columns}  {f'FAIL {wrong}' if wrong else 'PASS'}, {beside}",
        part="errors", row=str(check), errors=own, errors_of_jax=of_jax, ratios=ratios,
        yardstick=beside, passed=not wrong,
    )  # fmt: skip


def reference(check: Check, chunk: int = 512) -> Callable[..., dict[str, Array]]:
    """A function of `check.inputs()` in float32: out, dq, dk, dv and lse, by chunks of queries."""
    dot = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    group, scale = check.heads // check.kv_heads, check.head_dim**-0.5
    chunk = min(chunk, check.seq_len)

    def compute(q: Array, k: Array, v: Array, dout: Array, ids: Array) -> dict[str, Array]:
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))

        def rows(sums: tuple[Array, Array], start: Array) -> Any:
            q_i, dout_i = (lax.dynamic_slice_in_dim(x, start, chunk, 1) for x in (q, dout))
            seen = check.visible(ids, start + jnp.arange(chunk))[:, None]
            logits = jnp.where(seen, dot("bqnh,bsnh->bnqs", q_i, k) * scale, -jnp.inf)
            highest = jnp.where(seen.any(-1), logits.max(-1), 0.0)
            weights = jnp.exp(logits - highest[..., None])
            total = weights.sum(-1)
            lse = jnp.where(total > 0, highest + jnp.log(total), _EMPTY)
            p = weights / jnp.where(total > 0, total, 1.0)[..., None]
            dp = dot("bqnv,bsnv->bnqs", dout_i, v)
            ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
            dk, dv = sums
            dk += dot("bnqs,bqnh->bsnh", ds, q_i)
            dv += dot("bnqs,bqnv->bsnv", p, dout_i)
            return (dk, dv), (dot("bnqs,bsnv->bqnv", p, v), dot("bnqs,bsnh->bqnh", ds, k), lse)

        sums = jnp.zeros_like(k), jnp.zeros_like(v)
        (dk, dv), (out, dq, lse) = lax.scan(rows, sums, jnp.arange(0, check.seq_len, chunk))
        out, dq = (jnp.moveaxis(x, 0, 1).reshape(q.shape) for x in (out, dq))
        lse = jnp.moveaxis(lse, 0, 2).reshape(*lse.shape[1:3], -1)
        dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
        return _named(out, dq, dk, dv, lse)

    return compute


def _fail(report: Report, check: Check, error: str) -> None:
    report.failed = True
    report.write(f"{check!s:<64}  FAIL {error}", part="errors", row=str(check), error=error)


def ours(check: Check, mesh: Mesh) -> Callable[..., dict[str, Array]]:
    """The function of the package with the same results, on a mesh of one device."""
    options: dict[str, Any] = dict(backend=check.backend, causal=check.causal, window=check.window)
    if check.degrees.sequence > 1:
        layout = "zigzag" if check.causal else "contiguous"
        schedule = rehearsal.schedule_of(check.degrees, mesh, layout=layout, **options)
        return lambda *inputs: _named(*rehearsal.in_turn(schedule, *inputs[:4]))
    attention = st.Attention(mesh, **options)

    def compute(q: Array, k: Array, v: Array, dout: Array, ids: Array) -> dict[str, Array]:
        attend = functools.partial(
            attention, segment_ids=ids if check.packed else None, return_lse=True
        )
        (out, lse), vjp = jax.vjp(attend, q, k, v)
        return _named(out, *vjp((dout, jnp.zeros_like(lse))), lse)

    return compute


def jax_attention(check: Check, implementation: str) -> Callable[..., dict[str, Array]]:
    """The function of jax's own attention with the same results, without lse."""

    def compute(q: Array, k: Array, v: Array, dout: Array, ids: Array) -> dict[str, Array]:
        options: dict[str, Any] = dict(is_causal=check.causal)
        if check.packed or check.window:
            options = dict(mask=check.visible(ids, jnp.arange(check.seq_len))[:, None])

        def attend(*qkv: Array) -> Array:
            return jax.nn.dot_product_attention(
                *qkv, implementation="cudnn" if implementation == "cudnn" else "xla", **options
            )

        out, vjp = jax.vjp(attend, q, k, v)
        # jax's rows that see no key attend to all of them.
        sees = (ids >= 0)[:, :, None, None]
        return _named(jnp.where(sees, out, 0), *vjp(jnp.where(sees, dout, 0)))

    return compute


def _named(*arrays: Array) -> dict[str, Array]:
    return dict(zip(NAMES, arrays, strict=False))


def errors(results: dict[str, Array], expected: dict[str, Array]) -> dict[str, float]:
    """Relative error of every array in `results`.

    Rows that see no key have an lse that is agreed on; with any other, the error is NaN.
    """
    found = {}
    for name, x in results.items():
        x, y = np.asarray(x, np.float32), np.asarray(expected[name], np.float32)
        if name == "lse":
            empty = y == np.float32(_EMPTY)
            x, y = np.where(empty, np.where(x == y, 0, np.nan), x), np.where(empty, 0, y)
        found[name] = float(np.linalg.norm(x - y) / np.linalg.norm(y))
    return found


def faults(check: Check, own: dict[str, float], jax_own: dict[str, float]) -> list[str]:
    """Names of the arrays whose errors are too large; NaN counts as too large."""
    limits = {
        name: MOST_RATIO * jax_own[name] if name in jax_own else MOST_ERROR[check.dtype]
        for name in NAMES
    }
    limits["lse"] = min(MOST_LSE_ERROR, MOST_ERROR[check.dtype])
    return [name for name in NAMES if not own[name] <= limits[name]]

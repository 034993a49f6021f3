"""Part 1 of `run.py`: errors of the block backends beside those of jax's own attention.

The reference is `jax.nn.dot_product_attention` in float32 at highest precision, forward and
backward, with dense masks, and shares no code with the package. Errors are relative in the 2-norm
over the whole array: |x - reference| / |reference|.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jaxtyping import Array

import startrail_jax as st
from benchmarks.gpu.report import Program, Report, first_line
from startrail_jax.devices.axes import device_kind
from startrail_jax.devices.degrees import ROLES
from startrail_jax.rings import collectives, vjp
from startrail_jax.shapes import EMPTY

NAMES = ("out", "dq", "dk", "dv", "lse")

MOST_RATIO = 1.4
"""Largest error that is allowed, as a multiple of that of jax's attention in the same dtype."""

MOST_ERROR = 1e-5
"""Largest error in float32."""

MOST_LSE_ERROR = 1e-4
"""Largest error of the log-sum-exp in 16 bits."""


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
    """Degrees of a mesh, whose devices are computed as one batch."""

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        mask += f", window {self.window}" if self.window else ""
        mask += ", packed" if self.packed else ""
        heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        text = f"{self.backend}, {self.dtype}, {mask}, {heads}, {self.seq_len} tokens"
        sizes = [f"{axis} {size}" for axis, size in vars(self.degrees).items() if size > 1]
        return f"{text}, {', '.join(sizes)} at once" if sizes else text

    @property
    def yardstick(self) -> str:
        """The implementation of `jax.nn.dot_product_attention` to compare with."""
        return "xla" if self.packed or self.window or self.backend == "xla" else "cudnn"

    def inputs(self) -> tuple[Array, ...]:
        """Random q, k, v and dout, and segment ids: if `packed`, three documents, then padding."""
        rng = np.random.default_rng(0)
        arrays = (
            rng.standard_normal((1, self.seq_len, n, self.head_dim), np.float32)
            for n in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        )
        ends = np.asarray([0.07, 0.6, 0.93]) * self.seq_len
        ids = (np.arange(self.seq_len)[:, None] >= ends).sum(1)
        ids = np.where(ids == 3, -1, ids) if self.packed else np.zeros_like(ids)
        return (*(jnp.asarray(x, self.dtype) for x in arrays), jnp.asarray(ids[None], jnp.int32))

    def visible(self, ids: Array) -> Array:
        """Which keys the queries see: [B, T, S]."""
        rows, keys = jnp.ogrid[: self.seq_len, : self.seq_len]
        seen = (keys <= rows) | (not self.causal)
        seen &= keys > rows - (self.window or self.seq_len)
        return seen[None] & (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] >= 0)


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
    replace(check, backend="xla", heads=2, kv_heads=1, head_dim=16, seq_len=128)
    for check in (
        Check(backend="xla", window=30),
        Check(backend="xla", dtype="float32", packed=True),
        Check(backend="xla", degrees=st.Degrees.startrail(4, c=2)),
    )
)


def measure(report: Report) -> None:
    """Measures and prints all rows, until the time is up."""
    columns = "".join(f"{name:>18}" for name in NAMES)
    print(f"{'relative errors (over those of jax)':<66}{columns}")
    for check in report.wanted(TINY_CHECKS if report.args.tiny else CHECKS):
        if report.seconds_left < 0:
            report.left_out.append(f"errors: {check}")
            continue
        try:
            line, right = measure_row(report, check)
        except Exception as error:
            line, right = first_line(error), False
        report.failed |= not right
        print(f"{check!s:<66}{line}  {'PASS' if right else 'FAIL'}", flush=True)


def measure_row(report: Report, check: Check) -> tuple[str, bool]:
    """The errors of one row, as text, and whether they are small enough."""
    inputs = check.inputs()
    exact = (*(x.astype(jnp.float32) for x in inputs[:4]), inputs[4])
    programs = {
        "reference": Program(jax_attention(check, "xla"), exact),
        "ours": Program(ours(check, report.mesh), inputs, report.options),
    }
    if check.dtype != "float32":
        programs["jax"] = Program(jax_attention(check, check.yardstick), inputs)
    results = {name: program.run() for name, program in programs.items()}
    failed = {name: program.error for name, program in programs.items() if program.error}
    if failed:
        return "; ".join(f"{name}: {error}" for name, error in failed.items()), False
    own = errors(results["ours"], results["reference"])
    of_jax = errors(results.get("jax", {}), results["reference"])
    columns = ""
    for name in NAMES:
        ratio = f" ({own[name] / of_jax[name]:5.2f})" if name in of_jax else " " * 8
        columns += f"{own[name]:10.1e}{ratio}"
    wrong = faults(check, own, of_jax)
    return f"{columns} {' '.join(wrong)}", not wrong


def ours(check: Check, mesh: Mesh) -> Callable[..., dict[str, Array]]:
    """out, dq, dk, dv and lse of `check.inputs()` by the package."""
    options: dict[str, Any] = dict(backend=check.backend, causal=check.causal, window=check.window)
    if check.degrees.sequence > 1:
        return lambda *inputs: _named(*at_once(check.degrees, mesh, *inputs[:4], **options))
    attention = st.Attention(mesh, **options)

    def compute(q: Array, k: Array, v: Array, dout: Array, ids: Array) -> dict[str, Array]:
        attend = functools.partial(
            attention, segment_ids=ids if check.packed else None, return_lse=True
        )
        (out, lse), vjp = jax.vjp(attend, q, k, v)
        return _named(out, *vjp((dout, jnp.zeros_like(lse))), lse)

    return compute


def at_once(
    degrees: st.Degrees,
    device_mesh: Mesh,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    **options: Any,
) -> tuple[Array, ...]:
    """out, dq, dk, dv and lse as the devices of a mesh compute them, as a batch on one device.

    `jax.vmap` over named axes serves the same collectives as a mesh.

    Args:
        degrees: of the mesh, with a head degree of 1.
        device_mesh: a mesh of the device.
        q, k, v, dout: the whole sequence, in natural order.
        options: of `Attention`.
    """
    sizes = tuple(getattr(degrees, role) for role in ROLES)
    mesh = AbstractMesh(sizes, ROLES, axis_types=(AxisType.Explicit,) * len(ROLES))
    attention = st.Attention(mesh, layout="zigzag" if options["causal"] else None, **options)
    platform, capability = device_kind(device_mesh)
    schedule = replace(attention.schedule, platform=platform, capability=capability)
    axes = schedule.ring, schedule.group, schedule.team
    split_over = tuple(axis.degree for axis in axes)

    def on_device(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
        (out, lse), pull = jax.vjp(functools.partial(vjp.sharded_attention, schedule), q, k, v)
        return (out, *pull((dout, jnp.zeros_like(lse))), lse)

    devices: Callable[..., Any] = on_device
    for axis in reversed(axes):
        devices = jax.vmap(devices, axis_name=axis.names[0] if axis.degree > 1 else None)

    def split(x: Array) -> Array:
        x = attention.layout.permute(x)
        x = x.reshape(x.shape[0], *split_over, -1, *x.shape[2:])
        return jnp.moveaxis(x, 0, len(axes))

    def join(x: Array, dim: int) -> Array:
        x = jnp.moveaxis(x, range(len(axes)), range(dim, dim + len(axes)))
        whole = x.reshape(*x.shape[:dim], -1, *x.shape[dim + len(axes) + 1 :])
        return attention.layout.unpermute(whole, axis=dim)

    # That of the package asks the mesh, of which there is none, for the order of its axes.
    permute = lambda x, axis, pairs: lax.ppermute(x, axis.names, pairs)  # noqa: E731
    with mock.patch.object(collectives, "permute", permute):
        *arrays, lse = devices(*map(split, (q, k, v, dout)))
    return (*(join(x, 1) for x in arrays), join(lse, 2))


def jax_attention(check: Check, implementation: Any) -> Callable[..., dict[str, Array]]:
    """The same by jax's own attention."""

    @jax.default_matmul_precision("highest")
    def compute(q: Array, k: Array, v: Array, dout: Array, ids: Array) -> dict[str, Array]:
        seen = check.visible(ids)
        options: dict[str, Any] = dict(is_causal=check.causal)
        if check.packed or check.window:
            options = dict(mask=seen[:, None])
        attend = functools.partial(
            jax.nn.dot_product_attention, implementation=implementation, **options
        )
        out, vjp = jax.vjp(attend, q, k, v)
        # jax's rows that see no key attend to all of them.
        sees = (ids >= 0)[:, :, None, None]
        results = _named(jnp.where(sees, out, 0), *vjp(jnp.where(sees, dout, 0)))
        if q.dtype == jnp.float32:
            k = jnp.repeat(k, check.heads // check.kv_heads, axis=2)
            logits = jnp.einsum("btnh,bsnh->bnts", q, k) * check.head_dim**-0.5
            lse = jax.nn.logsumexp(logits, axis=-1, where=seen[:, None])
            results["lse"] = jnp.where(sees[:, None, :, 0, 0], lse, EMPTY)
        return results

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
            empty = y == np.float32(EMPTY)
            x, y = np.where(empty, np.where(x == y, 0, np.nan), x), np.where(empty, 0, y)
        found[name] = float(np.linalg.norm(x - y) / np.linalg.norm(y))
    return found


def faults(check: Check, own: dict[str, float], of_jax: dict[str, float]) -> list[str]:
    """Names of the arrays whose errors are too large; NaN counts as too large."""
    if check.dtype == "float32":
        limits = dict.fromkeys(NAMES, MOST_ERROR)
    else:
        limits = {name: MOST_RATIO * of_jax[name] for name in NAMES[:4]} | {"lse": MOST_LSE_ERROR}
    return [name for name in NAMES if not own[name] <= limits[name]]

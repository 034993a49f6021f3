"""Part 1 of `run.py`: errors of the block backends beside those of jax's own attention.

The reference is `jax.nn.dot_product_attention` in float32 at highest precision, forward and
backward, with dense masks, and shares no code with the package. Errors are relative in the 2-norm
over the whole array: |x - reference| / |reference|.
"""

from __future__ import annotations

import functools
import importlib.util
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

HAS_FA4 = importlib.util.find_spec("fa4_jax") is not None
"""Whether the package of backend "fa4" is installed."""
NAMES = ("out", "dq", "dk", "dv")
MOST_RATIO = 1.4
"""Largest error that is allowed, as a multiple of that of jax's attention in the same dtype."""
MOST_ERROR = 1e-5
"""Largest error in float32."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table: a backend, and what it has to compute."""

    backend: str
    dtype: str = "bfloat16"
    causal: bool = True
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    value_head_dim: int | None = None
    """Channels of a value head; None for `head_dim`."""
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
        heads += f"/{self.value_head_dim}" if self.value_head_dim else ""
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
        value_head_dim = self.value_head_dim or self.head_dim
        sizes = (
            (self.heads, self.head_dim),
            (self.kv_heads, self.head_dim),
            (self.kv_heads, value_head_dim),
            (self.heads, value_head_dim),
        )
        arrays = (rng.standard_normal((1, self.seq_len, *size), np.float32) for size in sizes)
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
    Check(backend="cudnn", packed=True, kv_heads=2, seq_len=8192),
    Check(backend="cudnn", window=3000, kv_heads=2, seq_len=8192),
    Check(backend="tiled", packed=True, kv_heads=2, seq_len=8192),
    Check(backend="cudnn", causal=False, packed=True, kv_heads=2),
    Check(backend="cudnn", degrees=st.Degrees.startrail(8, c=2)),
    Check(backend="cudnn", packed=True, seq_len=8192, degrees=st.Degrees(ring=2)),
    Check(backend="cudnn", window=500, seq_len=8192, degrees=st.Degrees(ring=4)),
    Check(backend="cudnn", dtype="float16", kv_heads=2, degrees=st.Degrees(team=4, ring=2)),
    Check(backend="xla", dtype="float32", packed=True, window=700, seq_len=2048),
    Check(backend="cudnn", packed=True, window=700, seq_len=8192, degrees=st.Degrees(ring=2)),
    Check(backend="cudnn", head_dim=192, value_head_dim=128),
    Check(backend="cudnn", head_dim=192, value_head_dim=128, packed=True, kv_heads=2),
    Check(backend="cudnn", head_dim=256, kv_heads=2),
    Check(backend="fa4", kv_heads=2),
    Check(backend="fa4", causal=False, head_dim=64),
    Check(backend="fa4", packed=True, kv_heads=2, seq_len=8192),
    Check(backend="fa4", dtype="float16", seq_len=8192),
    Check(backend="fa4", head_dim=96, value_head_dim=64),
)
TINY_CHECKS = tuple(
    replace(check, backend="xla", heads=2, kv_heads=1, head_dim=16, seq_len=128)
    for check in (
        Check(backend="xla", window=30),
        Check(backend="xla", dtype="float32", packed=True),
        Check(backend="xla", degrees=st.Degrees.startrail(4, c=2)),
    )
)


def measure(report: Report) -> bool:
    """Measures and prints all rows, until the time is up. Returns whether all are right."""
    columns = "".join(f"{name:>18}" for name in NAMES)
    print(f"{'relative errors (over those of jax)':<66}{columns}")
    all_right = True
    for check in TINY_CHECKS if report.tiny else CHECKS:
        if report.seconds_left < 0:
            print(f"left out, as the time was up: {check}")
            continue
        if check.backend == "fa4" and not HAS_FA4:
            print(f"left out, as fa4-jax is not installed: {check}")
            continue
        try:
            line, right = measure_row(report, check)
        except Exception as error:
            line, right = first_line(error), False
        all_right &= right
        print(f"{check!s:<66}{line}  {'PASS' if right else 'FAIL'}", flush=True)
    return all_right


def measure_row(report: Report, check: Check) -> tuple[str, bool]:
    """The errors of one row, as text, and whether they are small enough."""
    inputs = check.inputs()
    exact = (*(x.astype(jnp.float32) for x in inputs[:4]), inputs[4])
    programs = {
        "reference": Program(jax_attention(check, "xla"), exact),
        "ours": Program(ours(check, report.mesh), inputs, report.options),
        "jax": Program(jax_attention(check, check.yardstick), inputs),
    }
    results = {name: program.run() for name, program in programs.items()}
    failed = {name: program.error for name, program in programs.items() if program.error}
    if failed:
        return "; ".join(f"{name}: {error}" for name, error in failed.items()), False
    own, of_jax = (errors(results[name], results["reference"]) for name in ("ours", "jax"))
    is_exact = check.dtype == "float32"
    limits = [MOST_ERROR if is_exact else MOST_RATIO * error for error in of_jax]
    line = "".join(
        f"{error:10.1e}" + (" " * 8 if is_exact else f" ({error / other:5.2f})")
        for error, other in zip(own, of_jax, strict=True)
    )
    # NaN is too large.
    return line, all(error <= limit for error, limit in zip(own, limits, strict=True))


def errors(results: tuple[Array, ...], expected: tuple[Array, ...]) -> list[float]:
    pairs = [[np.asarray(x, np.float32) for x in pair]
             for pair in zip(results, expected, strict=True)]  # fmt: skip
    return [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs]


def ours(check: Check, mesh: Mesh) -> Callable[..., tuple[Array, ...]]:
    """out, dq, dk and dv of `check.inputs()` by the package."""
    options: dict[str, Any] = dict(backend=check.backend, causal=check.causal, window=check.window)
    if check.degrees.sequence > 1:
        return lambda q, k, v, dout, ids: at_once(
            check.degrees, mesh, q, k, v, dout, ids if check.packed else None, **options
        )
    attention = st.Attention(mesh, **options)

    def compute(q: Array, k: Array, v: Array, dout: Array, ids: Array) -> tuple[Array, ...]:
        attend = functools.partial(attention, segment_ids=ids if check.packed else None)
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return compute


def at_once(
    degrees: st.Degrees,
    device_mesh: Mesh,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    ids: Array | None,
    **options: Any,
) -> tuple[Array, ...]:
    """out, dq, dk and dv as the devices of a mesh compute them, as a batch on one device:
    `jax.vmap` over named axes serves the same collectives. Arrays are whole sequences, in natural
    order."""
    sizes = tuple(getattr(degrees, role) for role in ROLES)
    mesh = AbstractMesh(sizes, ROLES, axis_types=(AxisType.Explicit,) * len(ROLES))
    attention = st.Attention(mesh, layout="zigzag" if options["causal"] else None, **options)
    platform, capability = device_kind(device_mesh)
    schedule = replace(attention.schedule, platform=platform, capability=capability)
    axes = schedule.ring, schedule.group, schedule.team
    split_over = tuple(axis.degree for axis in axes)

    def on_device(q: Array, k: Array, v: Array, dout: Array, *packed: Array) -> tuple[Array, ...]:
        (ids,) = packed or (None,)

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            return vjp.sharded_attention(schedule, q, k, v, ids, ids)

        (out, lse), pull = jax.vjp(attend, q, k, v)
        return out, *pull((dout, jnp.zeros_like(lse)))

    devices: Callable[..., Any] = on_device
    for axis in reversed(axes):
        devices = jax.vmap(devices, axis_name=axis.names[0] if axis.degree > 1 else None)

    def split(x: Array) -> Array:
        x = attention.layout.permute(x)
        x = x.reshape(x.shape[0], *split_over, -1, *x.shape[2:])
        return jnp.moveaxis(x, 0, len(axes))

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, range(len(axes)), range(1, 1 + len(axes)))
        return attention.layout.unpermute(x.reshape(x.shape[0], -1, *x.shape[-2:]))

    # That of the package asks the mesh, of which there is none, for the order of its axes.
    permute = lambda x, axis, pairs: lax.ppermute(x, axis.names, pairs)  # noqa: E731
    with mock.patch.object(collectives, "permute", permute):
        given = (q, k, v, dout) if ids is None else (q, k, v, dout, ids)
        return tuple(map(join, devices(*map(split, given))))


def jax_attention(check: Check, implementation: Any) -> Callable[..., tuple[Array, ...]]:
    """The same by jax's own attention."""

    @jax.default_matmul_precision("highest")
    def compute(q: Array, k: Array, v: Array, dout: Array, ids: Array) -> tuple[Array, ...]:
        options: dict[str, Any] = dict(is_causal=check.causal)
        if check.packed or check.window:
            options = dict(mask=check.visible(ids)[:, None])

        def attend(q: Array, k: Array, v: Array) -> Array:
            # Values have as many channels as keys.
            head_dim, missing = v.shape[3], q.shape[3] - v.shape[3]
            v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, missing)))
            attend = jax.nn.dot_product_attention
            return attend(q, k, v, implementation=implementation, **options)[..., :head_dim]

        out, pull = jax.vjp(attend, q, k, v)
        # jax's rows that see no key attend to all of them.
        sees = (ids >= 0)[:, :, None, None]
        return jnp.where(sees, out, 0), *pull(jnp.where(sees, dout, 0))

    return compute

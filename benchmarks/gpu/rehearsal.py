"""Runs on one device, without the mesh, what the devices of a mesh compute.

`alone` runs the work of one of them, to time it; `together` runs that of all, to check the results:
`jax.vmap` over named axes serves the same collectives as a mesh.

In `alone` the device's own program (both rules of `vjp.concentric_attention`: rounds, merges,
reorders and combination) is traced with stand-ins for the functions of `collectives`, so that
everything but the network is left:

    index                 an argument of the program: what depends on the device is not folded
    permutes              the operand, as what arrives has the same shape and dtype
    gather, scatter_sum,  a buffer that is an argument of the program: the network has written it
    partials              (and has added, for scatter_sum) by the time the device reads it

Nothing reads such a buffer before the device has computed what it sends in return, which the
program returns beside the results. The buffers into which a ring hop receives are missing from its
memory (one key unit, forward). The numbers that come out mean nothing, because nothing was
received.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jaxtyping import Array, Int32

import startrail_jax as st
from startrail_jax.devices.axes import device_kind
from startrail_jax.devices.degrees import ROLES, Axis
from startrail_jax.rings import collectives, vjp
from startrail_jax.rings.schedule import Schedule


def schedule_of(degrees: st.Degrees, device_mesh: Mesh, **options: Any) -> Schedule:
    """The schedule of `Attention(mesh, **options)` on a mesh of devices like those of another.

    Raises:
        NotImplementedError: for `head` > 1 and for published=True.
    """
    published = options.get("published", False)
    if degrees.head > 1 or published:
        raise NotImplementedError(
            "Only head=1 and published=False can be rehearsed; got "
            f"head={degrees.head}, published={published}. "
            "A Ulysses exchange leaves the same attention with fewer heads."
        )
    sizes = tuple(getattr(degrees, role) for role in ROLES)
    mesh = AbstractMesh(sizes, ROLES, axis_types=(AxisType.Explicit,) * len(ROLES))
    platform, capability = device_kind(device_mesh)
    schedule = st.Attention(mesh, **options).schedule
    return dataclasses.replace(schedule, platform=platform, capability=capability)


def alone(schedule: Schedule, *, backward: bool) -> Callable[..., Any]:
    """What one device of the schedule's mesh computes, without the network.

    Returns:
        A function of (device, received, q, k, v, dout): the device's (p, g, a) as int32 [3];
        buffers as `arrivals` lists them; and arrays of the size of the device's shards. It returns
        out and, if `backward`, dq, dk and dv; and what the device has computed and sent.
    """

    def run(device: Int32[Array, " axes"], received: Sequence[Array], *arrays: Array) -> Any:
        network = _Network(schedule, device, arrays, iter(received))
        results = _rules(schedule, network.stand_ins, *arrays, backward=backward)
        return results[:4], network.sent

    return run


def arrivals(schedule: Schedule, *arrays: Any, backward: bool) -> list[jax.ShapeDtypeStruct]:
    """What the gathers and scatters of `alone` bring to the device, in order.

    Args:
        arrays: q, k, v and dout, or their shapes.
    """
    network = _Network(schedule, (0, 0, 0), ())
    # A function of its own, as jax remembers traces by function.
    jax.eval_shape(
        lambda *arrays: _rules(schedule, network.stand_ins, *arrays, backward=backward), *arrays
    )
    return network.shapes


def middle(schedule: Schedule) -> Int32[Array, " axes"]:
    """(p, g, a) in the middle of the mesh. Under zigzag the work of all devices is the same."""
    axes = (schedule.ring, schedule.group, schedule.team)
    return jnp.asarray([axis.degree // 2 for axis in axes], jnp.int32)


def together(schedule: Schedule, q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
    """Computes what all devices of the schedule's mesh compute, as one batch.

    Args:
        q, k, v, dout: the whole sequence, in natural order.

    Returns:
        out, dq, dk, dv and lse, in natural order.
    """
    layout, axes = schedule.layout, (schedule.ring, schedule.group, schedule.team)
    degrees = tuple(axis.degree for axis in axes)
    devices: Any = functools.partial(_rules, schedule, {"permute": _permute}, backward=True)
    for axis in reversed(axes):
        devices = jax.vmap(devices, axis_name=axis.names[0] if axis.degree > 1 else None)

    def split(x: Array) -> Array:
        x = layout.permute(x)
        x = x.reshape(x.shape[0], *degrees, -1, *x.shape[2:])
        return jnp.moveaxis(x, 0, len(degrees))

    def join(x: Array, dim: int) -> Array:
        x = jnp.moveaxis(x, range(len(degrees)), range(dim, dim + len(degrees)))
        whole = x.reshape(*x.shape[:dim], -1, *x.shape[dim + len(degrees) + 1 :])
        return layout.unpermute(whole, axis=dim)

    *arrays, lse = devices(*map(split, (q, k, v, dout)))
    return (*(join(x, 1) for x in arrays), join(lse, 2))


def _permute(x: Array, axis: Axis, pairs: Sequence[tuple[int, int]]) -> Array:
    """`collectives.permute`, also where jax cannot `vmap` it: over several axes."""
    sources = np.zeros(axis.degree, np.int32)
    for source, target in pairs:
        sources[target] = source
    return lax.all_gather(x, axis.names)[jnp.asarray(sources)[lax.axis_index(axis.names)]]


def _rules(
    schedule: Schedule, stand_ins: dict[str, Any], *arrays: Array, backward: bool
) -> tuple[Array, ...]:
    """The forward and the backward rule of the op, in one trace: out, and dq, dk, dv and lse.

    jax would trace the forward rule apart, and what is sent there could not be returned.
    """
    q, k, v, dout = arrays
    op: Any = vjp.concentric_attention
    with (
        # Without its jit, which would remember another trace.
        mock.patch.object(vjp, "concentric_attention", op.fun.__wrapped__),
        mock.patch.multiple(collectives, **stand_ins),
    ):
        (out, lse, _), residuals = op.fwd(schedule, q, k, v, None, None)
        if not backward:
            return (out,)
        return (*(out, *op.bwd(schedule, residuals, (dout, jnp.zeros_like(lse)))[:3]), lse)


class _Network:
    """Stand-ins for `startrail_jax.rings.collectives` during one trace."""

    def __init__(
        self,
        schedule: Schedule,
        device: Any,
        given: Sequence[Array],
        received: Iterator[Array] | None = None,
    ) -> None:
        axes = (schedule.ring, schedule.group, schedule.team)
        self.device = {axis.names: device[i] for i, axis in enumerate(axes)}
        self.given = given
        self.received = received
        self.sent: list[Array] = []
        self.shapes: list[jax.ShapeDtypeStruct] = []
        names = ("index", "permute", "gather", "scatter_sum", "partials")
        self.stand_ins = {name: getattr(self, name) for name in names}

    def index(self, axis: Axis) -> Any:
        return self.device[axis.names] if axis.degree > 1 else 0

    def permute(self, x: Array, axis: Axis, pairs: Any) -> Array:
        return x

    def gather(self, x: Array, axis: Axis, dim: int) -> Array:
        if axis.degree == 1:
            return x
        return self.receive(x, _resized(x.shape, dim, x.shape[dim] * axis.degree))

    def scatter_sum(self, x: Array, axis: Axis, dim: int) -> Array:
        if axis.degree == 1:
            return x
        return self.receive(x, _resized(x.shape, dim, x.shape[dim] // axis.degree))

    def partials(self, x: Array, axis: Axis, dim: int) -> Array:
        if axis.degree == 1:
            return x[None]
        part = _resized(x.shape, dim, x.shape[dim] // axis.degree)
        return self.receive(x, (axis.degree, *part))

    def receive(self, sent: Array, shape: tuple[int, ...]) -> Array:
        self.shapes.append(jax.ShapeDtypeStruct(shape, sent.dtype))
        here = jnp.zeros(shape, sent.dtype) if self.received is None else next(self.received)
        if any(sent is x for x in self.given):
            return here
        # XLA drops operands of a barrier that nothing uses, and their senders: hence `self.sent`.
        sent, here = lax.optimization_barrier((sent, here))
        self.sent.append(sent)
        return here


def _resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])

"""Runs on one device, without the mesh, what the devices of a mesh compute.

`alone` runs the work of one of them, to time it; `in_turn` runs that of all, to check the results.

In `alone` the device's own program (both rules of `rings.concentric_attention`: rounds, merges,
reorders and combination) is traced with stand-ins for the functions of `rings.collectives`, so that
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
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jaxtyping import Array, Int32

import startrail_jax as st
from startrail_jax import blocks
from startrail_jax.blocks.base import Pair
from startrail_jax.blocks.softmax import merge_partials
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.devices.axes import device_kind
from startrail_jax.devices.degrees import ROLES, Axis
from startrail_jax.rings import collectives, rings
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
        network = _Network(schedule, device, iter(received))
        return network.attend(*arrays, backward=backward), network.sent

    return run


def arrivals(schedule: Schedule, *arrays: Any, backward: bool) -> list[jax.ShapeDtypeStruct]:
    """What the gathers and scatters of `alone` bring to the device, in order.

    Args:
        arrays: q, k, v and dout, or their shapes.
    """
    network = _Network(schedule, (0, 0, 0))
    # A function of its own, as jax remembers traces by function.
    jax.eval_shape(lambda *arrays: network.attend(*arrays, backward=backward), *arrays)
    return network.shapes


def middle(schedule: Schedule) -> Int32[Array, " axes"]:
    """(p, g, a) in the middle of the mesh. Under zigzag the work of all devices is the same."""
    axes = (schedule.ring, schedule.group, schedule.team)
    return jnp.asarray([axis.degree // 2 for axis in axes], jnp.int32)


class _Network:
    """Stand-ins for `startrail_jax.rings.collectives` during one trace."""

    def __init__(
        self, schedule: Schedule, device: Any, received: Iterator[Array] | None = None
    ) -> None:
        self.schedule = schedule
        axes = (schedule.ring, schedule.group, schedule.team)
        self.device = {axis.names: device[i] for i, axis in enumerate(axes)}
        self.received = received
        self.given: tuple[Array, ...] = ()
        self.sent: list[Array] = []
        self.shapes: list[jax.ShapeDtypeStruct] = []

    def attend(
        self, q: Array, k: Array, v: Array, dout: Array, *, backward: bool
    ) -> tuple[Array, ...]:
        """The forward and the backward rule of the op, in one trace.

        jax would trace the forward rule apart, and what is sent there could not be returned.
        """
        self.given = (q, k, v, dout)
        op: Any = rings.concentric_attention
        with (
            # Without its jit, which would remember another trace.
            mock.patch.object(rings, "concentric_attention", op.fun.__wrapped__),
            mock.patch.multiple(
                collectives,
                index=self.index,
                gather=self.gather,
                scatter_sum=self.scatter_sum,
                partials=self.partials,
                permute=self.permute,
            ),
        ):
            (out, lse, _), residuals = op.fwd(self.schedule, q, k, v, None, None)
            if not backward:
                return (out,)
            return (out, *op.bwd(self.schedule, residuals, (dout, jnp.zeros_like(lse)))[:3])

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


def in_turn(schedule: Schedule, q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
    """Computes what all devices of a mesh compute, one after another, on the units of one sequence.

    Blocks, masks, merges and roundings are those of the mesh, in the "kv" mode of the backward
    pass, so that the results are what the mesh gets. The gathers and hops are slices.

    Args:
        q, k, v, dout: the whole sequence, in natural order.

    Returns:
        out, dq, dk and dv in the dtype of q, and lse, in natural order.
    """
    layout, devices = schedule.layout, _Devices(schedule)
    q, k, v, dout = (layout.permute(x) for x in (q, k, v, dout))
    out, lse = devices.forward(q, k, v)
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    results = (out, *devices.backward(q, k, v, dout, lse, delta))
    natural = [layout.unpermute(x).astype(q.dtype) for x in results]
    return (*natural, layout.unpermute(lse, axis=2))


@dataclasses.dataclass(frozen=True)
class _Devices:
    """All devices of a mesh; whole sequences are in layout order."""

    schedule: Schedule

    @property
    def ranks(self) -> Array:
        """(p, g, a) of every device, by rank."""
        axes = (self.schedule.ring, self.schedule.group, self.schedule.team)
        devices = itertools.product(*(range(axis.degree) for axis in axes))
        return jnp.asarray(list(devices), jnp.int32)

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """out in the dtype of q, and lse."""
        schedule, team = self.schedule, self.schedule.team.degree
        block, size = blocks.BACKENDS[str(schedule.backend)], schedule.query_ranks

        def attend(device: Array) -> tuple[Array, Array]:
            q_unit = self.unit(q, self.query_unit(device))
            partials: Any = ()
            for _, k_unit, v_unit, mask in self.rounds(device, k, v):
                pair = Pair(q_unit, k_unit, v_unit, mask, _scale(q))
                partials = block.forward(pair, partials)
            out, lse = merge_partials(partials)
            out, lse = schedule.unsort(out, size, 1), schedule.unsort(lse, size, 2)
            return (out.astype(q.dtype) if team > 1 else out), lse

        def combine(outs: Array, lses: Array) -> tuple[Array, Array]:
            return merge_partials(list(zip(outs, lses, strict=True)))

        outs, lses = (x.reshape(-1, team, *x.shape[1:]) for x in lax.map(attend, self.ranks))
        out, lse = jax.vmap(combine)(outs, lses)
        lse = jnp.moveaxis(lse, 0, 2)
        return _joined(out, q.shape).astype(q.dtype), lse.reshape(*lse.shape[:2], -1)

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array
    ) -> tuple[Array, ...]:
        """dq, dk, dv in float32."""
        schedule = self.schedule
        block = blocks.BACKENDS[str(schedule.backend)]

        def add_device(sums: tuple[Array, ...], device: Array) -> Any:
            dq, dk, dv = sums
            at = self.query_unit(device)
            q_unit, dout_unit = self.unit(q, at), self.unit(dout, at)
            lse_unit, delta_unit = self.unit(lse, at, 2), self.unit(delta, at, 2)
            own: Any = None
            for met, k_unit, v_unit, mask in self.rounds(device, k, v):
                pair = Pair(q_unit, k_unit, v_unit, mask, _scale(q))
                own, dk_unit, dv_unit = block.backward(
                    pair, lse_unit, delta_unit, dout_unit, (own, None, None)
                )
                own = own.astype(jnp.float32)
                dk, dv = self.add(dk, dk_unit, met), self.add(dv, dv_unit, met)
            return (self.add(dq, own, at), dk, dv), None

        zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        return lax.scan(add_device, zeros, self.ranks)[0]

    def rounds(
        self, device: Array, k: Array, v: Array
    ) -> Iterator[tuple[Array, Array, Array, Visibility]]:
        """The key unit, its keys and values, and the mask, of each round of a device."""
        for distance in range(self.schedule.ring.degree):
            met = self.key_unit(device, distance)
            mask = self.schedule.visibility(k.shape[1], tuple(device), keys_behind=distance)
            yield met, self.unit(k, met), self.unit(v, met), mask

    def query_unit(self, device: Array) -> Array:
        """The ranks of the query unit of a device."""
        p, g, _ = device
        size = self.schedule.query_ranks
        return (p * self.schedule.group.degree + g) * size + jnp.arange(size)

    def key_unit(self, device: Array, distance: int) -> Array:
        """The ranks of the key unit that a device meets at a ring distance."""
        p, _, a = device
        groups, head = self.schedule.group.degree, self.schedule.head.degree
        team = jnp.arange(groups)[:, None] * self.schedule.query_ranks
        block = self.schedule.along_ring(p, distance, -1) * groups * self.schedule.query_ranks
        return (block + team + a * head + jnp.arange(head)[None]).ravel()

    def unit(self, x: Array, ranks: Array, dim: int = 1) -> Array:
        """The shards of some ranks, sorted."""
        own = jnp.take(self.by_rank(x, dim), ranks, dim)
        own = own.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
        return self.schedule.sort(own, len(ranks), dim)

    def add(self, x: Array, dx: Array, ranks: Array) -> Array:
        """Adds what belongs to a unit, and is sorted, to the whole sequence."""
        dx, x_by_rank = self.schedule.unsort(dx, len(ranks), 1), self.by_rank(x, 1)
        parts = dx.reshape(dx.shape[0], len(ranks), -1, *dx.shape[2:])
        return x_by_rank.at[:, ranks].add(parts).reshape(x.shape)

    def by_rank(self, x: Array, dim: int) -> Array:
        """x with the dimension of its tokens divided into ranks."""
        ranks = len(self.ranks) * self.schedule.head.degree
        return x.reshape(*x.shape[:dim], ranks, -1, *x.shape[dim + 1 :])


def _joined(units: Array, shape: tuple[int, ...]) -> Array:
    """Joins units [unit, b, t, n, h] to whole sequences."""
    return jnp.moveaxis(units, 0, 1).reshape(shape)


def _scale(q: Array) -> float:
    return q.shape[-1] ** -0.5

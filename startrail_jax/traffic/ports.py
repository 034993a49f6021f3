"""Bytes between each pair of devices, and those that pass through the ports of the nodes.

`messages` gives them in closed form, and `startrail_jax.analysis.messages` counts them in a
compiled program; both divide a collective into messages by one table, `NCCL`. The order of the mesh
axes says where the devices are (`startrail_jax.devices.nodes`), and changes no message.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from startrail_jax.devices.degrees import ROLES, SEQUENCE_ROLES, Axis, Cycle, Degrees
from startrail_jax.devices.nodes import node_grid
from startrail_jax.errors import InputError
from startrail_jax.rings.transfers import Transfer
from startrail_jax.traffic.algorithms import NCCL, Algorithm


@dataclass(frozen=True, kw_only=True)
class NodeTraffic:
    """Bytes through the ports of the nodes, and inside the nodes."""

    sent: tuple[int, ...]
    """Bytes that each node sends to other nodes."""
    received: tuple[int, ...]
    """Bytes that each node receives from other nodes."""
    inside: tuple[int, ...]
    """Bytes that the devices of each node send each other."""
    sent_by_device: tuple[int, ...]
    """Bytes that each device sends to other nodes: its traffic if it has a port of its own. Devices
    are in the order of the mesh."""
    received_by_device: tuple[int, ...]
    """Bytes that each device receives from other nodes."""

    @property
    def port_bytes(self) -> int:
        """Bytes that the busiest node sends and receives through its port, added up."""
        return max(map(sum, zip(self.sent, self.received, strict=True)))

    @property
    def port_sent_bytes(self) -> int:
        """The most bytes that a node sends through its port."""
        return max(self.sent)

    @property
    def port_received_bytes(self) -> int:
        """The most bytes that a node receives through its port."""
        return max(self.received)

    @property
    def inside_bytes(self) -> int:
        """The most bytes that the devices of a node send each other."""
        return max(self.inside)


@dataclass(frozen=True, eq=False)
class Messages:
    """Bytes from device to device, each device numbered by its place in the flat mesh."""

    num_devices: int
    """Number of devices."""
    sources: np.ndarray
    """Sender of each message."""
    targets: np.ndarray
    """Receiver of each message, another device."""
    sizes: np.ndarray
    """Bytes of each message."""

    @classmethod
    def of(cls, num_devices: int, sizes: Mapping[tuple[int, int], int]) -> Messages:
        """The messages of a mapping from (sender, receiver) to bytes."""
        pairs = np.array(list(sizes), dtype=np.int64).reshape(-1, 2)
        return cls(num_devices, pairs[:, 0], pairs[:, 1], np.array(list(sizes.values()), np.int64))

    @property
    def matrix(self) -> np.ndarray:
        """Bytes by sender and receiver, in a square array."""
        matrix = np.zeros((self.num_devices, self.num_devices), np.int64)
        np.add.at(matrix, (self.sources, self.targets), self.sizes)
        return matrix

    def through(self, nodes: Sequence[int] | np.ndarray) -> NodeTraffic:
        """The traffic through the ports of the nodes.

        Args:
            nodes: the node of each device, in the order of the mesh: `node_grid(...).ravel()`.

        Raises:
            ValueError: if the number of devices differs.
        """
        nodes = np.asarray(nodes)
        if nodes.shape != (self.num_devices,):
            raise InputError(
                f"nodes must name the node of each of {self.num_devices} devices; got "
                f"{nodes.shape} of them. Pass node_grid(degrees, order, nodes).ravel()."
            )
        origin, goal = nodes[self.sources], nodes[self.targets]
        leaves = origin != goal
        num_nodes = int(nodes.max()) + 1

        def total(places: np.ndarray, chosen: np.ndarray, count: int) -> tuple[int, ...]:
            sums = np.zeros(count, np.int64)
            np.add.at(sums, places[chosen], self.sizes[chosen])
            return tuple(sums.tolist())

        return NodeTraffic(
            sent=total(origin, leaves, num_nodes),
            received=total(goal, leaves, num_nodes),
            inside=total(origin, ~leaves, num_nodes),
            sent_by_device=total(self.sources, leaves, self.num_devices),
            received_by_device=total(self.targets, leaves, self.num_devices),
        )


def messages(
    degrees: Degrees,
    transfers: Iterable[Transfer],
    algorithms: Mapping[str, Algorithm] = NCCL,
) -> Messages:
    """The messages of some transfers, in closed form.

    Args:
        degrees: the degrees of the mesh.
        transfers: the transfers of one or several passes, such as `Traffic.transfers`. If a mask
            lets a ring visit fewer rounds than it has places, and `communication` was told their
            number only, they are taken for the first ones.
        algorithms: collective -> how it is divided into messages.

    """
    sizes: Counter[tuple[Any, ...]] = Counter()
    for transfer in transfers:
        if transfer.sent_bytes == 0:
            continue
        hops: tuple[Any, ...] = transfer.hops or (transfer.pairs,)
        for hop in hops:
            pattern = transfer.roles, transfer.collective, hop, transfer.inner
            sizes[pattern] += transfer.sent_bytes // len(hops)
    parts = [np.zeros((3, 0), np.int64)]
    for (roles, collective, hop, inner), size in sizes.items():
        members = _members(degrees, roles)
        steps = (
            algorithms[collective](len(members))
            if hop == ()
            else [(_targets(degrees, roles, hop, inner), Fraction(1))]
        )
        for targets, share in steps:
            part = np.full(members.size, size * share.numerator // share.denominator)
            parts.append(np.stack([members.ravel(), members[targets].ravel(), part]))
    joined = np.concatenate(parts, axis=1)
    return Messages(degrees.num_devices, *joined[:, joined[0] != joined[1]])


def _members(degrees: Degrees, roles: tuple[str, ...]) -> np.ndarray:
    """[member, group]: the devices that are joined along the flat axis of some roles."""
    shape = [getattr(degrees, role) for role in ROLES]
    devices = np.arange(degrees.num_devices).reshape(shape)
    dims = [ROLES.index(role) for role in roles]
    size = math.prod(shape[dim] for dim in dims)
    return np.moveaxis(devices, dims, range(len(dims))).reshape(size, -1)


def _targets(
    degrees: Degrees, roles: tuple[str, ...], hop: tuple[Any, ...] | None, inner: int
) -> np.ndarray:
    """The receiver of each member in one message of a permute; none for a member itself."""
    ranks = np.arange(math.prod(getattr(degrees, role) for role in roles))
    if hop is not None and isinstance(hop[0], tuple):
        sources, targets = zip(*hop, strict=True)
        ranks[list(sources)] = targets
        return ranks
    if hop is None:  # Group and team trade places: see `rings.collectives.trade_places`.
        return ranks % degrees.group * degrees.group + ranks // degrees.group
    axis = Axis(roles, ranks.size)
    ranks = Cycle(axis, inner).place(ranks, hop[1])
    return Cycle(axis, ranks.size // inner, stride=inner).place(ranks, hop[0])


def cheapest_order(
    degrees: Degrees,
    nodes: Sequence[int],
    calls: Iterable[Iterable[Transfer]],
    algorithms: Mapping[str, Algorithm] = NCCL,
) -> tuple[str, ...]:
    """The order of the mesh axes with the fewest bytes through the busiest port of a node.

    `data` stays slowest and `tensor` fastest, because the other messages of a model along them are
    not known here.

    Args:
        degrees: the degrees of the mesh.
        nodes: the node of each device, as `startrail_jax.devices.nodes.nodes_of` gives it.
        calls: the transfers of one call, or of several calls: the order then has the smallest worst
            ratio to the best order of each call.
        algorithms: collective -> how it is divided into messages.

    Returns:
        The six roles, slowest first; `ROLES` if no other order has fewer bytes.
    """
    sent = [messages(degrees, transfers, algorithms) for transfers in calls]
    orders = sorted(orders_to_try(degrees), key=lambda order: order != ROLES)
    grids = [node_grid(degrees, order, nodes).ravel() for order in orders]
    bytes_of = np.array([[call.through(grid).port_bytes for grid in grids] for call in sent])
    if not bytes_of.size:
        return ROLES
    least = bytes_of.min(axis=1, keepdims=True)
    # Where the best order sends nothing from node to node, any other is out of the question.
    ratios = np.where(bytes_of == least, 1.0, bytes_of / np.maximum(least, 1e-9))
    return orders[int(ratios.max(axis=0).argmin())]


def orders_to_try(degrees: Degrees) -> list[tuple[str, ...]]:
    """Every order of the axes that share a sequence; axes of degree 1 stay where they are."""
    moving = [role for role in SEQUENCE_ROLES if getattr(degrees, role) > 1]
    orders = []
    for moved in itertools.permutations(moving):
        remaining = iter(moved)
        orders.append(tuple(next(remaining) if role in moving else role for role in ROLES))
    return orders

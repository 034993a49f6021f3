"""How long a collective takes on the links of a cluster, and which bytes go through its ports.

A collective is a number of steps, each of which takes

    latency + max(bytes through the busiest port / its rate, bytes of a device inside / its rate).

Which bytes go where follows from the algorithm, those of `startrail_jax.traffic.ports`, and from
where the axis lies: of the `size` devices along it, `inside` neighbours share a node.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.devices.degrees import ROLES, SEQUENCE_ROLES
from startrail_jax.traffic.algorithms import halving
from trainer.planner.grid import Placement, Settings
from trainer.planner.hardware import Cluster

_PEERS = 8
"""Peers that NCCL sends to at a time in an exchange of all with all. Over gloo, XLA sends to all of
them at a time (`GlooCommunicator::AllToAll`)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Cost:
    """What messages, and the kernels beside them, cost: arrays [setting]."""

    seconds: np.ndarray
    across: np.ndarray
    """Bytes that the busiest node sends to other nodes."""
    inside: np.ndarray
    """Bytes that the devices of a node send each other."""
    compute: Any = 0.0
    """Seconds in which kernels run."""

    def times(self, count: np.ndarray | int) -> Cost:
        """The cost of so many of them, one after another."""
        return Cost(**{name: count * value for name, value in vars(self).items()})

    def take(self, rows: Any) -> Cost:
        """The cost in some of the settings."""
        return Cost(**{name: value[rows] for name, value in vars(self).items()})

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: value + vars(other)[name] for name, value in vars(self).items()})


@dataclass(frozen=True, eq=False, kw_only=True)
class Move:
    """One step of an attention that moves bytes, by one kind of collective: arrays [setting]."""

    step: str
    """Step of the schedule: see `startrail_jax.rings.transfers`."""
    collective: str
    """One of `startrail_jax.traffic.COLLECTIVES`."""
    roles: tuple[str, ...]
    received: np.ndarray
    """Bytes that a device receives each time."""
    count: np.ndarray
    """How often, one after another: the hops of a ring."""
    arrays: np.ndarray | int = 1
    """Number of arrays that these bytes are."""
    last: np.ndarray | float = 1.0
    """Of hops, how many of the neighbours in a node send to another node, on average."""


class Links:
    """The links of a cluster, for the axes of settings."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self.settings, self.cluster = settings, cluster
        self.placement = Placement(settings, cluster)
        self.inside = {role: self.placement.inside(role) for role in ROLES}
        """Role -> neighbours along its axis that share a node."""

    def cost(self, move: Move) -> Cost:
        """The cost of a move: of all its hops if it has several."""
        if move.step.endswith("ring"):
            return self.hop(move).times(move.count)
        # XLA's CPU backend has a collective for each array, one after another, where those of NCCL
        # are launched together.
        arrays = move.arrays if self.cluster.algorithms == "gloo" else 1
        if move.collective == "collective_permute":
            across, inside = (part * move.received for part in self._traded)
            return self.messages(across, inside, arrays, np.where(inside > 0, move.received, 0))
        (role,) = move.roles
        size, inside = vars(self.settings)[role], self.inside[role]
        found = self.collective(move.collective, size, inside, move.received, arrays)
        return found.times(move.count)

    def costs(self, moves: Iterable[Move]) -> Cost:
        zero = np.zeros(len(self.settings))
        return sum(map(self.cost, moves), Cost(seconds=zero, across=zero, inside=zero))

    def over_replicas(self, kind: str, size: np.ndarray | int) -> Cost:
        """A collective with a buffer of `size` bytes over all devices that have different tokens:
        those of ZeRO."""
        devices = self.settings.replicas
        inside = np.maximum(self.cluster.gpus_per_node // self.settings.tensor, 1)
        twice = 2 if kind == "all_reduce" else 1
        received = twice * size * (devices - 1) / devices
        return self.collective(kind, devices, np.minimum(inside, devices), received)

    def collective(
        self,
        kind: str,
        size: np.ndarray,
        inside: np.ndarray,
        received: np.ndarray,
        arrays: np.ndarray | int = 1,
    ) -> Cost:
        """The cost of one collective, other than a permute, in groups of `size` devices, of which
        `inside` neighbours share a node. Each device receives `received` bytes in all, in `arrays`
        collectives one after another."""
        cluster, per_node = self.cluster, self.cluster.gpus_per_node
        nodes = size // inside
        others = np.maximum(size - 1, 1)
        if kind == "reduce_scatter" and cluster.algorithms == "gloo":
            return self._halving(size, inside, received, arrays)
        if kind == "all_to_all":
            leaving = (size - inside) / others
            across = per_node * received * leaving
            staying = received * (1 - leaving)
            steps = 1 if cluster.algorithms == "gloo" else -(-others // _PEERS)
            crossing, within = np.where(nodes > 1, steps, 0), np.where(nodes > 1, 0, steps)
        else:
            across = np.where(nodes > 1, per_node / inside, 0) * received
            # The last of the neighbours in a node sends to another one.
            staying = np.where(inside > 1, received, 0)
            turns = 2 if kind == "all_reduce" else 1
            crossing, within = turns * (nodes - 1), turns * (size - nodes)
            if cluster.algorithms == "gloo":
                crossing = np.where(nodes > 1, turns * others, 0)
                within = np.where(nodes > 1, 0, turns * others)
        latency = cluster.start_latency + crossing * cluster.latency
        latency = latency + within * cluster.inside_latency
        total = per_node * received
        return self._cost(received > 0, latency * arrays, across, staying, total - across)

    def hop(self, move: Move) -> Cost:
        """One message to the next device of the ring, or of an inner or an outer cycle of it; the
        mean of the hops if the ring skips rounds."""
        size, last = move.received, move.last
        cluster, per_node = self.cluster, self.cluster.gpus_per_node
        stride, inside = self.placement.strides["ring"], self.inside["ring"]
        leaves = self.settings.ring > inside
        if move.step.startswith("outer"):
            inside = np.ones(len(self.settings), np.int64)
        else:
            # The inner cycle of a double ring lies in a node.
            leaves &= self.settings.inner == 1
        # Of `inside` neighbours, `stride` apart, the last one sends to another node, or the last
        # ones if the hop goes further. These senders may be neighbours, which use one port.
        of_port = per_node // cluster.ports
        run = np.minimum(last * stride, per_node)
        senders = np.maximum(np.minimum(of_port, run), of_port * last / inside)
        through = np.where(leaves, senders * cluster.ports, 0) * size
        across = np.where(leaves, per_node * last / inside, 0) * size
        staying = np.where(inside > np.where(leaves, last, 1), size, 0)
        latency = np.where(leaves, cluster.latency, cluster.inside_latency) + cluster.start_latency
        latency = latency * (move.arrays if cluster.algorithms == "gloo" else 1)
        found = self._cost(size > 0, latency, through, staying, per_node * size - across)
        return Cost(seconds=found.seconds, across=across * (size > 0), inside=found.inside)

    def of_pairs(
        self, rows: np.ndarray, receivers: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes [setting] that the busiest node sends to others, and those that stay inside: two
        arrays. Of more than eight nodes, four are looked at.

        All `rows` have the same number of sequence ranks; `receivers` is [message, sending rank],
        and `sizes` is the bytes of each message.
        """
        per_node, nodes = self.cluster.gpus_per_node, self.cluster.nodes
        strides = np.stack([self.placement.strides[role][rows] for role in SEQUENCE_ROLES])
        degrees = np.stack([vars(self.settings)[role][rows] for role in SEQUENCE_ROLES])
        # Settings whose ranks lie on the same devices are one: neighbouring axes are joined.
        for i in (2, 1, 0) * 3:
            alone = degrees[i + 1] == 1
            joined = alone | (strides[i] == strides[i + 1] * degrees[i + 1])
            strides[i + 1] = np.where(alone, strides[i], strides[i + 1])
            degrees[i + 1] *= np.where(joined, degrees[i], 1)
            degrees[i] = np.where(joined, 1, degrees[i])
        strides[degrees == 1] = 1
        both, place = np.unique(np.stack([strides, degrees]), axis=2, return_inverse=True)
        # Division, which takes most of the time here, is twice as fast in 32 bits.
        axes = list(zip(*both.astype(np.int32), strict=True))
        some = np.array(range(nodes) if nodes <= 8 else (0, 1, nodes // 2, nodes - 1))
        some = some[:, None, None]
        base = (some * per_node + np.arange(per_node)[:, None]).astype(np.int32)
        rank = np.zeros((len(some), per_node, both.shape[2]), np.int32)
        for stride, degree in axes:
            digit = base // stride % degree
            rank, base = rank * degree + digit, base - digit * stride
        sent = np.zeros((2, len(some), both.shape[2]))
        for row, size in zip(receivers.astype(np.int32), sizes.tolist(), strict=True):
            rest, target = row[rank], base
            moves = rest != rank
            for stride, degree in reversed(axes):
                rest, digit = np.divmod(rest, degree)
                target = target + digit * stride
            leaves = target // np.int32(per_node) != some
            sent += size * np.stack([leaves, moves & ~leaves]).sum(2)
        most = sent.max(1)
        return most[0][place.ravel()], most[1][place.ravel()]

    def messages(
        self,
        across: np.ndarray,
        inside: np.ndarray,
        count: np.ndarray | int,
        staying: np.ndarray,
    ) -> Cost:
        """Messages of one device to another, one after another, `count` for each device. The
        busiest node sends `across` bytes to others, and its devices send each other `inside` bytes;
        one device sends `staying` bytes inside of its node."""
        cluster = self.cluster
        latency = np.where(across > 0, cluster.latency, cluster.inside_latency)
        latency = (latency + cluster.start_latency) * count
        return self._cost(across + inside > 0, latency, across, staying, inside)

    @functools.cached_property
    def _traded(self) -> np.ndarray:
        """Of the paper's permute of keys, in which group and team trade places: the devices of a
        node that send to another one, where these are most, and those that send inside of it."""
        s, sent = self.settings, np.zeros((2, len(self.settings)))
        rows = s.published & (s.group > 1)
        for ring, group in {*zip(s.ring[rows].tolist(), s.group[rows].tolist(), strict=True)}:
            mine = np.flatnonzero(rows & (s.ring == ring) & (s.group == group))
            ranks = np.arange(ring * group * group).reshape(ring, group, group)
            sent[:, mine] = self.of_pairs(mine, ranks.swapaxes(1, 2).reshape(1, -1), np.ones(1))
        return sent

    def _halving(
        self,
        size: np.ndarray,
        inside: np.ndarray,
        received: np.ndarray,
        arrays: np.ndarray | int,
    ) -> Cost:
        """Gloo's reduce_scatter: see `startrail_jax.traffic.algorithms`."""
        across, staying, steps = (np.zeros(len(size)) for _ in range(3))
        for n, k in {*zip(size.tolist(), inside.tolist(), strict=True)}:
            mine = (size == n) & (inside == k)
            nodes = np.arange(n) // k
            through = np.zeros(nodes[-1] + 1)
            for receivers, share in halving(n):
                goals = nodes[np.asarray(receivers)]
                leaves = nodes != goals
                ends = np.concatenate([nodes[leaves], goals[leaves]])
                through += np.bincount(ends, minlength=len(through)) * float(share)
                moves = np.asarray(receivers) != np.arange(n)
                staying[mine] += (moves & ~leaves).sum() / n * share
                steps[mine] += moves.any()
            # Over a number of devices that is no power of 2, other ports work while one rests.
            across[mine] = through.max() / (2 * k)
        per_node = self.cluster.gpus_per_node
        latency = np.where(across > 0, self.cluster.latency, self.cluster.inside_latency) * steps
        return self._cost(
            received > 0,
            (latency + self.cluster.start_latency) * arrays,
            per_node * across * received,
            staying * received,
            per_node * staying * received,
        )

    def _cost(
        self,
        moves: np.ndarray,
        latency: np.ndarray,
        across: np.ndarray,
        staying: np.ndarray,
        inside: np.ndarray,
    ) -> Cost:
        cluster = self.cluster
        both_ways = 2 if cluster.half_duplex else 1
        port = both_ways * across / cluster.ports / cluster.port_rate
        seconds = latency + np.maximum(port, staying / cluster.gpu.inside_rate)
        return Cost(
            seconds=np.where(moves, seconds, 0.0),
            across=np.where(moves, across, 0.0),
            inside=np.where(moves, inside, 0.0),
        )

"""The links of the devices, beside what the planner assumes, node by node and axis by axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from startrail_jax.devices.nodes import mesh_devices, nodes_of
from trainer.planner.hardware import Cluster
from trainer.planner.here import Pairs, Probe, known_gpu
from trainer.verify.report import Check

_OF_SHEET = 0.5
"""Least share of the rate of the data sheet inside of a node."""
_OF_OTHERS = 0.7
"""Least share of the median rate of all nodes that the port of one may have."""
_OF_LINK = 0.5
"""Least share of the measured rate of its links that an axis of the mesh may have."""
_MOST_NODES = 3
"""From so many nodes on, the slowest port can be told from those of its partners."""


def links(mesh: Any, cluster: Cluster, devices_per_node: int | None) -> Iterator[Check]:
    """Latency and rate inside of nodes and between them.

    Args:
        mesh: the mesh of the run.
        cluster: what `measure_cluster` has measured on its devices.
        devices_per_node: `MeshConfig.devices_per_node`.
    """
    devices = mesh_devices(mesh)
    is_cpu, known = devices[0].platform == "cpu", known_gpu(devices[0])
    if cluster.gpus_per_node > 1:
        sheet = None if known is None else known.inside_rate
        said = "" if sheet is None else f", {sheet / 1e9:.3g} GB/s by the data sheet"
        yield Check(
            name="links: inside of a node",
            value=cluster.gpu.inside_rate / 1e9,
            unit="GB/s",
            least=None if sheet is None else _OF_SHEET * sheet / 1e9,
            note=f"each device to the next, all at once{said}",
        )
        yield _latency("inside of a node", cluster.inside_latency, cluster)
    if cluster.nodes == 1 and is_cpu:
        return
    numbers = nodes_of(devices, devices_per_node)
    ordered = [devices[i] for i in np.argsort(numbers, kind="stable")]
    probe = Probe(ordered)
    if cluster.nodes > 1:
        several = "s" if cluster.ports > 1 else ""
        duplex = ", both ways together" if cluster.half_duplex else ""
        yield Check(
            name="links: port of a node",
            value=cluster.port_rate / 1e9,
            unit="GB/s",
            note=f"{cluster.ports} port{several} a node{duplex}: the planner takes --port",
        )
        yield _latency("between nodes", cluster.latency, cluster)
    rates = _node_rates(probe, cluster)
    if cluster.nodes > 1:
        yield _slowest(rates)
    # Simulated devices share cores, not links.
    is_bound = not is_cpu or cluster.nodes >= _MOST_NODES
    place = {device: i for i, device in enumerate(ordered)}
    places = np.array([place[x] for x in mesh.devices.flat]).reshape(mesh.devices.shape)
    yield from _axes(mesh.axis_names, places, probe, cluster, rates, is_bound=is_bound)


def _latency(where: str, seconds: float, cluster: Cluster) -> Check:
    assumed = {"inside of a node": Cluster.inside_latency, "between nodes": Cluster.latency}[where]
    return Check(
        name=f"links: latency {where}",
        value=1e6 * (seconds + cluster.start_latency),
        unit="us",
        note=f"of a short message; the planner takes {1e6 * (assumed + Cluster.start_latency):.3g}",
    )


def _node_rates(probe: Probe, cluster: Cluster) -> np.ndarray:
    """Bytes/s of all ports of each node: of its faster pair, with the node before it or after it,
    when all devices send at once."""
    nodes, size = cluster.nodes, cluster.gpus_per_node
    if nodes == 1:
        return np.full(1, np.inf)
    pairs = []
    for node in range(nodes):
        there = (node + 1) % nodes
        ways = [(node * size + i, there * size + i) for i in range(size)]
        pairs.append(size * probe.speed(ways).rate)
    return np.maximum(pairs, np.roll(pairs, 1))


def _slowest(rates: np.ndarray) -> Check:
    slowest, median = int(np.argmin(rates)), float(np.median(rates))
    return Check(
        name="links: slowest port",
        value=float(rates[slowest]) / median,
        least=_OF_OTHERS if len(rates) >= _MOST_NODES else None,
        note=f"that of node {slowest}, {rates[slowest] / 1e9:.3g} GB/s with all its devices, over "
        f"the median of {len(rates)} nodes, {median / 1e9:.3g} GB/s",
    )


def _axes(
    names: Sequence[str],
    places: np.ndarray,
    probe: Probe,
    cluster: Cluster,
    rates: np.ndarray,
    *,
    is_bound: bool,
) -> Iterator[Check]:
    """A message to the next device along each axis, beside what the links on its way can carry.

    `places` holds the place of each device of the mesh, counted node by node.
    """
    ports, per_port = cluster.nodes * cluster.ports, cluster.gpus_per_node // cluster.ports
    each = np.repeat(rates / cluster.ports, cluster.ports)
    nodes = places // cluster.gpus_per_node
    for dim, name in enumerate(names):
        if places.shape[dim] == 1:
            continue
        there = np.roll(places, -1, axis=dim)
        pairs: Pairs = list(zip(places.ravel().tolist(), there.ravel().tolist(), strict=True))
        leaves = nodes != np.roll(nodes, -1, axis=dim)
        expected = cluster.gpu.inside_rate if (~leaves).any() else np.inf
        if leaves.any():
            ends = (x[leaves] // per_port for x in (places, there))
            ways = np.stack([np.bincount(x, minlength=ports) for x in ends])
            busy = ways.sum(0) if cluster.half_duplex else ways.max(0)
            expected = min(expected, np.min(each[busy > 0] / busy[busy > 0]))
        across = f"{leaves.sum()} of {leaves.size} messages leave their node"
        rate = probe.speed(pairs).rate
        yield Check(
            name=f"links: axis {name}",
            value=rate / expected,
            least=_OF_LINK if is_bound else None,
            note=f"{rate / 1e9:.3g} GB/s of each device, over {expected / 1e9:.3g} of its links; "
            f"{across if leaves.any() else 'no message leaves its node'}",
        )

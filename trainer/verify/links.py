"""The links of the devices, beside what the planner assumes, node by node and axis by axis."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from startrail_jax.devices.nodes import mesh_nodes, nodes_of
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
    devices = mesh.devices.ravel().tolist()
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
    probe, order = _probe(devices, devices_per_node)
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
        yield _slowest(probe, cluster)
    # Simulated devices share cores, not links.
    is_bound = not is_cpu or cluster.nodes >= _MOST_NODES
    yield from _axes(mesh, probe, order, cluster, devices_per_node, is_bound=is_bound)


def _latency(where: str, seconds: float, cluster: Cluster) -> Check:
    assumed = {"inside of a node": Cluster.inside_latency, "between nodes": Cluster.latency}[where]
    return Check(
        name=f"links: latency {where}",
        value=1e6 * (seconds + cluster.start_latency),
        unit="us",
        note=f"of a short message; the planner takes {1e6 * (assumed + Cluster.start_latency):.3g}",
    )


def _probe(devices: Sequence[Any], devices_per_node: int | None) -> tuple[Probe, np.ndarray]:
    """A probe of the devices, node after node, and the place of each of them there."""
    numbers = nodes_of(devices, devices_per_node)
    order = np.argsort(numbers, kind="stable")
    place = np.empty(len(devices), int)
    place[order] = np.arange(len(devices))
    return Probe([devices[i] for i in order]), place


def _slowest(probe: Probe, cluster: Cluster) -> Check:
    """The slowest port beside the median: that of a node is at least as fast as its faster pair."""
    nodes, size = cluster.nodes, cluster.gpus_per_node
    pairs = [probe.speed([(i * size, (i + 1) % nodes * size)]).rate for i in range(nodes)]
    rates = [max(pairs[i - 1], pairs[i]) for i in range(nodes)]
    slowest = int(np.argmin(rates))
    median = statistics.median(rates)
    return Check(
        name="links: slowest port",
        value=rates[slowest] / median,
        least=_OF_OTHERS if nodes >= _MOST_NODES else None,
        note=f"that of node {slowest}, {rates[slowest] / 1e9:.3g} GB/s, over the median of "
        f"{nodes} nodes, {median / 1e9:.3g} GB/s",
    )


def _axes(
    mesh: Any,
    probe: Probe,
    place: np.ndarray,
    cluster: Cluster,
    devices_per_node: int | None,
    *,
    is_bound: bool,
) -> Iterator[Check]:
    """A message to the next device along each axis, beside what the links on its way can carry."""
    nodes, places = mesh_nodes(mesh, devices_per_node), place.reshape(mesh.devices.shape)
    for dim, name in enumerate(mesh.axis_names):
        if mesh.shape[name] == 1:
            continue
        there = np.roll(places, -1, axis=dim)
        pairs: Pairs = list(zip(places.ravel().tolist(), there.ravel().tolist(), strict=True))
        goals = np.roll(nodes, -1, axis=dim)
        leaves = nodes != goals
        expected = cluster.gpu.inside_rate if (~leaves).any() else np.inf
        if leaves.any():
            ways = [np.bincount(x[leaves], minlength=cluster.nodes) for x in (nodes, goals)]
            busiest = np.max(sum(ways) if cluster.half_duplex else np.maximum(*ways))
            expected = min(expected, cluster.ports * cluster.port_rate / busiest)
        across = f"{leaves.sum()} of {leaves.size} messages leave their node"
        rate = probe.speed(pairs).rate
        yield Check(
            name=f"links: axis {name}",
            value=rate / expected,
            least=_OF_LINK if is_bound else None,
            note=f"{rate / 1e9:.3g} GB/s of each device, over {expected / 1e9:.3g} of its links; "
            f"{across if leaves.any() else 'no message leaves its node'}",
        )

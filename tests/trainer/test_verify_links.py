"""`--verify` names a slow port and an axis on the wrong network: on links that are computed."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import startrail_jax as st
from programs import REPOSITORY
from startrail_jax.devices.nodes import mesh_devices
from trainer.planner.hardware import GPUS, Cluster
from trainer.planner.here import LinkSpeed
from trainer.verify import links

INSIDE, PORT = 100e9, 10e9
"""Bytes/s of a device inside of its node, and of one port."""


class Network:
    """Nodes of so many devices. The ports of a node share its messages, and devices a port."""

    def __init__(self, size, ports=1, half_duplex=False, slow=(), inside=INSIDE):
        self.size, self.ports, self.half_duplex = size, ports, half_duplex
        self.slow, self.inside = dict(slow), inside

    def __call__(self, devices):
        self.nodes = len(devices) // self.size
        return self

    def speed(self, pairs):
        ends = np.array(pairs)
        leaves = np.ptp(ends // self.size, axis=1) > 0
        rate = np.inf if leaves.all() else self.inside
        used = ends[leaves] * self.ports // self.size
        ways = np.stack([np.bincount(x, minlength=self.nodes * self.ports) for x in used.T])
        busy = ways.sum(0) if self.half_duplex else ways.max(0)
        for port in np.flatnonzero(busy):
            rate = min(rate, self.slow.get(port // self.ports, 1) * PORT / busy[port])
        return LinkSpeed(latency=1e-6, rate=rate)


def found(monkeypatch, network, degrees, order=None):
    """What the checks of the links say, by name."""
    devices = jax.devices()[: degrees.num_devices]
    mesh = st.make_mesh(
        degrees, devices=devices, devices_per_node=network.size, order=order, axis_type="auto"
    )
    cluster = Cluster(
        nodes=degrees.num_devices // network.size,
        gpus_per_node=network.size,
        gpu=dataclasses.replace(GPUS["h100"], inside_rate=INSIDE),
        port_rate=PORT,
        ports=network.ports,
        half_duplex=network.half_duplex,
    )
    monkeypatch.setattr(links, "Probe", network)
    return {x.name: x for x in links.links(mesh, cluster, network.size)}


STARTRAIL = st.Degrees.startrail(16, c=2)
NETWORKS = {
    "16 x 1": dict(size=1),
    "16 x 1, half duplex": dict(size=1, half_duplex=True),
    "4 x 4, one port": dict(size=4),
    "4 x 4, one port, half duplex": dict(size=4, half_duplex=True),
    "4 x 4, two ports": dict(size=4, ports=2),
    "4 x 4, four ports": dict(size=4, ports=4),
}


@pytest.mark.parametrize("order", ["rings_inside", "collectives_inside"])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_links_as_fast_as_they_are_alone_are_right(monkeypatch, network, order):
    checks = found(monkeypatch, Network(**network), STARTRAIL, order)
    assert [check for check in checks.values() if not check.ok] == []
    axes = [checks[f"links: axis {name}"] for name in ("group", "ring", "team")]
    assert [check.value for check in axes] == pytest.approx([1, 1, 1])
    assert all(check.least == 0.5 for check in axes)


@pytest.mark.parametrize("slow", [0, 1, 3])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_a_port_at_half_of_the_rate_of_others_is_named(monkeypatch, network, slow):
    checks = found(monkeypatch, Network(**network, slow={slow: 0.5}), STARTRAIL)
    wrong = [name for name, check in checks.items() if not check.ok]
    # The axes that go through it are as fast as it lets them.
    assert wrong == ["links: slowest port"]
    assert checks["links: slowest port"].value == pytest.approx(0.5)
    assert f"that of node {slow}, " in checks["links: slowest port"].note


def test_of_two_nodes_neither_is_called_slow(monkeypatch):
    checks = found(monkeypatch, Network(size=8, slow={1: 0.5}), STARTRAIL)
    assert checks["links: slowest port"].least is None


def test_an_axis_over_the_wrong_network_is_named(monkeypatch):
    class Wrong(Network):
        """Where all devices of a node send, messages inside of it pass through a port too."""

        def speed(self, pairs):
            is_inside = all(i // self.size == j // self.size for i, j in pairs)
            rate = PORT if is_inside else super().speed(pairs).rate
            return LinkSpeed(latency=1e-6, rate=rate)

    checks = found(monkeypatch, Wrong(size=4), STARTRAIL, "rings_inside")
    assert [name for name, check in checks.items() if not check.ok] == ["links: axis ring"]


def test_devices_of_a_mesh_come_node_by_node():
    devices = jax.devices()[:16]
    mesh = st.make_mesh(
        STARTRAIL, devices=devices, devices_per_node=4, order="rings_inside", axis_type="auto"
    )
    assert mesh.devices.ravel().tolist() != devices
    assert mesh_devices(mesh) == devices


def test_page_shows_the_lines_of_a_slow_port(monkeypatch):
    page = (REPOSITORY / "docs" / "verify.md").read_text().partition("## Slow ports")[2]
    shown = re.findall(r"^(ok|-|WRONG) +(links: .*?)  ", page, re.M)
    network = Network(size=4, half_duplex=True, slow={2: 0.5})
    checks = found(monkeypatch, network, STARTRAIL, "rings_inside")
    lines = (re.match(r"(ok|-|WRONG) +(.*?)  ", str(check)) for check in checks.values())
    names = {name for _, name in shown}
    assert [line.groups() for line in lines if line and line[2] in names] == shown

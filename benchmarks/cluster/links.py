"""The network of emulated nodes: bridges, ports, and their rates.

Every port is a pair of virtual Ethernet devices, one end in the network namespace of its node and
the other at a bridge. The kernel's traffic control limits it there: what leaves the node and what
comes to it goes through one queue that sends at the rate of the port, which is half-duplex. Over
gloo, exchanges of two devices take 1.5 to 2 times as long as their bytes on full-duplex ports.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from startrail_jax.errors import InputError

PORT, INSIDE_PORT = "eth0", "inside0"
"""Names of a node's port to the other nodes, and of a device's port to the others of its node."""
MTU = 9000
UNLIMITED = "40gbit"
"""Rate of a port without a limit: more than one machine can send to itself."""
BURST_BYTES, BURST_SECONDS = 40_960, 4e-3
"""Most that an idle port lets through at once: so many bytes, or what it sends in so many seconds.
At a low rate the bytes alone would be a good part of a short message."""
QUEUE_BYTES = 8 << 20
SHORT_BYTES = 64
"""Packets below this size are acknowledgements without data, which do not wait behind data. The
short messages of gloo are longer, and wait: if one overtook the data of its own connection, TCP
would take these for lost and send them twice."""
PATIENT = "congctl cubic rto_min 2s"
"""Options of a route: how TCP finds its rate, and how long it waits before it sends again."""
SOCKET_BYTES = 262_144
"""Most that waits in a socket."""
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_per_second(rate: str) -> float:
    """Reads a rate such as "100mbit".

    Raises:
        ValueError: if it is no such rate, or not above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not bits > 0:
        raise InputError(
            f"A rate must be a number above 0 and one of {', '.join(UNITS)}, which are 1000, "
            f"1000^2 and 1000^3 bits a second; got {rate!r}. Write for example 100mbit."
        )
    return bits


class Hub:
    """The bridges, and the ports of all nodes. It lives in a network namespace of its own."""

    def __init__(self) -> None:
        """Makes the bridge between the nodes."""
        self._bridges: set[str] = set()
        ip("link set lo up")
        self._bridge("nodes")

    def add_port(self, index: int, pid: int, rate: str) -> None:
        """Gives a process a port to the other nodes.

        Args:
            index: of the process.
            pid: its id; it has a network namespace of its own.
            rate: of the port, such as "100mbit".
        """
        self._connect(f"p{index}", "nodes", PORT, pid, rate)

    def add_inside_port(self, index: int, pid: int, node: int, rate: str | None) -> None:
        """Gives a process a port to the other processes of its node; None is no limit."""
        bridge = f"node{node}"
        self._bridge(bridge)
        self._connect(f"i{index}", bridge, INSIDE_PORT, pid, rate or UNLIMITED)

    def _bridge(self, name: str) -> None:
        if name not in self._bridges:
            self._bridges.add(name)
            ip(f"link add name {name} type bridge stp_state 0 forward_delay 0",
               f"link set {name} mtu {MTU} up")  # fmt: skip

    def _connect(self, name: str, bridge: str, port: str, pid: int, rate: str) -> None:
        queue = f"{name}q"
        ip(
            f"link add name {name} mtu {MTU} txqueuelen 10000 gso_max_size 32768 type veth "
            f"peer name {port} netns {pid}",
            f"link set {name} master {bridge}",
            f"link set {name} up",
            f"link add name {queue} mtu {MTU} txqueuelen 10000 type ifb",
            f"link set {queue} up",
        )
        # Ingress of the end at the bridge is what the node sends.
        tc(f"qdisc add dev {name} clsact",
           *(f"filter add dev {name} {way} protocol all u32 match u32 0 0 action mirred egress "
             f"redirect dev {queue}" for way in ("ingress", "egress")))  # fmt: skip
        tc(
            f"qdisc add dev {queue} root handle 1: htb default 12",
            *_classes(queue, bits_per_second(rate)),
            # IPv4 packets whose length is below that: a power of 2.
            f"filter add dev {queue} parent 1: protocol ip prio 1 u32 match u16 0 "
            f"{(1 << 16) - SHORT_BYTES:#x} at 2 flowid 1:11",
            f"qdisc add dev {queue} parent 1:11 pfifo limit 10000",
            f"qdisc add dev {queue} parent 1:12 bfifo limit {QUEUE_BYTES}",
        )


def configure_ports(address: str, network: str, neighbours: Sequence[str]) -> None:
    """Sets up the ports of a process, in its network namespace.

    Args:
        address: of the process.
        network: of all processes, such as "10.77.0.0/16".
        neighbours: addresses of the other processes of its node, which are behind its inside port.
    """
    ports = [PORT, INSIDE_PORT] if neighbours else [PORT]
    ip(
        "link set lo up",
        *(f"link set {port} mtu {MTU} txqueuelen 10000 gso_max_size 32768 up" for port in ports),
        f"addr add {address}/{network.partition('/')[2]} dev {PORT}",
        # By route, since an administrator may have restricted the default of new namespaces.
        f"route replace {network} dev {PORT} src {address} {PATIENT}",
        *(f"route add {other}/32 dev {INSIDE_PORT} src {address} {PATIENT}"
          for other in neighbours),
    )  # fmt: skip
    # No packet is lost here, and a long wait in a queue must not look like a loss: the kernel would
    # send the end of a message twice.
    Path("/proc/sys/net/ipv4/tcp_early_retrans").write_text("0")
    # What waits in a socket is short, as the queues of a real network are at its rate.
    for name in ("rmem", "wmem"):
        Path(f"/proc/sys/net/ipv4/tcp_{name}").write_text(f"4096 {SOCKET_BYTES} {SOCKET_BYTES}")


def received_bytes(port: str) -> int:
    """Bytes that a network device of this namespace has received, headers included.

    Raises:
        ValueError: if there is no such device.
    """
    lines = [line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    found = {name.strip(): int(counts.split()[0]) for name, _, counts in lines}
    if port not in found:
        raise InputError(
            f"interface must be one of {', '.join(found)}; got {port!r}. Name one of them."
        )
    return found[port]


def _classes(device: str, rate: float) -> list[str]:
    """Lines for `tc` that give a device its rate: nine tenths of it belong to data at least."""
    burst = round(min(BURST_BYTES, max(rate / 8 * BURST_SECONDS, MTU + 14)))
    some = f"burst {burst} cburst {burst} quantum 60000"
    kbit = max(rate / 1e3, 10)
    return [
        f"class add dev {device} parent 1: classid 1:1 htb rate {kbit:.0f}kbit {some}",
        f"class add dev {device} parent 1:1 classid 1:11 htb rate {kbit * 0.1:.0f}kbit "
        f"ceil {kbit:.0f}kbit prio 0 {some}",
        f"class add dev {device} parent 1:1 classid 1:12 htb rate {kbit * 0.9:.0f}kbit "
        f"ceil {kbit:.0f}kbit prio 1 {some}",
    ]


def ip(*lines: str) -> None:
    """Runs lines of the command `ip`."""
    run(["ip", "-batch", "-"], lines)


def tc(*lines: str) -> None:
    """Runs lines of the command `tc`."""
    run(["tc", "-batch", "-"], lines)


def run(command: Sequence[str], lines: Sequence[str] = ()) -> None:
    """Runs a command with lines as its input.

    Raises:
        RuntimeError: if it fails.
    """
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}\n{text}")

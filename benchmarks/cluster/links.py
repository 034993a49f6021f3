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

NETWORK = "10.77.0.0/16"
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


def bits_per_second(rate: str) -> float:
    """Reads a rate such as "100mbit".

    Raises:
        ValueError: if it is no such rate, or not above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    bits = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else 0.0
    if not bits > 0:
        raise InputError(
            "A rate must be a number above 0 and one of kbit, mbit, gbit, which are 1000, 1000^2 "
            f"and 1000^3 bits a second; got {rate!r}. Write for example 100mbit."
        )
    return bits


def address(index: int) -> str:
    """The address of a process."""
    return f"10.77.{index // 250}.{index % 250 + 1}"


def connect(neighbours: Sequence[Sequence[int]], rate: str, inside: str | None) -> None:
    """Makes a network namespace p0, p1 ... for each process, and connects them.

    Args:
        neighbours: of each process, the others of its node, which are behind its inside port.
        rate: of a port to the other nodes, such as "100mbit".
        inside: of a port to the others of the node; None is no limit.
    """
    ip("link set lo up")
    for index, others in enumerate(neighbours):
        ip(f"netns add p{index}")
        _add_port(f"p{index}q", "nodes", f"{PORT} netns p{index}", rate)
        if others:
            node = f"node{min(index, *others)}"
            _add_port(f"i{index}q", node, f"{INSIDE_PORT} netns p{index}", inside or UNLIMITED)
        own = address(index)
        ip(
            "link set lo up",
            *(f"link set {port} mtu {MTU} txqueuelen 10000 gso_max_size 32768 up"
              for port in ([PORT, INSIDE_PORT] if others else [PORT])),
            f"addr add {own}/{NETWORK.partition('/')[2]} dev {PORT}",
            # By route, since an administrator may have restricted the default of new namespaces.
            f"route replace {NETWORK} dev {PORT} src {own} {PATIENT}",
            *(f"route add {address(other)}/32 dev {INSIDE_PORT} src {own} {PATIENT}"
              for other in others),
            namespace=f"p{index}",
        )  # fmt: skip


def _add_port(queue: str, bridge: str, port: str, rate: str) -> None:
    """Adds a port at a bridge, which is made if it is new, with a queue in the middle."""
    if not Path(f"/proc/sys/net/ipv4/conf/{bridge}").exists():
        ip(f"link add name {bridge} type bridge stp_state 0 forward_delay 0",
           f"link set {bridge} mtu {MTU} up")  # fmt: skip
    end = queue.removesuffix("q")
    ip(
        f"link add name {end} mtu {MTU} txqueuelen 10000 gso_max_size 32768 type veth "
        f"peer name {port}",
        f"link set {end} master {bridge}",
        f"link set {end} up",
        f"link add name {queue} mtu {MTU} txqueuelen 10000 type ifb",
        f"link set {queue} up",
    )
    # Ingress of the end at the bridge is what the node sends.
    run_tool(
        ["tc", "-batch", "-"],
        f"qdisc add dev {end} clsact",
        *(f"filter add dev {end} {way} protocol all u32 match u32 0 0 action mirred egress "
          f"redirect dev {queue}" for way in ("ingress", "egress")),
        f"qdisc add dev {queue} root handle 1: htb default 12",
        *_classes(queue, bits_per_second(rate)),
        # IPv4 packets whose length is below that: a power of 2.
        f"filter add dev {queue} parent 1: protocol ip prio 1 u32 match u16 0 "
        f"{(1 << 16) - SHORT_BYTES:#x} at 2 flowid 1:11",
        f"qdisc add dev {queue} parent 1:11 pfifo limit 10000",
        f"qdisc add dev {queue} parent 1:12 bfifo limit {QUEUE_BYTES}",
    )  # fmt: skip


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


def received_bytes() -> int:
    """Bytes that the port of this process has received, headers included."""
    found = re.search(rf"^ *{PORT}: *(\d+)", Path("/proc/net/dev").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def ip(*lines: str, namespace: str | None = None) -> None:
    """Runs lines of the command `ip`."""
    run_tool(["ip", *(["-n", namespace] if namespace else []), "-batch", "-"], *lines)


def run_tool(command: Sequence[str], *lines: str) -> None:
    """Runs a command with lines as its input.

    Raises:
        RuntimeError: if it fails.
    """
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}\n{text}")

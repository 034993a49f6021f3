"""Runs a command on an emulated cluster: one process a node, each node with a port of its own.

    python benchmarks/cluster.py --nodes 4 --devices 4 --port 100Mbit/s -- \\
        python train.py gpt_tiny --distributed --steps 3 --run-dir runs/emulated
    python benchmarks/cluster.py --nodes 16 --devices 1 --slow 2=50Mbit/s -- python my_program.py

A node is a network namespace with --devices simulated CPU devices. Messages between nodes pass
through its port, which both directions share: over gloo, exchanges of two devices take up to twice
their time on full-duplex ports. What coordinates the processes passes through another network.

Processes get the variables of Open MPI, so that `--distributed`, or `jax.distributed.initialize()`,
needs nothing else. Shown are the output of process 0, the last lines of a process that fails, and
at the end the bytes that each port received, with headers. Nothing is left behind, even by SIGKILL.

It needs Linux, as root or in a user namespace. There is no latency, and all devices share the
cores: only ratios of times mean something, and only where the network takes most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from startrail_jax.errors import InputError, UnsupportedError
from trainer.planner.quantities import parse_rate
from trainer.run.exit import exit_on_user_errors

TOOLS = ("unshare", "setpriv", "mount", "ip", "tc")
SHARED = Path("/run")  # In the namespaces, a file system in memory.
INSIDE = "STARTRAIL_CLUSTER_INSIDE"  # Set where this program runs again, in its namespaces.
LOG_LINES, PORT, MTU = 40, "eth0", 9000
BURST_BYTES, BURST_SECONDS = 40_960, 4e-3  # Most that an idle port lets through at once.
QUEUE_BYTES, SOCKET_BYTES, SHORT_BYTES = 8 << 20, 256 << 10, 64
# Packets below SHORT_BYTES are acknowledgements, which do not wait behind data. If a longer one
# overtook the data of its own connection, TCP would send these twice.
# Runs in the namespace of a node. gloo listens at the address of the host's name, and jax takes
# processes with one boot_id for one node. A long wait in a queue must not look like a loss to TCP.
BEGIN = f"""set -e
mount --bind {SHARED}/hosts$0 /etc/hosts
mount --bind {SHARED}/machine$0 /proc/sys/kernel/random/boot_id
echo 0 > /proc/sys/net/ipv4/tcp_early_retrans
for way in rmem wmem; do
    echo 4096 {SOCKET_BYTES} {SOCKET_BYTES} > /proc/sys/net/ipv4/tcp_$way
done
exec "$@"
"""


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[float]]:
    """The flags, and the rate of each node's port in bytes per second; InputError if wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("command", nargs="+", help="after --: what each node runs")
    add("--nodes", type=int, default=4, help="number of nodes; default: 4")
    add("--devices", type=int, default=4, help="devices of a node; default: 4")
    add("--port", default="100Mbit/s", help="rate of a node's port; default: 100Mbit/s")
    add("--slow", action="append", default=[], metavar="NODE=RATE",
        help="another rate for the port of one node; may be repeated")  # fmt: skip
    add("--wait", type=float, default=30.0, help="seconds for others to end once one failed")
    args = parser.parse_args(argv)
    for name in ("nodes", "devices"):
        if not 1 <= getattr(args, name) <= 250:
            raise InputError(f"--{name} must be from 1 to 250; got {getattr(args, name)}.")
    rates = [parse_rate(args.port, "--port")] * args.nodes
    for text in args.slow:
        node, _, rate = text.partition("=")
        if not node.isdecimal() or int(node) >= args.nodes:
            raise InputError(
                f"--slow must name one of the nodes 0 to {args.nodes - 1} and a rate; got {text!r}."
                " Write for example --slow 2=50Mbit/s."
            )
        rates[int(node)] = parse_rate(rate, "--slow")
    return args, rates


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 if a process failed."""
    args, rates = read_arguments(argv)
    if os.environ.pop(INSIDE, None):
        return supervise(args, rates)
    if why := refusal():
        raise UnsupportedError(why)
    # Ctrl-C is for this process, which ends all others below.
    supervisor = subprocess.Popen(launcher(argv), start_new_session=True)
    try:
        return int(supervisor.wait() != 0)
    finally:
        supervisor.kill()
        supervisor.wait()


def launcher(argv: Sequence[str]) -> list[str]:
    """The command that runs this program again in namespaces of its own."""
    # The kernel ends the first command with this process, and all others with the first.
    return [
        *("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", "--mount-proc"),
        *("--net", "--mount", "--pid", *(["--user", "--map-root-user"] if os.getuid() else [])),
        *("env", f"{INSIDE}=1", sys.executable, str(Path(__file__).resolve()), *argv),
    ]


def refusal() -> str | None:
    """Why no nodes can be emulated on this machine; None if they can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        why = f"no {', '.join(missing)}. Install util-linux and iproute2."
    else:
        trial = launcher(["--nodes", "1", "--devices", "1", "true"])
        done = subprocess.run(trial, capture_output=True, text=True)
        if done.returncode == 0:
            return None
        why = " ".join(done.stderr.split()) or f"status {done.returncode}"
    return (
        "An emulated cluster needs network namespaces and traffic control of Linux, as root or in "
        f"a user namespace; got {why}"
    )


def supervise(args: argparse.Namespace, rates: Sequence[float]) -> int:
    """Starts all processes, waits until all have ended, and prints what the ports received."""
    run(["mount", "-t", "tmpfs", "tmpfs", str(SHARED)])
    connect(rates)
    running, failed, deadline, name = {}, False, float("inf"), socket.gethostname()
    for node in range(args.nodes):
        hosts = f"127.0.0.1 localhost\n{address(node)} {name}\n"
        (SHARED / f"hosts{node}").write_bytes(hosts.encode())
        (SHARED / f"machine{node}").write_bytes(f"{uuid.UUID(int=node + 1)}\n".encode())
        process = subprocess.Popen(
            ["ip", "netns", "exec", f"n{node}", "sh", "-c", BEGIN, str(node), *args.command],
            stdout=(SHARED / f"log{node}").open("wb") if node else None,
            stderr=subprocess.STDOUT if node else None,
            env=os.environ | variables(node, args.nodes, args.devices),
        )
        running[process] = node
    while running and time.monotonic() < deadline:
        time.sleep(0.05)
        for process in [x for x in running if x.poll() is not None]:
            node = running.pop(process)
            if process.returncode and not failed:
                failed, deadline = True, time.monotonic() + args.wait
                said = (SHARED / f"log{node}").read_bytes() if node else b""
                lines = said.decode(errors="replace").splitlines()[-LOG_LINES:]
                print(f"process {node} ended with status {process.returncode}",
                      *lines, sep="\n", file=sys.stderr)  # fmt: skip
    print(report(rates), flush=True)
    return int(failed)


def variables(node: int, nodes: int, devices: int) -> dict[str, str]:
    """Variables of a process: its devices, and its place as Open MPI would tell it."""
    coordinator = f"{address(0, network=78)}:61440"  # The port that jax finds for job 0.
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{coordinator}",
        "OMPI_COMM_WORLD_SIZE": str(nodes),
        "OMPI_COMM_WORLD_RANK": str(node),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def report(rates: Sequence[float]) -> str:
    """A table of the bytes that each port received, by the kernel's count."""
    lines = ["port        Mbit/s   MB received"]
    for node, rate in enumerate(rates):
        shown = run(["ip", "-n", f"n{node}", "-s", "-j", "link", "show", PORT])
        received = json.loads(shown)[0]["stats64"]["rx"]["bytes"]
        lines.append(f"node {node:<3}{rate * 8e-6:>10g}{received / 1e6:>14.3f}")
    return "\n".join(lines)


def address(node: int, network: int = 77) -> str:
    """The address of a node's port, or in network 78, the one without a limit."""
    return f"10.{network}.0.{node + 1}"


def connect(rates: Sequence[float]) -> None:
    """Makes the namespaces n0, n1 ...; what leaves or enters one waits in one queue at its port."""
    size = f"mtu {MTU} txqueuelen 10000"
    up, networks = ["link set lo up"], {"b77": PORT, "b78": "control0"}
    for bridge in networks:
        up.append(f"link add name {bridge} type bridge stp_state 0 forward_delay 0")
        up.append(f"link set {bridge} mtu {MTU} up")
    for node in range(len(rates)):
        run(["ip", "netns", "add", f"n{node}"])
        up.append(f"link add name q{node} {size} type ifb\nlink set q{node} up")
        for bridge, name in networks.items():
            end = f"{bridge}n{node}"
            up.append(f"link add name {end} {size} type veth peer name {name} netns n{node}")
            up.append(f"link set {end} master {bridge} gso_max_size 32768 up")
    run(["ip", "-batch", "-"], *up)
    for node, rate in enumerate(rates):
        run(["tc", "-batch", "-"], *limits(f"b77n{node}", f"q{node}", rate))
        inside = ["link set lo up"]
        for bridge, name in networks.items():
            inside.append(f"link set {name} {size} gso_max_size 32768 up")
            inside.append(f"addr add {address(node, int(bridge[1:]))}/24 dev {name}")
        route = f"route replace 10.77.0.0/24 dev {PORT} src {address(node)}"
        run(["ip", "-n", f"n{node}", "-batch", "-"], *inside, f"{route} congctl cubic rto_min 2s")


def limits(end: str, queue: str, rate: float) -> list[str]:
    """Lines for `tc` that give a port its rate: nine tenths of it belong to data at least."""
    burst = round(min(BURST_BYTES, max(rate * BURST_SECONDS, MTU + 14)))
    some = f"burst {burst} cburst {burst} quantum 60000"
    kbit = max(rate * 8e-3, 10)
    add = f"class add dev {queue} parent 1:"
    return [
        f"qdisc add dev {end} clsact",
        *(f"filter add dev {end} {way} protocol all u32 match u32 0 0 action mirred egress "
          f"redirect dev {queue}" for way in ("ingress", "egress")),
        f"qdisc add dev {queue} root handle 1: htb default 12",
        f"{add} classid 1:1 htb rate {kbit:.0f}kbit {some}",
        f"{add}1 classid 1:11 htb rate {kbit * 0.1:.0f}kbit ceil {kbit:.0f}kbit prio 0 {some}",
        f"{add}1 classid 1:12 htb rate {kbit * 0.9:.0f}kbit ceil {kbit:.0f}kbit prio 1 {some}",
        # IPv4 packets whose length is below that: a power of 2.
        f"filter add dev {queue} parent 1: protocol ip prio 1 u32 match u16 0 "
        f"{(1 << 16) - SHORT_BYTES:#x} at 2 flowid 1:11",
        f"qdisc add dev {queue} parent 1:11 pfifo limit 10000",
        f"qdisc add dev {queue} parent 1:12 bfifo limit {QUEUE_BYTES}",
    ]  # fmt: skip


def run(command: Sequence[str], *lines: str) -> str:
    """What a tool prints, given lines as its input."""
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    with exit_on_user_errors():
        sys.exit(main(sys.argv[1:]))

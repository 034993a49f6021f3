"""Emulated nodes: a command runs once in each of several network namespaces of this machine.

A node has its own network, and one port of limited rate (`links.py`), which both directions share.
Its devices are simulated by one process. With rails, every device has a process, a network
namespace and a port to the other nodes of its own, and another port to the devices of its node.

`run` needs Linux, the commands of `TOOLS`, and no root where user namespaces are allowed. All
processes are in one process namespace that ends with the process that called `run`, even if that is
killed. What they write to `SHARED` is in memory and ends with them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# For a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cluster.links import SOCKET_BYTES, address, bits_per_second, connect, run_tool
from startrail_jax.errors import InputError, UnsupportedError
from trainer.config import check_minimum

TOOLS = ("unshare", "setpriv", "mount", "ip", "tc")
COORDINATOR_PORT = 9911
SHARED = Path("/run")
"""Where the processes get a file system in memory of their own, hidden from all others."""
EMULATED = "STARTRAIL_CLUSTER_EMULATED"
"""Variable that is set in the processes of an emulated cluster."""
LOG_LINES = 40

# Runs in the namespace of a process. gloo listens at the address that the host's name stands for.
# No packet is lost here, and a long wait in a queue must not look like a loss: the kernel would
# send the end of a message twice. What waits in a socket is short, as the queues of a real network
# are at its rate.
BEGIN = f"""set -e
mount --bind {SHARED}/hosts$0 /etc/hosts
echo 0 > /proc/sys/net/ipv4/tcp_early_retrans
for way in rmem wmem; do
    echo 4096 {SOCKET_BYTES} {SOCKET_BYTES} > /proc/sys/net/ipv4/tcp_$way
done
exec "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Nodes, their devices, and the rates between them.

    Raises:
        ValueError: if a number or a rate is not above 0.
    """

    nodes: int = 4
    """Number of nodes."""
    devices: int = 4
    """Number of devices of a node."""
    rate: str = "100mbit"
    """Rate of a port, which both directions share."""
    rails: bool = False
    """Whether each device has a port of its own, as GPUs of large clusters have, or all devices of
    a node share one. With rails, every device has a process of its own."""
    inside: str | None = None
    """With rails: rate of a device inside its node, such as "800mbit". The default is no limit."""

    def __post_init__(self) -> None:
        check_minimum("nodes", self.nodes, 1)
        check_minimum("devices", self.devices, 1)
        bits_per_second(self.rate)
        if self.inside is not None:
            bits_per_second(self.inside)
            if not self.rails:
                raise InputError(
                    "inside is the rate of a device with a port of its own; got "
                    f"inside={self.inside} without rails. Add --rails, or leave it out."
                )

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.nodes * self.devices if self.rails else self.nodes

    @property
    def device_nodes(self) -> list[int]:
        """The node of each device."""
        return [index // self.devices for index in range(self.nodes * self.devices)]

    def neighbours(self, index: int) -> list[int]:
        """The other processes of the node of a process."""
        size = self.processes // self.nodes
        first = index // size * size
        return [other for other in range(first, first + size) if other != index]


def launcher(topology: Topology, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command that runs another one in every process; see `run`."""
    shape = {x.name: getattr(topology, x.name) for x in dataclasses.fields(Topology)}
    flags = ["-n", "-m", "-p"] if os.getuid() == 0 else ["-U", "-r", "-n", "-m", "-p"]
    # The kernel ends the first of these commands when this process ends, however that happens.
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", *flags, "--mount-proc", "--fork", "--kill-child"),
        *(sys.executable, str(Path(__file__).resolve())),
        json.dumps([shape, list(command), dict(variables)]),
    ]


def refusal() -> str | None:
    """Why no nodes can be emulated on this machine; None if they can."""
    needs = "An emulated cluster needs network namespaces and traffic control of Linux"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{needs}; got no {', '.join(missing)}. Install util-linux and iproute2."
    trial = launcher(Topology(nodes=2, devices=1), ["true"], {})
    done = subprocess.run(trial, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return (
        f"{needs}; got: {done.stderr.strip()}\nAllow user namespaces (sysctl "
        "user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or start as root; in a container, allow "
        "the capability SYS_ADMIN; load the kernel modules veth, bridge, ifb, sch_htb, cls_u32 and "
        "act_mirred."
    )


def run(topology: Topology, command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs a command in every process of an emulated cluster; returns when all have ended.

    Args:
        topology: the cluster.
        command: the command. In its words, `{index}` stands for the number of the process and
            `{coordinator}` for the address at which process 0 can listen.
        variables: further variables of its environment.

    Returns:
        0, or 1 if one process failed: all others then end at once, and the last lines of its
        output are printed.

    Raises:
        NotImplementedError: if this machine cannot emulate nodes.
    """
    if why := refusal():
        raise UnsupportedError(why)
    # Ctrl-C at a terminal is for this process, which ends all others below.
    supervisor = subprocess.Popen(launcher(topology, command, variables), start_new_session=True)
    try:
        return int(supervisor.wait() != 0)
    finally:
        supervisor.kill()
        supervisor.wait()


# In the namespaces -------------------------------------------------------------------------------


def supervise(topology: Topology, command: Sequence[str], variables: Mapping[str, str]) -> int:
    """What `run` starts in the namespaces: starts all processes, and waits until all have ended."""
    run_tool(["mount", "-t", "tmpfs", "tmpfs", str(SHARED)])
    connect([topology.neighbours(index) for index in range(topology.processes)],
            topology.rate, topology.inside)  # fmt: skip
    # With their objects: subprocess itself waits for a child whose object is gone.
    running = {}
    for index in range(topology.processes):
        hosts = f"127.0.0.1 localhost\n{address(index)} {socket.gethostname()}\n"
        (SHARED / f"hosts{index}").write_text(hosts)
        words = {"{index}": str(index), "{coordinator}": f"{address(0)}:{COORDINATOR_PORT}"}
        started = subprocess.Popen(
            [*("ip", "netns", "exec", f"p{index}", "sh", "-c", BEGIN, str(index)),
             *(words.get(word, word) for word in command)],
            stdout=log_of(index).open("w") if index else None,
            stderr=subprocess.STDOUT if index else None,
            env=os.environ | variables | {EMULATED: "1"},
        )  # fmt: skip
        running[started.pid] = index, started
    while running:
        pid, status = os.wait()
        if pid not in running:  # A process whose parent has ended.
            continue
        index, started = running.pop(pid)
        started.returncode = os.waitstatus_to_exitcode(status)
        if status:
            print(f"process {index} ended with status {started.returncode}", file=sys.stderr)
            lines = log_of(index).read_text(errors="replace").splitlines() if index else []
            print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
            return 1
    return 0


def log_of(index: int) -> Path:
    """The file of what a process other than process 0 prints."""
    return SHARED / f"process{index}.log"


if __name__ == "__main__":
    outcome = 1
    try:
        shape, *others = json.loads(sys.argv[1])
        outcome = supervise(Topology(**shape), *others)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # The kernel ends all processes of the namespace when its first one ends.
    os._exit(outcome)

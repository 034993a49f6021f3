"""Emulated nodes: a command runs once in each of several network namespaces of this machine.

A node has its own network and host name, and one port of limited rate (`links.py`), which both
directions share. Its devices are simulated by one process. With rails, every device has a process,
a network namespace and a port to the other nodes of its own, and another port to the devices of its
node.

`run` needs Linux, the commands of `TOOLS`, and no root where user namespaces are allowed. All
namespaces are anonymous, and all processes are in one process namespace that ends with the process
that called `run`, even if that is killed. What they write there is in memory and ends with them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# For a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cluster.links import Hub, bits_per_second, configure_ports
from benchmarks.cluster.links import run as run_tool
from startrail_jax.errors import InputError, UnsupportedError
from trainer.config import check_minimum

TOOLS = {"unshare": "util-linux", "setpriv": "util-linux",
         "mount": "util-linux", "ip": "iproute2", "tc": "iproute2"}  # fmt: skip
NETWORK = "10.77.0.0/16"
COORDINATOR_PORT = 9911
MOST_PROCESSES = 250
PRIVATE_FOLDER = Path("/dev/shm")
"""Where the processes get a file system in memory of their own, hidden from all others."""
EMULATED = "STARTRAIL_CLUSTER_EMULATED"
"""Variable that is set in the processes of an emulated cluster."""
LOG_LINES = 40
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Nodes, their devices, and the rates between them.

    Raises:
        ValueError: if a number or a rate is not above 0, or there are too many processes.
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
        if self.processes > MOST_PROCESSES:
            raise InputError(
                f"An emulated cluster may have {MOST_PROCESSES} processes; got nodes={self.nodes}, "
                f"devices={self.devices}, which need {self.processes}. Use fewer."
            )
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
    def devices_of_process(self) -> int:
        """Number of devices that a process simulates."""
        return 1 if self.rails else self.devices

    @property
    def device_nodes(self) -> list[int]:
        """The node of each device."""
        return [index // self.devices for index in range(self.nodes * self.devices)]

    def neighbours(self, index: int) -> list[int]:
        """The other processes of the node of a process."""
        size = self.processes // self.nodes
        first = index // size * size
        return [other for other in range(first, first + size) if other != index]


def address(index: int) -> str:
    """The address of a process."""
    return f"10.77.0.{index + 1}"


def refusal() -> str | None:
    """Why no nodes can be emulated on this machine; None if they can."""
    needs = "An emulated cluster needs network namespaces of Linux"
    if sys.platform != "linux":
        return f"{needs}; got {sys.platform}."
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        packages = ", ".join(sorted({TOOLS[tool] for tool in missing}))
        return f"{needs} and its tools; got no {', '.join(missing)}. Install {packages}."
    trial = (
        f"mount -t tmpfs tmpfs {PRIVATE_FOLDER} && ip link add name b0 type bridge && "
        "ip link add name v0 type veth peer name v1 && ip link add name q0 type ifb && "
        "tc qdisc add dev v0 clsact && tc qdisc add dev q0 root handle 1: htb && "
        "tc filter add dev v0 ingress protocol all u32 match u32 0 0 action mirred egress "
        "redirect dev q0"
    )
    done = subprocess.run([*unshare_command(), "sh", "-c", trial], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return (
        f"{needs} and its traffic control; got from `{' '.join(unshare_command())}`: "
        f"{done.stderr.strip()}. Allow user namespaces (sysctl user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), or "
        "start as root; in a container, allow the capability SYS_ADMIN; load the kernel modules "
        "veth, bridge, ifb, sch_htb, cls_u32 and act_mirred."
    )


def unshare_command() -> list[str]:
    """The command under which another one gets namespaces that end with this command."""
    flags = ["-n", "-m", "-p"] if os.getuid() == 0 else ["-U", "-r", "-n", "-m", "-p"]
    return ["unshare", *flags, "--mount-proc", "--fork", "--kill-child"]


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
    shape = {x.name: getattr(topology, x.name) for x in dataclasses.fields(Topology)}
    request = json.dumps([shape, list(command), dict(variables)])
    supervisor = subprocess.Popen(
        # The kernel ends the first of these commands when this process ends, however that happens.
        ["setpriv", "--pdeathsig", "KILL", *unshare_command(),
         sys.executable, str(Path(__file__).resolve()), request],
        # Ctrl-C at a terminal is for this process, which ends all others below.
        start_new_session=True,
    )  # fmt: skip
    try:
        return int(supervisor.wait() != 0)
    finally:
        supervisor.kill()
        supervisor.wait()


# In the namespaces -------------------------------------------------------------------------------


class Supervisor:
    """The first process of the namespaces: it makes the network, starts the others and waits."""

    def __init__(self, topology: Topology, command: list[str], variables: dict[str, str]) -> None:
        self._topology = topology
        self._command = command
        self._variables = variables
        self._running: dict[int, int] = {}
        self._hub = Hub()

    def run(self) -> int:
        """Starts all processes and waits for them; returns the exit status."""
        run_tool(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(PRIVATE_FOLDER)])
        for index in range(self._topology.processes):
            self._start(index)
        with selectors.DefaultSelector() as selector:
            for pid in self._running:
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            while self._running:
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    if status := self._ended(key.data):
                        return status
        return 0

    def _start(self, index: int) -> None:
        """Starts a process in namespaces of its own, and connects it."""
        topology = self._topology
        is_apart, may_go = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(index, is_apart)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        self._running[pid] = index
        may_go.recv(1)
        self._hub.add_port(index, pid, topology.rate)
        if topology.rails and topology.devices > 1:
            self._hub.add_inside_port(index, pid, index // topology.devices, topology.inside)
        may_go.send(b"x")
        is_apart.close()
        may_go.close()

    def _become(self, index: int, is_apart: socket.socket) -> None:
        """In the new process: sets up its namespaces and becomes the command."""
        if LIBC.unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "unshare")
        is_apart.send(b"x")
        is_apart.recv(1)
        topology = self._topology
        neighbours = [address(other) for other in topology.neighbours(index)]
        configure_ports(address(index), NETWORK, neighbours)
        self._take_name(index)
        if index:
            log = os.open(log_of(index), os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
        variables = os.environ | self._variables | {EMULATED: "1"}
        places = {"{index}": str(index), "{coordinator}": f"{address(0)}:{COORDINATOR_PORT}"}
        command = [places.get(word, word) for word in self._command]
        os.execvpe(command[0], command, variables)

    def _take_name(self, index: int) -> None:
        """Gives the process a host name: gloo listens at the address that it stands for."""
        run_tool(["mount", "--make-rprivate", "/"])
        socket.sethostname(f"process{index}")
        hosts = PRIVATE_FOLDER / f"hosts{index}"
        names = [f"{address(i)} process{i}\n" for i in range(self._topology.processes)]
        hosts.write_text("127.0.0.1 localhost\n" + "".join(names))
        run_tool(["mount", "--bind", str(hosts), "/etc/hosts"])

    def _ended(self, pid: int) -> int:
        """Notes the end of a process; returns 1 if it failed, and prints what it said."""
        _, status = os.waitpid(pid, 0)
        index = self._running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code:
            print(f"process {index} ended with status {code}", file=sys.stderr)
            with suppress(OSError):
                lines = log_of(index).read_text(errors="replace").splitlines()
                print("\n".join(lines[-LOG_LINES:]), file=sys.stderr, flush=True)
        return int(code != 0)


def log_of(index: int) -> Path:
    """The file of what a process other than process 0 prints."""
    return PRIVATE_FOLDER / f"process{index}.log"


def supervise(request: str) -> int:
    """What `run` starts in the namespaces."""
    topology, command, variables = json.loads(request)
    return Supervisor(Topology(**topology), command, variables).run()


if __name__ == "__main__":
    outcome = 1
    try:
        outcome = supervise(sys.argv[1])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # The kernel ends all processes of the namespace when its first one ends.
    os._exit(outcome)

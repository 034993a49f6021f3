"""Commands on emulated nodes: places, rates, bytes, and that no process outlives its launcher."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import cluster
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "benchmarks" / "cluster.py")


@pytest.fixture(scope="module")
def namespaces():
    if why := cluster.refusal():
        pytest.skip(f"needs network namespaces: {why}")


def start(flags, command, **options):
    words = [sys.executable, PROGRAM, *flags.split(), "--", *command]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(words, **pipes, **options)


def python(code):
    return [sys.executable, "-c", code]


# Flags -------------------------------------------------------------------------------------------


def test_ports_have_the_rates_of_the_flags():
    flags = "--nodes 3 --port 100Mbit/s --slow 2=50Mbit/s --slow 0=1MB/s --"
    args, rates = cluster.read_arguments([*flags.split(), "python", "train.py", "--nodes", "7"])
    assert rates == [1e6, 100e6 / 8, 50e6 / 8]
    assert args.nodes == 3
    assert args.command == ["python", "train.py", "--nodes", "7"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--nodes 0", "--nodes must be from 1 to 250; got 0"),
        ("--devices 251", "--devices must be from 1 to 250; got 251"),
        ("--port fast", "--port must be a finite rate .* got 'fast'"),
        ("--nodes 2 --slow 2=5Mbit/s", "--slow must name one of the nodes 0 to 1 .* '2=5Mbit/s'"),
        ("--slow 5Mbit/s", "--slow must name one of the nodes .* got '5Mbit/s'"),
        ("--slow 1", "--slow must be a finite rate"),
    ],
)
def test_invalid_flags_raise(flags, named):
    with pytest.raises(InputError, match=named):
        cluster.read_arguments([*flags.split(), "true"])


def test_idle_port_lets_through_what_it_sends_in_four_milliseconds():
    """And a packet at least, but no more than the burst of fast ports."""
    for rate, burst in ((1e6 / 8, 9014), (4e7 / 8, 20_000), (1e9 / 8, 40_960)):
        text = "\n".join(cluster.limits("p", "q", rate))
        assert set(re.findall(r" burst (\d+) cburst (\d+) ", text)) == {(str(burst),) * 2}
        assert f"classid 1:1 htb rate {rate * 8e-3:.0f}kbit" in text


def test_machine_without_namespaces_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(cluster, "launcher", lambda _: ["sh", "-c", "echo not allowed >&2; exit 1"])
    with refused(UnsupportedError, "as root or in a user namespace; got not allowed"):
        cluster.main(["--nodes", "2", "true"])
    monkeypatch.setenv("PATH", "")
    assert "no unshare, setpriv, mount, ip, tc. Install" in cluster.refusal()


# Nodes -------------------------------------------------------------------------------------------


def running(marker):
    """Ids of the processes with a word in their command line."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:1] == [b"sleep"] and marker.encode() in words:
            found.add(int(folder.name))
    return found


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nodes_end_with_their_launcher(namespaces, number):
    marker = f"{1000 + os.getpid() + number / 100}"
    launcher = start("--nodes 2 --devices 1", ["sleep", marker])
    try:
        wait_for(lambda: len(running(marker)) == 2)
        launcher.send_signal(number)
        launcher.communicate()
        wait_for(lambda: not running(marker))
    finally:
        launcher.kill()


def test_failing_process_is_shown_and_ends_the_others(namespaces):
    marker = f"{2000 + os.getpid()}"
    command = f"[ $OMPI_COMM_WORLD_RANK = 1 ] || exec sleep {marker}; echo so it goes; exit 3"
    launcher = start("--nodes 3 --devices 1 --wait 0.1", ["sh", "-c", command])
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "process 1 ended with status 3\nso it goes\n" in err
    assert "so it goes" not in out
    assert not running(marker)


# Node 0 sends so many bytes to node 1, over the port and around it.
SEND = """
import os, socket, time
for network in (78, 77):
    here = f"10.{network}.0.2", 7000
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        with socket.create_server(here) as server:
            peer = server.accept()[0]
            while peer.recv(1 << 16): pass
            peer.close()
    else:
        while True:
            try:
                peer = socket.create_connection(here)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        start = time.perf_counter()
        peer.sendall(bytes(1_000_000))
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(1) == b""
        print(time.perf_counter() - start)
"""


def test_port_has_its_rate_and_counts_its_bytes(namespaces):
    done = start("--nodes 2 --devices 1 --port 40Mbit/s --slow 0=20Mbit/s", python(SEND))
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    around, through = map(float, out.split()[:2])
    assert 0.9 * 0.4 < through < 1.25 * 0.4
    assert around < through / 3
    sizes = re.findall(r"^node (\d) +(\d+) +([\d.]+)$", out, re.MULTILINE)
    assert [(node, rate) for node, rate, _ in sizes] == [("0", "20"), ("1", "40")]
    assert 1.0 < float(sizes[1][2]) < 1.05
    assert float(sizes[0][2]) < 0.05


PLACES = """
import jax
from startrail_jax.devices.nodes import nodes_of
jax.distributed.initialize()
if jax.process_index() == 0:
    print("nodes", nodes_of(jax.devices()))
"""


@pytest.mark.slow
def test_jax_finds_all_processes_and_which_devices_share_a_node(namespaces):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = start("--nodes 2 --devices 3", python(PLACES), env=environment)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    assert "nodes (0, 0, 0, 1, 1, 1)\n" in out

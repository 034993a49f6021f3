"""The emulated cluster: its network, its end, its words; and one measurement from end to end."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import startrail_jax as st
from benchmarks.cluster import links as cluster_links
from benchmarks.cluster import nodes as cluster_nodes
from benchmarks.cluster import rounds as cluster_rounds
from benchmarks.cluster import run as cluster
from benchmarks.cluster import start
from benchmarks.cluster import training as cluster_training
from benchmarks.cluster.attention import AttentionCalls, Place
from benchmarks.cluster.nodes import Topology
from benchmarks.cluster.settings import ClusterSettings
from benchmarks.cluster.training import TrainingSteps
from benchmarks.schemes import read_scheme
from programs import TINY
from refusals import refused
from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.tokens.layout import Layout
from trainer.config import MeshConfig
from trainer.parallel.degrees import choose_degrees
from trainer.tasks import TASKS

ROOT = Path(__file__).parents[2]
REFUSAL = cluster_nodes.refusal()
needs_namespaces = pytest.mark.skipif(
    REFUSAL is not None, reason=f"needs network namespaces: {REFUSAL}"
)


# Words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 1e8), ("1.5gbit", 1.5e9), ("20kbit", 2e4)])
def test_rate_is_read(rate, bits):
    assert cluster_links.bits_per_second(rate) == bits


def test_idle_port_lets_through_what_it_sends_in_four_milliseconds():
    """And a packet at least, but no more than the burst of fast ports."""
    found = [cluster_links._classes("p0", rate)[0] for rate in (1e6, 4e7, 1e9)]
    assert [re.search(r" burst (\d+) cburst \1 ", line)[1] for line in found] == [
        "9014", "20000", "40960"]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("rate", ["0mbit", "0.0gbit", "-5mbit", "100", "fast", "", "100 mbit"])
def test_rate_that_is_none_is_refused(rate):
    with pytest.raises(InputError, match=rf"A rate must be .*; got '{rate}'.*100mbit"):
        ClusterSettings(rate=rate)
    with refused(InputError, "rate"):
        Topology(nodes=2, rails=True, inside=rate)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (dict(nodes=0), "nodes=0"),
        (dict(devices=-1), "devices=-1"),
        (dict(rounds=0), "rounds=0"),
        (dict(schemes=()), "schemes must name one at least"),
        (dict(window=5, causal=False), "window=5"),
        (dict(inside="5mbit"), "inside=5mbit"),
    ],
)
def test_setting_that_is_none_is_refused(wrong, named):
    with refused(InputError, named):
        ClusterSettings(**wrong)


@pytest.mark.parametrize(
    ("text", "degrees", "published"),
    [
        ("ring", Degrees(ring=16), False),
        ("all-gather", Degrees(group=16), False),
        ("ulysses", Degrees(head=16), False),
        ("head-4", Degrees(ring=4, head=4), False),
        ("startrail-2", Degrees(group=2, ring=4, team=2), False),
        ("published-4", Degrees(group=4, team=4), True),
        ("team-8", Degrees(ring=2, team=8), False),
        ("group=2,ring=2,team=4", Degrees(group=2, ring=2, team=4), False),
    ],
)
def test_scheme_is_read(text, degrees, published):
    scheme = read_scheme(text, 16)
    assert (scheme.name, scheme.degrees) == (text, degrees)
    assert scheme.options == ({"published": True} if published else {})


def test_scheme_has_the_options_in_its_name():
    scheme = read_scheme("published-2:inner=2,gradient_dtype=bfloat16,exchange=rings", 16)
    assert scheme.degrees == Degrees(group=2, ring=4, team=2)
    assert scheme.options == {
        "published": True, "inner": 2, "gradient_dtype": "bfloat16", "exchange": "rings"
    }  # fmt: skip
    scheme = read_scheme("ring:layout=contiguous,balance=exchange", 16)
    assert scheme.options == {"layout": "contiguous", "balance": "exchange"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"ring:{x}", rf"Options of a scheme must be .*; got '{x}'")
            for x in ("", "inner", "inner=x", "scale=2", "inner=2,inner=4")
        ),
        ("rings", r"A scheme must be one of ring, .*; got 'rings'"),
        ("head", r"A scheme must be one of .*; got 'head'"),
        ("ring-4", r"A scheme must be one of .*; got 'ring-4'"),
        ("team-3", r"product of the degrees .* got team-3, which has 15, for 16 devices"),
        ("startrail-3", r"c\^2 must divide the sequence degree; got c=3"),
        ("ring=4,team=2", r"product of the degrees .* got ring=4,team=2, which has 8"),
        ("ring=4,tensor=4", r"Degrees of a scheme must be values of ring, group, team, head"),
        ("ring=4,ring=4", r"Degrees of a scheme must be .* at most once"),
    ],
)
def test_scheme_that_is_none_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        read_scheme(text, 16)


def test_default_of_train_py_follows_the_heads_and_the_nodes():
    for kv_heads, nodes in ((16, 16), (4, 4), (4, 1)):
        settings = ClusterSettings(
            nodes=nodes, devices=16 // nodes, kv_heads=kv_heads, schemes=("train-default",)
        )
        places = settings.device_nodes
        assert (len(places), len(set(places))) == (16, nodes)
        (found,) = settings.read_schemes(places)
        wanted = choose_degrees(MeshConfig(), 16, settings.call, nodes=places, platform="cpu")
        assert found.degrees == wanted


def test_models_bring_their_mask_and_key_heads():
    settings = ClusterSettings(kv_heads=4, causal=False)
    assert (settings.of_model("gpt").causal, settings.of_model("gpt").num_kv_heads) == (True, 4)
    assert (settings.of_model("dit").causal, settings.of_model("dit").num_kv_heads) == (False, 16)


def test_training_in_bfloat16_is_refused_on_emulated_nodes():
    settings = ClusterSettings(train=("gpt",), dtype="bfloat16")
    with refused(InputError, "dtype=bfloat16"):
        cluster.emulate(settings, [])


@pytest.mark.parametrize(
    ("dtype", "scheme", "as_such"),
    [
        ("float32", "ring", False),
        ("bfloat16", "ring", True),
        ("float32", "ring:gradient_dtype=bfloat16", True),
    ],
)
def test_what_is_bfloat16_is_sent_as_such(dtype, scheme, as_such, monkeypatch):
    """XLA's CPU backend would send it as float32."""
    found = []
    monkeypatch.setattr(cluster_nodes, "run", lambda *arguments: found.append(arguments[2]))
    cluster.emulate(ClusterSettings(dtype=dtype, schemes=(scheme,)), [])
    assert (cluster.BFLOAT16_FLAG in found[0]["XLA_FLAGS"]) == as_such


@pytest.mark.parametrize(
    ("flags", "length"),
    [([], 960), (["--no-causal"], 1020), (["--train", "gpt", "--no-causal"], 960)],
)
def test_length_that_the_devices_do_not_divide_is_refused_first(monkeypatch, flags, length):
    started = []
    monkeypatch.setattr(cluster_nodes, "run", lambda *_: started.append("cluster"))
    flags = ["--nodes", "3", "--devices", "4", *flags, "--seq-len"]
    with refused(InputError, len=1030):
        cluster.main([*flags, "1030"])
    assert not started
    cluster.main([*flags, str(length)])
    assert started == ["cluster"]


def test_topology_of_a_real_cluster_is_refused():
    settings = ClusterSettings(rate="5mbit", nodes=3)
    with refused(InputError, "nodes=3, rate=5mbit"):
        cluster.measure(settings, cluster.Distributed(on=True))


def row(name, seconds, error=1e-7, expected=2e6):
    return cluster_rounds.Timed(
        name=name, what="forward", run=lambda: None, seconds=seconds, received=[2.04e6],
        expected=expected, error=error, tolerance=2e-6,
    )  # fmt: skip


def test_table_shows_medians_and_what_is_wrong():
    rows = [row("ring", [2.0, 1.0, 3.0]), row("team-2", [1.0], error=1e-3),
            row("odd", [4.0], expected=math.nan, error=math.nan)]  # fmt: skip
    ring, team, odd = cluster_rounds.table(rows).splitlines()[3:6]
    assert ring.split() == ["ring", "2.000", "100%", "1.00", "2.040", "2.000", "+2.0%",
                            "1.0e-07"]  # fmt: skip
    assert team.split()[3] == "2.00"
    assert team.endswith("WRONG")
    assert odd.split()[1:] == ["4.000", "0%", "0.50", "2.040", "-", "-", "-"]
    assert len(odd) == len(ring)
    assert [x.is_wrong for x in rows] == [False, True, False]


@pytest.fixture
def two_devices(monkeypatch):
    """A cluster of one process and two devices."""
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)


@pytest.fixture
def timed(monkeypatch):
    """The rows of each table."""
    tables, table = [], cluster_rounds.table
    monkeypatch.setattr(cluster_rounds, "table", lambda rows: tables.append(rows) or table(rows))
    return tables


@pytest.mark.slow
def test_schemes_and_steps_of_train_py_are_timed_in_one_process(two_devices, timed, capsys):
    sizes = dict(seq_len=16, heads=2, head_dim=4, layers=1, rounds=1)
    settings = ClusterSettings(**sizes, schemes=("ring",))
    assert cluster.measure_joined(settings, emulated=False) == 0
    steps = ClusterSettings(**sizes, train=("dit",), schemes=("ring", "ulysses"))
    assert cluster.measure_joined(steps, emulated=False) == 0
    (ring,), rows = timed
    assert (ring.name, ring.what) == ("ring", "forward + backward")
    assert [(row.name, row.what) for row in rows] == [("ring", "DiT step"), ("ulysses", "DiT step")]
    # The first loss does not depend on the mesh.
    for row in (ring, rows[1]):
        assert 0 <= row.error < row.tolerance
    assert "1 x 2 cpu devices" in capsys.readouterr().out


@pytest.mark.slow
def test_step_should_receive_what_its_program_sends_through_ports(two_devices):
    settings = ClusterSettings(seq_len=16, heads=2, head_dim=4, layers=1).of_model("dit")
    processes = cluster_rounds.Processes(emulated=False)
    found = {}
    for per_node in (1, 2):
        place = Place(devices=tuple(jax.devices()), devices_per_node=per_node, rails=False)
        calls = AttentionCalls(settings, place, processes)
        steps = TrainingSteps("dit", settings, calls, processes)
        found[per_node] = steps.prepare(read_scheme("ring", 2)).expected
    assert found[1] > found[2] == 0


@pytest.mark.parametrize("kind", ["gpt", "dit"])
def test_random_batch_is_one_of_the_run(kind):
    settings = ClusterSettings(seq_len=48, heads=2, head_dim=4, batch_size=3)
    config = cluster_training.train_config(kind, settings)
    assert config.num_tokens == 48
    objective = TASKS[kind].make_objective(config)
    layout = Layout.of(config.attention_of_model.get("layout"), 4)
    batch, wanted = cluster_training.random_batch(config, layout), objective.batch_shapes(layout)
    assert jax.tree.structure(batch) == jax.tree.structure(wanted)
    for found, like in zip(*map(jax.tree.leaves, (batch, wanted)), strict=True):
        assert (found.shape, found.dtype) == (like.shape, like.dtype)


# The network -------------------------------------------------------------------------------------


def test_machine_without_namespaces_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(cluster_nodes, "launcher", lambda *_: ["sh", "-c", "exit 1"])
    with refused(UnsupportedError, "An emulated cluster needs"):
        cluster_nodes.run(Topology(nodes=2), ["true"], {})
    monkeypatch.setenv("PATH", "")
    assert "got no unshare, setpriv, mount, ip, tc. Install util-linux and iproute2" in str(
        cluster_nodes.refusal()
    )


def running(marker):
    """Ids of the processes with a word in their command line."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in words:
            found.add(int(folder.name))
    return found


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nodes_end_with_their_launcher(number):
    marker = f"{1000 + os.getpid() + number / 100}"
    code = (
        "from benchmarks.cluster import nodes; "
        f"nodes.run(nodes.Topology(nodes=2, devices=1), ['sleep', '{marker}'], {{}})"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)

    def started():
        assert launcher.poll() is None, launcher.communicate()
        return len(running(marker)) == 2

    try:
        wait_for(started)
        launcher.send_signal(number)
        launcher.communicate()
        wait_for(lambda: not running(marker))
    finally:
        launcher.kill()


@needs_namespaces
def test_processes_may_end_before_the_last_one_starts(capfd):
    assert cluster_nodes.run(Topology(nodes=16, devices=1), ["true"], {}) == 0
    assert capfd.readouterr().err == ""


@needs_namespaces
def test_process_that_fails_ends_the_others_and_is_heard(capfd):
    command = ["sh", "-c", "if [ $0 = 1 ]; then echo so it goes; exit 3; fi; sleep 60", "{index}"]
    assert cluster_nodes.run(Topology(nodes=3, devices=1), command, {}) == 1
    shown = capfd.readouterr().err
    assert "process 1 ended with status 3\nso it goes" in shown
    assert not list(cluster_nodes.SHARED.glob("process*.log"))


@needs_namespaces
def test_rails_lead_to_other_nodes_and_inside(capfd):
    topology = Topology(nodes=2, devices=2, rails=True, inside="1gbit")
    assert topology.processes == 4
    assert topology.neighbours(2) == [3]
    # Process 0 alone is heard.
    ways = f"ip route get {cluster_links.address(1)}; ip route get {cluster_links.address(2)}"
    assert cluster_nodes.run(topology, ["sh", "-c", ways], {}) == 0
    inside, across = [x for x in capfd.readouterr().out.splitlines() if "dev" in x]
    assert "dev inside0" in inside
    assert "dev eth0" in across


@pytest.mark.slow
@needs_namespaces
def test_bytes_and_times_of_an_emulated_cluster_are_those_expected():
    """Two nodes with half-duplex ports: each byte that one receives, the other one sends."""
    flags = "--nodes 2 --devices 1 --rate 20mbit --schemes ring --rounds 2 "
    flags += "--seq-len 256 --heads 8 --head-dim 32"
    done = subprocess.run(
        [sys.executable, "benchmarks/cluster/run.py", *flags.split()],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "forward + backward" in done.stdout
    (line,) = re.findall(r"^ring .*$", done.stdout, re.MULTILINE)
    _, seconds, _, _, received, expected, _, error = line.split()
    sizes = dict(batch=1, seq_len=256, heads=8, kv_heads=8, head_dim=32)
    call = dict(sizes, dtype="float32", causal=True, layout="zigzag")
    wanted = st.communication(Degrees(ring=2), **call).total.received_bytes / 1e6
    assert float(expected) == pytest.approx(wanted, abs=1e-3)
    assert float(received) == pytest.approx(wanted, rel=0.05)
    # The ports let no more through.
    assert float(seconds) > 0.9 * 2 * wanted * 8 / 20
    assert 0 < float(error) < 2e-6


def test_start_needs_words_of_train_py(monkeypatch):
    started = []
    monkeypatch.setattr(start, "run", lambda *arguments: started.append(arguments) or 0)
    for argv in (["--nodes", "3"], ["--nodes", "3", "--"]):
        with refused(InputError, "The words of train.py"):
            start.main(argv)
    assert start.main(["--nodes", "3", "--devices", "2", "--", "gpt_tiny", "--steps", "5"]) == 0
    ((topology, command, variables),) = started
    assert (topology.nodes, topology.devices) == (3, 2)
    assert command[2:5] == ["gpt_tiny", "--steps", "5"]
    assert command[command.index("--distributed.processes") + 1] == "3"
    assert command[command.index("--mesh.devices-per-node") + 1] == "2"
    assert variables["JAX_NUM_CPU_DEVICES"] == "2"


@pytest.mark.slow
@needs_namespaces
def test_train_py_runs_on_an_emulated_cluster(tmp_path):
    words = f"{TINY} --steps 2 --run-dir {tmp_path / 'run'}".split()
    cluster_flags = ["--nodes", "2", "--devices", "2", "--rate", "400mbit", "--"]
    done = subprocess.run(
        [sys.executable, "benchmarks/cluster/start.py", *cluster_flags, "gpt_tiny", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "devices: 4 x cpu in 2 processes" in done.stdout
    assert "nodes: " in done.stdout
    assert "step 2/2" in done.stdout


def test_shared_program_runs_on_devices_in_the_order_of_the_mesh(tmp_path, request, monkeypatch):
    # A program that comes from jax's cache cannot be serialised.
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    request.addfinalizer(lambda: jax.config.update("jax_enable_compilation_cache", before))
    devices = np.array(jax.devices("cpu")[:4])[[0, 2, 1, 3]]
    spec = jax.P("x")
    mesh = jax.sharding.Mesh(devices, ("x",))
    given = jax.device_put(np.arange(8.0), jax.sharding.NamedSharding(mesh, spec))
    ring = [(i, (i + 1) % 4) for i in range(4)]
    function = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "x", ring), mesh=mesh, in_specs=spec, out_specs=spec
    )
    monkeypatch.setattr(cluster_rounds, "SHARED", tmp_path)
    processes = cluster_rounds.Processes(emulated=True)
    program, _ = processes.compile(jax.jit(function), (given,), given)
    np.testing.assert_array_equal(program(given), np.roll(np.arange(8.0), 2))

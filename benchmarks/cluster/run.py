"""Times every scheme with real collectives between processes, on an emulated or a real cluster.

    python benchmarks/cluster/run.py --nodes 4 --devices 4 --rate 100mbit
    python benchmarks/cluster/run.py --nodes 16 --devices 1 --kv-heads 4 --dtype bfloat16
    python benchmarks/cluster/run.py --schemes ring startrail-2 team-4:gradient_dtype=bfloat16
    python benchmarks/cluster/run.py --train gpt dit --head-dim 8 --schemes ring team-4
    srun python benchmarks/cluster/run.py --distributed          # on a real cluster

Without --distributed, the nodes are network namespaces of this machine, joined by ports of limited
rate (`nodes.py`); each node has one process with simulated devices, which talk over gloo.
This needs Linux, its commands `unshare`, `ip` and `tc`, and no root where user namespaces are
allowed. Nothing is left behind, even if the program is killed.

The benchmark compiles all rows, compares their results with dense attention in float64, and times
them in turn, --rounds times. It prints a table and says below what the columns mean. The exit
status is 1 if a result is wrong.

What the emulation does not have: overlap of messages with attention (XLA's CPU backend waits for
each message), latency, and cores of its own for each device. Only ratios of times mean something,
and only where ports are so slow that the network takes most of the time.

With --distributed, each process of a real cluster runs the same command, as with train.py
(`docs/cluster.md`), and uses all its devices.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

# For a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cluster import nodes as cluster_nodes
from benchmarks.cluster.nodes import EMULATED
from benchmarks.cluster.settings import ClusterSettings
from startrail_jax.devices.nodes import nodes_of
from startrail_jax.errors import InputError
from trainer.command_line import parse
from trainer.config import Distributed

SILENCE_SECONDS = 120
"""Time after which a silent process of an emulated cluster counts as lost: cores are few."""
BFLOAT16_FLAG = "--xla_disable_hlo_passes=float-normalization-bf16"
"""Without it XLA's CPU backend sends bfloat16 as float32."""
EMULATION_ONLY = ("nodes", "devices", "rate", "inside")


def main(argv: list[str]) -> int:
    command = parse(argv, default=ClusterSettings(), prog="cluster.py", description=__doc__)
    if command.distributed.several:
        return measure(command.settings, command.distributed)
    return emulate(command.settings, argv)


# On one machine ----------------------------------------------------------------------------------


def emulate(settings: ClusterSettings, argv: list[str]) -> int:
    """Starts this program in all processes of an emulated cluster."""
    if settings.train and settings.dtype != "float32":
        raise InputError(
            "dtype must be float32 for train on an emulated cluster, since XLA's CPU backend "
            "multiplies no matrices in bfloat16 as long as it sends bfloat16; got "
            f"dtype={settings.dtype}, train={' '.join(settings.train)}. Leave out one of them."
        )
    # What is wrong with the sizes and the schemes is said before anything starts.
    settings.check_length(len(settings.device_nodes))
    schemes = settings.read_schemes(settings.device_nodes)
    sent = {settings.dtype, *(scheme.options.get("gradient_dtype") for scheme in schemes)}
    flags = [os.environ.get("XLA_FLAGS", "")]
    flags += [BFLOAT16_FLAG] * ("bfloat16" in sent)
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1" if settings.rails else str(settings.devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": " ".join(flags).strip(),
        "PYTHONUNBUFFERED": "1",
        # A program that comes from jax's cache cannot be handed on to the other processes.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        # There are fewer cores than processes.
        "OMP_NUM_THREADS": "1",
    }
    where = ["--distributed.coordinator", "{coordinator}", "--distributed.index", "{index}",
             "--distributed.processes", str(settings.processes),
             "--distributed.timeout", str(SILENCE_SECONDS)]  # fmt: skip
    program = [sys.executable, str(Path(__file__).resolve()), *argv, *where]
    return cluster_nodes.run(settings, program, variables)


# In every process --------------------------------------------------------------------------------


def measure(settings: ClusterSettings, distributed: Distributed) -> int:
    """Measures in one of the processes; process 0 prints. Returns the exit status."""
    from trainer.processes import require_same_flags, together
    from trainer.run.settings import flags_of

    emulated = EMULATED in os.environ
    changed = [x for x in EMULATION_ONLY if getattr(settings, x) != getattr(ClusterSettings(), x)]
    if changed and not emulated:
        raise InputError(
            f"{', '.join(EMULATION_ONLY)} belong to an emulated cluster; got --distributed and "
            f"{', '.join(f'{x}={getattr(settings, x)}' for x in changed)}. Leave them out."
        )
    silence_gloo()
    with together(distributed):
        require_same_flags(flags_of(settings))
        return measure_joined(settings, emulated=emulated)


def silence_gloo() -> None:
    """Drops what C++ prints: gloo tells of every group of devices on standard output."""
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def measure_joined(settings: ClusterSettings, *, emulated: bool) -> int:
    """Measures, when the processes have joined each other. Returns the exit status."""
    import jax

    from benchmarks.cluster.attention import AttentionCalls
    from benchmarks.cluster.rounds import Processes, Timed, table
    from benchmarks.cluster.training import TrainingSteps

    say = print if jax.process_index() == 0 else lambda _: None
    processes = Processes(emulated=emulated)
    place = find_place(settings, emulated=emulated)
    settings.check_length(len(place.devices))
    platform = place.devices[0].platform
    say(
        f"{max(place.nodes) + 1} x {place.devices_per_node} {place.devices[0].device_kind} devices"
        + (f", emulated, {describe(settings)}" if emulated else "")
        + f"; {settings.batch_size} x {settings.seq_len} tokens, {settings.heads} heads "
        f"({settings.num_kv_heads} key heads) of {settings.head_dim}, {settings.dtype}, "
        + ("causal" if settings.causal else "full")
        + ("" if settings.window is None else f", window {settings.window}")
        + f"; jax {jax.__version__}, {os.cpu_count()} cores"
    )
    timed: list[Timed] = []
    for kind in settings.train or (None,):
        own = settings if kind is None else settings.of_model(kind)
        calls: Any = AttentionCalls(own, place, processes)
        if kind is not None:
            calls = TrainingSteps(kind, own, calls, processes)
        timed += [calls.prepare(scheme) for scheme in own.read_schemes(place.nodes, platform)]
    say(f"{len(timed)} programs are compiled and checked; timing")
    processes.run_rounds(timed, settings.rounds)
    say(table(timed))
    return int(any(row.is_wrong for row in timed))


def find_place(settings: ClusterSettings, *, emulated: bool) -> Any:
    """The devices of all processes, node by node.

    Raises:
        ValueError: if nodes have different numbers of devices.
    """
    import jax

    from benchmarks.cluster.attention import Place

    devices = sorted(jax.devices(), key=lambda x: (x.process_index, x.id))
    nodes = nodes_of(devices, settings.devices if emulated else None)
    counts = Counter(nodes)
    if len(set(counts.values())) > 1:
        raise InputError(
            "Every node must have the same number of devices; got "
            f"{', '.join(map(str, counts.values()))}. Use the same on all."
        )
    devices = [device for _, device in sorted(zip(nodes, devices, strict=True), key=lambda x: x[0])]
    return Place(devices=tuple(devices), devices_per_node=counts[0], rails=settings.rails)


def describe(settings: ClusterSettings) -> str:
    """The ports of an emulated cluster in words."""
    whose = "a device" if settings.rails else "a node"
    inside = f", {settings.inside} a device inside" if settings.inside else ""
    return f"one half-duplex port of {settings.rate} for {whose}{inside}"


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        sys.exit(main(sys.argv[1:]))

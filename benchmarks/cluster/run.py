"""Times the attention of schemes on the GPUs of a cluster; train.py times its steps itself.

    python benchmarks/cluster/run.py                             # the devices of this machine
    srun python benchmarks/cluster/run.py --distributed          # those of all processes
    python benchmarks/cluster/run.py --schemes ring startrail-2 team-4:gradient_dtype=bfloat16

With --distributed, each process of a cluster runs the same command, as with train.py
(`docs/cluster.md`). All rows are compiled, compared with dense attention in float64 where that is
small enough, and timed in turn, --rounds times. The columns are explained below the table. The exit
status is 1 if a result is wrong.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

# For a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cluster.settings import ClusterSettings
from startrail_jax.devices.nodes import nodes_of
from startrail_jax.errors import InputError
from trainer.command_line import parse


def main(argv: list[str]) -> int:
    from trainer.processes import require_same_flags, together
    from trainer.run.settings import flags_of

    command = parse(argv, default=ClusterSettings(), prog="cluster.py", description=__doc__)
    with together(command.distributed):
        require_same_flags(flags_of(command.settings))
        return measure(command.settings)


def measure(settings: ClusterSettings) -> int:
    """Measures in one of the processes; process 0 prints. Returns the exit status."""
    import jax

    from benchmarks.cluster.attention import AttentionCalls
    from benchmarks.cluster.rounds import run_rounds, table

    say = print if jax.process_index() == 0 else lambda _: None
    place = find_place()
    settings.check_length(len(place.devices))
    platform = place.devices[0].platform
    say(
        f"{max(place.nodes) + 1} x {place.devices_per_node} {place.devices[0].device_kind} devices"
        f"; {settings.batch_size} x {settings.seq_len} tokens, {settings.heads} heads "
        f"({settings.num_kv_heads} key heads) of {settings.head_dim}, {settings.dtype}, "
        + ("causal" if settings.causal else "full")
        + ("" if settings.window is None else f", window {settings.window}")
        + f"; jax {jax.__version__}, {os.cpu_count()} cores"
    )
    calls = AttentionCalls(settings, place)
    timed = [calls.prepare(scheme) for scheme in settings.read_schemes(place.nodes, platform)]
    say(f"{len(timed)} programs are compiled and checked; timing")
    run_rounds(timed, settings.rounds)
    say(table(timed))
    return int(any(row.is_wrong for row in timed))


def find_place() -> Any:
    """The devices of all processes, node by node."""
    import jax

    from benchmarks.cluster.attention import Place

    devices = sorted(jax.devices(), key=lambda x: (x.process_index, x.id))
    nodes = nodes_of(devices, None)
    counts = Counter(nodes)
    if len(set(counts.values())) > 1:
        raise InputError(
            "Every node must have the same number of devices; got "
            f"{', '.join(map(str, counts.values()))}. Use the same on all."
        )
    devices = [device for _, device in sorted(zip(nodes, devices, strict=True), key=lambda x: x[0])]
    return Place(devices=tuple(devices), devices_per_node=counts[0])


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        sys.exit(main(sys.argv[1:]))

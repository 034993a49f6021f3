"""Starts train.py in every process of an emulated cluster.

    python benchmarks/cluster/start.py --nodes 4 --devices 4 --rate 50mbit -- gpt_tiny --steps 5

The flags before `--` are those of the cluster, and what follows are words of train.py, which gets
the address, the index and the number of its process too. Every process compiles by itself,
which takes minutes for sixteen. What is emulated, and what is not, stands in `run.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

# For a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cluster.nodes import Topology, run
from startrail_jax.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
COMPILING_SECONDS = 1800
"""Time that processes wait for each other: cores are few."""


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    middle = argv.index("--") if "--" in argv else len(argv)
    topology = tyro.cli(Topology, prog="start.py", description=__doc__, args=argv[:middle])
    words = argv[middle + 1 :]
    if not words:
        raise InputError(
            "The words of train.py must follow `--`; got none. Write for example "
            "`python benchmarks/cluster/start.py --nodes 4 -- gpt_tiny --steps 5`."
        )
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1" if topology.rails else str(topology.devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        # There are fewer cores than processes.
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    where = ["--distributed.coordinator", "{coordinator}", "--distributed.index", "{index}",
             # Processes of one machine would say that they are one node.
             "--mesh.devices-per-node", str(topology.devices),
             "--distributed.processes", str(topology.processes),
             "--distributed.start-timeout", str(COMPILING_SECONDS),
             "--distributed.timeout", str(COMPILING_SECONDS)]  # fmt: skip
    return run(topology, [sys.executable, str(ROOT / "train.py"), *words, *where], variables)


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        sys.exit(main(sys.argv[1:]))

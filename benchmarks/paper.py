"""The evaluation of StarTrail's paper on paper: what the planner predicts for its clusters.

    python benchmarks/paper.py              # StarTrail over Ring on the clusters of table 1
    python benchmarks/paper.py --scaling    # strong and weak scaling, 8 to 64 H100
    python benchmarks/paper.py --case-30b   # bytes of one attention of a model of 30 B, 64 GPUs

Nothing is run, and nothing is tuned to the paper. Assumptions:

* 8 x 8 H100 have a port of 400 Gb/s for each GPU and NVLink inside; the A100 of 40 GB have one port
  of 100 Gb/s a node, and NVLink inside. Kernels, latencies and rates are those of
  `startrail_jax/planner/hardware.py`.
* "published" is the schedule of the paper (`Attention(mesh, published=True)`), "ours" that of this
  package, with the same team and group, both in their best order on the nodes. Ring Attention is a
  single ring, as in the paper; "double" lets it be a double ring.
* Batch 1, ZeRO 3, remat full, no offload, tiles, and no tensor parallelism for every row, so that
  rows differ in attention alone.

The case study of 30 B gives 1.625 GB for Ring Attention, and 0.406 GB of point-to-point messages
and 0.152 GB of collectives for StarTrail with C = 4, 0.558 GB in all. `--case-30b` takes these as
the bytes of one GPU in the forward pass of one attention, with 64K tokens, 6656 channels (the width
of LLaMA 30B) in 16 bits, 64 GPUs, and GB of 2^30 bytes: then all of them follow exactly. They count
P hops for a ring of P, where the last one sends nothing, and leave out the permute of keys; for
StarTrail, the two are equal. The column "sent" has what the schedules send.

The paper reports ratios from 1.199 to 2.114 for these clusters, up to 1.771 for GPTs and 2.114 for
DiTs, at lengths that it does not give with each of them.

Reference: StarTrail, https://arxiv.org/abs/2407.00611, sections 4.2 to 4.4.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from startrail_jax.planner.grid import Call, Settings, all_settings
from startrail_jax.planner.hardware import Cluster, find_gpu
from startrail_jax.planner.models import MODELS
from startrail_jax.planner.quantities import GIB, parse_rate, show_count
from startrail_jax.planner.search import Candidates, Prediction, Search
from startrail_jax.planner.timing import Timing

FIXED = Search(zero=(3,), remat=("full",), offload=(False,), tiled=(True, False))


@dataclass(frozen=True)
class Machine:
    """A cluster of table 1."""

    nodes: int
    gpus: int
    gpu: str
    port: str
    ports: int

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            nodes=self.nodes,
            gpus_per_node=self.gpus,
            gpu=find_gpu(self.gpu),
            port_rate=parse_rate(self.port, "--port"),
            ports=self.ports,
        )

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus} {self.gpu}"


MACHINES = (
    Machine(8, 8, "h100", "400Gb/s", 8),
    Machine(16, 2, "a100_40", "100Gb/s", 1),
    Machine(8, 4, "a100_40", "100Gb/s", 1),
    Machine(4, 8, "a100_40", "100Gb/s", 1),
)


def is_ring(settings: Settings) -> np.ndarray:
    return (settings.group == 1) & (settings.team == 1) & (settings.head == 1)


def is_star(c: int, published: bool) -> Callable[[Settings], np.ndarray]:
    def scheme(settings: Settings) -> np.ndarray:
        alike = (settings.group == c) & (settings.team == c) & (settings.head == 1)
        return alike & (settings.published == published) & (settings.inner == 1)

    return scheme


def fastest(
    cluster: Cluster, call: Call, schemes: dict[str, Callable[[Settings], np.ndarray]]
) -> dict[str, Prediction]:
    """The fastest setting of each scheme that the cluster and the model allow."""
    options = replace(FIXED, degrees={"tensor": 1, "data": 1})
    settings = all_settings(cluster, call, given=options.degrees)
    found = {}
    for name, scheme in schemes.items():
        rows = settings.take(np.flatnonzero(scheme(settings)))
        if len(rows):
            candidates = Candidates(cluster, call, options, rows)
            found[name] = candidates.best(np.ones(len(candidates.row), bool))[0]
    return found


def schemes() -> dict[str, Callable[[Settings], np.ndarray]]:
    """The rows of the tables."""
    found: dict[str, Callable[[Settings], np.ndarray]] = {
        "ring": lambda s: is_ring(s) & (s.inner == 1),
        "double": is_ring,
    }
    for c in (2, 4):
        found[f"published-{c}"] = is_star(c, True)
        found[f"ours-{c}"] = is_star(c, False)
    return found


def table(cases: Iterator[tuple[str, Cluster, Call]]) -> None:
    """One line for each case: seconds of Ring Attention, and how much faster others are."""
    names = list(schemes())
    print(f"{'':<34}" + "".join(f"{name:>13}" for name in names) + "   GiB")
    for name, cluster, call in cases:
        found = fastest(cluster, call, schemes())
        ring = found["ring"].seconds
        columns = [f"{ring:>11.3g} s"]
        columns += [
            f"{ring / found[x].seconds:>12.3f}x" if x in found else f"{'-':>13}" for x in names[1:]
        ]
        memory = [
            found[x].memory_bytes / GIB
            for x in ("ring", "published-2", "published-4")
            if x in found
        ]
        sizes = ", ".join(f"{size:.1f}" for size in memory)
        print(f"{name:<34}{''.join(columns)}   {sizes}")


def clusters() -> Iterator[tuple[str, Cluster, Call]]:
    for machine in MACHINES:
        for name in ("gpt_3b", "gpt_7b", "dit_1b"):
            for seq_len in (2**16, 2**17, 2**18, 2**19):
                call = Call(model=MODELS[name], seq_len=seq_len, batch=1)
                yield f"{machine}, {name}, {show_count(seq_len)}", machine.cluster, call


def scaling() -> Iterator[tuple[str, Cluster, Call]]:
    for kind in ("strong", "weak"):
        for nodes in (1, 2, 4, 8):
            cluster = replace(MACHINES[0], nodes=nodes).cluster
            seq_len = 2**17 if kind == "strong" else 2**16 * nodes
            call = Call(model=MODELS["gpt_7b"], seq_len=seq_len, batch=1)
            yield f"{kind}, {8 * nodes} h100, gpt_7b, {show_count(seq_len)}", cluster, call


def equations(gpus: int, c: int) -> tuple[int, int]:
    """Point-to-point messages and collectives of the case study, in shares of the query of one GPU.

    A ring of R hops sends C shares of key and of value in each; a team gathers C shares of query,
    key and value, and sums as many of the output. C = 1 is Ring Attention.
    """
    hops = gpus // c**2
    return 2 * c * hops, 4 * (c - 1)


def case_30b() -> None:
    """The case study: what the paper's equations give, and what schedules send, to the byte."""
    gpus, seq_len, heads = 64, 2**16, 52
    model = replace(MODELS["gpt_7b"], name="30b", width=6656, heads=heads, kv_heads=heads)
    call, cluster = Call(model=model, seq_len=seq_len, batch=1), MACHINES[0].cluster
    share = seq_len // gpus * heads * model.head_dim * model.itemsize / GIB
    settings = all_settings(cluster, call, given={"data": 1, "tensor": 1, "head": 1})
    sent = Timing(settings, cluster, call).received(backward=False) / GIB
    print(f"{'':<28}{'messages':>10}{'collectives':>13}{'in all':>9}{'sent':>9}   GiB a GPU")
    for name, c, scheme in (
        ("Ring Attention", 1, lambda s: is_ring(s) & (s.inner == 1)),
        ("StarTrail, published, C = 4", 4, is_star(4, True)),
        ("StarTrail here, C = 4", None, is_star(4, False)),
        ("StarTrail here, C = 8", None, is_star(8, False)),
        ("team 8, ring 8", None, lambda s: (s.team == 8) & (s.ring == 8) & (s.inner == 1)),
    ):
        parts = [share * count for count in equations(gpus, c)] if c is not None else []
        columns = [f"{x:.3f}" for x in (*parts, sum(parts))] if parts else ["-"] * 3
        exact = sent[scheme(settings)].min()
        print(f"{name:<28}{columns[0]:>10}{columns[1]:>13}{columns[2]:>9}{exact:>9.3f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--case-30b", action="store_true")
    args = parser.parse_args(argv)
    if args.case_30b:
        case_30b()
    else:
        table(scaling() if args.scaling else clusters())


if __name__ == "__main__":
    main()

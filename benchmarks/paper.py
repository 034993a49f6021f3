"""The evaluation of StarTrail's paper on paper: what the planner predicts for its clusters.

    python benchmarks/paper.py              # StarTrail over Ring on the clusters of table 1
    python benchmarks/paper.py --case-30b   # bytes of one attention of a model of 30 B, 64 GPUs

Nothing is run, and nothing is tuned to the paper. Assumptions:

* 8 x 8 H100 have a port of 400 Gb/s for each GPU and NVLink inside; the A100 of 40 GB have one port
  of 100 Gb/s a node, and NVLink inside. Kernels, latencies and rates are those of
  `startrail_jax/planner/hardware.py`.
* "published" is the schedule of the paper (`Attention(mesh, published=True)`), "ours" that of this
  package, with the same team and group, both in their best order on the nodes. Ring Attention is a
  single ring, as in the paper. `python -m startrail_jax.plan` compares all other settings too.
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
from collections.abc import Callable

import numpy as np

import startrail_jax as st
from startrail_jax.planner.grid import Call, Settings, all_settings
from startrail_jax.planner.hardware import Cluster, find_gpu
from startrail_jax.planner.models import MODELS
from startrail_jax.planner.quantities import GIB, parse_rate, show_count
from startrail_jax.planner.search import Candidates, Prediction, Search

SEARCH = Search(zero=(3,), remat=("full",), offload=(False,), degrees={"tensor": 1, "data": 1})
# Nodes, GPUs of a node, GPU, rate of a port, ports of a node: those of table 1.
CLUSTERS = (
    (8, 8, "h100", "400Gb/s", 8),
    (16, 2, "a100_40", "100Gb/s", 1),
    (8, 4, "a100_40", "100Gb/s", 1),
    (4, 8, "a100_40", "100Gb/s", 1),
)


def is_scheme(c: int, published: bool = False) -> Callable[[Settings], np.ndarray]:
    """StarTrail with C = c, which is a single ring for C = 1."""
    return lambda settings: (
        (settings.group == c)
        & (settings.team == c)
        & (settings.head == 1)
        & (settings.inner == 1)
        & (settings.published == published)
    )


SCHEMES = {
    "ring": is_scheme(1),
    **{f"{name}-{c}": is_scheme(c, name == "published")
       for c in (2, 4) for name in ("published", "ours")},
}  # fmt: skip


def fastest(cluster: Cluster, call: Call) -> dict[str, Prediction]:
    """The fastest setting of each scheme that the cluster and the model allow."""
    settings = all_settings(cluster, call, given=SEARCH.degrees)
    found = {}
    for name, scheme in SCHEMES.items():
        rows = settings.take(np.flatnonzero(scheme(settings)))
        if len(rows):
            candidates = Candidates(cluster, call, SEARCH, rows)
            found[name] = candidates.best(np.ones(len(candidates.row), bool))[0]
    return found


def clusters() -> None:
    """One line for each case: seconds of Ring Attention, and how much faster others are."""
    print(f"{'':<34}" + "".join(f"{name:>13}" for name in SCHEMES) + f"{'GiB of ring':>13}")
    for nodes, gpus, gpu, port, ports in CLUSTERS:
        cluster = Cluster(nodes=nodes, gpus_per_node=gpus, gpu=find_gpu(gpu),
                          port_rate=parse_rate(port, "--port"), ports=ports)  # fmt: skip
        for name in ("gpt_3b", "gpt_7b", "dit_1b"):
            for seq_len in (2**16, 2**17, 2**18, 2**19):
                found = fastest(cluster, Call(model=MODELS[name], seq_len=seq_len, batch=1))
                ring = found["ring"]
                gains = {x: f"{ring.seconds / y.seconds:.3f}x" for x, y in found.items()}
                gains["ring"] = f"{ring.seconds:.3g} s"
                print(f"{f'{nodes} x {gpus} {gpu}, {name}, {show_count(seq_len)}':<34}"
                      + "".join(f"{gains.get(x, '-'):>13}" for x in SCHEMES)
                      + f"{ring.memory_bytes / GIB:>13.1f}")  # fmt: skip


def equations(gpus: int, c: int) -> tuple[int, int]:
    """Point-to-point messages and collectives of the case study, in shares of the query of one GPU.

    A ring of R hops sends C shares of key and of value in each; a team gathers C shares of query,
    key and value, and sums as many of the output. C = 1 is Ring Attention.
    """
    hops = gpus // c**2
    return 2 * c * hops, 4 * (c - 1)


def case_30b() -> None:
    """The case study: what the paper's equations give, and what schedules send, to the byte."""
    gpus, seq_len, heads, head_dim = 64, 2**16, 52, 128
    share = seq_len // gpus * heads * head_dim * 2 / GIB
    print(f"{'':<28}{'messages':>10}{'collectives':>13}{'in all':>9}{'sent':>9}   GiB a GPU")
    for name, c, degrees, published in (
        ("Ring Attention", 1, st.Degrees.ring_attention(gpus), False),
        ("StarTrail, published, C = 4", 4, st.Degrees.startrail(gpus, c=4), True),
        ("StarTrail here, C = 4", None, st.Degrees.startrail(gpus, c=4), False),
        ("StarTrail here, C = 8", None, st.Degrees.startrail(gpus, c=8), False),
        ("team 8, ring 8", None, st.Degrees(team=8, ring=8), False),
    ):
        sent = st.communication(
            degrees, batch=1, seq_len=seq_len, heads=heads, kv_heads=heads, head_dim=head_dim,
            dtype="bfloat16", causal=True, layout="zigzag", published=published,
        ).forward.received_bytes / GIB  # fmt: skip
        parts = [share * count for count in equations(gpus, c)] if c else []
        columns = [f"{x:.3f}" for x in (*parts, sum(parts))] if parts else ["-"] * 3
        print(f"{name:<28}{columns[0]:>10}{columns[1]:>13}{columns[2]:>9}{sent:>9.3f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case-30b", action="store_true")
    args = parser.parse_args(argv)
    if args.case_30b:
        case_30b()
    else:
        clusters()


if __name__ == "__main__":
    main()

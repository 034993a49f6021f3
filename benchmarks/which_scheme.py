"""How close simple rules come to the fastest setting, by the planner, over many clusters.

    python benchmarks/which_scheme.py                                # the table of docs/planner.md
    python benchmarks/which_scheme.py --gpu b200 --gpus-per-node 4   # the same on other clusters

All GPUs share one sequence. Every degree of head, team, ring and group, double ring, order of the
axes, ZeRO, remat, offload and tile is timed, and a rule counts with the best of the rest of them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from models.config import GPTConfig
from plan import find_run
from startrail_jax.devices.degrees import Degrees
from trainer.planner.gpt import sizes_of_gpt
from trainer.planner.grid import Call
from trainer.planner.hardware import Cluster, find_gpu
from trainer.planner.models import ModelSizes
from trainer.planner.search import Candidates, Search

# Qwen3 0.6B and Gemma 2B: the config.json of Qwen/Qwen3-0.6B and google/gemma-2b.
_SMALL = (
    sizes_of_gpt(
        GPTConfig(
            width=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp_width=3072,
            vocab_size=151_936, qk_norm=True, tied_head=True,
        ),
        name="qwen3_0.6b",
    ),
    sizes_of_gpt(
        GPTConfig(
            width=2048, layers=18, heads=8, kv_heads=1, head_dim=256, mlp_width=16_384,
            vocab_size=256_128, tied_head=True,
        ),
        name="gemma_2b",
    ),
)  # fmt: skip
_LARGE = ("gpt_7b", "llama3_8b", "llama3_70b")
_MODELS = (*(find_run(x).sizes for x in _LARGE), *_SMALL)
_TOKENS = (2**16, 2**18, 2**20)
_GPUS = (8, 16, 32, 64, 128, 256)
_GIGABITS = (25, 100, 400)
NEAR = 1.05
"""A rule is close to the fastest setting if it is at most so many times as slow."""


@dataclass(frozen=True)
class Case:
    """A model on a cluster."""

    model: ModelSizes
    tokens: int
    cluster: Cluster
    seconds: dict[Degrees, float]
    """The fastest step of each setting of the degrees that fits the memory."""

    @property
    def best(self) -> float:
        """Seconds of the fastest step."""
        return min(self.seconds.values())

    def slowness(self, rule: Callable[[Case], Degrees]) -> float:
        """How many times as slow as the fastest step that of a rule is; inf if it is not legal."""
        return self.seconds.get(rule(self), math.inf) / self.best


def rule(case: Case) -> Degrees:
    """The rule of docs/planner.md, "The rule"."""
    cluster = case.cluster
    return Degrees.recommended(
        cluster.num_gpus,
        heads=case.model.heads,
        kv_heads=case.model.kv_heads,
        devices_per_node=cluster.gpus_per_node,
        fast_ports=cluster.ports == cluster.gpus_per_node and cluster.port_rate >= 400e9 / 8,
    )


RULES: dict[str, Callable[[Case], Degrees]] = {
    "the rule": rule,
    "`head` as many as key heads, `ring` for the rest": lambda case: Degrees.loongtrain(
        case.cluster.num_gpus, head=math.gcd(case.cluster.num_gpus, case.model.kv_heads)
    ),
    "StarTrail, C = 2": lambda case: Degrees.startrail(case.cluster.num_gpus, c=2),
    "Ring Attention": lambda case: Degrees.ring_attention(case.cluster.num_gpus),
    "all-gather": lambda case: Degrees.all_gather(case.cluster.num_gpus),
}


OPTIONS = Search(degrees=dict(data=1, tensor=1), baselines=False)


def questions(gpu: str, gpus_per_node: int) -> Iterator[tuple[Cluster, Call]]:
    """The clusters and models of all cases: ports of a node are one, or one for each GPU."""
    for model, tokens, gpus, gigabits, ports in itertools.product(
        _MODELS, _TOKENS, _GPUS, _GIGABITS, (1, gpus_per_node)
    ):
        if gpus <= gpus_per_node and (gigabits, ports) != (_GIGABITS[0], 1):
            continue  # One node has no port.
        cluster = Cluster(
            nodes=max(gpus // gpus_per_node, 1),
            gpus_per_node=min(gpus, gpus_per_node),
            gpu=find_gpu(gpu),
            port_rate=gigabits * 1e9 / 8,
            ports=ports,
        )
        yield cluster, Call(model=model, seq_len=tokens, batch=1)


def cases(gpu: str, gpus_per_node: int) -> Iterator[Case]:
    """All cases in which a setting fits the memory."""
    for cluster, call in questions(gpu, gpus_per_node):
        found = Candidates(cluster, call, OPTIONS)
        seconds: dict[Degrees, float] = {}
        for index in np.flatnonzero(found.fits):
            degrees, _ = found.degrees(index)
            second = float(found.seconds[index])
            seconds[degrees] = min(second, seconds.get(degrees, math.inf))
        if seconds:
            yield Case(call.model, call.seq_len, cluster, seconds)


def near(found: list[Case], choose: Callable[[Case], Degrees], gpus: int | None = None) -> float:
    """Share of the cases, all or those of some number of GPUs, in which a rule is close."""
    slow = [x.slowness(choose) for x in found if gpus in (None, x.cluster.num_gpus)]
    return sum(x <= NEAR for x in slow) / len(slow)


def table(found: list[Case]) -> list[str]:
    """A row for each rule, in Markdown, and sentences."""
    counts = sorted({case.cluster.num_gpus for case in found})
    heads = ("choice", *(f"{count} GPUs" for count in counts), "all", "median", "worst")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, choose in RULES.items():
        slow = [case.slowness(choose) for case in found]
        shares = [near(found, choose, count) for count in (*counts, None)]
        cells = [name, *(f"{x:.0%}" for x in shares)]
        cells += [f"{statistics.median(slow):.2f}", f"{max(slow):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    gains = [
        min(x for degrees, x in case.seconds.items() if degrees.team == 1) / case.best
        for case in found
    ]
    over_ring = sum(case.slowness(RULES["Ring Attention"]) >= 1.2 for case in found)
    return [
        *lines,
        "",
        f"{len(found)} cases. The fastest setting is at least 1.2 times as fast as Ring Attention "
        f"in {over_ring}. The best setting with teams is at least 5 % faster than the best without "
        f"in {sum(x >= 1.05 for x in gains)}, 10 % in {sum(x >= 1.1 for x in gains)}, and at most "
        f"{max(gains):.2f} times as fast.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", default="h100", help="name of a GPU; default: h100")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="default: 8")
    args = parser.parse_args()
    print("\n".join(table(list(cases(args.gpu, args.gpus_per_node)))))


if __name__ == "__main__":
    main()

"""The plan of a cluster and a model: the result of `plan.py`, and its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from startrail_jax.errors import InputError
from trainer.planner.command import OWN, command_of, remarks
from trainer.planner.documents import DocumentForecast, cut, fill_rows, forecast, read_lengths
from trainer.planner.grid import Call
from trainer.planner.hardware import Cluster, Gpu, find_gpu
from trainer.planner.models import ModelSizes, check_model
from trainer.planner.quantities import (
    GIB,
    as_count,
    parse_rate,
    parse_seconds,
    show_bytes,
    show_count,
    show_rate,
    show_seconds,
)
from trainer.planner.search import (
    BASELINES,
    Candidates,
    Prediction,
    Search,
    check_options,
    family,
    scheme_of,
)

_TIGHT = 0.85
"""The fastest setting is taken, unless it needs more than this share of what a step may take."""
_NEAR = 1.02
"""Then a setting that is so many times as slow is taken if it needs less memory."""
_MUCH = 0.2
"""The share of a step from which on its waiting for ZeRO is a subject of the advice."""
_EQUAL = 1.05
"""Predictions do not tell settings apart whose seconds differ by so much."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest settings of a cluster for a model; `print` shows them."""

    cluster: Cluster
    """The cluster."""
    call: Call
    """The model, its tokens and its batch."""
    options: Search
    """The settings that were searched."""
    run: tuple[str, ...]
    """Words that name the model to `train.py`, and flags that it was planned with."""
    ranked: tuple[Prediction, ...]
    """The fastest settings, one for each setting of the degrees, best first."""
    baselines: dict[str, Prediction]
    """Name of a known scheme -> its fastest setting, without tensor parallelism."""
    illegal: dict[str, str]
    """Name of a known scheme -> the reason why none of its settings is legal here."""
    frugal: Prediction
    """The setting to take: the winner, unless that needs more than 85 % of the memory that a step
    may take. Then it is the setting of the least memory that is predicted to be at most 2 % slower;
    it offloads only if the winner does."""
    reason: str | None
    """Two sentences on why the winner wins, and how its time is spent; None if nothing fits."""
    documents: DocumentForecast | None
    """The plan for whole documents, each on few GPUs, if their lengths were given; None if not, or
    if no setting for them fits."""
    alone: float | None
    """Seconds of a step on one GPU of enough memory, if they are no more than the winner's."""
    num_settings: int
    """Settings of the degrees and of the order of the axes."""
    num_candidates: int
    """Settings of the degrees, with all savings."""
    num_fitting: int
    """Candidates that fit the memory."""

    @property
    def winner(self) -> Prediction:
        """The fastest setting that fits; if none does, the one that needs least memory."""
        return self.ranked[0]

    @property
    def command(self) -> str:
        """The command that trains with `frugal`."""
        fraction = self.options.memory_fraction
        settings: Any = dict(run=self.run, memory_fraction=fraction)
        return command_of(self.frugal, self.call, self.cluster, **settings)

    @property
    def advice(self) -> list[str]:
        """Sentences to read before running the command."""
        found = []
        if self.alone is not None:
            found.append(
                "So many GPUs are of no use here: one with enough memory would take "
                f"{show_seconds(self.alone)} a step. Give a larger --seq-len or --batch-size."
            )
        if self.frugal.memory_bytes < self.winner.memory_bytes:
            slower = self.frugal.seconds / self.winner.seconds - 1
            speed = f"{slower:.1%} slower" if slower else "as fast"
            found.append(
                f"The first setting needs {self.winner.memory_bytes / GIB:.1f} of "
                f"{self._limit / GIB:.1f} GiB. The command takes another, of "
                f"{self.frugal.memory_bytes / GIB:.1f} GiB, which is predicted to be {speed}: "
                f"{self.frugal.label}; {describe(self.frugal)}."
            )
        waits = self.frugal.parts["zero waits"]
        if waits > _MUCH * self.frugal.seconds:
            found.append(
                f"A step waits {show_seconds(waits)} of {show_seconds(self.frugal.seconds)} for "
                "the weights and gradients of ZeRO, whatever the number of sequences: try a larger "
                f"--batch-size. The plan does not search {_unsearched(self.frugal, self.cluster)}."
            )
        return found

    @property
    def _limit(self) -> float:
        """Bytes of a GPU that a step may take."""
        return self.options.memory_fraction * self.cluster.gpu.memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dicts, for JSON."""
        cluster = asdict(self.cluster)
        if self.cluster.nodes == 1:
            cluster["port_rate"] = None
        return {
            "cluster": cluster,
            "model": self.call.model.as_dict(),
            "run": list(self.run),
            "options": asdict(self.options),
            "seq_len": self.call.seq_len,
            "batch": self.call.batch,
            "num_settings": self.num_settings,
            "num_candidates": self.num_candidates,
            "num_fitting": self.num_fitting,
            "ranked": [_as_dict(choice) for choice in self.ranked],
            "baselines": {name: _as_dict(x) for name, x in self.baselines.items()},
            "illegal": self.illegal,
            "frugal": _as_dict(self.frugal),
            "reason": self.reason,
            "alone": self.alone,
            "advice": self.advice,
            "documents": asdict(self.documents) if self.documents else None,
            "command": self.command,
        }

    def _is_equal(self, choice: Prediction) -> bool:
        return choice.fits and choice.seconds <= _EQUAL * self.winner.seconds

    def __str__(self) -> str:
        ranks = enumerate(self.ranked, 1)
        return "\n".join(
            [
                *self._head(),
                "",
                f"{'':>4}{'s/step':>9}{'waits':>9}{'MFU':>7}{'GiB':>7}{'across':>9}{'inside':>9}"
                "  scheme",
                *(_line(f"{place}", x, equal=self._is_equal(x)) for place, x in ranks),
                "  known schemes, each at its best, without tensor parallelism:",
                *(_line("", x, name, self._is_equal(x)) for name, x in self.baselines.items()),
                *(f"{'':>4}{'no legal setting':<50}  {x}: {y}" for x, y in self.illegal.items()),
                "",
                *self._tail(),
            ]
        )

    def _head(self) -> list[str]:
        cluster, call = self.cluster, self.call
        duplex = " (both ways together)" if cluster.half_duplex else ""
        nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} x "
        nodes += f"{cluster.gpus_per_node} {cluster.gpu.name}"
        several = "s" if cluster.ports > 1 else ""
        rate = f"{show_rate(cluster.port_rate)} ({show_rate(8 * cluster.port_rate, 'bit')})"
        ports = f"{cluster.ports} port{several} of {rate}{duplex} a node, "
        ports = ports if cluster.nodes > 1 else ""
        return [
            f"{nodes}, {ports}{show_rate(cluster.gpu.inside_rate)} inside; "
            f"{call.model.name}, {show_count(call.seq_len)} tokens, batch {call.batch}",
            f"{self.num_settings} settings of degrees and order; with ZeRO, remat, offload and "
            f"tile {self.num_candidates}, of which {self.num_fitting} fit "
            f"{self._limit / GIB:.1f} GiB",
            *([call.model.assumed] if call.model.assumed else []),
        ]

    def _tail(self) -> list[str]:
        if self.reason is None:
            return [
                f"Nothing fits: the least is {self.winner.memory_bytes / GIB:.1f} GiB "
                f"({self.winner.label}, with {describe(self.winner)}). Use fewer tokens, more "
                "nodes or a larger GPU, or leave out flags that restrict the search.",
            ]
        columns = (
            "=: at most 5% slower than the first, too close to call by predictions. waits: "
            "seconds in which a GPU waits for\nmessages. across, inside: bytes that the attentions "
            "of a step send through the ports of a node, and between its GPUs.\nTimes and memory "
            "are predictions: see docs/planner.md."
        )
        lines = [self.reason, *self.advice]
        if self.documents is not None:
            lines.append(self.documents.comparison)
        lines += ["", self.command, *remarks(self.run, self.cluster)]
        return [*lines, "", columns]


def describe(choice: Prediction) -> str:
    """The savings of a choice in a few words."""
    savings = choice.savings
    words = [f"zero {savings.zero}", f"remat {savings.remat}"]
    words += ["offload"] * savings.offload
    words += ["moments on the host"] * savings.offload_optimizer
    words += [f"tile {choice.tile}"] * (choice.tile is not None)
    return ", ".join(words)


def _unsearched(choice: Prediction, cluster: Cluster) -> str:
    """Flags of `train.py` that change what ZeRO sends, and what each does."""
    text = (
        "--gradient-accumulation, which at ZeRO 0 and 1 sums gradients once for all parts of a "
        "batch"
    )
    size, inside = 1, []
    for role in reversed(choice.order):
        degree = getattr(choice.degrees, role)
        size *= degree
        if size <= cluster.gpus_per_node and degree > 1 and role != "tensor":
            inside.insert(0, role)
    if not (choice.savings.zero and inside and size > cluster.gpus_per_node):
        return text
    axes = f"--zero-axes {' '.join(inside)}, which gathers weights inside a node and needs memory"
    return f"{axes}, or {text}"


_WAITS = {
    "attention": "computes attention for {} more",
    "linear attention": "computes linear attention for {} more",
    "products": "computes matrix products for {} more",
    "other kernels": "moves bytes between matrix products for {} more",
    "recomputation": "recomputes for {} more",
    "optimizer": "spends {} more in the optimizer",
    "attention waits": "waits {} more for the messages of attention",
    "state waits": "waits {} more for the states of linear attention",
    "tensor waits": "waits {} more for sums over tensor",
    "zero waits": "waits {} more for weights and sums of gradients",
    "offload waits": "waits {} more for the memory of the host",
}


def _reason(candidates: Candidates, winner: Prediction) -> str:
    """Why the winner wins, and what its seconds are spent on."""
    spent = sorted(winner.parts.items(), key=lambda part: -part[1])
    shares = [f"{name} {show_seconds(seconds)}" for name, seconds in spent if seconds][:3]
    return f"{_why(candidates, winner)} Of its {show_seconds(winner.seconds)}: {', '.join(shares)}."


def _why(candidates: Candidates, winner: Prediction) -> str:
    """The fastest setting of another scheme, and what it loses its seconds with."""
    name = f"{winner.scheme} ({winner.label})"
    rival = next(
        (
            candidates.prediction(index)
            for index in candidates.ordered(~candidates.mask(lambda s: s.published))
            if family(scheme_of(candidates.degrees(index)[0])) != family(winner.scheme)
        ),
        None,
    )
    if rival is None:
        return f"{name} wins, since no other scheme is legal and fits the memory here."
    gaps = {part: rival.parts[part] - winner.parts[part] for part in winner.parts}
    part = max(gaps, key=lambda x: gaps[x])
    text = f"{name} wins, since the next scheme, {rival.scheme} ({rival.label}), "
    if gaps[part] <= 0:
        more = " and needs more memory" if rival.memory_bytes > winner.memory_bytes else ""
        return f"{text}is as fast{more}."
    slower = rival.seconds / winner.seconds - 1
    return f"{text}is {slower:.1%} slower: it {_WAITS[part].format(show_seconds(gaps[part]))}."


def _alone(candidates: Candidates, winner: Prediction) -> float | None:
    """Seconds of a step on one GPU, if several do not make it faster."""
    cluster, options = candidates.cluster, candidates.options
    if cluster.num_gpus == 1:
        return None
    gpu = replace(cluster.gpu, memory_bytes=1 << 60)
    few: Any = dict(degrees={}, zero=(0,), offload=(False,), tiled=(False,), baselines=False)
    alone = replace(cluster, nodes=1, gpus_per_node=1, ports=1, gpu=gpu)
    one = Candidates(alone, candidates.call, replace(options, **few))
    seconds = float(one.seconds.min())
    return seconds if seconds <= winner.seconds else None


_SEVERAL = "several GPUs for a sequence"
_NEEDS = {
    "Ring Attention": _SEVERAL,
    "all-gather": _SEVERAL,
    "Ulysses": "heads that all GPUs of a sequence can split",
    "LoongTrain / USP": "heads that some GPUs of a sequence can split, and several such parts",
    "StarTrail as published": "a C above 1 whose square divides the GPUs of a sequence",
}


def _why_illegal(candidates: Candidates, name: str) -> str:
    """Why there is no candidate of a known scheme without tensor parallelism."""
    flags = "".join(f" --mesh.{role} {size}" for role, size in candidates.options.degrees.items())
    # One GPU has nothing to share, whatever its heads.
    needs = _NEEDS[name] if candidates.cluster.num_gpus > 1 else _SEVERAL
    return f"it needs {needs}{f', beside{flags}' if flags else ''}"


def _short(seconds: float) -> str:
    """Seconds in at most 8 characters."""
    return f"{seconds:.4g}" if seconds >= 0.01 else f"{seconds:.2e}"


def _line(place: str, choice: Prediction, name: str | None = None, equal: bool = False) -> str:
    known = choice.scheme if name is None else name
    misfit = "" if choice.fits else "  DOES NOT FIT"
    sent = f"{show_bytes(choice.across_bytes):>9}{show_bytes(choice.inside_bytes):>9}"
    seconds = f"{'=' if equal else ' '}{_short(choice.seconds):>9}{choice.exposed_seconds:>9.3g}"
    return (
        f"{place:>3}{seconds}{choice.mfu:>7.1%}"
        f"{choice.memory_bytes / GIB:>7.1f}{sent}  {known}: {choice.label}; "
        f"{describe(choice)}{misfit}"
    )


def _as_dict(choice: Prediction) -> dict[str, Any]:
    derived = ("compute_seconds", "exposed_seconds")
    return asdict(choice) | {name: getattr(choice, name) for name in derived}


def plan(
    *,
    nodes: int,
    gpus_per_node: int,
    gpu: str | Gpu,
    model: ModelSizes,
    run: Sequence[str] = (OWN,),
    port: str | None = None,
    ports: int | None = None,
    inside: str | None = None,
    half_duplex: bool = False,
    latency: str | None = None,
    seq_len: str | float | int | None = None,
    batch: str | float | int | None = None,
    lengths: str | None = None,
    options: Search | None = None,
    top: int = 8,
) -> Plan:
    """Ranks every legal setting of a cluster by the time of a training step, under its memory.

    Args:
        nodes: number of nodes.
        gpus_per_node: number of GPUs in each node.
        gpu: name of a GPU, or a `trainer.planner.hardware.Gpu` with your own figures.
        model: the sizes of the model, such as those of a recipe: see `plan_run` of plan.py.
        run: the words that name the model to `train.py`, and flags that it is planned with.
        port: rate of one network port of a node in each direction, with its unit: "50GB/s" (bytes)
            or "400Gb/s" (bits). It may be left out for a single node.
        ports: number of ports of a node, shared evenly by its GPUs; None for one port per GPU.
        inside: rate between the GPUs of a node, with its unit; None for NVLink, as NCCL counts it.
        half_duplex: whether sending and receiving share the rate of a port.
        latency: time of a message through a port, such as "10us"; None for that of NCCL.
        seq_len: tokens in a sequence, as a number or as "512K"; None for that of the model.
        batch: sequences in a batch, over all devices; None for that of the model.
        lengths: tokens of the documents that fill the sequences, as the path of a text file with a
            number on each line or as "lognormal:MEDIAN,MEAN"; None for one document in each
            sequence.
        options: the settings to search; None for all.
        top: number of settings to rank.

    Returns:
        The plan. `print` shows it; `winner` and `command` say what to do.

    Raises:
        ValueError: if a name is unknown, a number is not positive or lacks its unit, or no setting
            is legal.
    """
    kind = find_gpu(gpu) if isinstance(gpu, str) else gpu
    nodes, gpus_per_node = as_count(nodes, "--nodes"), as_count(gpus_per_node, "--gpus-per-node")
    if inside is not None:
        kind = replace(kind, inside_rate=parse_rate(inside, "--inside"))
    if port is None and nodes > 1:
        raise InputError(
            f"--port must be given for several nodes; got --nodes {nodes} and no --port. Write the "
            "rate of one port of a node, such as --port 50GB/s or --port 400Gb/s."
        )
    cluster = Cluster(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=kind,
        port_rate=math.inf if port is None else parse_rate(port, "--port"),
        ports=gpus_per_node if ports is None else as_count(ports, "--ports"),
        half_duplex=half_duplex,
    )
    if latency is not None:
        cluster = replace(cluster, latency=parse_seconds(latency, "--latency"))
    call = call_of(model, seq_len, batch)
    top = as_count(top, "--top")
    return plan_of(cluster, call, options or Search(), run=run, lengths=lengths, top=top)


def _frugal(found: Candidates, mask: np.ndarray, winner: Prediction) -> Prediction:
    """The setting to take: see `Plan.frugal`."""
    memory = found.options.memory_fraction * found.cluster.gpu.memory_bytes
    if not winner.fits or winner.memory_bytes <= _TIGHT * memory:
        return winner
    near = mask & found.fits & (found.seconds <= _NEAR * winner.seconds)
    offloads = np.array([savings.offload for _, savings in found.kinds])[found.kind]
    near = np.flatnonzero(near & (~offloads | winner.savings.offload))
    return found.prediction(near[np.lexsort((found.seconds[near], found.memory[near]))[0]])


def call_of(
    sizes: ModelSizes, seq_len: str | int | float | None, batch: str | int | float | None
) -> Call:
    """The model and the batch of a step; arguments and errors as in `plan`."""
    length = sizes.seq_len if seq_len is None else as_count(seq_len, "--seq-len")
    if length is None:
        raise InputError(
            f"--seq-len must be given for {sizes.name}, which has none of its own. Write for "
            "example --seq-len 512K."
        )
    count = as_count(sizes.batch if batch is None else batch, "--batch-size")
    check_model(sizes, length, count)
    return Call(model=sizes, seq_len=length, batch=count)


def plan_of(
    cluster: Cluster,
    call: Call,
    options: Search,
    *,
    run: Sequence[str] = (OWN,),
    lengths: str | None = None,
    top: int = 8,
) -> Plan:
    """The plan of a cluster and a call: see `plan`."""
    check_options(options)
    pieces = filled = None
    if lengths is not None:
        if not call.causal:
            raise InputError(
                "--lengths are those of documents of text, in causal attention; got --lengths "
                f"{lengths} for {call.model.name}. Leave it out."
            )
        pieces = cut(read_lengths(lengths), call.seq_len)
        filled = fill_rows(pieces, call.seq_len, call.batch)
        call = replace(call, visible=filled.visible)
    found = Candidates(cluster, call, options)
    ours = ~found.mask(lambda settings: settings.published)
    ranked = found.best(ours, top)
    alone = found.mask(lambda settings: settings.tensor == 1)
    known = BASELINES if options.baselines else {}
    baselines = {
        name: choice
        for name, scheme in known.items()
        for choice in found.best(found.mask(scheme) & alone)
    }
    fits = ranked[0].fits
    whole = None
    if pieces is not None and filled is not None:
        whole = forecast(found, pieces, filled.fill)
    return Plan(
        cluster=cluster,
        call=call,
        options=options,
        run=tuple(run),
        ranked=tuple(ranked),
        baselines=baselines,
        illegal={name: _why_illegal(found, name) for name in known if name not in baselines},
        frugal=_frugal(found, ours, ranked[0]),
        reason=_reason(found, ranked[0]) if fits else None,
        documents=whole,
        alone=_alone(found, ranked[0]),
        num_settings=len(found.settings),
        num_candidates=len(found.seconds),
        num_fitting=int(np.count_nonzero(found.fits)),
    )

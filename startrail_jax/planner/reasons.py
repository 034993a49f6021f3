"""Why a setting wins, what would change that, and what to do where nothing fits the memory.

Every sentence is computed: other clusters and models are planned too, and compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from startrail_jax.errors import UserError
from startrail_jax.planner.grid import Call, Settings, all_settings
from startrail_jax.planner.hardware import GPUS, Cluster
from startrail_jax.planner.models import is_length
from startrail_jax.planner.quantities import GIB, show_bytes, show_count, show_rate, show_seconds
from startrail_jax.planner.search import BASELINES, Candidates, Options, Prediction
from startrail_jax.planner.step import Savings

_WIDEST = 64.0
"""Port rates are tried from this fraction of the given one to this multiple."""
_HALVINGS = 7
_KEPT = 200
"""Candidates whose settings are timed again at other port rates."""

_WAITS = {
    "attention": "computes attention for {} more",
    "products": "computes matrix products for {} more",
    "recomputation": "recomputes for {} more",
    "optimizer": "spends {} more in the optimizer",
    "attention waits": "waits {} more for the messages of attention",
    "tensor waits": "waits {} more for sums over tensor",
    "zero waits": "waits {} more for weights and sums of gradients",
    "offload waits": "waits {} more for the memory of the host",
}


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """Two sentences about a plan."""

    why: str
    """Why the winner wins."""
    change: str
    """What would let another scheme win."""


def family(scheme: str) -> str:
    """The name of a scheme without its numbers."""
    return re.sub(", C = [0-9]+", "", scheme)


def reasons(candidates: Candidates, winner: Prediction) -> Reasons:
    """The two sentences.

    Args:
        candidates: all that was timed.
        winner: the fastest of them that fits.
    """
    return Reasons(why=_why(candidates, winner), change=_change(candidates, winner))


def _rival(candidates: Candidates, winner: Prediction) -> Prediction | None:
    """The fastest setting of another scheme."""
    for index in candidates.ordered(~candidates.mask(_published)):
        if family(candidates.scheme(index)) != family(winner.scheme):
            return candidates.prediction(index)
    return None


def _why(candidates: Candidates, winner: Prediction) -> str:
    name = f"{winner.scheme} ({winner.label})"
    rival = _rival(candidates, winner)
    if rival is None:
        return f"{name} wins, since no other scheme is legal and fits the memory here."
    slower = rival.seconds / winner.seconds - 1
    gaps = {part: rival.parts[part] - winner.parts[part] for part in winner.parts}
    part = max(gaps, key=lambda x: gaps[x])
    text = f"{name} wins, since the next scheme, {rival.scheme} ({rival.label}), "
    if gaps[part] <= 0:
        more = " and needs more memory" if rival.memory_bytes > winner.memory_bytes else ""
        return f"{text}is as fast{more}."
    text += f"is {slower:.1%} slower: it {_WAITS[part].format(show_seconds(gaps[part]))}"
    if part == "attention waits" and candidates.cluster.nodes > 1:
        theirs, ours = (show_bytes(x.across_bytes) for x in (rival, winner))
        more = rival.across_bytes > winner.across_bytes and theirs != ours
        sent, too = (theirs, " as well") if theirs == ours else (f"{theirs} against {ours}", "")
        text += f", with {sent} through the ports of a node{too}"
        text += "" if more else ", with less of it beside kernels"
    return f"{text}."


def _change(candidates: Candidates, winner: Prediction) -> str:
    found = [*_other_rates(candidates, winner), *_other_heads(candidates, winner)]
    if not found:
        speeds = f"at any port speed from 1/{_WIDEST:g} to {_WIDEST:g} times the given one, and "
        speeds = speeds if candidates.cluster.nodes > 1 else ""
        return f"{family(winner.scheme)} stays ahead {speeds}with half or twice the heads."
    return f"Otherwise: {'; '.join(found)}."


def _other_rates(candidates: Candidates, winner: Prediction) -> Iterator[str]:
    """The port rates at which another scheme wins."""
    cluster = candidates.cluster
    if cluster.nodes == 1:
        return
    rows, savings = _promising(candidates)
    settings = candidates.settings.take(rows)
    options = replace(
        candidates.options,
        baselines=False,
        zero=sorted({x.zero for x in savings}),
        remat=sorted({x.remat for x in savings}),
        offload=sorted({x.offload for x in savings}),
        tiled=sorted({x.tiled for x in savings}),
    )

    def best(factor: float) -> Prediction:
        other = replace(cluster, port_rate=cluster.port_rate * factor)
        timed = Candidates(other, candidates.call, options, settings)
        return timed.best(~timed.mask(_published))[0]

    for word, limit in (("below", 1 / _WIDEST), ("above", _WIDEST)):
        if family(best(limit).scheme) == family(winner.scheme):
            continue
        same, other = 0.0, float(np.log2(limit))
        for _ in range(_HALVINGS):
            middle = (same + other) / 2
            if family(best(2**middle).scheme) == family(winner.scheme):
                same = middle
            else:
                other = middle
        rival = best(2**other)
        rate = show_rate(cluster.port_rate * 2**other)
        yield f"{word} about {rate} a port, {rival.scheme} ({rival.label}) is faster"


def _published(settings: Settings) -> np.ndarray:
    return settings.published


def _promising(candidates: Candidates) -> tuple[np.ndarray, set[Savings]]:
    """What may win at some port rate, the fastest at three of them: rows of settings, and savings.

    Of the savings, those of the ten fastest.
    """
    savings: set[Savings] = set()
    cluster, found = candidates.cluster, []
    best_orders = np.unique(np.concatenate(candidates.rows))
    settings = candidates.settings.take(best_orders)
    options = replace(candidates.options, baselines=False)
    for factor in (1.0, 1 / _WIDEST, _WIDEST):
        other = replace(cluster, port_rate=cluster.port_rate * factor)
        timed = Candidates(other, candidates.call, options, settings)
        fitting = np.flatnonzero(timed.fits)
        fastest = fitting[np.argsort(timed.seconds[fitting], kind="stable")[:_KEPT]]
        savings |= {timed.savings[timed.kind[index]][1] for index in fastest[:10]}
        for index in fastest:
            number, _ = timed.savings[timed.kind[index]]
            found.append(best_orders[timed.rows[number][timed.row[index]]])
    return np.unique(found), savings


def _other_heads(candidates: Candidates, winner: Prediction) -> Iterator[str]:
    """Whether another scheme wins with half or twice the heads, of half or twice the channels."""
    call, cluster = candidates.call, candidates.cluster
    if len(candidates.settings) > 20_000:
        # Planning again would take longer than the first time is allowed to.
        return
    model = call.model
    for factor, word in ((2, "twice"), (0.5, "half")):
        heads, keys, channels = (
            size * factor for size in (model.heads, model.kv_heads, model.head_dim / factor**2)
        )
        if any(size != int(size) or size < 1 for size in (heads, keys, channels)) or channels < 16:
            continue
        try:
            other = replace(
                model, heads=int(heads), kv_heads=int(keys), head_dim=int(channels), name="other"
            )
            options = replace(candidates.options, baselines=False)
            timed = Candidates(cluster, replace(call, model=other), options)
        except UserError:
            continue
        rival = timed.best(timed.fits)[0] if timed.fits.any() else None
        if rival is not None and family(rival.scheme) != family(winner.scheme):
            yield f"with {word} the heads ({int(heads)}), {rival.scheme} ({rival.label}) is faster"


_SEVERAL = "several GPUs for a sequence"
_NEEDS = {
    "Ring Attention": _SEVERAL,
    "all-gather": _SEVERAL,
    "Ulysses": "heads that all GPUs of a sequence can split",
    "LoongTrain / USP": "heads that some GPUs of a sequence can split, and several such parts",
    "StarTrail as published": "a C above 1 whose square divides the GPUs of a sequence",
}


def why_illegal(candidates: Candidates, name: str) -> str:
    """Why there is no candidate of a known scheme without tensor parallelism.

    Args:
        candidates: all that was timed.
        name: one of `BASELINES`.
    """
    cluster, call, options = candidates.cluster, candidates.call, candidates.options

    def served(settings: Settings) -> bool:
        return bool(np.any(BASELINES[name](settings) & (settings.tensor == 1)))

    if served(candidates.settings):
        return "not with these --zero, --remat, --offload and --tile"
    if options.degrees and served(all_settings(cluster, call)):
        return f"not with {' '.join(f'--{role} {size}' for role, size in options.degrees.items())}"
    model = call.model
    several = "s" if cluster.num_gpus > 1 else ""
    gpus = f"{cluster.num_gpus} GPU{several} in nodes of {cluster.gpus_per_node}"
    heads = f"{model.heads} heads, {model.kv_heads} key heads"
    # One GPU has nothing to share, whatever its heads.
    needs = _NEEDS[name] if cluster.num_gpus > 1 else _SEVERAL
    return f"it needs {needs}; got {gpus}, {heads}, batch {call.batch}"


def ways_to_fit(cluster: Cluster, call: Call, options: Options) -> list[str]:
    """The smallest changes that would make a setting fit the memory, where none does."""
    ways = []
    free = Options(
        degrees=options.degrees,
        gradient_dtype=options.gradient_dtype,
        memory_fraction=options.memory_fraction,
    )
    for names, others in (
        ("--zero, --remat, --offload and --tile", free),
        ("all that restricts the search", replace(free, degrees={})),
    ):
        fitting = _fitting(cluster, call, others)
        if fitting is not None and others != options:
            ways.append(f"leave out {names}: {fitting.label}, with {describe(fitting)}")
            break

    def first(values: list[int], planned: Callable[[int], tuple[Cluster, Call]]) -> int | None:
        return next((x for x in values if _fitting(*planned(x), options) is not None), None)

    lengths = [call.seq_len // 2**k for k in range(1, 12) if call.seq_len % 2**k == 0]
    lengths = [length for length in lengths if is_length(call.model, length)]
    if length := first(lengths, lambda x: (cluster, replace(call, seq_len=x))):
        ways.append(f"--seq-len {show_count(length)}")
    nodes = [cluster.nodes * 2**k for k in range(1, 8) if cluster.num_gpus * 2**k <= 4096]
    if count := first(nodes, lambda x: (replace(cluster, nodes=x), call)):
        port = " and a --port" if math.isinf(cluster.port_rate) else ""
        ways.append(f"--nodes {count}{port}")
    larger = sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes)
    for gpu in larger:
        if gpu.memory_bytes > cluster.gpu.memory_bytes:
            other = replace(cluster, gpu=gpu)
            if _fitting(other, call, options) is not None:
                ways.append(f"--gpu {gpu.name}, of {gpu.memory_bytes / GIB:.0f} GiB")
                break
    return ways


def _fitting(cluster: Cluster, call: Call, options: Options) -> Prediction | None:
    """The fastest setting that fits, if there is one."""
    try:
        settings = all_settings(cluster, call, given=options.degrees, published=False)
        timed = Candidates(cluster, call, options, settings)
    except UserError:
        return None
    return timed.best(timed.fits)[0] if timed.fits.any() else None


def describe(choice: Prediction) -> str:
    """The savings of a choice in a few words."""
    savings = choice.savings
    words = [f"zero {savings.zero}", f"remat {savings.remat}"]
    words += ["offload"] * savings.offload
    words += [f"tile {choice.tile}"] * (choice.tile is not None)
    return ", ".join(words)

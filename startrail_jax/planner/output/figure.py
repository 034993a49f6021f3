"""A figure of a plan: time and memory of the schemes, and which one wins where.

Only `check_plot` and `draw` import matplotlib, which the package does not require.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from startrail_jax.errors import InputError, UnsupportedError, UserError
from startrail_jax.planner.grid import Settings
from startrail_jax.planner.models import is_length
from startrail_jax.planner.quantities import GIB, show_count, show_rate
from startrail_jax.planner.reasons import family
from startrail_jax.planner.search import Candidates, Options, Prediction

if TYPE_CHECKING:
    from startrail_jax.planner.planning import Plan

FORMATS = (".png", ".pdf", ".svg")
_FACTORS = tuple(2.0**k for k in range(-6, 7, 2))
"""Port rates of the map, over that of the plan, and lengths of its sequences likewise."""
_NOTHING = "nothing fits"
_ABOVE: dict[str, Any] = dict(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
"""Place of a legend."""


@dataclass(frozen=True)
class WinnerMap:
    """Which scheme is the fastest by the tokens of a sequence and the rate of a link."""

    lengths: tuple[int, ...]
    """Tokens of a sequence."""
    rates: tuple[float, ...]
    """Bytes/s: of a port, or inside of the only node."""
    winners: tuple[tuple[str, ...], ...]
    """Names of the schemes: a row for each rate."""


def check_plot(file: str) -> None:
    """Raises unless a figure can be written to a file.

    Raises:
        ValueError: if its name has no known ending, or its folder does not exist.
        NotImplementedError: if matplotlib is not installed.
    """
    path = Path(file)
    if path.suffix.lower() not in FORMATS:
        raise InputError(
            f"--plot must be a file that ends in {', '.join(FORMATS)}; got {file!r}. Write for "
            "example --plot plan.png."
        )
    if not path.parent.is_dir():
        raise InputError(
            f"--plot must be in a folder that exists; got {file!r}. Make {str(path.parent)!r}."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            f"--plot draws with matplotlib, which is not installed; got --plot {file}. Run: "
            "pip install 'startrail-jax[plot]'"
        )


def scheme_rows(plan: Plan) -> list[tuple[str, Prediction]]:
    """The winner, StarTrail with each C, and the other known schemes, each at its best."""
    found = Candidates(plan.cluster, plan.call, plan.options)
    rows = [(f"{plan.winner.label} (the plan)", plan.winner)]
    alone = found.mask(lambda s: (s.tensor == 1) & (s.head == 1) & ~s.published)
    for c in _divisors(plan.cluster.num_gpus):
        for choice in found.best(found.mask(_star(c)) & alone) if c > 1 else ():
            rows.append((f"StarTrail, C = {c}", choice))
    return rows + list(plan.baselines.items())


def _star(c: int) -> Callable[[Settings], np.ndarray]:
    return lambda settings: (settings.team == c) & (settings.group == c)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]


def winner_map(plan: Plan) -> WinnerMap:
    """The map around the cluster and the length of a plan.

    The ZeRO level is that of the winner, and the remat that of the winner or "full".
    """
    cluster, call, savings = plan.cluster, plan.call, plan.winner.savings
    options = Options(
        degrees=plan.options.degrees,
        zero=(savings.zero,),
        remat=tuple(x for x in plan.options.remat if x in (savings.remat, "full")),
        offload=plan.options.offload,
        tiled=plan.options.tiled,
        gradient_dtype=plan.options.gradient_dtype,
        memory_fraction=plan.options.memory_fraction,
        baselines=False,
    )
    lengths = [int(call.seq_len * x) for x in _FACTORS if call.seq_len * x >= 1]
    lengths = [x for x in lengths if is_length(call.model, x)] or [call.seq_len]
    several = cluster.nodes > 1
    rate = cluster.port_rate if several else cluster.gpu.inside_rate
    rates = [rate * x for x in _FACTORS]

    def winner(rate: float, length: int) -> str:
        gpu = cluster.gpu if several else replace(cluster.gpu, inside_rate=rate)
        port = rate if several else cluster.port_rate
        try:
            timed = Candidates(
                replace(cluster, port_rate=port, gpu=gpu), replace(call, seq_len=length), options
            )
        except UserError:
            return _NOTHING
        return family(timed.best(timed.fits)[0].scheme) if timed.fits.any() else _NOTHING

    rows = tuple(tuple(winner(rate, length) for length in lengths) for rate in rates)
    return WinnerMap(tuple(lengths), tuple(rates), rows)


def draw(plan: Plan, file: str) -> None:
    """Draws a plan.

    Args:
        plan: the plan.
        file: path of the figure; its ending is one of `FORMATS`.

    Raises:
        ValueError: if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    bars, memory, area = figure.subplots(1, 3, width_ratios=(3, 2, 4))
    _draw_rows(bars, memory, scheme_rows(plan), plan)
    _draw_map(area, winner_map(plan), plan)
    call, cluster = plan.call, plan.cluster
    figure.suptitle(
        f"Predicted: {call.model.name}, {show_count(call.seq_len)} tokens, batch {call.batch}, on "
        f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    )
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise InputError(f"--plot must be a file that can be written; got {error}.") from None


def _draw_rows(bars: Any, memory: Any, rows: list[tuple[str, Prediction]], plan: Plan) -> None:
    names = [name for name, _ in rows][::-1]
    choices = [choice for _, choice in rows][::-1]
    places = np.arange(len(rows))
    compute = [choice.compute_seconds for choice in choices]
    bars.barh(places, compute, label="kernels")
    bars.barh(places, [x.exposed_seconds for x in choices], left=compute, label="waits")
    bars.set_yticks(places, names)
    bars.set_xlabel("seconds of a step")
    bars.legend(**_ABOVE)
    memory.barh(places, [x.memory_bytes / GIB for x in choices], color="tab:green")
    limit = plan.options.memory_fraction * plan.cluster.gpu.memory_bytes / GIB
    memory.axvline(limit, color="black", linestyle="--", label="what fits")
    memory.set_yticks(places, [""] * len(rows))
    memory.set_xlabel("GiB of a GPU")
    memory.legend(**_ABOVE)


def _draw_map(area: Any, found: WinnerMap, plan: Plan) -> None:
    names = sorted({name for row in found.winners for name in row})
    numbers = [[names.index(name) for name in row] for row in found.winners]
    area.imshow(numbers, origin="lower", aspect="auto", cmap="Set3", vmin=-0.5, vmax=11.5)
    area.set_xticks(range(len(found.lengths)), [show_count(x) for x in found.lengths])
    area.set_yticks(range(len(found.rates)), [show_rate(x) for x in found.rates])
    area.set_xlabel("tokens of a sequence")
    area.set_ylabel("rate of a port" if plan.cluster.nodes > 1 else "rate inside of the node")
    for y, row in enumerate(found.winners):
        for x, name in enumerate(row):
            text = name.replace(" x ", "\nx ").replace(" / ", "\n/ ").replace(" Att", "\nAtt")
            area.text(x, y, text, ha="center", va="center", fontsize=6)

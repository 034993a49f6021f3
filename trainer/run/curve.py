"""Draws the losses of a run as an SVG file, which browsers show; also while the run trains.

    python -m trainer.run.curve runs/gpt_tiny         # runs/gpt_tiny/losses.svg

Imports no jax.
"""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from startrail_jax.errors import InputError
from trainer.durable import replace_text
from trainer.printable import printable
from trainer.run.commands import command
from trainer.run.exit import exit_on_user_errors
from trainer.run.folder import METRICS_FILE, read_records

CURVE_FILE = "losses.svg"
# Names of the metrics -> labels, and colours that are told apart by colour-blind readers.
CURVES = {
    "train_loss": ("training", "#4477aa"),
    "validation_loss": ("validation", "#ee6677"),
}
# The same as characters, on a terminal.
MARKS = {"train_loss": "*", "validation_loss": "o"}
COLUMNS, ROWS = 60, 11
Losses = Mapping[str, Sequence[tuple[int, float]]]
"""For each metric of `CURVES`, the steps in which it was measured, and its values."""

# In pixels; LEFT, RIGHT, TOP and BOTTOM are those of the axes.
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 704, 40, 350
# More would not be seen.
MOST_POINTS = 640
STYLE = """
text { font: 13px sans-serif; fill: #333 }
.end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: #8884 } .curve { fill: none; stroke-width: 2; stroke-linejoin: round }
@media (prefers-color-scheme: dark) { text { fill: #ccc } }
"""


class Axes(NamedTuple):
    """The values at the marks of both axes, ascending; the outermost are the ends of the axis."""

    steps: list[float]
    losses: list[float]

    def place(self, step: float, loss: float) -> tuple[float, float]:
        """Where a point lies: from 0 to 1, from left to right and from the bottom to the top."""
        x, y = (
            (value - marks[0]) / (marks[-1] - marks[0])
            for value, marks in zip((step, loss), self, strict=True)
        )
        return x, y


def show_results(run_dir: Path) -> None:
    """Draws the losses of a whole run and names the next command, in the first process only."""
    import jax

    from trainer.run.metrics import Reporter

    if jax.process_index() == 0:
        report = Reporter(steps=0, tokens_per_step=0)
        report.line(describe_curve(run_dir))
        report.line(f"next: {command('sample.py', run_dir)}")


def describe_curve(run_dir: Path) -> str:
    """A line for the end of a run's log: draws the losses."""
    try:
        return f"loss curve: {draw_curve(run_dir)}"
    except (OSError, InputError) as error:  # The run is complete all the same.
        return f"loss curve: could not be drawn ({error})"


def draw_curve(run_dir: Path) -> Path:
    """Draws the losses that a run has reported so far, over its steps.

    Args:
        run_dir: folder of the run.

    Returns:
        The SVG file, in that folder.

    Raises:
        ValueError: if the folder has no losses.
        OSError: if the file cannot be written.
    """
    losses = losses_of(read_records(run_dir))
    if not any(losses.values()):
        raise InputError(
            f"A run must have reported a loss; got none in {run_dir / METRICS_FILE}. Wait for the "
            "first --log-every steps of the run, or give the folder of another."
        )
    path = run_dir / CURVE_FILE
    replace_text(path, svg_of(losses, str(run_dir)))
    return path


def losses_of(records: Iterable[Mapping[str, Any]]) -> Losses:
    """The losses among the records of a run; none for a metric that it has not reported."""
    records = list(records)
    return {
        name: [(x["step"], x[name]) for x in records if isinstance(x.get(name), int | float)]
        for name in CURVES
    }


def axes_of(losses: Losses) -> Axes:
    """Axes for all the losses, with up to seven round numbers on each; steps begin at 0."""
    points = [point for curve in losses.values() for point in curve]
    steps, values = zip(*points, strict=True)
    return Axes(_marks(0, max(steps), least=1), _marks(min(values), max(values)))


def svg_of(losses: Losses, title: str) -> str:
    """A picture of the losses as SVG, for light and dark backgrounds.

    Args:
        losses: the losses of a run, at least one.
        title: what they belong to, in any characters.
    """
    axes = axes_of(losses)

    def place(step: float, loss: float) -> tuple[float, float]:
        x, y = axes.place(step, loss)
        return round(LEFT + x * (RIGHT - LEFT), 1), round(BOTTOM - y * (BOTTOM - TOP), 1)

    lines = [f'<text x="{LEFT}" y="22">loss of {html.escape(printable(title))}</text>']
    for loss in axes.losses:
        _, y = place(0, loss)
        lines.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>')
        lines.append(f'<text class="end" x="{LEFT - 8}" y="{y + 4}">{loss:.6g}</text>')
    for step in axes.steps:
        x, _ = place(step, axes.losses[0])
        lines.append(f'<text class="middle" x="{x}" y="{BOTTOM + 20}">{step:.9g}</text>')
    lines.append(f'<text class="middle" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 40}">step</text>')
    for number, (name, (label, colour)) in enumerate(CURVES.items()):
        if not losses[name]:
            continue
        # The last point stays, whatever is left out.
        some = losses[name][:: -math.ceil(len(losses[name]) / MOST_POINTS)][::-1]
        points = [place(*point) for point in some]
        path = " ".join(f"{x},{y}" for x, y in points)
        lines.append(f'<polyline class="curve" stroke="{colour}" points="{path}"/>')
        if len(points) < 60:
            lines += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        x, y = RIGHT - 190 + 100 * number, 18
        lines.append(f'<path stroke="{colour}" stroke-width="3" d="M{x} {y}h18"/>')
        lines.append(f'<text x="{x + 24}" y="{y + 4}">{label}</text>')
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    body = "\n".join(lines)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>\n{body}\n</svg>'


def chart_of(losses: Losses) -> str:
    """A picture of the losses, at least one, in characters: 13 lines of up to 70."""
    axes = axes_of(losses)
    cells = [[" "] * COLUMNS for _ in range(ROWS)]
    for name, curve in losses.items():
        for point in curve:
            x, y = axes.place(*point)
            cells[round((1 - y) * (ROWS - 1))][round(x * (COLUMNS - 1))] = MARKS[name]
    ends = {0: f"{axes.losses[-1]:.6g}", ROWS - 1: f"{axes.losses[0]:.6g}"}
    lines = [f"{ends.get(i, ''):>8} |{''.join(row)}" for i, row in enumerate(cells)]
    left = "0  " + "  ".join(f"{MARKS[name]} {label}" for name, (label, _) in CURVES.items())
    right = f"step {axes.steps[-1]:.9g}"
    return "\n".join([*lines, f"{'':10}{left}{right:>{COLUMNS - len(left)}}", ""])


def _marks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Round numbers, from one that is at most `low` to one that is at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = max(least, next(k * power for k in (1, 2, 5, 10) if span <= 5 * k * power))
    first = math.floor(low / step)
    return [x * step for x in range(first, max(math.ceil(high / step), first + 1) + 1)]


if __name__ == "__main__":
    with exit_on_user_errors():
        if len(sys.argv) != 2:
            raise InputError(
                f"The only word must be the folder of a run; got {sys.argv[1:]}. Use the --run-dir "
                "of train.py."
            )
        print(printable(str(draw_curve(Path(sys.argv[1])))))

"""Draws the losses of a run as an SVG file, which browsers show; also while the run trains.

    python -m trainer.run.curve runs/gpt_tiny         # runs/gpt_tiny/losses.svg

Imports no jax.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
Losses = Mapping[str, Sequence[tuple[int, float]]]
"""For each metric of `CURVES`, the steps in which it was measured, and its values."""


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
    """Draws the losses that a run has reported so far, over its steps, in an SVG file there."""
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


def svg_of(losses: Losses, title: str) -> str:
    """A picture of the losses as SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axes: Any = figure.subplots()
        axes.set_title(f"loss of {printable(title)}", parse_math=False)
        axes.set_xlabel("step")
        axes.grid(alpha=0.5)
        for name, (label, colour) in CURVES.items():
            if losses[name]:
                steps, values = zip(*losses[name], strict=True)
                marker = "o" if len(steps) < 60 else ""
                axes.plot(steps, values, label=label, color=colour, marker=marker, gid=name)
        axes.set_xlim(left=0)
        axes.legend()
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


if __name__ == "__main__":
    with exit_on_user_errors():
        if len(sys.argv) != 2:
            raise InputError(
                f"The only word must be the folder of a run; got {sys.argv[1:]}. Use the --run-dir "
                "of train.py."
            )
        print(printable(str(draw_curve(Path(sys.argv[1])))))

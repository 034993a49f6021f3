"""Draws the losses of a run, also while it trains.

    python -m trainer.run.curve runs/gpt_tiny         # runs/gpt_tiny/losses.png

Needs matplotlib, with which train.py draws them at the end of every run.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from startrail_jax.errors import InputError
from trainer.errors import MissingPackageError
from trainer.printable import printable
from trainer.run.commands import command
from trainer.run.exit import exit_on_user_errors
from trainer.run.folder import METRICS_FILE, step_of_line

CURVE_FILE = "losses.png"
MODULE = "trainer.run.curve"
# Names of the metrics -> labels, and colours that are told apart by colour-blind readers.
CURVES = {
    "train_loss": ("training", "#4477aa", ""),
    "validation_loss": ("validation", "#ee6677", "o"),
}


def show_results(run_dir: Path) -> None:
    """Draws the losses of a whole run and names the next command, in the first process only."""
    import jax

    from trainer.run.metrics import Reporter

    if jax.process_index() == 0:
        report = Reporter(steps=0, tokens_per_step=0)
        report.line(describe_curve(run_dir))
        report.line(f"next: {command('sample.py', run_dir)}")


def describe_curve(run_dir: Path) -> str:
    """A line for the end of a run's log: draws the losses if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        install, draw = command("pip", "install", "matplotlib"), command(MODULE, run_dir)
        return f"loss curve: {install} && {draw}"
    try:
        return f"loss curve: {draw_curve(run_dir)}"
    except (OSError, InputError) as error:  # The run is complete all the same.
        return f"loss curve: could not be drawn ({error})"


def draw_curve(run_dir: Path) -> Path:
    """Draws the losses that a run has reported so far, over its steps.

    Args:
        run_dir: folder of the run.

    Returns:
        The PNG file, in that folder.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the folder has no losses.
        OSError: if the file cannot be written.
    """
    losses = _read(run_dir / METRICS_FILE)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "The loss curve needs the package matplotlib, which is missing. Run: "
            f"{command('pip', 'install', 'matplotlib')}"
        ) from error
    # Not by pyplot, which would look for a screen.
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, (label, colour, marker) in CURVES.items():
        if losses[name]:
            steps, values = zip(*losses[name], strict=True)
            lone = "o" if len(steps) == 1 else marker
            axes.plot(steps, values, color=colour, marker=lone, markersize=4, label=label)
    axes.set_title(str(run_dir), loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    axes.legend(frameon=False)
    path = run_dir / CURVE_FILE
    figure.savefig(path)
    return path


def _read(path: Path) -> dict[str, list[tuple[int, float]]]:
    """For each metric of `CURVES`, the steps in which it was measured, and its values."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    # A run that trains may be writing the last line, and a disk may have damaged others.
    records = [json.loads(line) for line in lines if step_of_line(line) is not None]
    found = {
        name: [(x["step"], x[name]) for x in records if x.get(name) is not None] for name in CURVES
    }
    if not any(found.values()):
        raise InputError(
            f"A run must have reported a loss; got none in {path}. Wait for the first --log-every "
            "steps of the run, or give the folder of another."
        )
    return found


if __name__ == "__main__":
    with exit_on_user_errors():
        if len(sys.argv) != 2:
            raise InputError(
                f"The only word must be the folder of a run; got {sys.argv[1:]}. Use the --run-dir "
                "of train.py."
            )
        print(printable(str(draw_curve(Path(sys.argv[1])))))

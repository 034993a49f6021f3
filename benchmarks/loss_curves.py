"""Draws the losses of one GPT, trained with Ring Attention, with StarTrail and on one device.

    pip install -e '.[benchmarks]'
    python benchmarks/loss_curves.py                       # docs/loss_curves.png
    python benchmarks/loss_curves.py --steps 800 --out curves.png

All runs are the recipe gpt_tiny with fewer steps, on simulated devices, with the same data, seed
and other settings. The upper panel shows the loss of every training step. The lower panel shows its
relative difference from the loss of one device. The difference starts at the rounding of float32,
because sums over tokens are taken in another order, and grows because training amplifies every
difference. A fourth run tells how much of it is rounding: one device again, which takes the
sequences of the batch one after another, so that its sums are in another order as well.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from configs.gpt import gpt_tiny
from train import train
from trainer.config import (
    CheckpointConfig,
    MeshConfig,
)
from trainer.gpt.config import GPTTrainConfig

SIMULATED_DEVICES = 8
COLOURS_OF_FILE = 64

CONTROL = "one device"
REORDERED = "one device, sums in another order"
RING = "Ring Attention (C = 1), 8 devices"
STARTRAIL = "StarTrail (C = 2), 8 devices"

# Colours that are told apart by colour-blind readers: https://personal.sron.nl/~pault.
COLOURS = {CONTROL: "#999999", REORDERED: "#777777", RING: "#4477aa", STARTRAIL: "#ee6677"}
# Width, dashes, and where a label and what it points at are, as shares of the panel's width and
# height. A later line lies on the earlier ones and leaves their edges bare.
CURVES = {
    CONTROL: (7.0, "-", (0.46, 0.90), (0.12, 0.25)),
    RING: (3.2, "-", (0.46, 0.75), (0.25, 0.36)),
    STARTRAIL: (1.2, (0, (4, 2)), (0.46, 0.60), (0.36, 0.43)),
}


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)
    losses = {}
    for name in COLOURS:
        print(f"--- {name}", flush=True)
        losses[name] = train_losses(name, args.steps)
    for name, values in relative_differences(losses).items():
        print(f"{name}: at most {values.max():.1e} from {CONTROL}, in step {values.argmax() + 1}")
    save(draw(losses), args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1e3:.0f} kB")
    print(
        "next, the whole run with Ring Attention: python train.py --mesh.team 1 --run-dir runs/ring"
    )


def train_losses(name: str, steps: int) -> np.ndarray:
    """The training loss of every step of one run, in nats per byte."""
    with tempfile.TemporaryDirectory() as folder:
        return np.array(train(make_config(name, steps, Path(folder))).train)


def make_config(name: str, steps: int, run_dir: Path) -> GPTTrainConfig:
    """The recipe gpt_tiny with the devices and degrees of one run, without what is not drawn."""
    config = replace(
        gpt_tiny(),
        devices=1,
        steps=steps,
        run_dir=run_dir,
        checkpoint=CheckpointConfig(every=steps),
        evaluate_every=steps,
        validation_sequences=2,
        sample_length=0,
        tensorboard=False,
    )
    return {
        CONTROL: config,
        REORDERED: replace(config, accumulation=config.batch_size),
        RING: replace(config, devices=SIMULATED_DEVICES, mesh=MeshConfig(team=1)),
        STARTRAIL: replace(config, devices=SIMULATED_DEVICES, mesh=MeshConfig(team=2)),
    }[name]


def relative_differences(losses: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """|loss - loss of one device| / loss of one device, of every step, for the other runs."""
    control = losses[CONTROL]
    return {name: abs(x - control) / control for name, x in losses.items() if name != CONTROL}


def draw(losses: dict[str, np.ndarray]) -> Figure:
    """Draws the losses on top of each other, and below them their differences from one device."""
    figure = Figure(figsize=(8, 5.8), dpi=130, layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#eeeeee")
        axes.set_axisbelow(True)
    draw_losses(above, losses)
    draw_differences(below, relative_differences(losses))
    below.set_xlim(1, len(losses[CONTROL]))
    return figure


def draw_losses(axes: Axes, losses: dict[str, np.ndarray]) -> None:
    """Draws each curve over those before it, with a label that points at one of its peaks."""
    num_steps = len(losses[CONTROL])
    for name, (width, dashes, label, (first, last)) in CURVES.items():
        colour, values = COLOURS[name], losses[name]
        axes.plot(range(1, num_steps + 1), values, color=colour, linewidth=width, linestyle=dashes)
        begin = int(first * num_steps)
        peak = begin + int(values[begin : max(int(last * num_steps), begin + 1)].argmax())
        axes.annotate(
            name,
            (peak + 1, values[peak]),
            xytext=label,
            textcoords="axes fraction",
            color=colour,
            fontweight="bold",
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": colour, "relpos": (0, 0.5), "shrinkB": 3},
        )
    axes.set_title("Training loss of one GPT with and without sequence parallelism", loc="left")
    axes.set_ylabel("nats / byte")


def draw_differences(axes: Axes, differences: dict[str, np.ndarray]) -> None:
    """Draws curves on a logarithmic axis, where steps whose losses are equal have no place."""
    for name, values in differences.items():
        steps = np.flatnonzero(values) + 1
        label = f"{name}: at most {_power(values.max())}"
        axes.plot(steps, values[steps - 1], color=COLOURS[name], linewidth=1.2, label=label)
    axes.set_yscale("log")
    axes.set_title(
        "Relative difference to one device: rounding, which training amplifies", loc="left"
    )
    axes.set_xlabel("step")
    axes.legend(loc="upper left", frameon=False, labelcolor="linecolor")


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG of few colours, which makes the file a third as large."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).quantize(COLOURS_OF_FILE).save(path, optimize=True)


def _power(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return rf"{mantissa}$\times$10$^{{{int(exponent)}}}$"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--out", type=Path, default=Path("docs/loss_curves.png"), help="the figure")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

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
from matplotlib.figure import Figure

from configs.gpt import gpt_tiny
from train import train
from trainer.config import (
    CheckpointConfig,
    MeshConfig,
)
from trainer.gpt.config import GPTTrainConfig

SIMULATED_DEVICES = 8

CONTROL = "one device"
REORDERED = "one device, sums in another order"
RING = "Ring Attention (C = 1), 8 devices"
STARTRAIL = "StarTrail (C = 2), 8 devices"

# Colours that are told apart by colour-blind readers: https://personal.sron.nl/~pault.
COLOURS = {CONTROL: "#999999", REORDERED: "#777777", RING: "#4477aa", STARTRAIL: "#ee6677"}
# Width and dashes. A later line lies on the earlier ones and leaves their edges bare.
CURVES = {CONTROL: (7.0, "-"), RING: (3.2, "-"), STARTRAIL: (1.2, (0, (4, 2)))}


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
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(losses).savefig(args.out)
    print(args.out)
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
    steps = np.arange(1, len(losses[CONTROL]) + 1)
    for name, (width, dashes) in CURVES.items():
        colour = COLOURS[name]
        above.plot(steps, losses[name], color=colour, lw=width, linestyle=dashes, label=name)
    above.set_title("Training loss of one GPT with and without sequence parallelism", loc="left")
    above.set_ylabel("nats / byte")
    for name, values in relative_differences(losses).items():
        apart = values > 0  # Steps whose losses are equal have no place on a logarithmic axis.
        label = f"{name}: at most {_power(values.max())}"
        below.plot(steps[apart], values[apart], color=COLOURS[name], lw=1.2, label=label)
    below.set_yscale("log")
    below.set_title(
        "Relative difference to one device: rounding, which training amplifies", loc="left"
    )
    below.set_xlabel("step")
    for axes in (above, below):
        axes.legend(frameon=False, labelcolor="linecolor")
    below.set_xlim(1, len(steps))
    return figure


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

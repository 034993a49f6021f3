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
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from configs.gpt import gpt_tiny
from train import train
from trainer.config import CheckpointConfig, MeshConfig

SIMULATED_DEVICES = 8

CONTROL = "one device"
REORDERED = "one device, sums in another order"
# Settings of each run, which differ from those of one device. Colours are told apart by
# colour-blind readers: https://personal.sron.nl/~pault.
RUNS: dict[str, dict[str, Any]] = {
    CONTROL: {},
    REORDERED: {"gradient_accumulation": gpt_tiny().batch_size},
    "Ring Attention (C = 1), 8 devices": {"devices": 8, "mesh": MeshConfig(c=1)},
    "StarTrail (C = 2), 8 devices": {"devices": 8, "mesh": MeshConfig(c=2)},
}
COLOURS = dict(zip(RUNS, ("#999999", "#777777", "#4477aa", "#ee6677"), strict=True))
# Width and dashes. A later line lies on the earlier ones and leaves their edges bare.
CURVES = dict(zip(RUNS, ((7.0, "-"), None, (3.2, "-"), (1.2, (0, (4, 2)))), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--out", type=Path, default=Path("docs/loss_curves.png"), help="the figure")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)
    losses = {}
    for name in RUNS:
        print(f"--- {name}", flush=True)
        losses[name] = train_losses(name, args.steps)
    for name, values in relative_differences(losses).items():
        print(f"{name}: at most {values.max():.1e} from {CONTROL}, in step {values.argmax() + 1}")
    draw(losses).savefig(args.out)
    print(args.out)


def train_losses(name: str, steps: int) -> np.ndarray:
    """The training loss of every step of one run of gpt_tiny, in nats per byte."""
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = dict(
            devices=1, steps=steps, run_dir=Path(folder), checkpoint=CheckpointConfig(every=steps),
            validation_every=steps, validation_sequences=2, sample_length=0, tensorboard=False,
        )  # fmt: skip
        return np.array(train(replace(gpt_tiny(), **(common | RUNS[name]))).train)


def relative_differences(losses: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """|loss - loss of one device| / loss of one device, of every step, for the other runs."""
    control = losses[CONTROL]
    return {name: abs(x - control) / control for name, x in losses.items() if name != CONTROL}


def draw(losses: dict[str, np.ndarray]) -> Figure:
    """Draws the losses on top of each other, and below them their differences from one device."""
    figure = Figure(figsize=(8, 5.8), dpi=130, layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = np.arange(1, len(losses[CONTROL]) + 1)
    for name, style in CURVES.items():
        if style is not None:
            width, dashes = style
            above.plot(steps, losses[name], color=COLOURS[name], lw=width, ls=dashes, label=name)
    above.set_title("Training loss of one GPT with and without sequence parallelism", loc="left")
    above.set_ylabel("nats / byte")
    for name, values in relative_differences(losses).items():
        apart = values > 0  # Steps whose losses are equal have no place on a logarithmic axis.
        mantissa, exponent = f"{values.max():.1e}".split("e")
        label = rf"{name}: at most {mantissa}$\times$10$^{{{int(exponent)}}}$"
        below.plot(steps[apart], values[apart], color=COLOURS[name], lw=1.2, label=label)
    below.set_yscale("log")
    below.set_title(
        "Relative difference to one device: rounding, which training amplifies", loc="left"
    )
    below.set_xlabel("step")
    below.set_xlim(1, len(steps))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#eeeeee")
        axes.set_axisbelow(True)
        axes.legend(frameon=False, labelcolor="linecolor")
    return figure


if __name__ == "__main__":
    main()

"""Judges the digits that a run draws: whether they are digits, the right ones, and new ones.

    pip install -e '.[benchmarks]'
    python train.py dit_digits
    python benchmarks/digits.py                                    # docs/digits.png
    python benchmarks/digits.py --samples 1000 --guidance 1
    python benchmarks/digits.py --run-dir runs/other --out other.png

The benchmark draws the same number of samples of each class, on the mesh of the run. A support
vector machine that has learnt the real digits on which the run was trained then says which digit
each sample is. A model that has memorised the training images gains nothing: a sample counts as a
copy where it is nearer to a training image than all but 1 % of the held-out digits are, and the
verdict of the machine is also printed without the copies. The distances between the samples of a
class tell how varied they are. All distances are L2, of 64 pixels with values from 0 to 16.

The figure has a row for each class: samples, and beside them the training image that is nearest to
each. The exit status is 1 if fewer than 85 % of the samples are the digit that was asked for.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.svm import SVC

import startrail_jax as st
from trainer.dit.config import DiTTrainConfig
from trainer.dit.drawing import image_grid
from trainer.dit.images import Examples, Images, Wanted, open_images
from trainer.dit.sample import load_drawing
from trainer.parallel.degrees import choose_degrees
from trainer.processes import select_devices
from trainer.run.settings import CONFIG_FILE
from trainer.tasks import load_train_config

CLASSES = 10
BRIGHTEST = 16
"""Of a digit's pixels, which are whole numbers."""
AGREEMENT = 0.85
"""Share of the samples that must be named as they were meant."""
COPIES = 0.01
"""Share of the held-out digits that would count as copies."""
COLUMNS = 10
"""Samples of a class in the figure."""
COLOURS_OF_FILE = 32


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    config = load_train_config(args.run_dir / CONFIG_FILE)
    if not isinstance(config, DiTTrainConfig):
        raise SystemExit(f"--run-dir must hold a run of a DiT; got one of kind {config.kind!r}.")
    drawn, labels = draw_samples(config, args)
    images = open_digits(config)
    train, train_labels = read(images.train)
    held_out, held_out_labels = read(images.held_out)

    classifier = SVC(C=10.0).fit(train, train_labels)
    score = classifier.score(held_out, held_out_labels)
    print(f"classifier: names {score:.1%} of {len(held_out)} held-out digits right")
    right = classifier.predict(drawn) == labels
    distances = euclidean_distances(drawn, train)
    nearest = distances.min(axis=1)
    known = euclidean_distances(held_out, train).min(axis=1)
    limit = float(np.quantile(known, COPIES))
    report_agreement(right, labels, nearest < limit)
    report_distances({"samples": nearest, "held-out digits": known}, limit)
    report_variety({"samples": (drawn, labels), "training digits": (train, train_labels)})

    panels = {
        "drawn by the model": drawn,
        "the training image nearest to each": train[distances.argmin(axis=1)],
    }
    save(draw_figure(panels, labels), args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1e3:.0f} kB")
    return int(right.mean() < AGREEMENT)


def draw_samples(config: DiTTrainConfig, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Samples from the newest checkpoint, as pixels of digits, and their classes in turn."""
    devices = select_devices(config.devices)
    degrees = choose_degrees(config.mesh, len(devices), config.attention_call)
    drawing, weights, step = load_drawing(
        args.run_dir,
        config,
        st.make_mesh(degrees, axis_type="auto", devices=devices),
        sampler=args.sampler,
        steps=args.steps,
        guidance=args.guidance,
        rows=args.samples,
    )
    print(
        f"{args.run_dir} after step {step}: {args.samples} samples by {args.steps} steps of "
        f"{drawing.sampler!r}, guidance {args.guidance:g}",
        flush=True,
    )
    labels = np.arange(args.samples) % CLASSES
    captions = [b""] * args.samples if config.model.caption_length else None
    drawn = drawing.draw(weights, labels=labels.tolist(), captions=captions, seed=args.seed)
    return to_digits(np.stack(list(drawn))), labels


def open_digits(config: DiTTrainConfig) -> Images:
    """What the run was trained on, and what it never saw."""
    if config.data.path is not None or config.model.classes != CLASSES:
        raise ValueError(
            "The run must be one of the handwritten digits of scikit-learn, with classes; got "
            f"data.path={config.data.path}, classes={config.model.classes}. Give the --run-dir of "
            "another."
        )
    wanted = Wanted(
        size=config.size,
        channels=config.model.channels,
        classes=CLASSES,
        caption_length=config.model.caption_length,
    )
    return open_images(config.data, wanted)


def read(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of digits, and their classes."""
    rows = [examples[index] for index in range(len(examples))]
    return to_digits(np.stack([x.latent for x in rows])), np.array([x.label for x in rows])


def to_digits(latents: np.ndarray) -> np.ndarray:
    """Pixels as scikit-learn has them, [number, 64]: whole numbers from 0 to 16."""
    pixels = np.round((np.clip(latents, -1, 1) + 1) * BRIGHTEST / 2)
    return pixels.reshape(len(latents), -1)


def report_agreement(right: np.ndarray, labels: np.ndarray, copies: np.ndarray) -> None:
    """On how many of the samples the classifier names the intended class."""
    print(f"named as intended: {count(right)}")
    for label in range(CLASSES):
        print(f"    {label}: {count(right[labels == label])}")
    print(f"copies of training images: {count(copies)}")
    print(f"named as intended, of those that are no copies: {count(right[~copies])}")


def report_distances(nearest: dict[str, np.ndarray], limit: float) -> None:
    """How far from the training images samples are, and digits that are not learnt from."""
    print(f"distance to the nearest training image; a copy is nearer than {limit:.1f}")
    print("                      1 %    10 %  median  90 %")
    for name, values in nearest.items():
        quantiles = np.quantile(values, [0.01, 0.1, 0.5, 0.9])
        print(f"    {name:16s}" + "".join(f"{x:7.1f}" for x in quantiles))


def report_variety(parts: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """How far from each other images of a class are: medians of its pairs."""
    print("median distance of two images of a class")
    classes = "".join(f"{label:6d}" for label in range(CLASSES))
    print(f"{'':24s}{classes}  mean")
    for name, (pixels, labels) in parts.items():
        medians = []
        for label in range(CLASSES):
            of_class = pixels[labels == label]
            pairs = euclidean_distances(of_class)[np.triu_indices(len(of_class), 1)]
            medians.append(float(np.median(pairs)))
        print(f"    {name:20s}" + "".join(f"{x:6.1f}" for x in [*medians, np.mean(medians)]))


def count(which: np.ndarray) -> str:
    """For example "170 of 200 (85.0%)"."""
    share = f" ({which.mean():.1%})" if len(which) else ""
    return f"{which.sum()} of {len(which)}{share}"


def draw_figure(panels: dict[str, np.ndarray], labels: np.ndarray) -> Figure:
    """Panels side by side, with a row of images for each class."""
    rows = [np.flatnonzero(labels == label)[:COLUMNS] for label in range(CLASSES)]
    columns = min(map(len, rows))
    figure = Figure(figsize=(8, 4.3), dpi=130, layout="constrained", facecolor="white")
    for axes, (title, pixels) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        side = math.isqrt(pixels.shape[1])
        # The other way round: dark ink, white gaps.
        ink = (pixels * (255 / BRIGHTEST)).astype(np.uint8).reshape(-1, side, side, 1)
        grid = 255 - image_grid([ink[n] for row in rows for n in row[:columns]], columns=columns)
        axes.imshow(grid.squeeze(-1), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.set_title(title)
        axes.set_xticks([])
        axes.set_yticks([row * (side + 1) + side / 2 for row in range(CLASSES)], range(CLASSES))
        axes.tick_params(length=0)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG of few colours, a fraction of what it takes otherwise."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).quantize(COLOURS_OF_FILE).save(path, optimize=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("--run-dir", type=Path, default=Path("runs/dit_digits"), help="the run to draw from")
    add("--samples", type=int, default=200, help="samples of all classes together")
    add("--guidance", type=float, default=1.5, help="1 draws what the model has learnt")
    add("--sampler", help="by default that which is usual for the run")
    add("--steps", type=int, default=50, help="of the sampler")
    add("--seed", type=int, default=0, help="of the noise")
    add("--out", type=Path, default=Path("docs/digits.png"), help="the figure")
    args = parser.parse_args(argv)
    if args.samples < 2 * CLASSES:
        parser.error(f"--samples must be two of each class at least; got {args.samples}")
    return args


if __name__ == "__main__":
    sys.exit(main())

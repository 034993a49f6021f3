"""What `run.py` leaves behind: shares of right answers, as JSON and as heat maps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from PIL import Image

from startrail_jax.planner.quantities import show_count

COLOURS_OF_FILE = 128


@dataclass(frozen=True, kw_only=True)
class Score:
    """How often a model was right at one length and depth."""

    stage: str
    length: int
    depth: float
    right: int
    cases: int
    seconds: float

    @property
    def share(self) -> float:
        return self.right / self.cases


def report(scores: list[Score], *, figure: Path, results: Path) -> None:
    """Writes the figure and the results."""
    for path in (figure, results):
        path.parent.mkdir(parents=True, exist_ok=True)
    shares = [asdict(score) | {"share": score.share} for score in scores]
    results.write_text(json.dumps(shares, indent=1) + "\n")
    canvas = FigureCanvasAgg(draw(scores))
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    Image.fromarray(pixels).quantize(COLOURS_OF_FILE).save(figure, format="png", optimize=True)
    print(f"{results}\n{figure}: {figure.stat().st_size / 1e3:.0f} kB")


def draw(scores: list[Score]) -> Figure:
    """A heat map of lengths and depths for each stage."""
    stages = list(dict.fromkeys(score.stage for score in scores))
    lengths = sorted({score.length for score in scores})
    depths = sorted({score.depth for score in scores})
    figure = Figure(figsize=(1.6 + 2.2 * len(stages), 2.6), dpi=110, layout="constrained")
    shares = {(score.stage, score.length, score.depth): score.share for score in scores}
    panels = figure.subplots(1, len(stages), squeeze=False, sharey=True)[0]
    for axes, stage in zip(panels, stages, strict=True):
        grid = np.array([[shares[stage, x, depth] for x in lengths] for depth in depths])
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for (row, column), share in np.ndenumerate(grid):
            ink = "white" if share > 0.5 else "black"
            axes.text(column, row, f"{share:.0%}", color=ink, ha="center", va="center", fontsize=8)
        axes.set_title(stage, fontsize=9)
        axes.set_xticks(range(len(lengths)), map(show_count, lengths))
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_xlabel("tokens")
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=panels, label="answers that are right", format=PercentFormatter(1))
    return figure

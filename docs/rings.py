"""Draws docs/rings.svg: 16 devices as one ring and as four concentric rings.

pip install -e '.[benchmarks]'
python docs/rings.py
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

GROUP, RING, TEAM = 2, 4, 2
COLORS = ("#4477aa", "#ee6677")
"""By team index: the rings of one index carry the same key units."""
DARK = "#333333"
RADII = (1.0, 1.62, 2.55, 3.17)
"""Of the rings (group 0, team 0), (0, 1), (1, 0), (1, 1)."""


def place(group: int, ring: int, team: int) -> np.ndarray:
    """Centre of a device: ring places are spokes, and the first of them points up."""
    angle = np.pi / 2 - 2 * np.pi * ring / RING
    return RADII[group * TEAM + team] * np.array([np.cos(angle), np.sin(angle)])


def draw_device(axes: Axes, centre: np.ndarray, rank: int, color: str) -> None:
    axes.add_patch(Circle(centre, 0.235, facecolor=color, edgecolor="white", linewidth=1, zorder=3))
    axes.text(*centre, str(rank), color="white", ha="center", va="center", fontsize=8, zorder=4)


def draw_hops(axes: Axes, radius: float, places: int, color: str) -> None:
    """A circle with an arrow head in the middle of each hop, clockwise."""
    axes.add_patch(Circle((0, 0), radius, fill=False, edgecolor=color, linewidth=1.3))
    for hop in range(places):
        angle = np.pi / 2 - 2 * np.pi * (hop + 0.5) / places
        at = radius * np.array([np.cos(angle), np.sin(angle)])
        ahead = 0.05 * np.array([np.sin(angle), -np.cos(angle)])
        style = dict(arrowstyle="-|>", mutation_scale=11, color=color, linewidth=0)
        axes.add_patch(FancyArrowPatch(at - ahead, at + 2 * ahead, **style, zorder=2))


def draw_ring_attention(axes: Axes) -> None:
    devices, radius = GROUP * RING * TEAM, 2.7
    draw_hops(axes, radius, devices, DARK)
    for rank in range(devices):
        angle = np.pi / 2 - 2 * np.pi * rank / devices
        draw_device(axes, radius * np.array([np.cos(angle), np.sin(angle)]), rank, DARK)
    axes.text(0, 0, "15 hops", ha="center", va="center", fontsize=11, color=DARK)
    axes.set_title("Ring Attention: one ring of 16 devices", fontsize=11)


def draw_startrail(axes: Axes) -> None:
    for index, radius in enumerate(RADII):
        draw_hops(axes, radius, RING, COLORS[index % TEAM])
    for group in range(GROUP):
        for ring in range(RING):
            for team in range(TEAM):
                rank = (ring * GROUP + group) * TEAM + team
                draw_device(axes, place(group, ring, team), rank, COLORS[team])
            low, high = sorted((place(group, ring, 0), place(group, ring, 1)), key=sum)
            pad = 0.33
            axes.add_patch(
                FancyBboxPatch(
                    low - pad,
                    *(high - low + 2 * pad),
                    boxstyle="round,pad=0,rounding_size=0.33",
                    facecolor="#eeeeee",
                    edgecolor=DARK,
                    linewidth=0.9,
                    zorder=1,
                )
            )
    # One group: the devices (0, 0, 0) and (1, 0, 0).
    bend = dict(arrowstyle="-", connectionstyle="arc3,rad=0.75", linestyle=(0, (4, 2)))
    ends = place(0, 0, 0), place(1, 0, 0)
    axes.add_patch(FancyArrowPatch(*ends, **bend, color=DARK, linewidth=1.2, zorder=2))
    pointer = dict(arrowprops=dict(arrowstyle="-", color=DARK, linewidth=0.7), zorder=5)
    name = dict(fontsize=9, color=DARK, va="center")
    axes.annotate("a group shares its keys", (0.55, 1.8), (1.2, 3.45), ha="left", **name, **pointer)
    axes.annotate(
        "a team shares\nits queries",
        (-2.9, -0.33),
        (-3.75, -3.1),
        ha="left",
        **name,
        **pointer,
    )
    axes.text(0, 0, "3 hops", ha="center", va="center", fontsize=11, color=DARK)
    axes.set_title("StarTrail, C = 2: four rings of 4 devices", fontsize=11)


def draw_rounds(axes: Axes) -> None:
    """Which member of a team meets which key unit, and in which round."""
    units = GROUP * RING
    for query in range(units):
        for key in range(units):
            round_number = (query % RING - key // TEAM) % RING
            color = COLORS[key % TEAM]
            axes.add_patch(Rectangle((key, query), 0.94, 0.94, facecolor=color))
            centre = (key + 0.47, query + 0.48)
            axes.text(
                *centre, str(round_number), color="white", ha="center", va="center", fontsize=8
            )
        names = f"{query * TEAM}, {query * TEAM + 1}"
        axes.text(-0.2, query + 0.5, names, ha="right", va="center", fontsize=8, color=DARK)
    axes.text(-0.2, -0.38, "team", ha="right", va="center", fontsize=9, color=DARK)
    axes.text(units / 2, -0.38, "key unit", ha="center", va="center", fontsize=9, color=DARK)
    axes.text(
        units / 2,
        units + 0.5,
        "number: round; color: member of the team",
        ha="center",
        va="center",
        fontsize=9,
        color=DARK,
    )
    axes.set_title("Each team meets each key unit once", fontsize=11)
    axes.set_xlim(-1.6, units + 0.6)
    axes.set_ylim(units + 0.9, -1.3)


def main() -> None:
    # Text stays text, which keeps the file small.
    plt.rcParams.update({"svg.hashsalt": "rings", "svg.fonttype": "none"})
    figure, panels = plt.subplots(1, 3, figsize=(12, 4.2))
    for axes, draw in zip(panels, (draw_ring_attention, draw_startrail, draw_rounds), strict=True):
        axes.set_aspect("equal")
        axes.axis("off")
        draw(axes)
    for axes in panels[:2]:
        axes.set_xlim(-3.8, 3.8)
        axes.set_ylim(-3.8, 3.8)
    figure.tight_layout(w_pad=0)
    file = Path(__file__).parent / "rings.svg"
    figure.savefig(file, metadata={"Date": None}, facecolor="white", bbox_inches="tight")
    # A hundredth of a point is enough, and makes the file a third smaller.
    numbers = re.compile(r"\d+\.\d{3,}")
    file.write_text(numbers.sub(lambda match: f"{float(match[0]):.2f}", file.read_text()))


if __name__ == "__main__":
    main()

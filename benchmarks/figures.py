"""Draws the figures of the first page: docs/rings.svg, docs/schemes.svg and docs/bytes.svg.

    python benchmarks/figures.py

The rounds of rings.svg are those of the op's schedule, the seconds of schemes.svg those of the
table of emulated clusters in RESULTS.md, and the bytes of bytes.svg those of `st.communication`.
The fourth, docs/learning.svg, is drawn by `examples/rl/run.py`, which trains for it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import startrail_jax as st
from startrail_jax.devices.degrees import SEQUENCE_ROLES, Degrees
from startrail_jax.rings.schedule import schedule_of
from startrail_jax.tokens.layout import Layout
from startrail_jax.traffic.settings import legal_degrees

ROOT = Path(__file__).resolve().parents[1]
FONT = "text{font:14px system-ui,sans-serif;fill:#24292f}.b{font-weight:700}.e{text-anchor:end}"

# Rings -------------------------------------------------------------------------------------------

STARTRAIL = Degrees.startrail(16, c=2)
COLOURS = "#4477aa", "#ee6677"
"""By team index: the rings of one index carry the same key units."""
DARK = "#333333"
UNIT = 33.0
"""Pixels of a unit of the radii."""
RADII = 1.0, 1.62, 2.55, 3.17
"""Of the rings (group 0, team 0), (0, 1), (1, 0), (1, 1)."""


def rounds() -> dict[tuple[int, int], tuple[int, int]]:
    """(team, key unit) -> (member of the team, round) in which they meet, by the op's schedule."""
    schedule = schedule_of(STARTRAIL, st.masks.Full(), Layout("contiguous", 16))
    ring, group, team = STARTRAIL.ring, STARTRAIL.group, STARTRAIL.team
    keys = {schedule.key_runs(16, p, a): p * team + a for p in range(ring) for a in range(team)}
    found = {}
    for round_number in range(ring):
        for p in range(ring):
            for g in range(group):
                for a in range(team):
                    behind = schedule.along_ring(p, round_number, -1)
                    key = keys[schedule.key_runs(16, behind, a)]
                    found[p * group + g, key] = a, round_number
    return found


def rings_svg() -> str:
    """Sixteen devices as one ring and as four concentric rings, and who meets whom when."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 846 279" role="img">',
        "<title>Sixteen devices as one ring and as four concentric rings</title>",
        f"<style>text{{font:9px system-ui,sans-serif;fill:{DARK};text-anchor:middle}}"
        ".t{font-size:11px}.d{font-size:8px;fill:#fff}.s{text-anchor:start}.e{text-anchor:end}"
        "</style>",
        '<rect width="846" height="279" fill="#fff"/>',
        '<text class="t" x="132" y="16">Ring Attention: one ring of 16 devices</text>',
        *_ring((132, 147), 2.7, range(16), DARK),
        '<text class="t" x="132" y="150">15 hops</text>',
        '<text class="t" x="412" y="16">StarTrail, C = 2: four rings of 4 devices</text>',
    ]
    centre = 412, 147
    for spoke in range(STARTRAIL.ring):  # Behind the devices: a box around each team.
        for inner, outer in (RADII[:2], RADII[2:]):
            (x0, y0), (x1, y1) = (_at(centre, r, spoke / STARTRAIL.ring) for r in (inner, outer))
            x, y, wide, high = min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0)
            lines.append(
                f'<rect x="{x - 11:.0f}" y="{y - 11:.0f}" width="{wide + 22:.0f}" '
                f'height="{high + 22:.0f}" rx="11" fill="#eee" stroke="{DARK}"/>'
            )
    for index, radius in enumerate(RADII):
        group, team = divmod(index, STARTRAIL.team)
        ranks = [(p * STARTRAIL.group + group) * STARTRAIL.team + team
                 for p in range(STARTRAIL.ring)]  # fmt: skip
        lines += _ring(centre, radius, ranks, COLOURS[team])
    (x0, y0), (x1, y1) = (_at(centre, RADII[i], 0) for i in (0, 2))
    lines += [
        f'<path d="M{x0 + 8:.0f} {y0:.0f}Q{x0 + 40:.0f} {(y0 + y1) / 2:.0f} {x1 + 8:.0f} {y1:.0f}" '
        f'fill="none" stroke="{DARK}" stroke-dasharray="4 2"/>',
        f'<path d="M430 87L452 40M316 158L300 242" stroke="{DARK}" stroke-width=".7"/>',
        '<text class="s" x="450" y="36">a group shares its keys</text>',
        '<text class="s" x="288" y="252">a team shares</text>',
        '<text class="s" x="288" y="264">its queries</text>',
        '<text class="t" x="412" y="150">3 hops</text>',
        '<text class="t" x="705" y="16">Each team meets each key unit once</text>',
        '<text x="604" y="36" class="e">team</text><text x="708" y="36">key unit</text>',
    ]
    size = 25
    for (team, key), (member, number) in sorted(rounds().items()):
        x, y = 608 + size * key, 42 + size * team
        lines.append(f'<rect x="{x}" y="{y}" width="24" height="24" fill="{COLOURS[member]}"/>')
        lines.append(f'<text class="d" x="{x + 12}" y="{y + 15}">{number}</text>')
        if key == 0:
            ranks = f"{team * STARTRAIL.team}, {team * STARTRAIL.team + 1}"
            lines.append(f'<text class="e" x="604" y="{y + 15}">{ranks}</text>')
    note = "number: round; color: member of the team"
    return "\n".join([*lines, f'<text x="708" y="258">{note}</text>', "</svg>", ""])


def _at(centre: tuple[int, int], radius: float, turn: float) -> tuple[float, float]:
    """A place on a circle, so many turns clockwise from its top."""
    angle = 2 * math.pi * turn
    return (centre[0] + UNIT * radius * math.sin(angle),
            centre[1] - UNIT * radius * math.cos(angle))  # fmt: skip


def _ring(
    centre: tuple[int, int], radius: float, ranks: Sequence[int], colour: str
) -> Iterator[str]:
    """A circle with the devices of a ring, and an arrow head in the middle of each hop."""
    x, y = centre
    yield (f'<circle cx="{x}" cy="{y}" r="{UNIT * radius:.1f}" fill="none" stroke="{colour}" '
           'stroke-width="1.3"/>')  # fmt: skip
    for place, rank in enumerate(ranks):
        (x, y), turn = _at(centre, radius, (place + 0.5) / len(ranks)), (place + 0.5) / len(ranks)
        yield (f'<path d="M-3 -3L4 0L-3 3z" fill="{colour}" '
               f'transform="translate({x:.1f} {y:.1f})rotate({360 * turn:.1f})"/>')  # fmt: skip
        x, y = _at(centre, radius, place / len(ranks))
        yield (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7.7" fill="{colour}" stroke="#fff"/>'
               f'<text class="d" x="{x:.1f}" y="{y + 3:.1f}">{rank}</text>')  # fmt: skip


# Schemes -----------------------------------------------------------------------------------------

TABLE = "| scheme | 16 x 1, s | x ring | MB counted | 4 x 4, s |"
# Label of a bar, its class, and its row of the table for either cluster.
BARS = (
    ("Ring Attention", "o", "ring", "ring"),
    ("all-gather", "o", "all-gather", "all-gather"),
    ("StarTrail, published", "o", "published-2", "published-4"),
    ("StarTrail here", "s", "team-4", "startrail-2"),
    ("USP: 4 heads x ring", "h", "head-4", "head-4"),
    ("Ulysses: 16 heads", "h", "ulysses", "ulysses"),
)
# Title, left end of the bars, column of the table.
CLUSTERS = (
    ("16 nodes of 1 device", 150, 1),
    ("4 nodes of 4 devices, which share a port", 472, 4),
)
LEGEND = (
    (8, "o", "any number of heads"),
    (196, "s", "any number of heads, fewest bytes"),
    (490, "h", "needs 4 or 16 key heads"),
)
PIXELS_PER_SECOND = 54
SCHEMES_HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 300" role="img">
<title>Bars of the seconds of six schemes on two emulated clusters</title>
<style>{FONT}
path{{stroke:#8c959f}}.o{{fill:#8c959f}}.s{{fill:#d55e00}}.h{{fill:#0072b2}}
@media(prefers-color-scheme:dark){{text{{fill:#e6edf3}}.s{{fill:#ff8c42}}.h{{fill:#58a6ff}}}}</style>
<text x="8" y="18" class="b">
Seconds of causal attention, forward and backward, on 16 emulated devices
</text>"""


def schemes_svg(results: str) -> str:
    """Bars of the seconds of six schemes, from the text of RESULTS.md."""
    rows = {}
    for line in results[results.index(TABLE) :].split("\n\n")[0].splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = [cell.split()[0] for cell in cells]
    lines = [SCHEMES_HEAD]
    for title, left, column in CLUSTERS:
        lines.append(f'<text x="{left}" y="48">{title}</text>')
        for number, (label, kind, *names) in enumerate(BARS):
            y = 62 + 30 * number
            bold = " b" if kind == "s" else ""
            seconds = rows[names[column > 1]][column - 1]
            width = round(PIXELS_PER_SECOND * float(seconds))
            if column == 1:
                lines.append(f'<text x="{left - 10}" y="{y + 15}" class="e{bold}">{label}</text>')
            bar = f'<rect class="{kind}" x="{left}" y="{y}" width="{width}" height="21" rx="2"/>'
            weight = ' class="b"' if kind == "s" else ""
            at = f'x="{left + width + 6}" y="{y + 15}"'
            lines += [bar, f"<text {at}{weight}>{seconds}</text>"]
        lines.append(f'<path d="M{left} 57v180"/>')
    for x, kind, text in LEGEND:
        lines.append(f'<rect class="{kind}" x="{x}" y="255" width="13" height="13" rx="2"/>')
        lines.append(f'<text x="{x + 19}" y="266">{text}</text>')
    note = "1024 tokens, 16 heads of 64, one port of 100 Mbit/s a node, emulated on CPUs."
    return "\n".join([*lines, f'<text x="8" y="290">{note}</text>', "</svg>", ""])


# Bytes -------------------------------------------------------------------------------------------

COUNTS = tuple(2**i for i in range(3, 10))
# Name, title, left end, smallest value of the axis, call.
MODELS: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("Wan 14B", "Wan 14B: 40 heads, full, 75,776 tokens", 60, 100,
     dict(seq_len=75_776, heads=40, kv_heads=40, mask=st.masks.Full())),
    ("Llama 3 8B", "Llama 3 8B: 32 and 8 heads, causal, 1M tokens", 445, 500,
     dict(seq_len=1 << 20, heads=32, kv_heads=8, mask=st.masks.Causal(), layout="zigzag")),
)  # fmt: skip
# Class of a line, its name, and the degrees that it may have beside the ring.
LINES = (
    ("o", "Ring Attention", ()),
    ("h", "USP", ("head",)),
    ("s", "StarTrail x Ulysses here", ("head", "group", "team")),
)
BYTES_HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 330" role="img">
<title>Bytes that a GPU receives for attention, against the number of GPUs</title>
<style>{FONT}.m{{text-anchor:middle}}
path{{fill:none;stroke-width:2.5}}.g{{stroke:#8c959f;stroke-width:.5}}.o{{stroke:#8c959f}}.s{{stroke:#d55e00}}.h{{stroke:#0072b2}}
circle{{fill:#fff;stroke-width:2.5}}
@media(prefers-color-scheme:dark){{text{{fill:#e6edf3}}circle{{fill:#0d1117}}\
.s{{stroke:#ff8c42}}.h{{stroke:#58a6ff}}}}</style>
<text x="8" y="18" class="b">MiB that a GPU receives for one layer's attention, \
forward and backward, in bfloat16</text>"""


def fewest(count: int, roles: Sequence[str], call: dict[str, Any]) -> tuple[float, Degrees]:
    """The fewest MiB that a device of so many receives, and the degrees: the simplest that do."""
    settings = [
        (st.communication(x, batch=1, head_dim=128, dtype="bfloat16", **call).total.received_bytes,
         sum(getattr(x, role) > 1 for role in SEQUENCE_ROLES), -x.head, -x.ring, x)
        for x in legal_degrees(count, batch=1, **call)
        if all(role in roles or getattr(x, role) == 1 for role in ("head", "group", "team"))
    ]  # fmt: skip
    received, *_, degrees = min(settings, key=lambda x: x[:-1])
    return received / 2**20, degrees


def bytes_svg() -> str:
    """The fewest bytes of three schemes against the number of GPUs."""
    lines = [BYTES_HEAD]
    for model, title, left, low, call in MODELS:
        places = [round(left + 280 * i / (len(COUNTS) - 1)) for i in range(len(COUNTS))]
        lines.append(f'<text x="{left}" y="46">{title}</text>')
        for power in range(3):
            y = 270 - 104 * power
            lines.append(f'<path class="g" d="M{left} {y}H{left + 280}"/><text x="{left - 6}" '
                         f'y="{y + 5}" class="e">{low * 10**power:,}</text>')  # fmt: skip
        for x, count in zip(places, COUNTS, strict=True):
            lines.append(f'<text x="{x}" y="290" class="m">{count}</text>')
        for kind, name, roles in LINES:
            points = [fewest(count, roles, call) for count in COUNTS]
            heights = [270 - 104 * math.log10(mib / low) for mib, _ in points]
            at = (f"{x} {y:.1f}" for x, y in zip(places, heights, strict=True))
            lines.append(f'<path class="{kind}" d="M{"L".join(at)}"/>')
            for x, y, count, (mib, degrees) in zip(places, heights, COUNTS, points, strict=True):
                named = ", ".join(f"{role} {getattr(degrees, role)}"
                                  for role in ("head", "group", "team", "ring")
                                  if getattr(degrees, role) > 1)  # fmt: skip
                lines.append(
                    f'<circle class="{kind}" cx="{x}" cy="{y:.1f}" r="3.5"><title>{model}, '
                    f"{count} GPUs, {name}: {mib:,.1f} MiB ({named})</title></circle>"
                )
            lines.append(
                f'<text x="{left + 288}" y="{heights[-1] + 5:.0f}">{points[-1][0]:,.0f}</text>'
            )
    lines.append('<text x="392" y="290" class="m">GPUs</text>')
    for x, (kind, name, _) in zip((60, 230, 330), LINES, strict=True):
        bold = ' class="b"' if kind == "s" else ""
        lines.append(f'<path class="{kind}" d="M{x} 312h24"/>'
                     f'<text x="{x + 30}" y="317"{bold}>{name}</text>')  # fmt: skip
    return "\n".join(
        [*lines, '<text x="560" y="317">each at its best degrees</text>', "</svg>", ""]
    )


def figures() -> dict[str, str]:
    """All figures, by the names of their files in docs/."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    return {"rings.svg": rings_svg(), "schemes.svg": schemes_svg(results), "bytes.svg": bytes_svg()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder; default: docs")
    args = parser.parse_args()
    for name, text in figures().items():
        (args.out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

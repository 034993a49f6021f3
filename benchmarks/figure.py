"""Draws README's figure from the table of schemes in RESULTS.md.

    python benchmarks/figure.py

It writes docs/schemes.svg.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SVG = ROOT / "docs" / "schemes.svg"
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
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 300" role="img">
<title>Bars of the seconds of six schemes on two emulated clusters</title>
<style>text{font:14px system-ui,sans-serif;fill:#24292f}.b{font-weight:700}.e{text-anchor:end}
path{stroke:#8c959f}.o{fill:#8c959f}.s{fill:#d55e00}.h{fill:#0072b2}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#ff8c42}.h{fill:#58a6ff}}</style>
<text x="8" y="18" class="b">
Seconds of causal attention, forward and backward, on 16 emulated devices
</text>"""


def draw(results: str) -> str:
    """The figure as SVG, from the text of RESULTS.md."""
    rows = {}
    for line in results[results.index(TABLE) :].split("\n\n")[0].splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = [cell.split()[0] for cell in cells]
    lines = [HEAD]
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


if __name__ == "__main__":
    SVG.write_text(draw((ROOT / "benchmarks" / "RESULTS.md").read_text()))

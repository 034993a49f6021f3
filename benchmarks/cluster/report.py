"""What `run.py` shows: a table and a JSON file."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cluster.rounds import Timed

HEADER = (
    f"{'':<32}{'s':>9}{'spread':>8}{'x first':>9}{'port MB':>10}{'expected':>10}{'over':>8}"
    f"{'error':>10}"
)
LEGEND = """
s         median over the rounds of the time of the slowest process
spread    longest minus shortest round, over the median
x first   time of the first row over that of this one
port MB   bytes that the busiest port received, by the kernel's count, less those of an idle round
expected  the same by st.communication with the algorithms of NCCL, or of gloo on CPUs; for a
          training step, by the collectives of the compiled program
over      port MB over expected: what headers and acknowledgements add
error     largest difference from dense float64 attention, relative to the largest value; for a
          training step, difference of the first loss from that of the first row"""


def result(timed: Timed) -> dict[str, Any]:
    """A row of the JSON file."""
    return {
        "name": timed.name,
        "pass": timed.what,
        "seconds": timed.seconds,
        "port_received": timed.received,
        "port_sent": timed.sent,
        "expected": timed.expected,
        "error": timed.error,
        "tolerance": timed.tolerance,
        "losses": timed.losses,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of some rows of the JSON file, pass by pass."""
    lines: list[str] = []
    for what in dict.fromkeys(row["pass"] for row in rows):
        chosen = [row for row in rows if row["pass"] == what]
        yardstick = statistics.median(chosen[0]["seconds"])
        lines += ["", what, HEADER]
        lines += [_line(row, yardstick) for row in chosen]
    return "\n".join([*lines, LEGEND])


def _line(row: dict[str, Any], yardstick: float) -> str:
    seconds = statistics.median(row["seconds"])
    spread = (max(row["seconds"]) - min(row["seconds"])) / seconds
    received, expected = statistics.median(row["port_received"]), row["expected"]
    ports = f"{received / 1e6:10.3f}" if received > 0 else f"{'-':>10}"
    known = not math.isnan(expected)
    ports += f"{expected / 1e6:10.3f}" if known else f"{'-':>10}"
    ports += f"{received / expected - 1:+8.1%}" if known and min(received, expected) > 0 else (
        f"{'-':>8}")  # fmt: skip
    error = row["error"]
    shown = f"{'-':>10}" if error is None or math.isnan(error) else f"{error:10.1e}"
    return (
        f"{row['name']:<32}{seconds:9.3f}{spread:8.0%}{yardstick / seconds:9.2f}{ports}{shown}"
        f"{' WRONG' if is_wrong(row) else ''}"
    )


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a result was too far from the reference."""
    error = row["error"]
    return error is not None and not math.isnan(error) and not error <= row["tolerance"]


def save(path: Path, header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Writes everything as JSON."""
    path.write_text(json.dumps({**header, "rows": list(rows)}, indent=1, default=str) + "\n")


def header_of(settings: Any, **facts: Any) -> dict[str, Any]:
    """What the JSON file says before the rows."""
    return {"settings": asdict(settings), **facts}

"""Shows a run while it trains: losses, speed, memory, the time left, the next checkpoint.

    python -m trainer.run.watch runs/gpt_tiny               # until the run ends, or Ctrl-C
    python -m trainer.run.watch runs/gpt_tiny --once
    python -m trainer.run.watch runs/gpt_tiny --html watch.html --every 30

A terminal shows the same screen again and again; a log file gets the last one alone. A browser
loads the file of --html again by itself. Nothing in the folder of the run is changed.
"""

from __future__ import annotations

import argparse
import html
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from startrail_jax.errors import InputError
from trainer.durable import replace_text
from trainer.errors import StorageError
from trainer.printable import duration, printable, size_of
from trainer.run.curve import CURVES, Losses, chart_of, losses_of, svg_of
from trainer.run.exit import exit_on_user_errors
from trainer.run.folder import LOCK_FILE, is_locked, read_records
from trainer.run.settings import CHECKPOINTS_FOLDER, CONFIG_FILE

# Names of the metrics -> labels, and how their last values are shown.
SHOWN = {name: (f"{label} loss", "{:.4f}".format) for name, (label, _) in CURVES.items()} | {
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "mfu": ("MFU", "{:.1%}".format),
    "memory_bytes": ("memory of a device", size_of),
}
# The pace is that of so many reports.
RECENT_REPORTS = 20
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<style>body { font: 15px sans-serif } th { text-align: left; padding-right: 1em }</style>
"""


class Look(NamedTuple):
    """What the folder of a run shows at one moment: values by their names, and the losses."""

    facts: dict[str, str]
    losses: Losses
    is_training: bool


def look(run_dir: Path, now: float) -> Look:
    """Reads the folder of a run, to which another program may be writing.

    Args:
        run_dir: the folder.
        now: the time, in seconds since 1970.

    Raises:
        ValueError: if it is not the folder of a run.
    """
    if not any((run_dir / name).is_file() for name in (LOCK_FILE, CONFIG_FILE)):
        raise InputError(
            f"The first word must be the folder of a run; got {run_dir}. Use the --run-dir of "
            "train.py, which makes the folder when it has read the data."
        )
    is_training = is_locked(run_dir)  # First: what a program writes before it ends is read too.
    records, config = read_records(run_dir), _read_config(run_dir)
    step, steps = records[-1]["step"] if records else 0, config.get("steps", 0)
    facts = {"state": "training" if is_training else "finished" if step == steps else "stopped"}
    facts["step"] = f"{step} of {steps}" if steps else str(step)
    if records and is_training:
        facts["step"] += f", reported {duration(max(now - records[-1]['time'], 0))} ago"
    last = {name: value for x in records for name, value in x.items() if value is not None}
    facts |= {label: shown(last[name]) for name, (label, shown) in SHOWN.items() if name in last}
    pace = _seconds_per_step(records[-RECENT_REPORTS:])
    names = [path.name for path in (run_dir / CHECKPOINTS_FOLDER).glob("*")]
    saved = max((int(name) for name in names if name.isdecimal()), default=None)
    facts["checkpoint"] = "none" if saved is None else f"step {saved}"
    if is_training and step < steps:
        every = config["checkpoint"]["every"]
        following = min((step // every + 1) * every, steps)
        facts["next checkpoint"] = f"step {following}"
        if pace:
            facts["next checkpoint"] += f", in {duration(pace * (following - step))}"
            facts["time left"] = duration(pace * (steps - step))
    return Look(facts, losses_of(records), is_training)


def _read_config(run_dir: Path) -> dict[str, Any]:
    """The config.json of a run, which a new run writes when it has compiled; else nothing."""
    try:
        return json.loads((run_dir / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return {}


def _seconds_per_step(records: Sequence[Mapping[str, Any]]) -> float | None:
    """A median, since a run that goes on has a gap, and evaluations take long."""
    moments = [(x["step"], x["time"]) for x in records]
    paces = [(t1 - t0) / (n1 - n0) for (n0, t0), (n1, t1) in pairwise(moments) if n1 > n0]
    return statistics.median(paces) if paces else None


def text_of(title: str, seen: Look) -> str:
    """A screen of a terminal."""
    chart = [chart_of(seen.losses)] if any(seen.losses.values()) else []
    facts = (f"{name:<20}{value}" for name, value in seen.facts.items())
    return printable("\n".join([title, *chart, *facts, ""]))


def page_of(title: str, seen: Look, every: float | None) -> str:
    """A page of HTML, which a browser loads again after `every` seconds; None for never."""
    again = f'<meta http-equiv="refresh" content="{every:g}">' if every else ""
    picture = svg_of(seen.losses, title) if any(seen.losses.values()) else ""
    rows = "".join(f"<tr><th>{name}<td>{value}" for name, value in seen.facts.items())
    title = html.escape(printable(title))
    return f"{HEAD}{again}<title>{title}</title>\n{picture}\n<table>{rows}</table></html>"


def main(arguments: Sequence[str]) -> None:
    """Shows a run until its program ends; see the text of this module.

    Raises:
        ValueError: if there is no run, or a flag has a wrong value.
        OSError: if the page cannot be written.
    """
    description = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=description)
    parser.add_argument("run_dir", type=Path, help="the --run-dir of train.py")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="look once")
    parser.add_argument("--html", type=Path, help="also write a page for a browser to this file")
    options = parser.parse_args(arguments)
    if not options.every > 0:
        raise InputError(f"--every must be positive; got {options.every}. Leave it out for 5 s.")
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            seen = look(options.run_dir, time.time())
            is_last = options.once or not seen.is_training
            live.update(Text(text_of(str(options.run_dir), seen)), refresh=True)
            if options.html is not None:
                page = page_of(str(options.run_dir), seen, None if is_last else options.every)
                try:
                    replace_text(options.html, page)
                except OSError as error:
                    raise StorageError(
                        f"--html must name a file that can be written; got {options.html}: "
                        f"{error.strerror}. Name another."
                    ) from error
            if is_last:
                return
            time.sleep(options.every)


if __name__ == "__main__":
    with exit_on_user_errors():
        main(sys.argv[1:])

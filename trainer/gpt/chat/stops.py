"""The tokens that end answers of conversations, which a run keeps for its samples and its export.

Imports no jax.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from trainer.data.opening import read_object
from trainer.durable import replace_text

STOPS_FILE = "stops.json"
_KEY = "stops"


def keep_stops(run_dir: Path, stops: Collection[int]) -> None:
    """Adds tokens to those that the folder of a run keeps: a run may go on with other data."""
    known = read_stops(run_dir)
    if not {*stops} <= {*known}:
        found = [*known, *(x for x in stops if x not in known)]
        replace_text(run_dir / STOPS_FILE, json.dumps({_KEY: found}))


def read_stops(run_dir: Path) -> tuple[int, ...]:
    """The tokens that the folder of a run keeps; none without conversations."""
    path = run_dir / STOPS_FILE
    return tuple(read_object(path)[_KEY]) if path.is_file() else ()

"""Says which packages this Python lacks, before anything imports them. Imports none of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from trainer.printable import printable

NEEDED = (
    *("jax", "flax", "optax", "orbax", "grain", "tyro", "rich", "safetensors"),
    *("tensorboardX", "docstring_parser", "matplotlib"),
)
"""Those of the extra `train`. Packages of other extras have messages of their own."""
ROOT = Path(__file__).parents[1]


def missing() -> list[str]:
    """Those of the packages that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def message(names: list[str]) -> str:
    """What to do about packages that are not installed."""
    own = ROOT / ".venv" / "bin" / "python"
    if own.exists() and Path(sys.prefix) != own.parents[1]:
        way_out = f"Run {own} in place of `python`, or first: source {own.parent}/activate"
    else:
        way_out = f"Install them: {sys.executable} -m pip install -e '{ROOT}[train]'"
    return (
        f"MissingPackageError: This program needs packages that {sys.executable} does not have: "
        f"{', '.join(names)}. {way_out}"
    )


if __name__ != "__main__" and (names := missing()):
    sys.exit(printable(message(names)))

"""The degrees that a run was trained with, so that it goes on with them. Imports no jax."""

from __future__ import annotations

import json
from pathlib import Path

from startrail_jax.errors import InputError
from trainer.run.folder import CONFIG_FILE
from trainer.run.settings import replace_text

MESH_FILE = "mesh.json"


def save_degrees(run_dir: Path, degrees: dict[str, int]) -> None:
    """Notes in the folder of a run with which degrees it trains now."""
    replace_text(run_dir / MESH_FILE, json.dumps({"degrees": degrees}))


def read_degrees(run_dir: Path) -> dict[str, int] | None:
    """The degrees with which a run trained last; None if it has not trained yet.

    They are empty for a run that a version of this program trained that did not note them.

    Raises:
        ValueError: if the file does not hold degrees.
    """
    path = run_dir / MESH_FILE
    if not path.is_file():
        return {} if (run_dir / CONFIG_FILE).is_file() else None
    wrong = InputError(
        f"{path} must hold the degrees of a run, positive integers by their names. Delete it, and "
        "the run goes on with degrees chosen anew."
    )
    try:
        degrees = json.loads(path.read_text())["degrees"].items()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise wrong from error
    if not all(type(degree) is int and degree >= 1 for _, degree in degrees):
        raise wrong
    return dict(degrees)

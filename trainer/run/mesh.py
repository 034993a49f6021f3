"""The degrees that a run was trained with, so that it goes on with them. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from startrail_jax.errors import InputError
from trainer.config import ROLES
from trainer.durable import replace_text
from trainer.run.settings import CONFIG_FILE

MESH_FILE = "mesh.json"


def save_degrees(
    run_dir: Path, degrees: dict[str, int], order: Sequence[str] | None = None
) -> None:
    """Notes in the folder of a run with which degrees it trains now.

    Args:
        run_dir: the folder.
        degrees: the degrees by their names.
        order: the order of the axes over the nodes, if the planner chose it with the degrees.
    """
    planned = {} if order is None else {"order": list(order)}
    replace_text(run_dir / MESH_FILE, json.dumps({"degrees": degrees, **planned}))


def read_planned_order(run_dir: Path) -> tuple[str, ...] | None:
    """The order of the axes of a run whose mesh the planner chose; None for other runs.

    Raises:
        ValueError: if the file holds anything else.
    """
    path = run_dir / MESH_FILE
    try:
        order = json.loads(path.read_text()).get("order") if path.is_file() else None
        if order is None:
            return None
        if sorted(order) == sorted(ROLES):
            return tuple(order)
        raise _wrong(path)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _wrong(path) from error


def _wrong(path: Path) -> InputError:
    return InputError(
        f"{path} must hold the degrees of a run, positive integers by their names. Delete it, and "
        "the run goes on with degrees chosen anew."
    )


def read_degrees(run_dir: Path) -> dict[str, int] | None:
    """The degrees with which a run trained last; None if it has not trained yet.

    They are empty for a run that a version of this program trained that did not note them.

    Raises:
        ValueError: if the file does not hold degrees.
    """
    path = run_dir / MESH_FILE
    if not path.is_file():
        return {} if (run_dir / CONFIG_FILE).is_file() else None
    try:
        degrees = json.loads(path.read_text())["degrees"].items()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _wrong(path) from error
    if not all(type(degree) is int and degree >= 1 for _, degree in degrees):
        raise _wrong(path)
    return dict(degrees)

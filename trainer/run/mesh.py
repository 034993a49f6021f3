"""The mesh that a run was trained with, so that it goes on with it. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from startrail_jax.errors import InputError
from trainer.config import ROLES
from trainer.durable import replace_text

MESH_FILE = "mesh.json"


@dataclass(frozen=True)
class FormerMesh:
    """The mesh with which a run trained last."""

    degrees: dict[str, int]
    """The degrees by their names."""
    order: tuple[str, ...] | None = None
    """The order of the axes over the nodes, if the planner chose it with the degrees."""

    def __str__(self) -> str:
        planned = "" if self.order is None else f", planned in the order {' '.join(self.order)}"
        return f"{self.degrees}{planned}"


def save_degrees(
    run_dir: Path, degrees: dict[str, int], order: Sequence[str] | None = None
) -> None:
    """Notes in the folder of a run with which mesh it trains now: see `FormerMesh`."""
    planned = {} if order is None else {"order": list(order)}
    replace_text(run_dir / MESH_FILE, json.dumps({"degrees": degrees, **planned}))


def read_mesh(run_dir: Path) -> FormerMesh | None:
    """The mesh with which a run trained last; None if there is no note of it.

    Raises:
        ValueError: if the file holds anything else.
    """
    path = run_dir / MESH_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        degrees, order = dict(values["degrees"]), values.get("order")
        if all(type(x) is int and x >= 1 for x in degrees.values()) and (
            order is None or sorted(order) == sorted(ROLES)
        ):
            return FormerMesh(degrees, None if order is None else tuple(order))
        wrong = None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        wrong = error
    raise InputError(
        f"{path} must hold the degrees of a run, positive integers by their names. Delete it, and "
        "the run goes on with degrees chosen anew."
    ) from wrong

"""Exactness of both passes, beside float64."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from startrail_jax.testing import MARKED_ROWS
from startrail_jax.verify.cases import Case
from startrail_jax.verify.schemes import Scheme
from startrail_jax.xla.compiler import compiler_options


@dataclass(frozen=True)
class Cell:
    """The error of one result of one scheme."""

    error: float
    """Largest difference from the reference, relative to its largest value."""
    bound: float
    """Largest error that is allowed, likewise."""
    sharded: bool
    """Whether the result has the sharding that it must have."""

    @property
    def ok(self) -> bool:
        """Whether the result is right."""
        return self.error <= self.bound and self.sharded

    def __str__(self) -> str:
        said = "ok" if self.ok else "WRONG" if self.sharded else "WRONG sharding"
        return f"{self.error:.0e}/{self.bound:.0e} {said}"

    def as_json(self) -> dict[str, Any]:
        """The cell as JSON; an infinite error is None."""
        error = self.error if math.isfinite(self.error) else None
        return {**asdict(self), "error": error, "ok": self.ok}


def check_exactness(case: Case, scheme: Scheme) -> dict[str, Cell]:
    """The errors of one scheme, by the names of the results."""
    attention, trial = case.checked(scheme), case.trial
    options: dict[str, Any] = dict(compiler_options(attention.mesh))
    found = trial.results(attention, attention, options or None)
    sharded = {
        name: x.sharding.is_equivalent_to(trial.sharding(attention, name), x.ndim)
        for name, x in found.items()
    }
    cells: dict[str, Cell] = {}
    marks_are_right = True
    for x in trial.compare(attention, found):
        if x.name == MARKED_ROWS:
            marks_are_right = x.error <= x.bound
            continue
        # An lse that says of a wrong row that it sees no key is as wrong as it can be.
        error = x.error if marks_are_right or x.name != "lse" else math.inf
        cells[x.name] = Cell(float(error), float(x.bound), bool(sharded[x.name]))
    return cells

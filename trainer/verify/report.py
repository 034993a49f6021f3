"""What `--verify` finds: a line for each check, and verify.json."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Check:
    """One number that was measured, and what it must be."""

    name: str
    """What was compared."""
    value: float
    unit: str = ""
    """That of the value; empty for a relative difference."""
    most: float | None = None
    """The largest value that is right; None for no bound."""
    least: float | None = None
    """The smallest one."""
    note: str = ""
    """What was cut, and where the value is."""

    @property
    def ok(self) -> bool:
        """Whether the value is right."""
        above = self.most is not None and not self.value <= self.most
        below = self.least is not None and not self.value >= self.least
        return not (above or below)

    def __str__(self) -> str:
        bounds = [f"at most {_shown(self.most)}"] if self.most is not None else []
        bounds += [f"at least {_shown(self.least)}"] if self.least is not None else []
        verdict = ("ok" if self.ok else "WRONG") if bounds else "-"
        value = f"{_shown(self.value, digits=3)} {self.unit}" if self.unit else _shown(self.value)
        return f"{verdict:<7}{self.name:<38}{value:<13}{', '.join(bounds):<18}{self.note}".rstrip()


def _shown(x: float, digits: int = 2) -> str:
    return f"{x:,.0f}" if float(x).is_integer() and abs(x) < 1e6 else f"{x:.{digits}g}"


@dataclass
class Verdicts:
    """All checks of a run."""

    line: Callable[[str], None]
    """Shows a line."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What verify.json says beside the checks."""
    checks: list[Check] = field(default_factory=list)
    is_whole: bool = False
    """Whether all checks were made."""
    _begin: float = field(default_factory=time.perf_counter)
    _seconds: list[float] = field(default_factory=list)
    """When each check was made, after the beginning."""

    def add(self, check: Check) -> None:
        """Adds a check, and shows it."""
        self.checks.append(check)
        self._seconds.append(round(time.perf_counter() - self._begin, 1))
        self.line(str(check))

    @property
    def ok(self) -> bool:
        """Whether all checks were made, and nothing is wrong."""
        return self.is_whole and all(check.ok for check in self.checks)

    @property
    def summary(self) -> str:
        """One line about all checks."""
        wrong = [check.name for check in self.checks if not check.ok]
        seconds = time.perf_counter() - self._begin
        bounded = sum(check.most is not None or check.least is not None for check in self.checks)
        told = f"{bounded} checks in {seconds:.0f} s"
        if not wrong:
            return f"verified: {told}, nothing is wrong"
        return f"NOT VERIFIED: {len(wrong)} of {told} are wrong: {'; '.join(wrong)}"

    def as_json(self) -> str:
        """verify.json."""
        checks = [
            {**dataclasses.asdict(x), "ok": x.ok, "after_seconds": seconds}
            for x, seconds in zip(self.checks, self._seconds, strict=True)
        ]
        seconds = round(time.perf_counter() - self._begin, 1)
        found = {"ok": self.ok, "seconds": seconds, **self.facts, "checks": checks}
        return json.dumps(found, indent=1, default=str) + "\n"

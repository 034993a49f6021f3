"""What is right: the largest differences that rounding makes."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.verify.report import Check
from trainer.verify.results import Apart

FLOAT32 = 5e-5
"""Largest difference in float32: of a loss, relative to it or to 1; of a gradient, relative to the
largest value of its weight. Up to 1.2e-5 was measured on CPUs."""
NARROW = 4.0
"""In bfloat16: times the error of one device, against float32 or float64. Ratios of up to 2 were
measured."""
AFTER_STEPS = 1e-4
"""Largest difference of a loss after some steps in float32: an optimizer divides by the size of a
gradient, and so enlarges what rounding makes of a small one."""


def compared(name: str, apart: Apart, most: float, note: str) -> Iterator[Check]:
    """A loss, and the gradient that is furthest off; `note` says what is compared with what."""
    yield Check(name=f"{name}: loss", value=apart.loss, most=most, note=note)
    where = f"of {len(apart.gradients)} weights, most in {apart.worst}"
    yield Check(name=f"{name}: gradients", value=apart.gradient, most=most, note=where)

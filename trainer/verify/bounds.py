"""What is right: the largest differences that rounding makes."""

from __future__ import annotations

from collections.abc import Iterator

from startrail_jax.testing import NARROW_ERROR_RATIO
from trainer.verify.report import Check
from trainer.verify.results import Apart

FLOAT32 = 5e-5
"""Largest difference in float32: of a loss, relative to it or to 1; of a gradient, relative to the
largest value of its weight. Up to 1.2e-5 was measured on CPUs."""
AFTER_STEPS = 1e-4
"""Largest difference of a loss after some steps in float32: an optimizer divides by the size of a
gradient, and so enlarges what rounding makes of a small one."""
NARROW_LOSS = 2e-3
"""Least bound of a loss in bfloat16, half of the distance of two numbers: one device may be right
by chance."""


def compared(name: str, apart: Apart, note: str, one: Apart | None = None) -> Iterator[Check]:
    """A loss, and the gradient that is furthest off; `note` says what is compared with what. `one`
    is how far one device is off in the same narrow type; None in float32."""
    loss = FLOAT32 if one is None else max(NARROW_ERROR_RATIO * one.loss, NARROW_LOSS)
    gradient = FLOAT32 if one is None else max(NARROW_ERROR_RATIO * one.gradient, FLOAT32)
    yield Check(name=f"{name}: loss", value=apart.loss, most=loss, note=note)
    where = f"of {len(apart.gradients)} weights, most in {apart.worst}"
    if one is not None:
        where += f"; {one.gradient:.2g} on one device"
    yield Check(name=f"{name}: gradients", value=apart.gradient, most=gradient, note=where)

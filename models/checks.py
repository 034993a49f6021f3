"""Checks of settings, whose errors name them. Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from startrail_jax.errors import InputError


def check_minimum(name: str, value: Any, minimum: int) -> None:
    """Raises ValueError unless a setting is None, or finite and not below its minimum."""
    if value is not None and not minimum <= value < math.inf:
        raise InputError(
            f"{name} must be at least {minimum}; got {name}={value}. Leave it out for the default."
        )


RANGES: Mapping[str, Callable[[float], bool]] = {
    "above 0 and below 1": lambda x: 0 < x < 1,
    "above 0 and finite": lambda x: 0 < x < math.inf,
    "at least 0 and below 1": lambda x: 0 <= x < 1,
    "at least 0 and finite": lambda x: 0 <= x < math.inf,
    "at least 0 and below 2**32": lambda x: 0 <= x < 2**32,
}


def check_range(
    name: str, value: int | float | None, rule: str, way_out: str = "Leave it out for the default."
) -> None:
    """Raises ValueError unless a setting is None, or in one of `RANGES`."""
    if value is not None and not RANGES[rule](value):
        field = name.rpartition(".")[2]
        raise InputError(f"{name} must be {rule}; got {field}={value}. {way_out}")


def check_used(section: str, config: Any, *, used: bool, needs: str, got: str, flags: str) -> None:
    """Raises if options are set for layers that a model does not have.

    Args:
        section: name of the options, such as "linear".
        config: the options, a dataclass.
        used: True if the model has the layers.
        needs: the layers that the options need.
        got: the layers that the model has.
        flags: the flags that give a model the layers.
    """
    changed = [name for name, x in vars(config).items() if x != getattr(type(config), name)]
    if changed and not used:
        raise InputError(
            f"model.{section}.{changed[0]} needs {needs}; got {got}. Use {flags}, or leave it out."
        )

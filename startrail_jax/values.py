"""Which values public arguments take for whole numbers, numbers and truth values.

NumPy's count, and become Python's, so that equal arguments have equal hashes.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

_BOOLS = (bool, np.bool_)


def whole(value: Any) -> Any:
    """The `int` that `operator.index` makes of a value; bools and other values as they are."""
    if isinstance(value, _BOOLS):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def is_whole(value: Any, least: int) -> bool:
    """Whether `whole` made an integer of at least `least`."""
    return type(value) is int and value >= least


def real(value: Any) -> Any:
    """The `float` of a finite real number; other values as they are."""
    if isinstance(value, _BOOLS) or not isinstance(value, numbers.Real):
        return value
    return float(value) if math.isfinite(value) else value


def is_real(value: Any) -> bool:
    """Whether `real` made a finite number."""
    return type(value) is float and math.isfinite(value)


def truth(value: Any) -> Any:
    """The `bool` of a truth value of NumPy; other values as they are."""
    return bool(value) if isinstance(value, np.bool_) else value


def adopt(instance: Any, kind: Any, *names: str) -> None:
    """Lets fields of a frozen dataclass be what `kind`, one of these functions, makes of them."""
    for name in names:
        object.__setattr__(instance, name, kind(getattr(instance, name)))

"""Sizes and rates as people type them: 512K tokens, 80GiB, 50GB/s, 400Gb/s.

A `parse` function takes what was typed and the flag that its message names. It raises an
`InputError` unless that is a number in range, with its unit.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable
from typing import Any

from startrail_jax.errors import InputError

GIB = 2**30
LARGEST_COUNT = 2**40
"""Larger counts would overflow the integers in which bytes are counted."""
LARGEST_SIZE = 2**60
"""Bytes."""

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def _parse(text: Any, unit: str, size: Callable[..., float]) -> float:
    """A number times `size` of the groups of its unit; NaN where the text is none."""
    pattern = rf"(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d+))?\s*{unit}"
    match = re.fullmatch(pattern, text.strip()) if isinstance(text, str) else None
    # Too large an exponent gives infinity, where a power of ten would raise.
    number = float(f"{match[1]}e{match[2] or 0}") if match else math.nan
    return number * size(*match.groups()[2:]) if match else number


def parse_count(text: str, flag: str) -> int:
    """A number of tokens, heads or the like: 524288, 512K (times 1024) or 1M (times 1024^2)."""
    value = _parse(text.replace("_", ""), "([kKmMgG]?)", lambda x: _BINARY[x.lower()])
    if not 1 <= value <= LARGEST_COUNT or value != int(value):
        raise InputError(
            f"{flag} must be a whole number from 1 to {LARGEST_COUNT}; got {text!r}. Write for "
            "example 524288, 512K (512 * 1024) or 1M (1024 * 1024)."
        )
    return int(value)


def parse_window(text: str) -> int | None:
    """The tokens of a window: as `parse_count`, or `none`, for all earlier ones."""
    if text == "none":
        return None
    try:
        return parse_count(text, "--windows")
    except InputError as error:
        raise InputError(f"{error} For a layer without a window, write none.") from None


def parse_rate(text: Any, flag: str) -> float:
    """Bytes per second: 50GB/s, 400Gb/s (bits) or 400Gbit/s."""

    def size(letter: str, binary: str, unit: str) -> float:
        # Of 50gb/s, nobody knows whether it means bits or bytes.
        if letter in ("m", "g", "t") and unit == "b":
            return math.nan
        return (_BINARY if binary else _DECIMAL)[letter.lower()] / (1 if unit == "B" else 8)

    value = _parse(text, "([kKmMgGtT]?)(i?)(B|b|bit|bits)(?:/s|ps)?", size)
    if not 0 < value < math.inf:
        raise InputError(
            f"{flag} must be a finite rate above 0 with its unit; got {text!r}. Write for example "
            "'50GB/s' (bytes) or '400Gb/s' (bits)."
        )
    return value


def parse_bytes(text: str, flag: str) -> int:
    """Bytes: 80GiB or 80GB (times 10^9)."""
    value = _parse(
        text,
        r"(?=\D)([kKmMgGtT]?)(i?)B?",
        lambda letter, binary: (_BINARY if binary else _DECIMAL)[letter.lower()],
    )
    if not 1 <= value < LARGEST_SIZE:
        raise InputError(
            f"{flag} must be a size from a byte to an exbibyte, with its unit; got {text!r}. Write "
            "for example 80GiB or 80GB."
        )
    return int(value)


def parse_flops(text: str, flag: str) -> float:
    """FLOP/s: 989T, 989TFLOPs or 0.989P."""
    value = _parse(text.lower(), r"(?=\D)([kmgtp]?)(?:flops?(?:/s)?)?", lambda x: _DECIMAL[x])
    if not 0 < value < math.inf:
        raise InputError(
            f"{flag} must be a finite number of FLOP/s above 0 with its unit; got {text!r}. Write "
            "for example 989T."
        )
    return value


def parse_seconds(text: Any, flag: str) -> float:
    """Seconds: 10us, 0.01ms or 0s."""
    value = _parse(text, "(ns|us|µs|ms|s)", lambda x: _SECONDS[x])
    if not value < math.inf:
        raise InputError(
            f"{flag} must be a finite time of at least 0 with its unit; got {text!r}. Write, say, "
            "'10us'."
        )
    return value


def as_count(value: Any, flag: str) -> int:
    """A positive whole number, of any type of number, or as text: see `parse_count`."""
    if isinstance(value, str):
        return parse_count(value, flag)
    numeric = issubclass(type(value), numbers.Real) and not isinstance(value, bool)
    # Of infinity, the quotient is no number, which equals nothing.
    if not numeric or value != value // 1 or not 1 <= value <= LARGEST_COUNT:
        raise InputError(
            f"{flag} must be a whole number from 1 to {LARGEST_COUNT}; got {value!r}. Correct it."
        )
    return int(value)


def show_count(count: int) -> str:
    """A count as one may type it: 512K."""
    for letter, unit in (("M", 2**20), ("K", 2**10)):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


def show_rate(rate: float, unit: str = "B") -> str:
    """A rate as one may type it: 50 GB/s, or 400 Gbit/s."""
    if math.isinf(rate):
        return "unlimited"
    return f"{_scaled(rate, {'T': 1e12, 'G': 1e9, 'M': 1e6, 'k': 1e3, '': 1.0})}{unit}/s"


def show_seconds(seconds: float) -> str:
    """A time with a unit that suits it."""
    return _scaled(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}) if seconds else "0 s"


def show_bytes(size: float) -> str:
    """A size with a unit that suits it, in powers of ten as the rates of links."""
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
    return f"{size:.0f} B" if size < 1e3 else _scaled(size, units)


def _scaled(value: float, units: dict[str, float]) -> str:
    """A number in the largest unit of which it is one, or in the last."""
    unit = next((x for x, size in units.items() if value >= size), [*units][-1])
    return f"{value / units[unit]:.3g} {unit}"

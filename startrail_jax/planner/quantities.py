"""Sizes and rates as people type them: 512K tokens, 80GiB, 50GB/s, 400Gb/s."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

from startrail_jax.errors import InputError

GIB = 2**30
LARGEST_COUNT = 2**40
"""Larger counts would overflow the integers in which bytes are counted."""
LARGEST_SIZE = 2**60
"""Bytes."""

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d+))?"
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_count(text: str, flag: str) -> int:
    """A number of tokens, heads or the like: 524288, 512K (times 1024) or 1M (times 1024^2).

    Args:
        text: what was typed.
        flag: the flag that the message names. So it is in all functions of this module.

    Raises:
        ValueError: if it is not a positive whole number.
    """
    match = _match(rf"{_NUMBER}\s*([kKmMgG]?)", text.replace("_", ""))
    value = _value(match) * _BINARY[match[3].lower()] if match else 0.0
    if not 1 <= value <= LARGEST_COUNT or value != int(value):
        raise InputError(
            f"{flag} must be a positive whole number; got {text!r}. Write for example 524288, 512K "
            f"(512 * 1024) or 1M (1024 * 1024), and at most {LARGEST_COUNT}."
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
    """Bytes per second: 50GB/s, 400Gb/s (bits) or 400Gbit/s.

    A number has no unit, so it is refused, as a text without one.

    Raises:
        ValueError: if it is not a rate above 0 with its unit.
    """
    match = _match(rf"{_NUMBER}\s*([kKmMgGtT]?)(i?)(B|b|bit|bits)(?:/s|ps)?", text)
    value = 0.0
    # Of 50gb/s, nobody knows whether it means bits or bytes.
    if match and not (match[3] in ("m", "g", "t") and match[5] == "b"):
        units = _BINARY if match[4] else _DECIMAL
        value = _value(match) * units[match[3].lower()] / (1 if match[5] == "B" else 8)
    if not 0 < value < math.inf:
        raise InputError(
            f"{flag} must be a rate above 0 with its unit; got {text!r}. Write for example "
            "'50GB/s' (bytes) or '400Gb/s' (bits)."
        )
    return value


def parse_bytes(text: str, flag: str) -> int:
    """Bytes: 80GiB or 80GB (times 10^9).

    Raises:
        ValueError: if it is not a size above 0 with its unit.
    """
    match = _match(rf"{_NUMBER}\s*(?=\D)([kKmMgGtT]?)(i?)B?", text)
    value = 0.0
    if match:
        value = _value(match) * (_BINARY if match[4] else _DECIMAL)[match[3].lower()]
    if not 1 <= value < LARGEST_SIZE:
        raise InputError(
            f"{flag} must be a size above 0 with its unit; got {text!r}. Write for example 80GiB "
            "or 80GB, and less than an exbibyte."
        )
    return int(value)


def parse_flops(text: str, flag: str) -> float:
    """FLOP/s: 989T, 989TFLOPs or 0.989P.

    Raises:
        ValueError: if it is not a rate above 0 with its unit.
    """
    match = _match(rf"{_NUMBER}\s*(?=\D)([kmgtp]?)(?:flops?(?:/s)?)?", text, re.IGNORECASE)
    value = _value(match) * _DECIMAL[match[3].lower()] if match else 0.0
    if not 0 < value < math.inf:
        raise InputError(
            f"{flag} must be a number of FLOP/s above 0 with its unit; got {text!r}. Write for "
            "example 989T."
        )
    return value


def parse_seconds(text: Any, flag: str) -> float:
    """Seconds: 10us, 0.01ms or 0s.

    A number has no unit, so it is refused, as a text without one.

    Raises:
        ValueError: if it is not a time of at least 0 with its unit.
    """
    match = _match(rf"{_NUMBER}\s*(ns|us|µs|ms|s)", text)
    value = _value(match) * _SECONDS[match[3]] if match else math.inf
    if not value < math.inf:
        raise InputError(
            f"{flag} must be a time of at least 0 with its unit; got {text!r}. Write for example "
            "'10us'."
        )
    return value


def _match(pattern: str, text: Any, flags: int = 0) -> re.Match[str] | None:
    return re.fullmatch(pattern, text.strip(), flags) if isinstance(text, str) else None


def _value(match: re.Match[str]) -> float:
    # Too large an exponent gives infinity, where a power of ten would raise.
    return float(f"{match[1]}e{match[2] or 0}")


def as_count(value: Any, flag: str) -> int:
    """A positive whole number, of any type of number, or as text: see `parse_count`.

    Raises:
        ValueError: if it is none.
    """
    if isinstance(value, str):
        return parse_count(value, flag)
    # Of infinity, the quotient is no number, which equals nothing.
    if _real(value) == _real(value) // 1:
        if value < 1:
            raise InputError(f"{flag} must be at least 1; got {value}. Use 1 or more.")
        if value > LARGEST_COUNT:
            raise InputError(f"{flag} must be at most {LARGEST_COUNT}; got {value}. Use less.")
        return int(value)
    raise InputError(f"{flag} must be a positive whole number; got {value!r}. Correct it.")


def _real(value: Any) -> float:
    """The value; NaN if it is no number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        return float(value) if is_number else math.nan
    except OverflowError:
        return math.inf


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
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {letter}{unit}/s"
    return f"{rate:.3g} {unit}/s"


def show_seconds(seconds: float) -> str:
    """A time with a unit that suits it."""
    for letter, unit in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {letter}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def show_bytes(size: float) -> str:
    """A size with a unit that suits it, in powers of ten as the rates of links."""
    for letter, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= unit:
            return f"{size / unit:.3g} {letter}"
    return f"{size:.0f} B"

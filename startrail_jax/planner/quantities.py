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
        flag: the flag that the message names.

    Raises:
        ValueError: if it is not a positive whole number.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([kKmMgG]?)", text.strip().replace("_", ""))
    value = _value(match) * _BINARY[match[3].lower()] if match else 0.0
    if not 1 <= value <= LARGEST_COUNT or value != int(value):
        raise InputError(
            f"{flag} must be a positive whole number; got {text!r}. Write for example 524288, 512K "
            f"(512 * 1024) or 1M (1024 * 1024), and at most {LARGEST_COUNT}."
        )
    return int(value)


def parse_window(text: str) -> int | None:
    """The tokens of a window: as `parse_count`, or `none`, for all earlier ones.

    Args:
        text: what was typed.

    Raises:
        ValueError: if it is neither.
    """
    if text == "none":
        return None
    try:
        return parse_count(text, "--windows")
    except InputError as error:
        raise InputError(f"{error} For a layer without a window, write none.") from None


def parse_rate(text: str, flag: str) -> float:
    """Bytes per second: 50GB/s, 400Gb/s (bits), 400Gbit/s, or a plain number of bytes.

    Args:
        text: what was typed.
        flag: the flag that the message names.

    Raises:
        ValueError: if it is not a rate above 0.
    """
    pattern = rf"{_NUMBER}\s*([kKmMgGtT]?)(i?)(B|b|bit|bits)?(?:/s|ps)?"
    match = re.fullmatch(pattern, text.strip())
    value = 0.0
    if match:
        units = _BINARY if match[4] else _DECIMAL
        bits = match[5] is not None and match[5] != "B"
        value = _value(match) * units[match[3].lower()] / (8 if bits else 1)
    if not 0 < value < math.inf:
        raise InputError(
            f"{flag} must be a rate above 0; got {text!r}. Write for example 50GB/s (bytes) or "
            "400Gb/s (bits)."
        )
    return value


def parse_bytes(text: str, flag: str) -> int:
    """Bytes: 80GiB, 80GB (times 10^9), or a plain number.

    Args:
        text: what was typed.
        flag: the flag that the message names.

    Raises:
        ValueError: if it is not a size above 0.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([kKmMgGtT]?)(i?)B?", text.strip())
    value = 0.0
    if match:
        value = _value(match) * (_BINARY if match[4] else _DECIMAL)[match[3].lower()]
    if not 1 <= value < LARGEST_SIZE:
        raise InputError(
            f"{flag} must be a size above 0; got {text!r}. Write for example 80GiB or 80GB, and "
            "less than an exbibyte."
        )
    return int(value)


def parse_flops(text: str, flag: str) -> float:
    """FLOP/s: 989T, 989TFLOPs, 0.989P, or a plain number.

    Args:
        text: what was typed.
        flag: the flag that the message names.

    Raises:
        ValueError: if it is not a rate above 0.
    """
    pattern = rf"{_NUMBER}\s*([kKmMgGtTpP]?)(?:flops?(?:/s)?)?"
    match = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
    value = _value(match) * _DECIMAL[match[3].lower()] if match else 0.0
    if not 0 < value < math.inf:
        raise InputError(
            f"{flag} must be a number of FLOP/s above 0; got {text!r}. Write for example 989T."
        )
    return value


def parse_seconds(text: str, flag: str) -> float:
    """Seconds: 10us, 0.01ms, or a plain number of seconds.

    Args:
        text: what was typed.
        flag: the flag that the message names.

    Raises:
        ValueError: if it is not a time of at least 0.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*(ns|us|µs|ms|s)?", text.strip())
    value = _value(match) * _SECONDS[match[3] or "s"] if match else math.inf
    if not value < math.inf:
        raise InputError(
            f"{flag} must be a time of at least 0; got {text!r}. Write for example 10us."
        )
    return value


def _value(match: re.Match[str]) -> float:
    # Too large an exponent gives infinity, where a power of ten would raise.
    return float(f"{match[1]}e{match[2] or 0}")


def as_count(value: Any, flag: str) -> int:
    """A positive whole number, of any type of number, or as text: see `parse_count`.

    Args:
        value: what was given.
        flag: the flag that the message names.

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


def as_seconds(value: Any, flag: str) -> float:
    """Seconds, as a number or as text: see `parse_seconds`. Arguments and errors as there."""
    if isinstance(value, str):
        return parse_seconds(value, flag)
    return _number(value, flag, "seconds", 0 <= _real(value) < math.inf)


def as_rate(value: Any, flag: str) -> float:
    """Bytes per second, as a number or as text: see `parse_rate`. Arguments and errors as there."""
    if isinstance(value, str):
        return parse_rate(value, flag)
    return _number(value, flag, "bytes/s above 0", _real(value) > 0)


def _real(value: Any) -> float:
    """The value; NaN if it is no number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        return float(value) if is_number else math.nan
    except OverflowError:
        return math.inf


def _number(value: Any, flag: str, what: str, fits: bool) -> float:
    if not fits:
        raise InputError(f"{flag} must be a number of {what}; got {value!r}. Correct it.")
    return float(value)


def show_count(count: int) -> str:
    """A count as one may type it: 512K."""
    for letter, unit in (("M", 2**20), ("K", 2**10)):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


def show_rate(rate: float) -> str:
    """A rate as one may type it: 50 GB/s."""
    if math.isinf(rate):
        return "unlimited"
    for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= unit:
            return f"{rate / unit:.3g} {letter}B/s"
    return f"{rate:.3g} B/s"


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

"""The values of a config.json, with errors that name them. Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from startrail_jax.errors import InputError, UnsupportedError

TOO_LARGE = 1 << 31
"""No size of a model is so large."""


class ConfigValues:
    """The values of a config.json, or of an object in it.

    A default of an argument is for values that are null or missing.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        """Keeps the values, and the name of the file for messages."""
        self.values = values
        self.name = name

    def number(
        self, key: str, *, default: int | None = None, least: int = 1, most: int = TOO_LARGE - 1
    ) -> int:
        """A whole number from `least` to `most`; the default may be another."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}", value)
        return value

    def real(self, key: str, *, default: float | None = None) -> float:
        """A finite number."""
        value: Any = self.values.get(key)
        value = default if value is None else value
        try:
            if type(value) in (int, float) and math.isfinite(value):
                return float(value)
        except OverflowError:  # Of a whole number that no float holds.
            pass
        raise self.wrong(key, "a finite number", value)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.values.get(key)
        if type(value) is not bool:
            raise self.wrong(key, "true or false", value)
        return value

    def require(self, key: str, supported: Any, *, default: Any = None) -> None:
        """Raises unless something has the only value that is supported."""
        value = self.values.get(key)
        value = default if value is None else value
        if value != supported:
            raise UnsupportedError(
                f"{key} must be {supported!r} in {self.name!r}; got {value!r}, which is not "
                "supported. Use another model."
            )

    def wrong(self, key: str, wanted: str, value: Any) -> InputError:
        """The error of a value that is not what it must be."""
        given = repr(value)
        given = given if len(given) <= 200 else f"{given[:200]}..."
        return InputError(
            f"{key} must be {wanted} in {self.name!r}; got {given}. Download the file again."
        )

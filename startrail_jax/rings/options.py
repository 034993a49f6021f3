"""Options of the communication of an attention. They do not change its result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError
from startrail_jax.values import adopt, is_whole, truth, whole

Side = Literal["query", "kv"]
Backward = Literal["auto", "query", "kv"]
GradientDtype = Literal["float32", "bfloat16"]
Exchange = Literal["auto", "rings", "sparse"]
Balance = Literal["auto", "exchange", "layout"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "backward": get_args(Backward),
    "published": (False, True),
    "gradient_dtype": get_args(GradientDtype),
    "keep_gathered": (False, True),
    "exchange": get_args(Exchange),
    "balance": get_args(Balance),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an attention communicates: the fields of the same names of `Attention`, which documents
    them.

    Raises:
        ValueError: if an option does not exist.
    """

    backward: Backward = "auto"
    published: bool = False
    inner: int = 1
    head_chunks: int = 1
    gradient_dtype: GradientDtype = "float32"
    keep_gathered: bool = False
    exchange: Exchange = "auto"
    balance: Balance = "auto"

    def __post_init__(self) -> None:
        adopt(self, whole, "inner", "head_chunks")
        adopt(self, truth, "published", "keep_gathered")
        for name, values in _CHOICES.items():
            value = getattr(self, name)
            if value not in values:
                raise InputError(
                    f"{name} must be one of {values}; got {name}={value!r}. "
                    f"Leave it out for {values[0]!r}."
                )
        if not is_whole(self.head_chunks, 1):
            raise InputError(
                "head_chunks must be a positive integer; got "
                f"head_chunks={self.head_chunks!r}. Use 1 for all heads at once."
            )

    def check(self, degrees: Degrees) -> None:
        """Raises a ValueError if the degrees do not allow these options."""
        if self.published and degrees.team != degrees.group:
            raise InputError(
                "published=True needs team == group, which are C in the paper; got "
                f"team={degrees.team}, group={degrees.group}. Use Degrees.startrail, or leave "
                "published out."
            )
        if is_whole(self.inner, 1) and degrees.ring % self.inner == 0:
            return
        divisors = [n for n in range(1, degrees.ring + 1) if degrees.ring % n == 0]
        raise InputError(
            "inner must be a positive integer that divides the ring degree; got "
            f"inner={self.inner!r}, ring={degrees.ring}. Use one of {divisors}; 1 is a single ring."
        )


OPTIONS = tuple(field.name for field in dataclasses.fields(Options))

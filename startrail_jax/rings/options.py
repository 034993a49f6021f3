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
    """How an attention communicates.

    Raises:
        ValueError: if an option does not exist.
    """

    backward: Backward = "auto"
    """Side that travels round the ring in the backward pass: "query" (as in the paper), "kv", or
    "auto" for the side with fewer bytes, and for "query" if `published`."""
    published: bool = False
    """Whether keys and outputs are sent as in the StarTrail paper (arXiv 2407.00611, algorithm 2),
    as a baseline for measurements: the team gathers keys and trades places with the group, and a
    reduce_scatter sums outputs in the dtype of the query. Otherwise the group gathers keys, which
    takes fewer bytes, and the owner of the queries sums outputs in float32."""
    inner: int = 1
    """Number of devices in an inner cycle of a double ring (LoongTrain's Double-Ring-Attention),
    which divides the ring degree: keys (or queries) travel round these neighbours while those of
    the next cycle are on their way. It is meant for rings that cross nodes, with inner cycles
    inside a node. 1 is a single ring."""
    head_chunks: int = 1
    """Number of parts in which a device computes the attention of its heads, one after another; it
    divides the key heads of a device. Gathered units, messages of the ring and sums of gradients
    then take memory for two parts at a time, and the same bytes are sent in more messages."""
    gradient_dtype: GradientDtype = "float32"
    """Dtype in which partial gradients travel round the ring and to their owners, which sum them in
    float32: "float32" (exact), or "bfloat16" (half of these bytes; the docs give the error)."""
    keep_gathered: bool = False
    """Whether the gathered units of queries, keys and values are kept from the forward to the
    backward pass, which otherwise gathers them again. Each layer then keeps `team` shares of the
    queries and `group` shares of keys and values in place of one."""
    exchange: Exchange = "auto"
    """Messages between devices: "rings" (the units of the scheme), "sparse" (only the keys that a
    static mask shows to the queries of each device, such as those of a window), or "auto" for the
    choice with fewer bytes. See `Attention.explain`."""
    balance: Balance = "auto"
    """How to balance the work of devices on tokens in contiguous order, where late tokens see more
    keys: "exchange" (the op brings tokens into zigzag order and outputs back, in four permutes of
    half a share), "layout" (the op leaves the work as the layout divides it), or "auto" for the
    exchange where it saves more time than it takes. See `Attention.explain`."""

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

    @property
    def options(self) -> dict[str, Any]:
        """Name -> value of only these options, also for a subclass with more fields."""
        return {name: getattr(self, name) for name in OPTIONS}

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

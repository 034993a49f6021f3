"""What a model leaves to those who run it: it knows neither devices nor memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array


def _unchanged(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions that a model calls where memory and parallelism are decided.

    The defaults run it as it is written: on one device, or on global arrays, where the compiler
    splits the work.
    """

    layer: Callable[[Callable[..., Any]], Callable[..., Any]] = _unchanged
    """Wraps the function (weights, x, ...) -> x of one layer, or -> (x, cache):
    rematerialisation, and the collection of weights that lie split."""
    tokens: Callable[[Callable[..., Array]], Callable[..., Array]] = _unchanged
    """Wraps a function of arrays [B T ...] that treats every token alike: tiling."""
    spread: Callable[[Array], Array] = _unchanged
    """Applied to activations before projections whose outputs are split (Megatron-LM's f)."""
    join: Callable[[Array], Array] = _unchanged
    """Applied to activations after projections whose inputs are split: a sum (Megatron-LM's g)."""

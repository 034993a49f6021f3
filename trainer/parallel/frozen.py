"""Which weights of a model are trained: all, or its adapters if it has some (`models.lora`)."""

from __future__ import annotations

from typing import Any

from flax import nnx

from trainer.parallel.partition import ADAPTERS


def split_frozen(weights: Any) -> tuple[Any, Any]:
    """The weights that are trained, and those that are frozen.

    Args:
        weights: all weights of a model, as flax keeps them, or anything in their places.

    Returns:
        Two parts of the tree, the second of which is None if all are trained.
    """
    if not any(path[-1] in ADAPTERS for path, _ in nnx.to_flat_state(weights)):
        return weights, None
    return nnx.split_state(weights, lambda path, _: path[-1] in ADAPTERS, ...)


def join_frozen(trained: Any, frozen: Any) -> Any:
    """All weights, from what `split_frozen` returns."""
    return trained if frozen is None else nnx.merge_state(trained, frozen)

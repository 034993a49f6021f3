"""How much of a model is not trained, for predictions of time and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from models.hooks import Hooks
from models.periods import PARTS
from trainer.config import TrainConfig
from trainer.objective import Objective
from trainer.parallel.partition import STACKED, TENSOR_DIMS, counts_experts, split_frozen
from trainer.planner.models import FrozenShares, ModelSizes


def abstract_weights(objective: Objective) -> Any:
    """Shapes and types of the weights of a model."""
    model = nnx.eval_shape(
        lambda: objective.make_model(jax.nn.dot_product_attention, Hooks(), nnx.Rngs(0))
    )
    return nnx.state(model)


def with_frozen(sizes: ModelSizes, objective: Objective, config: TrainConfig) -> ModelSizes:
    """The sizes of a model that say how much of it `config.frozen` keeps from training."""
    if not config.frozen:
        return sizes
    weights = abstract_weights(objective)
    trained, frozen = split_frozen(weights, config.frozen)
    objective.check_frozen(frozen)

    def share(count: Callable[[Any], Any]) -> float:
        """The frozen share of weights of which `count` says how much each of their elements is."""

        def amount(tree: Any) -> Any:
            return sum(math.prod(x.shape) * count(path) for path, x in nnx.to_flat_state(tree))

        return amount(frozen) / max(amount(weights), 1)

    experts = sizes.experts

    def active(path: Any) -> Any:
        if path[-1] != "kernel" or path[-2] not in TENSOR_DIMS:
            return 0
        return experts.top_k / experts.count if experts and counts_experts(path[-2]) else 1

    parts = [PARTS[kind.mixer, kind.feed_forward] for kind in sizes.kinds]
    outside = (objective.head, *(("patches",) if sizes.takes_values else ()))
    shares = FrozenShares(
        layers=tuple(share(lambda path, x=x: path[0] == x) for x in parts),
        products=tuple(share(lambda path, x=x: (path[0] == x) * active(path)) for x in parts),
        experts=share(lambda path: len(path) > 1 and counts_experts(path[-2])),
        others=share(lambda path: path[0] not in STACKED),
        embedding=share(lambda path: path[0] == "embedding"),
        head=share(lambda path: path[0] in outside and path[-1] in ("kernel", "embedding")),
        after_layers={*trained} <= {"norm", "head"},
    )
    return replace(sizes, frozen_by_name=shares)

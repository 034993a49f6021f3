"""Experts that rollouts name, in place of the router's choice. Imports no jax.

References:
    Rollout Routing Replay (R3), https://arxiv.org/abs/2510.11370.
"""

from __future__ import annotations

from typing import NamedTuple

from models.config import GPTConfig
from startrail_jax.errors import InputError

EXPERTS = "experts"
"""The key of a record, and the name of the numbers of tokens."""


class Replay(NamedTuple):
    """What the experts of a rollout's tokens are, for a model."""

    layers: int
    """Number of layers of experts."""
    top_k: int
    """Number of experts of a token in each."""
    count: int
    """Number of experts of a layer."""

    @classmethod
    def of_model(cls, model: GPTConfig) -> Replay:
        """Raises `InputError` if the model has no such layers."""
        layers = model.layer_feed_forwards.count("experts")
        if not layers:
            raise InputError(
                "replay_experts needs layers of experts; got "
                f"feed_forwards={' '.join(model.feed_forwards)}. Leave it out."
            )
        return cls(layers, model.experts.top_k, model.experts.count)

    @property
    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """As `RowLoss.arrays`: [layers, k] of the smallest type that holds the number of an
        expert."""
        bits = next(x for x in (8, 16, 32) if self.count <= 2**x)
        return {EXPERTS: (f"uint{bits}", (self.layers, self.top_k))}

"""The sizes of a GPT. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models.config import GPTConfig
from models.parts.gpt import gpt_dims, gpt_weights, recurrences_of
from models.patterns import shortest
from trainer.planner.models import ModelSizes


def sizes_of_gpt(
    model: GPTConfig, *, windows: Sequence[int | None] | None = None, **fields: Any
) -> ModelSizes:
    """The sizes of a GPT.

    Args:
        model: its config.
        windows: the window of each layer; None for the windows of the config.
        fields: other fields of `ModelSizes`, which do not follow from the config.
    """
    has_experts = "experts" in model.layer_feed_forwards
    return ModelSizes(
        weights=gpt_weights(model),
        sizes=gpt_dims(model),
        layers=model.layers,
        mixers=model.mixers,
        recurrences=recurrences_of(model),
        feed_forwards=model.feed_forwards,
        top_k=model.experts.top_k if has_experts else 0,
        outputs=1 if model.scores else model.vocab_size,
        head=model.head,
        windows=shortest(model.layer_windows if windows is None else windows),
        **fields,
    )

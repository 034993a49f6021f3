"""The sizes of a diffusion transformer, for its FLOPs and for plans. Imports no jax."""

from __future__ import annotations

import math
from typing import Any

from models.parts.dit import TIME_CHANNELS, dit_weights
from trainer.dit.config import DiTTrainConfig
from trainer.planner.models import DIT, ModelSizes
from trainer.sizes import common_sizes


def sizes_of(config: DiTTrainConfig) -> ModelSizes:
    """The sizes of the model of a run."""
    model, texts = config.model, config.model.text_dim is not None
    own = {"time": TIME_CHANNELS, "classes": model.classes + 1, "text_dim": model.text_dim or 0}
    tokens = config.data.text_tokens or 0
    weights = dit_weights(text=texts)
    return sizes_of_patches(config, weights=weights, own=own, text_tokens=tokens)


def sizes_of_patches(config: Any, *, own: dict[str, int], **others: Any) -> ModelSizes:
    """The sizes of a model whose tokens are patches.

    Args:
        config: of a run.
        own: sizes of dimensions that other models have not.
        others: fields of its own.
    """
    model = config.model
    outputs = math.prod(model.patch) * model.channels
    sizes = {
        **{"width": model.width, "heads": model.heads, "mlp": model.mlp_width},
        "head_dim": max(model.width // model.heads, 1),
        "values": outputs,
        **{"layer_modulations": 6, "modulations": 2},
    }
    return ModelSizes(
        **{**common_sizes(config), **DIT, **others},
        sizes=sizes | own,
        layers=model.layers,
        outputs=outputs,
        block=config.block_tokens,
    )

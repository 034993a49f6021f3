"""The sizes of a diffusion transformer, for its FLOPs and for plans. Imports no jax."""

from __future__ import annotations

import math
from typing import Any

from trainer.dit.config import DiTTrainConfig
from trainer.planner.models import DIT, ModelSizes
from trainer.sizes import common_sizes


def sizes_of(config: DiTTrainConfig) -> ModelSizes:
    """The sizes of the model of a run."""
    return sizes_of_patches(config, classes=config.model.classes)


def sizes_of_patches(config: Any, **others: Any) -> ModelSizes:
    """The sizes of a model whose tokens are patches; `others` are fields of its own."""
    model = config.model
    patch = math.prod(model.patch)
    return ModelSizes(
        **{**common_sizes(config), **DIT, **others},
        kv_heads=model.heads,
        head_dim=max(model.width // model.heads, 1),
        mlp_matrices=2,
        outputs=patch * model.channels,
        patch=patch,
        block=config.block_tokens,
    )

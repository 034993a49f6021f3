"""The sizes of a Wan, by which its FLOPs are counted and plans are made. Imports no jax."""

from __future__ import annotations

from trainer.dit.sizes import sizes_of_patches
from trainer.dit.wan.config import WanTrainConfig
from trainer.planner.models import ModelSizes


def sizes_of(config: WanTrainConfig) -> ModelSizes:
    """The sizes of the model of a run."""
    model = config.model
    names = ("given_channels", "text_tokens", "text_dim")
    return sizes_of_patches(
        config,
        kind="wan",
        qk_norm=True,
        image_dim=model.image_dim or 0,
        **{name: getattr(model, name) for name in names},
    )

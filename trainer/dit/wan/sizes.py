"""The sizes of a Wan, by which its FLOPs are counted and plans are made. Imports no jax."""

from __future__ import annotations

from models.parts.dit import wan_weights
from trainer.dit.sizes import sizes_of_patches
from trainer.dit.wan.config import WanTrainConfig
from trainer.planner.models import IMAGE_TOKENS, ModelSizes


def sizes_of(config: WanTrainConfig) -> ModelSizes:
    """The sizes of the model of a run."""
    model = config.model
    own = dict(zip(("frames", "rows", "columns"), model.patch, strict=True))
    own |= {"in_channels": model.channels + model.given_channels, "time": model.time_channels}
    own |= {"text_dim": model.text_dim, "image_dim": model.image_dim or 0}
    return sizes_of_patches(
        config,
        kind="wan",
        weights=wan_weights(image=model.image_dim is not None, text_norm=model.text_norm),
        own=own,
        text_tokens=model.text_tokens,
        image_tokens=IMAGE_TOKENS if model.image_dim else 0,
    )

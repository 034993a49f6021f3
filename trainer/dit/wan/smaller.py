"""A smaller run of a Wan, and random data for it. Imports no jax at first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from trainer.dit.smaller import smaller_denoiser
from trainer.dit.wan.config import WanTrainConfig
from trainer.task import Smaller


def smaller_wan(config: WanTrainConfig, to: Smaller) -> WanTrainConfig:
    """`Task.smaller`."""
    found = smaller_denoiser(config, to)
    if to.channels is None:
        return found
    few = {"text_dim": 32, "text_tokens": 8, "time_channels": 32}
    sizes = {name: min(getattr(config.model, name), most) for name, most in few.items()}
    image = config.model.image_dim
    sizes["image_dim"] = image and min(image, 32)
    lora = found.lora
    if lora.rank is not None:
        rank = min(lora.rank, 8)
        lora = replace(lora, rank=rank, alpha=rank * lora.scale)
    return replace(found, model=replace(found.model, **sizes), lora=lora)


def drawn_clips(config: WanTrainConfig, layout: Any) -> Any:
    """`Task.drawn_data`."""
    from trainer.data.dataset import Dataset, Drawn
    from trainer.dit.wan.batches import Clip, clip_batch
    from trainer.planner.models import IMAGE_TOKENS

    model, size = config.model, (*config.size, config.model.channels)

    def normal(rng: np.random.Generator, *shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    def draw(rng: np.random.Generator) -> Clip:
        return Clip(
            normal(rng, *size),
            normal(rng, int(rng.integers(1, model.text_tokens + 1)), model.text_dim),
            normal(rng, *size) if model.first_frame == "channels" else None,
            None if model.image_dim is None else normal(rng, IMAGE_TOKENS, model.image_dim),
        )

    empty = normal(np.random.default_rng(config.seed), 1, model.text_dim)
    return Dataset(
        train=Drawn(make=draw, seed=config.seed),
        held_out=Drawn(make=draw, seed=config.seed, count=0),
        collate=partial(clip_batch, empty=empty, config=config, layout=layout),
        description="random videos",
        loss_unit="",
    )

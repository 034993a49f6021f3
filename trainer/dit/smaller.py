"""A smaller run of a diffusion transformer, and random data for it. Imports no jax at first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from trainer.dit.config import DenoiserTrainConfig, DiTTrainConfig
from trainer.task import Smaller

_DIM = 16
"""Channels of a head, where they need not be those of the run."""
_TEXT_DIM, _TEXT_TOKENS = 32, 8
"""Channels and number of the tokens of a text, at most, likewise."""


def smaller_denoiser(config: Any, to: Smaller) -> Any:
    """`Task.smaller`, for any diffusion transformer."""
    config = config.of_size(config.size)
    model = replace(config.model, layers=min(config.model.layers, 2))
    if to.channels is not None:
        dim = model.head_dim if to.head_dim else min(model.head_dim, _DIM)
        mlp = min(model.mlp_width, to.channels)
        model = replace(model, width=model.heads * dim, mlp_width=mlp)
    size, frames = _fewer_tokens(config, to.tokens)
    return replace(config, model=model, size=size, block_frames=frames)


def smaller_dit(config: DiTTrainConfig, to: Smaller) -> DiTTrainConfig:
    """`Task.smaller`, for a DiT."""
    found, text_dim = smaller_denoiser(config, to), config.model.text_dim
    if to.channels is None or text_dim is None:
        return found
    tokens = min(config.data.text_tokens or _TEXT_TOKENS, _TEXT_TOKENS)
    model = replace(found.model, text_dim=min(text_dim, _TEXT_DIM))
    return replace(found, model=model, data=replace(found.data, text_tokens=tokens))


def _fewer_tokens(
    config: DenoiserTrainConfig, tokens: int | None
) -> tuple[tuple[int, int, int], int | None]:
    """A size of at most so many tokens, or one more halving of a side, and frames of a block."""
    patch, frames = config.model.patch, config.block_frames
    grid = [n // p for n, p in zip(config.size, patch, strict=True)]
    while tokens is not None and np.prod(grid) > tokens and max(grid) > 1:
        side = grid.index(max(grid))
        grid[side] = (grid[side] + 1) // 2
    if frames is not None and grid[0] * patch[0] < config.size[0]:
        frames = min(frames, max(grid[0] // 2, 1) * patch[0])
    size = tuple(n * p for n, p in zip(grid, patch, strict=True))
    return (size[0], size[1], size[2]), frames


def drawn_images(config: DiTTrainConfig, layout: Any) -> Any:
    """`Task.drawn_data`."""
    from trainer.data.dataset import Dataset, Drawn
    from trainer.dit.batches import image_batch
    from trainer.dit.images import Example

    shape, classes = (*config.size, config.model.channels), config.model.classes
    text_dim, text_tokens = config.model.text_dim, config.data.text_tokens

    def draw(rng: np.random.Generator) -> Example:
        label, text = int(rng.integers(classes)) if classes else None, None
        latent = rng.standard_normal(shape).astype(np.float32)
        if text_dim is not None and text_tokens is not None:
            count = int(rng.integers(text_tokens + 1))
            text = rng.standard_normal((count, text_dim)).astype(np.float32)
        return Example(latent, label, text)

    return Dataset(
        train=Drawn(make=draw, seed=config.seed),
        held_out=Drawn(make=draw, seed=config.seed, count=0),
        collate=partial(image_batch, config=config, layout=layout),
        description="random images",
        loss_unit="",
    )

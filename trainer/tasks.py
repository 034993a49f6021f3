"""The data of a run, whatever it trains: examples by number, and how batches are made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from startrail_jax.errors import InputError
from startrail_jax.layout import Layout
from trainer.config import TrainConfig
from trainer.data.batches import Source
from trainer.dit.config import DiTTrainConfig
from trainer.gpt.config import GPTTrainConfig
from trainer.objective import Objective
from trainer.run.settings import load_config, read_kind


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run reads."""

    train: Source
    held_out: Source
    collate: Callable[[list[Any], list[int]], Any]
    """(examples, their numbers) -> rows of a batch, on the host, in layout order."""
    description: str
    """One line, for the log."""
    loss_unit: str
    """What the loss is measured in."""
    corpus: Any = None
    """Of a language model: its text, to be continued."""


def open_data(config: TrainConfig, layout: Layout) -> Data:
    """Opens what a run trains on.

    Args:
        config: of the run.
        layout: the order of the tokens.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it does not fit the config.
    """
    if isinstance(config, DiTTrainConfig):
        return _open_images(config, layout)
    assert isinstance(config, GPTTrainConfig)
    return _open_text(config, layout)


def _open_text(config: GPTTrainConfig, layout: Layout) -> Data:
    from trainer.gpt.batches import (
        Sequences,
        next_token_batch,
    )
    from trainer.gpt.corpus import open_corpus

    corpus = open_corpus(config.data, vocab_size=config.model.vocab_size)
    end = corpus.end_of_document if config.data.mask_documents else None

    def collate(windows: list[Any], numbers: list[int]) -> Any:
        return next_token_batch(np.stack(windows), layout=layout, end_of_document=end)

    return Data(
        train=Sequences(corpus.train, config.seq_len),
        held_out=Sequences(corpus.held_out, config.seq_len),
        collate=collate,
        description=corpus.description,
        loss_unit=f"nats/{corpus.unit}",
        corpus=corpus,
    )


def _open_images(config: DiTTrainConfig, layout: Layout) -> Data:
    from trainer.dit.images import open_images
    from trainer.dit.objective import image_batch

    model = config.model
    images = open_images(
        config.data,
        size=config.size,
        channels=model.channels,
        classes=model.classes,
        caption_length=model.caption_length,
    )
    return Data(
        train=images.train,
        held_out=images.held_out,
        collate=partial(image_batch, config=config, layout=layout),
        description=images.description,
        loss_unit="mean squared error",
    )


def make_objective(config: TrainConfig) -> Objective:
    """The objective of a run."""
    # Imported where needed: a language model needs no diffusion.
    if isinstance(config, DiTTrainConfig):
        from trainer.dit.objective import Denoising

        return Denoising(config)
    assert isinstance(config, GPTTrainConfig)
    from trainer.gpt.objective import NextToken

    return NextToken(config)


def load_train_config(path: Path) -> TrainConfig:
    """Reads the config of a run, whatever it trains.

    Raises:
        ValueError: if the file is not such a config.
    """
    types = {x.kind: x for x in (GPTTrainConfig, DiTTrainConfig)}
    kind = read_kind(path)
    if kind not in types:
        raise InputError(
            f"{path} must hold the config of a run. kind must be {' or '.join(types)}; got "
            f"{kind!r}. Correct the file."
        )
    return load_config(types[kind], path)

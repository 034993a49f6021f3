"""What a pretrained model decides of the settings of a run. Imports no jax: `--help` is fast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.data.files import TOKEN_KINDS, kind_of_data
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.pretrained.families import read_description

TOKENIZER = "tokenizer.json"


def with_model_of(folder: Path, config: GPTTrainConfig) -> GPTTrainConfig:
    """A config with the model of a folder.

    Raises:
        ValueError: if the folder cannot be read.
        NotImplementedError: if its model is not supported.
    """
    return replace(config, model=read_description(folder).model, init_from=folder)


def with_tokenizer(config: Any) -> Any:
    """A config with the tokenizer of its pretrained model, if text needs one and none is given."""
    if not isinstance(config, GPTTrainConfig) or config.init_from is None:
        return config
    path = config.init_from / TOKENIZER
    data = config.data
    if data.tokenizer is not None or not path.is_file():
        return config
    if data.path is not None and kind_of_data(data.path, "data.path") in TOKEN_KINDS:
        return config
    return replace(config, data=replace(data, tokenizer=path))

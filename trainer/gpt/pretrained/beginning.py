"""Which token a pretrained model has always seen in front of a text. Imports no jax."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError
from trainer.data.opening import read_object
from trainer.gpt.config import GPTTrainConfig
from trainer.run.folder import CHECKPOINTS_FOLDER, CONFIG_FILE

TOKENIZER_CONFIG = "tokenizer_config.json"


def with_beginning(
    config: GPTTrainConfig, *, given: bool, inherited: bool = False
) -> GPTTrainConfig:
    """A config that begins documents as its pretrained model has always seen them.

    A run that goes on keeps what it began with, so that its data stay the same: runs of earlier
    versions have no such token.

    Args:
        config: config of a run.
        given: whether the user has said how documents begin.
        inherited: whether the tokenizer is that of the config.json of another run. How documents
            begin is then inherited too: the two belong together.

    Raises:
        ValueError: if the files of the tokenizer cannot be read.
    """
    data = config.data
    if config.init_from is None or given:
        return config
    if data.tokenizer is None:
        return replace(config, data=replace(data, begin_of_document=None))
    begun = any((config.run_dir / CHECKPOINTS_FOLDER).glob("*"))
    if begun and (saved := _data_of(config.run_dir / CONFIG_FILE)) is not None:
        begin = saved.get("begin_of_document")
    elif inherited:
        return config
    elif data.tokenizer.is_file():
        begin = beginning_of(data.tokenizer)
    else:  # Another place says that it is missing.
        return config
    return replace(config, data=replace(data, begin_of_document=begin))


def beginning_of(path: Path) -> int | None:
    """The token that a tokenizer puts in front of every text; None if it puts none.

    `add_bos_token` in tokenizer_config.json decides, as in transformers; without it, the
    post-processor in tokenizer.json does.

    Args:
        path: the tokenizer.json.

    Raises:
        ImportError: if the package that reads it is missing.
        ValueError: if a file cannot be read, or the token is none of the vocabulary's.
    """
    from trainer.gpt.tokenizer import FileTokenizer

    # Neither the token that ends a document nor the size of the vocabulary matters here.
    tokenizer = FileTokenizer(path, end_of_document=0, vocab_size=1)
    beside = path.with_name(TOKENIZER_CONFIG)
    values = read_object(beside) if beside.is_file() else {}
    asked, name = values.get("add_bos_token"), values.get("bos_token")
    name = name.get("content") if isinstance(name, dict) else name
    if asked is True and name is not None:
        found = tokenizer.id_of(name) if isinstance(name, str) else None
        if found is None:
            raise InputError(
                "A tokenizer that asks for a token in front of every text must have it; got "
                f"add_bos_token with bos_token={name!r} in {str(beside)!r}, which {str(path)!r} "
                "lacks. Copy both from one model, or give the id: --data.begin-of-document."
            )
        return found
    before = tokenizer.tokens_before()
    return before[0] if asked is not False and len(before) == 1 else None


def _data_of(path: Path) -> dict[str, Any] | None:
    """The settings of the data in a config.json; None if it is missing or damaged."""
    try:
        data = json.loads(path.read_text())["data"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return data if isinstance(data, dict) else None

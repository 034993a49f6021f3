"""Which tokens a pretrained model has always seen around a text. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError
from trainer.data.opening import read_object
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.pretrained.config_json import CONFIG
from trainer.gpt.pretrained.defaults import GENERATION
from trainer.run.settings import CHECKPOINTS_FOLDER, CONFIG_FILE


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
    if config.init_from is None or given:
        return config
    tokenizer = config.data.tokenizer
    if tokenizer is None:
        return replace(config, data=replace(config.data, begin_of_document=None))

    def beginning() -> int | None:
        from trainer.gpt.tokenizer import beginning_of  # Not above: `--help` must be fast.

        return beginning_of(tokenizer)

    return _with_token(config, "begin_of_document", inherited, beginning)


def with_ending(config: GPTTrainConfig, *, given: bool, inherited: bool = False) -> GPTTrainConfig:
    """A config that ends completions as its pretrained model ends what it says.

    Elsewhere the model stops at that token only. A run that goes on keeps what it began with: in
    runs of earlier versions it is the token with one of the usual names.

    Args:
        config: config of a run.
        given: whether the user has said what ends a document.
        inherited: whether what ends one is that of the config.json of another run.

    Raises:
        ValueError: if the files of the model or of the tokenizer cannot be read.
    """
    folder, tokenizer = config.init_from, config.data.tokenizer
    if folder is None or config.data.loss_on != "completion" or given:
        return config

    def ending() -> int | None:
        if tokenizer is not None:
            return ending_of(tokenizer)
        # The config.json of a model of bytes may name an id that is beyond them.
        return next((x for x in eos_of(folder) if x < config.model.vocab_size), None)

    return _with_token(config, "end_of_document", inherited, ending)


def _with_token(
    config: GPTTrainConfig, name: str, inherited: bool, find: Callable[[], int | None]
) -> GPTTrainConfig:
    """A config with a token of its data: that of the run that goes on, or what `find` finds."""
    data = config.data
    if (saved := _begun_with(config)) is not None:
        token = saved.get(name)
    # Another place says that a tokenizer is missing.
    elif inherited or (data.tokenizer is not None and not data.tokenizer.is_file()):
        return config
    else:
        token = find()
    return replace(config, data=replace(data, **{name: token}))


def ending_of(path: Path) -> int | None:
    """The token with which the model of a tokenizer ends what it says; None if no file names it.

    It is the `eos_token` of the tokenizer; without one, the first of `eos_of`.

    Args:
        path: the tokenizer.json, beside which the other files lie.

    Raises:
        ValueError: if a file cannot be read.
    """
    from trainer.gpt.tokenizer import load_tokenizer

    found: int | None = load_tokenizer(path).eos_token_id
    return next(iter(eos_of(path.parent)), None) if found is None else found


def eos_of(folder: Path) -> tuple[int, ...]:
    """The tokens at which a model stops elsewhere; none if no file of its folder names one.

    As in transformers, generation_config.json comes before config.json.

    Raises:
        ValueError: if a file cannot be read, or names no ids.
    """
    for path in (folder / GENERATION, folder / CONFIG):
        found: Any = read_object(path).get("eos_token_id") if path.is_file() else None
        ids: list[Any] = found if isinstance(found, list) else [found]
        if ids in ([], [None]):
            continue
        if not all(type(x) is int for x in ids):
            raise InputError(
                "eos_token_id of a model must be an id or a list of ids; got "
                f"{found!r} in {str(path)!r}. Download the file again."
            )
        # Some files write -1 for none.
        return tuple(x for x in ids if x >= 0)
    return ()


def _begun_with(config: GPTTrainConfig) -> dict[str, Any] | None:
    """The settings of the data of a run that goes on; None for a new run."""
    begun = any((config.run_dir / CHECKPOINTS_FOLDER).glob("*"))
    return _data_of(config.run_dir / CONFIG_FILE) if begun else None


def _data_of(path: Path) -> dict[str, Any] | None:
    """The settings of the data in a config.json; None if it is missing or damaged."""
    try:
        data = json.loads(path.read_text())["data"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return data if isinstance(data, dict) else None

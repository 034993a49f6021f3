"""What a pretrained model decides of the settings of a run. Imports no jax: `--help` is fast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from startrail_jax.errors import InputError
from trainer.config import OptimizerConfig
from trainer.gpt.config import TOKENIZER, GPTTrainConfig
from trainer.gpt.pretrained.config_json import read_description
from trainer.run.folder import KEPT_FOLDER
from trainer.run.settings import CHECKPOINTS_FOLDER
from trainer.sums import SUMS_FILE, check_sums

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""Files that say how text becomes tokens."""
IDS_OF_BYTES = range(256, 513)
"""Sizes of the vocabulary of a model whose tokens are bytes: few others may be among them."""


def pretrained(folder: Path) -> GPTTrainConfig:
    """Training that goes on from a pretrained model: the default of `train.py --init-from FOLDER`.

    Command: `python train.py --init-from Qwen3-8B --data.path FOLDER`. It is not in the table of
    recipes, since the model is that of the folder. The settings save memory and change no loss.

    Args:
        folder: a model in the format of Hugging Face.
    """
    described = read_description(folder)
    return GPTTrainConfig(
        model=described.model,
        optimizer=OptimizerConfig(learning_rate=1e-5),
        init_from=folder,
        steps=1000,
        batch_size=8,
        seq_len=min(described.length, 4096),
        zero=3,
        remat="attention_saved",
        run_dir=Path("runs") / folder.resolve().name,
    )


def with_model_of(folder: Path, config: GPTTrainConfig) -> GPTTrainConfig:
    """A config with the model of a folder, and without the tokenizer of another model.

    The token in front of documents goes with the tokenizer, and so does the one that ends
    completions.

    Raises:
        ValueError: if the folder cannot be read.
        NotImplementedError: if its model is not supported.
    """
    before, data = config.init_from, config.data
    if before is None or before.resolve() != folder.resolve():
        # Files of tokens name no tokenizer: what ends their documents stays.
        end = None if data.loss_on == "completion" else data.end_of_document
        data = replace(data, tokenizer=None, begin_of_document=None, end_of_document=end)
    return replace(config, model=read_description(folder).model, init_from=folder, data=data)


def with_tokenizer(config: GPTTrainConfig, *, given: bool = True) -> GPTTrainConfig:
    """A config with the tokenizer of its pretrained model, if text needs one and none is given.

    Args:
        config: config of a run.
        given: whether the user has chosen the tokenizer that it has. What comes from the config of
            an earlier run is left out for data that are tokens, if it is that of the model.

    Raises:
        ValueError: if the model has no tokenizer that is read, and its tokens are no bytes.
    """
    if config.init_from is None:
        return config
    from trainer.data.remote import holds_tokens

    data, path = config.data, config.init_from / TOKENIZER
    if data.path is not None and holds_tokens(data.path, "data.path"):
        inherited = not given and data.tokenizer == path
        return replace(config, data=replace(data, tokenizer=None)) if inherited else config
    if data.tokenizer is not None:
        return config
    if path.is_file():
        return replace(config, data=replace(data, tokenizer=path))
    # An import reads no text, and a run that goes on keeps what it began with.
    if config.steps and not any((config.run_dir / CHECKPOINTS_FOLDER).glob("*")):
        require_bytes(config.init_from, config.model.vocab_size, "--data.tokenizer")
    return config


def kept_folder(run_dir: Path) -> Path:
    """What a run keeps of the model with which it began, after a look at the checksums.

    Raises:
        ValueError: if a file is damaged.
    """
    folder = run_dir / KEPT_FOLDER
    if (folder / SUMS_FILE).is_file():
        check_sums(
            folder,
            "Copy the file again from the model of --init-from, or from a copy of the run; if it "
            f"was changed on purpose, delete {folder / SUMS_FILE}.",
        )
    return folder


def kept_tokenizer(path: Path | None, config: GPTTrainConfig, run_dir: Path) -> Path | None:
    """What a run keeps of a tokenizer that is gone with the folder of its pretrained model.

    Args:
        path: the tokenizer.json that is wanted. Of one that is not the model's, nothing is kept.
        config: config of the run.
        run_dir: folder of the run.

    Returns:
        The copy; None if there is none, or none is needed.
    """
    copy = run_dir / KEPT_FOLDER / TOKENIZER
    if path is None or config.init_from is None or path != config.init_from / TOKENIZER:
        return None
    if path.is_file() or not copy.is_file():
        return None
    return kept_folder(run_dir) / TOKENIZER


def require_bytes(folder: Path, vocab_size: int, flag: str) -> None:
    """Raises unless the tokens of a pretrained model can be bytes.

    Args:
        folder: the folder of the model, or what a run keeps of it.
        vocab_size: number of token ids that the model knows.
        flag: what gives another tokenizer.

    Raises:
        ValueError: if it has files of a tokenizer, or another number of ids than bytes have.
    """
    files = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if files or vocab_size not in IDS_OF_BYTES:
        raise InputError(
            f"Text for a pretrained model must become tokens by its {TOKENIZER}; got none, for "
            f"{str(folder)!r} with {', '.join(files) or 'no file of a tokenizer'} and "
            f"vocab_size={vocab_size}: its tokens are no bytes. Give {flag}, or write "
            f"{TOKENIZER} with transformers' save_pretrained."
        )

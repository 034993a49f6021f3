"""Settings of a run that follow from a pretrained model: sizes, tokenizer, tokens around a text.

Imports neither jax nor, above its functions, numpy: `--help` is fast.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError
from trainer.config import OptimizerConfig
from trainer.data.opening import read_object
from trainer.gpt.chat.forms import has_answers, has_examples, has_rollouts
from trainer.gpt.config import TOKENIZER, GPTTrainConfig, TextSampleConfig
from trainer.gpt.pretrained.values import CONFIG
from trainer.run.folder import KEPT_FOLDER
from trainer.run.settings import CHECKPOINTS_FOLDER, CONFIG_FILE
from trainer.sums import SUMS_FILE, check_sums

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""Files that say how text becomes tokens."""
TEMPLATES_FOLDER = "additional_chat_templates"
"""Folder of chat templates with names, such as one for tools."""
IDS_OF_BYTES = range(256, 513)
"""Sizes of the vocabulary of a model whose tokens are bytes: it may have a few tokens beside
them."""


def files_of_tokenizer(folder: Path) -> dict[str, Path]:
    """The files in a folder that say how text becomes tokens, by their path in it."""
    templates = sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))
    names = (*TOKENIZER_FILES, *(f"{TEMPLATES_FOLDER}/{path.name}" for path in templates))
    return {name: folder / name for name in names if (folder / name).is_file()}


def pretrained(folder: Path) -> GPTTrainConfig:
    """Training that goes on from a pretrained model: the default of `train.py --init-from FOLDER`.
    It is not in the table of recipes, since the folder gives the model. The settings save memory
    and change no loss."""
    from trainer.gpt.pretrained.config_json import read_description

    described = read_description(folder)
    return GPTTrainConfig(
        model=described.model,
        objective="reward" if described.model.scores else "next_token",
        optimizer=OptimizerConfig(learning_rate=1e-5),
        init_from=folder,
        steps=1000,
        batch_size=8,
        seq_len=min(described.length, 4096),
        zero=3,
        run_dir=Path("runs") / folder.resolve().name,
    )


def with_model_of(folder: Path, config: GPTTrainConfig) -> GPTTrainConfig:
    """A config with the model of a folder, and without the tokenizer of another model, the token in
    front of documents and the one that ends completions."""
    from trainer.gpt.pretrained.config_json import read_description

    before, data = config.init_from, config.data
    if before is None or before.resolve() != folder.resolve():
        # Files of tokens name no tokenizer: what ends their documents stays.
        end = None if has_examples(data) else data.end_of_document
        data = replace(data, tokenizer=None, begin_of_document=None, end_of_document=end)
    model, objective = read_description(folder).model, config.objective
    if model.scores:
        config, objective = with_scores(config), "reward"
    elif objective == "reward":
        model = replace(model, scores=True)
    return replace(config, model=model, objective=objective, init_from=folder, data=data)


def with_scores(config: GPTTrainConfig) -> GPTTrainConfig:
    """A config of a reward model, which continues no texts."""
    return replace(
        config,
        objective="reward",
        model=replace(config.model, scores=True),
        sample=TextSampleConfig(),
    )


def with_tokenizer(config: GPTTrainConfig, *, by_user: bool = True) -> GPTTrainConfig:
    """A config with the tokenizer of its pretrained model, if text needs one and none is given. If
    the data are tokens already, a tokenizer that an earlier run, and not the user, has chosen is
    left out."""
    if config.init_from is None:
        return config
    from trainer.data.files import holds_tokens

    data, path = config.data, config.init_from / TOKENIZER
    if data.path and holds_tokens(data.path[0], "data.path"):
        inherited = not by_user and data.tokenizer == path
        return replace(config, data=replace(data, tokenizer=None)) if inherited else config
    if data.tokenizer is not None:
        return config
    if path.is_file():
        return replace(config, data=replace(data, tokenizer=path))
    if has_rollouts(config):  # They have no text.
        return config
    # An import reads no text, and a run that goes on keeps what it began with.
    if config.steps and not any((config.run_dir / CHECKPOINTS_FOLDER).glob("*")):
        require_bytes(config.init_from, config.model.vocab_size, "--data.tokenizer")
    return config


def with_vocabulary(config: GPTTrainConfig) -> GPTTrainConfig:
    """A config with the vocabulary size of its tokenizer or, in a run that goes on, the former
    size. A pretrained model keeps its own."""
    path, former = config.data.tokenizer, config.run_dir / CONFIG_FILE
    if config.init_from is not None or path is None or not path.is_file():
        return config
    if former.is_file():
        size = read_object(former)["model"].get("vocab_size", config.model.vocab_size)
    else:
        from trainer.gpt.tokenizer import text_tokenizer

        size = text_tokenizer(config.data, vocab_size=1 << 31).num_ids
    return replace(config, model=replace(config.model, vocab_size=size))


def with_beginning(
    config: GPTTrainConfig, *, by_user: bool, inherited: bool = False
) -> GPTTrainConfig:
    """A config that begins documents as its pretrained model has always seen them, unless the user
    has set the token (`by_user`). An inherited tokenizer comes with an inherited token: the two
    belong together."""
    if config.init_from is None or by_user:
        return config
    tokenizer = config.data.tokenizer
    if tokenizer is not None and (inherited or not tokenizer.is_file()):
        return config  # Another place says that a tokenizer is missing.
    from trainer.gpt.tokenizer import beginning_of  # Not above: `--help` must be fast.

    token = None if tokenizer is None else beginning_of(tokenizer)
    return replace(config, data=replace(config.data, begin_of_document=token))


def with_ending(
    config: GPTTrainConfig, *, by_user: bool, inherited: bool = False
) -> GPTTrainConfig:
    """A config that ends completions with the token with which its pretrained model ends answers,
    unless the token at the end of documents is given or inherited. Other programs stop the model at
    that token only."""
    folder, tokenizer = config.init_from, config.data.tokenizer
    if folder is None or by_user or inherited or not has_answers(config):
        return config
    if tokenizer is None:
        # The config.json of a model of bytes may name an id that is beyond them.
        token = next((x for x in eos_of(folder) if x < config.model.vocab_size), None)
    elif tokenizer.is_file():
        token = ending_of(tokenizer)
    else:
        return config
    return replace(config, data=replace(config.data, end_of_document=token))


def ending_of(path: Path) -> int | None:
    """The token with which the model of a tokenizer ends its answers: the `eos_token` of the
    tokenizer, or else the first of `eos_of`."""
    from trainer.gpt.tokenizer import load_tokenizer

    token: int | None = load_tokenizer(path).eos_token_id
    return next(iter(eos_of(path.parent)), None) if token is None else token


def eos_of(folder: Path) -> tuple[int, ...]:
    """The tokens at which other programs stop a model; none if no file of its folder names one. As
    in transformers, generation_config.json comes before config.json."""
    for path in (folder / GENERATION, folder / CONFIG):
        value: Any = read_object(path).get("eos_token_id") if path.is_file() else None
        ids: list[Any] = value if isinstance(value, list) else [value]
        if ids in ([], [None]):
            continue
        if not all(type(x) is int for x in ids):
            raise InputError(
                "eos_token_id of a model must be an id or a list of ids; got "
                f"{value!r} in {str(path)!r}. Download the file again."
            )
        # Some files write -1 for none.
        return tuple(x for x in ids if x >= 0)
    return ()


def kept_folder(run_dir: Path) -> Path:
    """The folder with a run's copies of files of its pretrained model; checks their checksums."""
    folder = run_dir / KEPT_FOLDER
    if (folder / SUMS_FILE).is_file():
        check_sums(
            folder,
            "Copy the file again from the model of --init-from, or from a copy of the run; if it "
            f"was changed on purpose, delete {folder / SUMS_FILE}.",
        )
    return folder


def kept_tokenizer(path: Path | None, config: GPTTrainConfig, run_dir: Path) -> Path | None:
    """The run's copy of `path`, if `path` is its pretrained model's tokenizer.json and is gone."""
    copy = run_dir / KEPT_FOLDER / TOKENIZER
    if path is None or config.init_from is None or path != config.init_from / TOKENIZER:
        return None
    if path.is_file() or not copy.is_file():
        return None
    return kept_folder(run_dir) / TOKENIZER


def require_bytes(folder: Path, vocab_size: int, flag: str) -> None:
    """Raises unless the tokens of a pretrained model can be bytes."""
    files = files_of_tokenizer(folder)
    if files or vocab_size not in IDS_OF_BYTES:
        raise InputError(
            f"Text for a pretrained model must become tokens by its {TOKENIZER}; got none, for "
            f"{str(folder)!r} with {', '.join(files) or 'no file of a tokenizer'} and "
            f"vocab_size={vocab_size}: its tokens are no bytes. Give {flag}, or write "
            f"{TOKENIZER} with transformers' save_pretrained."
        )

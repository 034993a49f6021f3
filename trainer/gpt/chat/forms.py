"""Forms in which files hold conversations, as messages with role and content.

References:
    ShareGPT: objects with `from` and `value`, as https://github.com/lm-sys/FastChat reads them;
    Alpaca: `instruction`, `input` and `output`, https://github.com/tatsu-lab/stanford_alpaca.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError
from trainer.gpt.config import DataConfig, GPTTrainConfig

ALPACA = ("instruction", "input", "output", "system")
"""What a record of an instruction may hold; the first and the third are needed."""
SHAREGPT = ("from", "value")
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""Who speaks in ShareGPT -> role of the message."""
CALL = "function_call"
"""Who speaks there if the assistant calls functions: the value is JSON with their arguments."""


def has_examples(config: DataConfig) -> bool:
    """Whether data are conversations or completions. With a loss on all tokens, the first record of
    each path says so, if it has no text."""
    if config.loss != "all" or not config.path:
        return config.loss in ("answers", "last")
    of_paths = {path: _are_examples(path, config) for path in config.path}
    first, *others = of_paths
    if differing := [x for x in others if of_paths[x] != of_paths[first]]:
        texts, talks = sorted((first, differing[0]), key=of_paths.__getitem__)
        raise InputError(
            "All of data.path must be text, or all conversations and completions; got text in "
            f"{str(texts)!r} and none in {str(talks)!r}. Train on one of them, or turn the text "
            "into completions."
        )
    return of_paths[first]


def has_answers(config: GPTTrainConfig) -> bool:
    """Whether data are conversations, completions, or pairs of answers."""
    loss = config.row_loss
    return has_examples(config.data) if loss is None else loss.form == "pairs"


def has_rollouts(config: GPTTrainConfig) -> bool:
    """Whether data are rollouts: for an objective that learns from these, in a folder of which they
    are yet to appear, or as the first record of the first path has tokens, and no text."""
    if config.row_loss is not None or config.data.follow:
        return True
    data = config.data
    if data.loss is not None or not data.path:
        return False
    fields = _first_record(data.path[0]) or {}
    return "tokens" in fields and data.text_key not in fields


def _are_examples(path: Path, config: DataConfig) -> bool:
    fields = _first_record(path)
    return fields is not None and config.text_key not in fields


def _first_record(path: Path) -> dict[str, Any] | None:
    """What the first record of a path holds; None of files that hold no records."""
    from trainer.data.documents import read_records  # Not above: `--help` must be fast.
    from trainer.data.files import RECORD_KINDS, find_files

    files = find_files(path, "data.path")
    if files.kind not in RECORD_KINDS:
        return None
    records: Any = read_records(files)
    with closing(records):
        first = next(records, None)
    return None if first is None else first.fields


def is_alpaca(fields: Mapping[str, Any]) -> bool:
    """Whether a record is an instruction with its output."""
    return {"instruction", "output"} <= fields.keys()


def of_alpaca(fields: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """The messages of an instruction but that of the system; its input stands in a line below."""
    texts = {name: fields.get(name) or "" for name in ALPACA}
    wrong = [name for name, text in texts.items() if not isinstance(text, str)]
    if wrong:
        raise InputError(
            f"{', '.join(ALPACA)} of a record must be texts; got {wrong[0]}="
            f"{texts[wrong[0]]!r} in {place!r}. Mend or remove the line."
        )
    asked = [texts["instruction"], texts["input"]]
    return [
        {"role": "user", "content": "\n".join(filter(None, asked))},
        {"role": "assistant", "content": texts["output"]},
    ]


def of_sharegpt(messages: Any, place: str) -> Any:
    """The messages of a conversation in the form of ShareGPT; all others as they are."""
    is_list = isinstance(messages, list) and all(isinstance(x, dict) for x in messages)
    if not is_list or not all({*SHAREGPT} <= x.keys() and "role" not in x for x in messages):
        return messages
    return [_message(x, place) for x in messages]


def _message(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    speaker, value = (given[name] for name in SHAREGPT)
    others = {name: x for name, x in given.items() if name not in SHAREGPT}
    if speaker == CALL:
        return {"role": "assistant", "tool_calls": _calls(value, place), **others}
    # Of another speaker, the chat template may know what to do.
    return {"role": ROLES.get(speaker, speaker), "content": value, **others}


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(x, dict) and isinstance(x.get("name"), str) for x in calls):
        raise InputError(
            f"The value of a {CALL} must be JSON of a call, {{'name': ..., 'arguments': ...}}, or "
            f"of a list of calls; got {value!r} in {place!r}. Mend or remove the line."
        )
    return [{"type": "function", "function": call} for call in calls]

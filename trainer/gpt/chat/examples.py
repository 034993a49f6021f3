"""The examples in JSONL files and tables: a conversation, or a prompt and its completion, in each
line or row."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from startrail_jax.errors import InputError
from trainer.data.documents import Document, Record, check_unicode, read_records
from trainer.data.files import Files, Kind
from trainer.gpt.chat.forms import ALPACA, is_alpaca, of_alpaca, of_sharegpt
from trainer.gpt.chat.template import (
    CONFIG_FILE,
    RESERVED,
    TEMPLATE_FILE,
    ChatTemplate,
    Conversation,
    Messages,
)
from trainer.printable import shortened

MESSAGES = "messages"
OTHERS = ("system", "tools", "documents", "chat_template_kwargs")
"""What a record of a conversation may hold beside its messages."""
KINDS: dict[str, type] = {
    **{MESSAGES: list, "system": str, "tools": list, "documents": list},
    "chat_template_kwargs": dict,
}
NAMES_OF_KINDS = {
    list: "a list of JSON, or a text that holds one",
    dict: "an object of JSON, or a text that holds one",
    str: "a text",
}
COMPLETION = ("prompt", "completion")
"""What any other record holds."""
WEIGHTS = ("train", "weight")
"""Keys of a message that say whether it counts."""
FORMS = (
    '{"messages": [...]}, {"prompt": "...", "completion": "..."} or '
    '{"instruction": "...", "input": "...", "output": "..."}'
)


Loss = Literal["all", "answers", "last"]


@dataclass(frozen=True, kw_only=True)
class ChatExample(Document):
    """A conversation, or a prompt and its completion."""

    conversation: Conversation | None = None
    """The former."""


def read_examples(
    files: Files,
    template: ChatTemplate | None,
    ignored: Collection[str] = (),
    on_read: Callable[[int], None] = lambda size: None,
    *,
    messages: str = "messages",
    loss: Loss = "answers",
) -> Iterator[ChatExample]:
    """The examples of JSONL files or tables, in order, as documents of which some parts count.
    `on_read` is told of every number of bytes of the files that are read, `messages` is the key of
    a conversation, and `loss` says what counts."""
    for record in read_records(files, on_read, without=ignored):
        yield example_of(record, files.kind, template, messages=messages, loss=loss)


def example_of(
    record: Record, kind: Kind, template: ChatTemplate | None, *, messages: str, loss: Loss
) -> ChatExample:
    """The example of a record of files of a kind. Other arguments as of `read_examples`."""
    fields = {key: x for key, x in record.fields.items() if x is not None}
    if kind == "table":
        # Its columns give all objects the same keys.
        fields = _without_nulls(fields)
    record = replace(record, fields=fields)
    if messages in fields:
        check_keys(record, [messages, *OTHERS])
        renamed = {MESSAGES if key == messages else key: x for key, x in fields.items()}
        example = _conversation(replace(record, fields=renamed), template, loss)
    elif is_alpaca(fields):
        check_keys(record, ALPACA)
        of_system = {key: x for key, x in fields.items() if key == "system"}
        said = {MESSAGES: of_alpaca(fields, record.place)} | of_system
        example = _conversation(replace(record, fields=said), template, loss)
    else:
        example = _completion(record, messages, loss)
        check_keys(record, COMPLETION)
    if loss == "all":
        example = replace(example, counted=((0, len(example.text)),))
    return example


def check_keys(record: Record, known: Collection[str]) -> None:
    """Raises if a record has a key that says nothing."""
    if unknown := [key for key in record.fields if key not in known]:
        raise InputError(
            f"Every key of a record must be one of {', '.join(known)}; got {', '.join(unknown)} in "
            f"{record.place!r}. Leave out what says nothing that is to be learned: "
            f"--data.ignored-keys {' '.join(map(shlex.quote, unknown))} (in score.py, "
            "--ignored-keys)"
        )


def _completion(record: Record, messages: str, loss: Loss) -> ChatExample:
    prompt, completion = (record.fields.get(name) for name in COMPLETION)
    if not (isinstance(prompt, str) and isinstance(completion, str)):
        given = {name: type(value).__name__ for name, value in record.fields.items()}
        lists = [name for name, x in record.fields.items() if isinstance(x, list) and x]
        talks = [name for name in lists if isinstance(record.fields[name][0], dict)]
        way_out = "Rename the keys"
        if talks:
            way_out = (
                f"If {talks[0]} holds the messages of a conversation: --data.messages {talks[0]}"
            )
        raise InputError(
            f"With data.loss={loss!r} every record must be {FORMS}; got {given} in "
            f"{record.place!r}, without the key {messages!r}. {way_out}."
        )
    text = prompt + completion
    check_unicode(text, record.place)
    return ChatExample(
        key=record.key,
        place=record.place,
        text=text,
        counted=((len(prompt), len(text)),),
        is_last=True,
    )


def _conversation(record: Record, template: ChatTemplate | None, loss: Loss) -> ChatExample:
    if template is None:
        raise InputError(
            "Conversations need the chat template of a tokenizer; got none for the messages in "
            f"{record.place!r}. Give --data.tokenizer with {TEMPLATE_FILE} or {CONFIG_FILE} beside "
            "it, or the template (--data.chat-template); or write prompt and completion."
        )
    fields = {key: _parsed(key, x, record) for key, x in record.fields.items()}
    messages = _checked(of_sharegpt(fields.pop(MESSAGES), record.place), record.place)
    if system := fields.pop("system", None):
        messages = [{"role": "system", "content": system}, *messages]
    options = fields.pop("chat_template_kwargs", {})
    if reserved := sorted(RESERVED & options.keys()):
        raise InputError(
            "chat_template_kwargs must not set what the program sets; got "
            f"{', '.join(reserved)} in {record.place!r}. Remove them."
        )
    counts = [_counts(message, record.place) for message in messages]
    if loss == "last":
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        counts = [counts[n] and n == answers[-1] for n in range(len(counts))]
    if not any(counts):
        raise InputError(
            "A conversation must have a message of the assistant that the loss counts; got "
            f"train=false or weight=0 for {'the last one' if loss == 'last' else 'all of them'} in "
            f"{record.place!r}. Remove the line."
        )
    # Of a message, transformers leaves out what is null.
    said = [
        {key: x for key, x in message.items() if key not in WEIGHTS and x is not None}
        for message in messages
    ]
    found = template.render(said, record.place, counted=counts, **fields, **options)
    check_unicode(found.text, record.place)
    if not found.answers:
        raise InputError(
            "A chat template must show what the assistant says; got a text without any for "
            f"{record.place!r}. Correct the template (--data.chat-template) or the messages."
        )
    return ChatExample(
        key=record.key,
        place=record.place,
        text=found.text,
        counted=found.answers,
        is_last=False,
        conversation=found,
    )


def _checked(messages: Any, place: str) -> Messages:
    """The messages of a conversation."""
    is_list = isinstance(messages, list) and all(isinstance(x, dict) for x in messages)
    if not is_list or not all(isinstance(x.get("role"), str) for x in messages):
        raise InputError(
            "messages must be a list of objects with role and content; got "
            f"{shortened(messages)} in {place!r}. Mend or remove the line."
        )
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise InputError(
            "A conversation must have a message of the assistant, which is what the loss counts; "
            f"got the roles {roles} in {place!r}. Rename the roles, or remove the line."
        )
    for message in messages:
        content = message.get("content")  # Templates expect a text.
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise InputError(
                "The content of a message must be a text, which only a message with tool_calls "
                f"may leave out; got {shortened(message)} in {place!r}. Mend or remove the line."
            )
    return messages


def _parsed(key: str, value: Any, record: Record) -> Any:
    """The value of a key, which tables may hold as a text of JSON."""
    kind, found = KINDS[key], value
    if isinstance(value, str) and kind is not str:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, kind):
        raise InputError(
            f"{key} must be {NAMES_OF_KINDS[kind]}; got {shortened(value)} in {record.place!r}. "
            "Mend or remove the line."
        )
    return found


def _without_nulls(value: Any) -> Any:
    """A value of JSON without the keys that are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(x) for key, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def _counts(message: dict[str, Any], place: str) -> bool:
    """Whether the loss counts a message."""
    is_assistant = message["role"] == "assistant"
    given = [message[key] for key in WEIGHTS if message.get(key) is not None]
    if any(x not in (0, 1) for x in given) or len(set(map(bool, given))) > 1:
        raise InputError(
            "train of a message must be true or false, and its weight 0 or 1, which say the same; "
            f"got {shortened(message)} in {place!r}. Mend or remove the line."
        )
    if any(given) and not is_assistant:
        raise InputError(
            "The loss counts messages of the assistant only; got "
            f"{shortened(message)} in {place!r}. Remove train and weight, or divide the "
            "conversation into prompt and completion."
        )
    return is_assistant and all(given)

"""The examples in JSONL files and tables: a conversation, or a prompt and its completion, in each
line or row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from startrail_jax.errors import InputError
from trainer.data.documents import Document, Record, check_unicode, read_records
from trainer.data.files import Files
from trainer.gpt.chat.template import (
    BEGIN,
    CONFIG_FILE,
    END,
    TEMPLATE_FILE,
    ChatTemplate,
    Messages,
)

VARIABLES = ("tools", "documents")
"""Keys beside the messages that a template sees."""
COLUMNS = ("messages", "prompt", "completion", *VARIABLES)
FORMS = '{"messages": [...]} or {"prompt": "...", "completion": "..."}'


def read_examples(
    files: Files,
    template: ChatTemplate | None,
    on_read: Callable[[int], None] = lambda size: None,
) -> Iterator[Document]:
    """The examples of JSONL files or tables, in order, as documents of which some parts count.

    Args:
        files: of one of `RECORD_KINDS`.
        template: turns messages into text; None if there is none.
        on_read: is told of every number of bytes of the files that are read.

    Raises:
        ValueError: if a line is not an example, or says nothing that counts.
    """
    for record in read_records(files, on_read, columns=COLUMNS):
        if "messages" in record.fields:
            yield _conversation(record, template)
        else:
            yield _completion(record)


def _completion(record: Record) -> Document:
    prompt, completion = (record.fields.get(name) for name in ("prompt", "completion"))
    if not (isinstance(prompt, str) and isinstance(completion, str)):
        given = {name: type(value).__name__ for name, value in record.fields.items()}
        raise InputError(
            f"With data.loss_on='completion' every record must be {FORMS}; got {given} in "
            f"{record.place!r}. Rename the keys, or write a conversation under 'messages'."
        )
    text = prompt + completion
    check_unicode(text, record.place)
    return Document(
        key=record.key,
        place=record.place,
        text=text,
        counted=((len(prompt), len(text)),),
        is_last=True,
    )


def _conversation(record: Record, template: ChatTemplate | None) -> Document:
    if template is None:
        raise InputError(
            "Conversations need the chat template of a tokenizer; got none for the messages in "
            f"{record.place!r}. Give --data.tokenizer with {TEMPLATE_FILE} or {CONFIG_FILE} beside "
            "it, or the template (--data.chat-template); or write prompt and completion."
        )
    fields = _without_nulls(record.fields)
    messages = _checked(fields["messages"], record.place)
    variables = {name: fields[name] for name in VARIABLES if name in fields}
    text, counted = template.render(messages, record.place, **variables)
    check_unicode(text, record.place)
    if not counted:
        raise InputError(
            "A chat template must show what the assistant says; got a text without any for "
            f"{record.place!r}. Correct the template (--data.chat-template) or the messages."
        )
    return Document(key=record.key, place=record.place, text=text, counted=counted, is_last=False)


def _checked(messages: Any, place: str) -> Messages:
    """The messages of a conversation.

    Raises:
        ValueError: if one of them has no role, or none is the assistant's.
    """
    is_list = isinstance(messages, list) and all(isinstance(x, dict) for x in messages)
    if not is_list or not all(isinstance(x.get("role"), str) for x in messages):
        raise InputError(
            "messages must be a list of objects with role and content; got "
            f"{_shortened(messages)} in {place!r}. Mend or remove the line."
        )
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise InputError(
            "A conversation must have a message of the assistant, which is what the loss counts; "
            f"got the roles {roles} in {place!r}. Rename the roles, or remove the line."
        )
    if any(mark in json.dumps(messages, ensure_ascii=False) for mark in (BEGIN, END)):
        raise InputError(
            f"messages must not hold {BEGIN!a} and {END!a}, which are no characters; got one in "
            f"{place!r}. Mend or remove the line."
        )
    return [_with_text(message, place) for message in messages]


def _without_nulls(value: Any) -> Any:
    """A value of JSON without the keys that are null, as tables give all objects the same keys.

    The content of a message stays: a template may ask whether it is none.
    """
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if v is not None or k == "content"}
        return {key: _without_nulls(x) for key, x in kept.items()}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def _with_text(message: dict[str, Any], place: str) -> dict[str, Any]:
    """A message whose content is text, as templates expect."""
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise InputError(
            "The content of a message must be a text, which only a message with tool_calls may "
            f"leave out; got {_shortened(message)} in {place!r}. Mend or remove the line."
        )
    if message.get("weight", 1) != 1:
        raise InputError(
            "The loss counts all messages of the assistant alike; got "
            f"{_shortened(message)} in {place!r}. Remove the weight, or divide the conversation "
            "into prompt and completion."
        )
    return {**message, "content": content}


def _shortened(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 200 else f"{shown[:200]}..."

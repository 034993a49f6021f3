"""Marks in the strings of a conversation, by which one sees what a chat template shows.

A template is a program: that it names a key does not say that it shows what is there. So each
string of the messages gets a mark behind it, and their text says which strings are shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from trainer.printable import shortened

REASONING = {"reasoning_content", "reasoning", "thinking"}
"""Names of what an assistant thought; transformers gives each to a template that asks for one."""
UNMARKED = {"role", "tool_call_id"}
"""Keys of a message that choose what a template does, or only say which call is answered."""

Kind = Literal["content", "call"]


@dataclass(frozen=True)
class Mark:
    """The mark of one string of a message."""

    number: int
    """Number of the message."""
    word: str
    """What stands behind the string."""
    description: str
    """What the string is, for errors."""
    kind: Kind
    is_thought: bool
    alone: Callable[[], list[dict[str, Any]]]
    """Makes the messages in which no other string is marked."""

    def is_in(self, text: str) -> bool:
        """Whether a text shows the mark, in letters of any size."""
        return self.word in text or self.word in text.lower()


class MarkedMessages:
    """The messages of a conversation with a mark behind each string, in front of spaces."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], text: str) -> None:
        """`text` is what a template makes of the messages: no mark is a part of it."""
        self._given = messages
        lowered = text.lower()
        self._stem = next(x for x in (f"zq{i}v" for i in count()) if x not in lowered)
        self._marks: list[Mark] = []
        self.messages = self._marked(None)

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._marks)

    def places(self, marked: str, text: str) -> list[tuple[int, Kind]]:
        """Where the marks of `marked` would be in `text`, ascending, and the kind of each; none
        unless both texts are the same but for marks."""
        pattern = re.compile(rf"{self._stem}(\d+)z")
        if pattern.sub("", marked) != text:
            return []
        found, removed = [], 0
        for match in pattern.finditer(marked):
            found.append((match.start() - removed, self._marks[int(match[1])].kind))
            removed += len(match[0])
        return found

    def _marked(self, only: int | None) -> list[dict[str, Any]]:
        """The messages with all marks, which are then known, or with that of one number."""
        numbers = count()

        def mark(string: str, message: int, description: str, kind: Kind, thought: bool) -> str:
            number = next(numbers)
            if only is None:
                word = f"{self._stem}{number}z"
                self._marks.append(
                    Mark(message, word, description, kind, thought, lambda: self._marked(number))
                )
            elif number != only:
                return string
            end = len(string.rstrip())
            return f"{string[:end]}{self._marks[number].word}{string[end:]}"

        return [_marked_message(x, number, mark) for number, x in enumerate(self._given)]


def _marked_message(message: Mapping[str, Any], number: int, mark: Any) -> dict[str, Any]:
    role, calls, found = message["role"], message.get("tool_calls"), {}
    place = f"message {number + 1} of role {role!r}"
    for key, value in message.items():
        thought = key in REASONING

        def of_key(string: str, key: str = key, thought: bool = thought) -> str:
            # An empty message is shown too, unless it says something by its calls.
            if not string.strip() and (key != "content" or calls):
                return string
            return mark(string, number, f"the {key} of {place}", "content", thought)

        if key == "tool_calls" and isinstance(value, list):
            found[key] = [_marked_call(call, number, place, mark) for call in value]
        elif key in UNMARKED or (key, role) == ("name", "tool"):
            found[key] = value
        else:
            found[key] = _of_strings(value, of_key)
    return found


def _marked_call(call: Any, number: int, place: str, mark: Any) -> Any:
    """A call with marks behind its name, and the names and strings of its arguments."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _marked_call(call["function"], number, place, mark)}
    name, arguments, found = call.get("name"), call.get("arguments"), dict(call)
    if isinstance(name, str):
        found["name"] = mark(name, number, f"the call of {name!r} in {place}", "call", False)

    def of_arguments(string: str) -> str:
        if not string.strip():
            return string
        described = f"the arguments {shortened(arguments, 100)} of the call of {name!r} in {place}"
        return mark(string, number, described, "call", False)

    if isinstance(arguments, dict):
        pairs = _of_strings(arguments, of_arguments).items()
        found["arguments"] = {of_arguments(key): value for key, value in pairs}
    elif isinstance(arguments, str):  # As in the interface of OpenAI: JSON as a text.
        found["arguments"] = of_arguments(arguments)
    return found


def _of_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with each string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _of_strings(x, change) for key, x in value.items()}
    return [_of_strings(x, change) for x in value] if isinstance(value, list) else value

"""Chat templates: how the messages of a conversation become one text, and what the assistant said.

A template is a program in the language Jinja, which comes with a tokenizer. transformers runs it in
Jinja's sandbox: it sees the messages and the special tokens, and reaches nothing else, but can
still use up time and memory. See https://huggingface.co/docs/transformers/chat_templating.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError
from trainer.gpt.chat.marks import REASONING, Mark, MarkedMessages
from trainer.gpt.tokenizer import load_tokenizer, special_tokens

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
# A run that goes on must have the text with which it began, so that no day is today. The templates
# of Llama 3 take this one where they are told none.
TODAY = datetime.date(2024, 7, 26)
NOW = re.compile(r"""strftime_now\(\s*(?:"([^"{}]*)"|'([^'{}]*)')\s*\)""")
# What transformers takes for the mark of what the assistant says.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SPECIAL_TOKENS = {"bos_token", "eos_token", "unk_token", "pad_token"}
COMMON = {"role", "content", "tool_call_id"}
"""Keys of messages that a template may leave unread: an id only says which call is answered."""
RESERVED = {
    *("messages", "tools", "documents", "add_generation_prompt", "strftime_now"),
    *("conversations", "chat_template", "return_assistant_tokens_mask", "continue_final_message"),
}
"""What chat_template_kwargs may not set."""

Span = tuple[int, int]
"""First character, and the character after the last."""
Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """A conversation as one text."""

    text: str
    answers: tuple[Span, ...]
    """The parts of the text that the assistant says, each with what ends it."""
    ends: frozenset[str] = frozenset()
    """The special tokens that end answers."""
    within: frozenset[str] = frozenset()
    """The special tokens in answers before their end."""
    is_open: bool = False
    """Whether an answer ends with a text that is no special token."""


class ChatTemplate:
    """A Hugging Face chat template. It makes of messages what transformers makes of them, except
    that `strftime_now` always tells `TODAY`."""

    def __init__(self, tokenizer: Any, source: str | None, *, name: str, tokens_of: str) -> None:
        """`source` is None for the templates of the tokenizer; `tokens_of` is the file that may
        name special tokens, for errors, and empty if there is one."""
        self._tokenizer = tokenizer
        self._source = source
        self._name = name
        self._tokens = dict(tokenizer.special_tokens_map)
        specials = sorted(special_tokens(tokenizer), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        found = source or tokenizer.chat_template
        sources = list(found.values()) if isinstance(found, Mapping) else [found]
        self.digest = hashlib.sha256(json.dumps([sources, self._tokens]).encode()).hexdigest()
        """A hash of what the text of a conversation depends on."""
        words = set(re.findall(r"\w+", " ".join(sources)))
        if tokens_of and (missing := sorted(words & SPECIAL_TOKENS - set(self._tokens))):
            raise InputError(
                f"A chat template must know the special tokens that it uses; got {name!r}, which "
                f"uses {', '.join(missing)}, and no file {tokens_of!r} that names them. Copy it "
                "there too."
            )
        for text in sources:
            if asked := re.search(r"strftime_now\([^)]*\)?", NOW.sub("", text)):
                raise InputError(
                    "A chat template must write the form of a date where it asks for one; got "
                    f"{asked.group()!r} in {name!r}. Write strftime_now('%d %b %Y') or another "
                    "form, in a template of your own: --data.chat-template."
                )

    @classmethod
    def find(cls, tokenizer: Path, chosen: Path | None) -> ChatTemplate | None:
        """The template in the file `chosen`, or else that of a tokenizer.json, beside which may lie
        `CONFIG_FILE`, with special tokens and templates, and `TEMPLATE_FILE`; None without any."""
        loaded = load_tokenizer(tokenizer)
        source = None if chosen is None else _read_text(chosen)
        if source is None and not loaded.chat_template:
            return None
        config = tokenizer.with_name(CONFIG_FILE)
        tokens_of = "" if config.is_file() else str(config)
        return cls(loaded, source, name=str(chosen or tokenizer.parent), tokens_of=tokens_of)

    def render(
        self, messages: Messages, place: str, *, counted: Sequence[bool] = (), **variables: Any
    ) -> Conversation:
        """The text of a conversation, and the parts of it that the assistant says. These are what
        the template marks by `{% generation %}`. If it marks nothing, they are what it adds to the
        messages before and to the words that ask the assistant to speak. With both, the token that
        ends the turn belongs to them. `counted` says for each message whether it counts if it is
        the assistant's; empty if all do."""
        source = self._source_for(variables.get("tools"), place)
        is_marked = bool(GENERATION.search(source))
        run = functools.partial(self._run, source, place=place, variables=variables)
        text, spans = run(messages, marks=is_marked)
        self._check_keys(source, messages, variables, text, run, place)
        said = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [n for n in said if not counted or counted[n]]
        if not is_marked:
            spans = [self._answer(text, messages, number, run, place) for number in wanted]
        elif wanted != said:
            if len(spans) != len(said):
                raise InputError(
                    "A chat template must mark one part for each message of the assistant if some "
                    f"of them do not count; got {len(spans)} parts for {len(said)} messages from "
                    f"{self._name!r} for {place!r}. Correct the template (--data.chat-template)."
                )
            spans = [span for number, span in zip(said, spans, strict=True) if number in wanted]
        strings = self._check_shown(messages, wanted, text, run, place)
        spans = [(first, end) for first, end in spans if first < end]
        return self._with_ends(text, spans, strings, messages, run, place)

    def question(self, text: str) -> str:
        """A conversation that a user begins with a text, up to the answer of the assistant."""
        asked, place = [{"role": "user", "content": text}], "the prompt"
        source = self._source_for(None, place)
        return self._run(source, asked, place=place, variables={}, add_generation_prompt=True)[0]

    def _source_for(self, tools: Any, place: str) -> str:
        """The template for these tools: a tokenizer may have one of its own for them."""
        try:
            source = self._tokenizer.get_chat_template(self._source, tools)
        except ValueError as error:
            raise self._failed(str(error), place) from error

        return _dated(source)

    def _answer(self, text: str, messages: Messages, number: int, run: Any, place: str) -> Span:
        """What the assistant says in a message, in a template without marks."""
        message = messages[number]
        before, _ = run(messages[:number], add_generation_prompt=True)
        after, _ = run(messages[: number + 1])
        first = len(before)
        if text.startswith(before) and after.startswith(before):
            if text.startswith(after):
                return first, len(after)
            # Some templates put an empty place for thoughts in front of the last answer alone.
            added = after[first:]
            ends = (added[cut:] for cut in range(1, len(added)))
            kept = next((end for end in ends if text.startswith(end, first)), "")
            if not _has_reasoning(message) and all(x in kept for x in _must_show(message)):
                return first, first + len(kept)
        raise InputError(
            f"A chat template must show what the assistant says; got {self._name!r}, whose text of "
            f"{place!r} does not begin with its text of the first {number + 1} messages. Put "
            "{% generation %} and {% endgeneration %} around the answers in the template "
            "(--data.chat-template), or write prompt and completion."
        )

    def _check_keys(
        self,
        source: str,
        messages: Messages,
        variables: Mapping[str, Any],
        text: str,
        run: Any,
        place: str,
    ) -> None:
        """Raises if the template takes no notice of a key."""
        words = _words(source)
        idle = {key for key, value in variables.items() if value and key not in words}
        for message in messages:
            own = COMMON | {"name"} if message["role"] == "tool" else COMMON
            idle |= {key for key in message if key not in words | own}
        # A template may show whole messages, and name no key.
        idle = {
            key
            for key in idle
            if key in variables
            or text == run([{k: v for k, v in x.items() if k != key} for x in messages])[0]
        }
        if idle:
            raise self._not_shown(f"the keys {sorted(idle)}", place)
        tools = [x for x in map(_name_of, variables.get("tools") or ()) if x and x not in text]
        if tools:
            raise self._not_shown(f"the tools {tools}", place)

    def _check_shown(
        self, messages: Messages, counted: Sequence[int], text: str, run: Any, place: str
    ) -> Sequence[tuple[int, str]]:
        """Raises unless all that messages say is in the text. Returns where each string ends in it,
        and of what kind it is; nothing if that cannot be told."""
        marks = MarkedMessages(messages, text)
        try:
            marked = run(marks.messages)[0]
        except InputError:  # The template heeds what a string is: each is marked by itself.
            marked = ""
        for mark in marks:
            if not (mark.is_in(marked) or self._shows(mark, counted, run)):
                raise self._not_shown(mark.description, place)
        return marks.places(marked, text)

    def _shows(self, mark: Mark, counted: Sequence[int], run: Any) -> bool:
        """Whether a string is shown if it alone is marked. A thought that does not count may be
        forgotten by later turns."""
        messages = mark.alone()
        if mark.is_thought and mark.number not in counted:
            messages = messages[: mark.number + 1]
        try:
            return mark.is_in(run(messages)[0])
        except InputError:
            return True

    def _with_ends(
        self,
        text: str,
        spans: Sequence[Span],
        strings: Sequence[tuple[int, str]],
        messages: Messages,
        run: Any,
        place: str,
    ) -> Conversation:
        """The conversation, with the end of each answer: a special token, or another text that the
        template puts behind what the assistant says. The token of the next role ends an answer too;
        behind the last one, it is added."""
        ends, within, answers, is_open = set[str](), set[str](), [], False
        for first, end in spans:
            found = [*self._special.finditer(text, first, end)]
            if not found or text[found[-1].end() : end].strip():
                last, kind = max((x for x in strings if first <= x[0] <= end), default=(0, "call"))
                if kind == "content" and text[last:end].strip():
                    is_open = True
                    within |= {x[0] for x in found}
                    answers.append((first, end))
                    continue
                text, follows = self._next_token(text, end, messages, run)
                if follows is None:
                    raise InputError(
                        "A chat template must end what the assistant says by a token, which the "
                        f"loss counts; got {self._name!r}, with nothing behind an answer of "
                        f"{place!r}: the model would never stop. Write {{{{ eos_token }}}} behind "
                        "the answers in a template of your own (--data.chat-template), or write "
                        "prompt and completion, which end as documents do."
                    )
                found.append(follows)
                end = follows.end()
            # Behind that token, there may be the one that begins the next turn.
            at = len(found) - 1
            while at and not text[found[at - 1].end() : found[at].start()].strip():
                at -= 1
            ends.add(found[at][0])
            within |= {x[0] for x in found[:at]}
            answers.append((first, end))
        return Conversation(text, tuple(answers), frozenset(ends), frozenset(within), is_open)

    def _next_token(
        self, text: str, end: int, messages: Messages, run: Any
    ) -> tuple[str, re.Match[str] | None]:
        """The special token that follows an answer, in a text that has it: at the end of the text,
        the one with which the user would speak next is added. None if other text follows."""
        longer = text
        if not text[end:].strip():
            try:
                longer = run([*messages, {"role": "user", "content": "a"}])[0]
            except InputError:  # A template may refuse another turn.
                return text, None
        follows = self._special.search(longer, end) if longer.startswith(text) else None
        if follows is None or longer[end : follows.start()].strip():
            return text, None
        return max(text, longer[: follows.end()], key=len), follows

    def _not_shown(self, what: str, place: str) -> InputError:
        return InputError(
            f"A chat template must show all that a conversation has; got {place!r}, with {what}, "
            f"which {self._name!r} leaves out. Remove or rename it, or give another template: "
            "--data.chat-template."
        )

    def _run(
        self,
        source: str,
        messages: Messages,
        *,
        place: str,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        seen: Any = {**self._tokens, **variables}
        try:
            rendered: Any = render_jinja_template(
                [list(messages)],
                chat_template=source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=add_generation_prompt,
                **seen,
            )
        except Exception as error:
            # A template may fail in any way that Python knows.
            raise self._failed(f"{type(error).__name__}: {error}", place) from error
        (text,), spans = rendered
        return text, spans[0] if marks else []

    def _failed(self, why: str, place: str) -> InputError:
        return InputError(
            f"The chat template must take the messages; got {why} from {self._name!r} for "
            f"{place!r}. Correct the messages, or give another template: --data.chat-template."
        )


@functools.cache
def _dated(source: str) -> str:
    """A template in which `TODAY` stands for what it asks of the day."""

    def date(form: re.Match[str]) -> str:
        return json.dumps(TODAY.strftime(form[1] or form[2] or ""))

    return NOW.sub(date, source)


@functools.cache
def _words(source: str) -> set[str]:
    """The keys that a template may read."""
    words = set(re.findall(r"\w+", source))
    return words | REASONING if words & REASONING else words


def _name_of(tool: Any) -> str | None:
    """The name of a function in a list of tools."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _called(message: Mapping[str, Any]) -> list[str]:
    """Names of the functions that a message calls."""
    names = map(_name_of, message.get("tool_calls") or [])
    return [name for name in names if name is not None]


def _must_show(message: Mapping[str, Any]) -> list[str]:
    """What a part of a text must have to be what a message says."""
    return [*_called(message), str(message.get("content") or "").strip()]


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    return any(message.get(x) for x in REASONING) or "think>" in str(message.get("content"))


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{str(path)!r} must be a file of UTF-8; got {type(error).__name__}: {error}. Give "
            "another: --data.chat-template."
        ) from error

"""Haystacks of tokens with sentences hidden in them, questions about these, and scores.

A needle is a sentence with a key and its value. A case hides several needles with different keys
in a haystack and asks for the value of one of them, so that a model that remembers any value is
not right more often than by chance. The needle that is asked for lies at a given depth: 0 is the
beginning of the haystack, and 1 its end, just before the question. The other needles lie anywhere.

`Words` makes all of this from a vocabulary of 68 words, each of which is one token, for a
model that is trained within minutes. `Sentences` hides sentences of plain English in a text, for
models that can read.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from startrail_jax.errors import InputError
from trainer.data.documents import Document, read_documents
from trainer.data.files import find_files, standard_library
from trainer.gpt.text import IdTokenizer, Tokenizer

Tokens = Integer[np.ndarray, " tokens"]

END = "</s>"
"""Ends a document: a name by which the program knows such a token."""
HAY = (
    *("apple", "bird", "cloud", "door", "earth", "field", "grass", "hill", "ink", "jar", "kite"),
    *("lake", "moon", "nest", "oak", "path", "quill", "river", "stone", "tree", "urn", "vine"),
    *("wood", "yard", "bell", "coal", "dust", "fire", "gate", "hat", "iron", "leaf"),
)
NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ian", "Joy", "Kim", "Leo"),
    *("Mia", "Nils", "Ola", "Pia"),
)
NUMBERS = tuple(f"{number:02}" for number in range(16))
CITIES = (
    *("Accra", "Bergen", "Cairo", "Dakar", "Edmonton", "Florence", "Geneva", "Havana"),
    *("Istanbul", "Jakarta", "Kyoto", "Lisbon", "Madrid", "Nairobi", "Oslo", "Prague"),
    *("Quito", "Riga", "Seoul", "Tallinn", "Utrecht", "Vienna", "Warsaw", "Zurich"),
)
# A model continues: a question that is repeated in the answer also serves one that was not trained
# to chat.
SENTENCE = "\nThe secret number of {key} is {value}.\n"
QUESTION = (
    "\n\nQuestion: What is the secret number of {key}?\nAnswer: The secret number of {key} is"
)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %} {% generation %}"
    "{{ message.content }}{% endgeneration %}{% else %}{{ '' if loop.first else ' ' }}"
    "{{ message.content }}{% endif %}{% endfor %}"
)
"""Chat template of the words: the messages with spaces between, of which the answers count."""
DIGITS = 7
"""Of a number in a sentence."""
TRIED_VALUES = 64
"""Values whose tokens are counted, to know how many an answer may take."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A haystack with needles, and questions about some of them."""

    context: Tokens
    """The haystack with all needles in it."""
    questions: tuple[Tokens, ...]
    """Tokens of the questions."""
    answers: tuple[str, ...]
    """The values that are asked for."""
    needle_at: int
    """Where in `context` the needle begins that the first question asks for."""

    @property
    def prompt(self) -> Tokens:
        """What a model continues with the answer to the first question."""
        return np.concatenate([self.context, self.questions[0]])


class Wording(ABC):
    """How haystack, needles and questions read."""

    keys: tuple[str, ...]
    """What needles are about."""
    most_answer_tokens: int
    """Number of tokens of the longest answer."""
    beginning: Tokens = np.empty(0, np.int64)
    """What the model expects in front of a document, once: a token that begins it, or nothing."""

    @abstractmethod
    def haystack(self, rng: np.random.Generator, count: int) -> Tokens:
        """So many tokens of a haystack."""

    @abstractmethod
    def needle(self, key: str, value: str) -> Tokens:
        """A sentence with a key and its value."""

    @abstractmethod
    def question(self, key: str) -> Tokens:
        """A question for the value of a key."""

    @abstractmethod
    def value(self, rng: np.random.Generator) -> str:
        """A random value."""

    @abstractmethod
    def text(self, tokens: Tokens) -> str:
        """What a model has said."""

    def is_right(self, said: Tokens, answer: str) -> bool:
        """Whether a model that said these tokens has found the value: whether they begin with it.

        All values have the same number of characters, so none is the beginning of another.
        """
        return self.text(said).strip().startswith(answer)

    def case(
        self,
        rng: np.random.Generator,
        *,
        length: int,
        needles: int,
        depth: float | None = None,
        questions: int = 1,
    ) -> Case:
        """A case whose context, questions and answers fill `length` tokens.

        Args:
            rng: random numbers.
            length: tokens of everything, where every answer counts as the longest one.
            needles: sentences that are hidden.
            depth: how deep in the haystack the needle of the first question lies, from 0 to 1;
                None for anywhere.
            questions: number of questions, of which later ones may be about the same needle.

        Raises:
            ValueError: if there are not enough keys, or there is no room for a haystack.
        """
        if not 1 <= needles <= len(self.keys):
            raise InputError(
                f"needles must be from 1 to {len(self.keys)}, the number of keys; got "
                f"needles={needles}. Use --needles {min(max(needles, 1), len(self.keys))}."
            )
        if depth is not None and not 0 <= depth <= 1:
            raise InputError(f"A depth must be from 0 to 1; got depth={depth}. Use 0.5.")
        keys = [self.keys[i] for i in rng.permutation(len(self.keys))[:needles]]
        values = [self.value(rng) for _ in keys]
        hidden = [self.needle(*pair) for pair in zip(keys, values, strict=True)]
        # Drawn with replacement: if each needle were asked for once, the last answers could be
        # found by elimination.
        which = [0, *rng.integers(needles, size=questions - 1)]
        asked = [self.question(keys[i]) for i in which]
        others = sum(map(len, [self.beginning, *hidden, *asked]))
        others += questions * self.most_answer_tokens
        if (room := length - others) < needles:
            raise InputError(
                "A length must have room for needles, questions, answers and a haystack; got "
                f"length={length}, of which all but the haystack take {others} tokens. "
                f"Use a length of at least {others + needles}, or fewer --needles."
            )
        places = rng.integers(room + 1, size=needles)
        # What is hidden at one place comes in a random order, but for the needle that has a depth:
        # nothing is before it at depth 0, or after it at depth 1.
        order = rng.permutation(needles).astype(float)
        if depth is not None:
            places[0] = round(depth * room)
            order[0] = -1 if depth < 0.5 else needles
        hay, parts, at, needle_at = self.haystack(rng, room), [self.beginning], 0, 0
        for i in np.lexsort((order, places)):
            parts.append(hay[at : places[i]])
            if not i:
                needle_at = sum(map(len, parts))
            parts.append(hidden[i])
            at = places[i]
        return Case(
            context=np.concatenate([*parts, hay[at:]]),
            questions=tuple(asked),
            answers=tuple(values[i] for i in which),
            needle_at=needle_at,
        )


class Words(Wording):
    """Random words, in which "remember Ada 17 ." is a needle and "? Ada" a question."""

    keys = NAMES
    most_answer_tokens = 1
    vocabulary = (END, "?", ".", "remember", *HAY, *NAMES, *NUMBERS)
    """The words, in the order of their ids."""

    def __init__(self) -> None:
        self._ids = {word: number for number, word in enumerate(self.vocabulary)}

    def haystack(self, rng: np.random.Generator, count: int) -> Tokens:
        return rng.integers(len(HAY), size=count) + self._ids[HAY[0]]

    def needle(self, key: str, value: str) -> Tokens:
        return self._tokens("remember", key, value, ".")

    def question(self, key: str) -> Tokens:
        return self._tokens("?", key)

    def value(self, rng: np.random.Generator) -> str:
        return NUMBERS[rng.integers(len(NUMBERS))]

    def text(self, tokens: Tokens) -> str:
        return " ".join(self.vocabulary[token] for token in tokens)

    def _tokens(self, *words: str) -> Tokens:
        return np.array([self._ids[word] for word in words])

    def conversation(self, case: Case) -> dict[str, Any]:
        """A case as a line of JSONL to train on; the loss counts what the assistant says."""
        said = [{"role": "user", "content": self.text(case.context)}]
        for question, answer in zip(case.questions, case.answers, strict=True):
            said.append({"role": "user", "content": self.text(question)})
            said.append({"role": "assistant", "content": answer})
        return {"messages": said}

    def write_tokenizer(self, folder: Path) -> Path:
        """Writes a tokenizer.json of the words, and the chat template beside it."""
        model = {"type": "WordLevel", "vocab": self._ids, "unk_token": END}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "tokenizer.json"
        split = {"type": "WhitespaceSplit"}
        described = {"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model}
        path.write_text(json.dumps(described))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        return path

    def write_rows(self, path: Path, cases: Iterable[Case]) -> None:
        """Writes conversations to train on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.writelines(json.dumps(self.conversation(case)) + "\n" for case in cases)


class Sentences(Wording):
    """Haystacks of text, with sentences about secret numbers of cities."""

    keys = CITIES

    def __init__(self, tokenizer: Tokenizer, path: Path | None, *, longest: int) -> None:
        """Reads the text.

        Args:
            tokenizer: that of the model.
            path: text as `train.py --data.path` takes it; None for the source code of the Python
                standard library.
            longest: the largest number of tokens that a case will have.

        Raises:
            ValueError: if the text cannot be read or is too short, or the model has no text.
        """
        if isinstance(tokenizer, IdTokenizer):
            raise InputError(
                "A model must read text to be asked a question; got a run whose data are tokens. "
                "Give the tokenizer.json that made them: --tokenizer."
            )
        self._tokenizer = tokenizer
        self.beginning = self._encode_document("")
        files = standard_library() if path is None else find_files(path, "haystack")
        if files.kind not in ("text", "jsonl"):
            raise InputError(
                f"haystack must be text; got {files.kind} files in {files.name!r}. Give text, or "
                "leave out --haystack."
            )
        parts, found = [], 0
        for document in read_documents(files, text_key="text"):
            parts.append(self._encode(document.text))
            found += len(parts[-1])
            if found >= 2 * longest:  # So that haystacks differ.
                break
        if found < longest:
            raise InputError(
                "haystack must have as many tokens as the longest of the lengths; got "
                f"{found:,} in {files.name!r} for a length of {longest:,}. Give more text with "
                "--haystack."
            )
        self._hay = np.concatenate(parts)
        rng = np.random.default_rng(0)
        tried = [self._encode(f" {self.value(rng)}") for _ in range(TRIED_VALUES)]
        # One more, for a tokenizer that puts a space before a number.
        self.most_answer_tokens = max(map(len, tried)) + 1

    def haystack(self, rng: np.random.Generator, count: int) -> Tokens:
        start = rng.integers(len(self._hay) - count + 1)
        return self._hay[start : start + count]

    def needle(self, key: str, value: str) -> Tokens:
        return self._encode(SENTENCE.format(key=key, value=value))

    def question(self, key: str) -> Tokens:
        return self._encode(QUESTION.format(key=key))

    def value(self, rng: np.random.Generator) -> str:
        return str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS))

    def text(self, tokens: Tokens) -> str:
        return self._tokenizer.decode(np.asarray(tokens))

    def _encode(self, text: str) -> Tokens:
        """The tokens of a text in the middle of a document."""
        return self._encode_document(text)[len(self.beginning) :]

    def _encode_document(self, text: str) -> Tokens:
        """The tokens of a text at the beginning of a document."""
        part = Document(key="", place="the haystack", text=text, is_last=False)
        return self._tokenizer.encode([part])[0].astype(np.int64)


def spread(count: int) -> Sequence[float]:
    """So many depths from 0 to 1; the middle for one."""
    return [0.5] if count == 1 else [i / (count - 1) for i in range(count)]

"""Haystacks of text with sentences hidden in them, and questions about these.

A needle is a sentence with a city and its secret number. A case hides several needles about
different cities in a haystack and asks for one of the numbers, so that a model that remembers any
number is not right more often than by chance. The needle that is asked for lies at a given depth: 0
is the beginning of the haystack, and 1 its end, just before the question. The other needles lie
anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from startrail_jax.errors import InputError
from trainer.data.documents import Document, read_documents
from trainer.data.files import find_files, standard_library
from trainer.gpt.text import IdTokenizer, Tokenizer

Tokens = Integer[np.ndarray, " tokens"]

CITIES = (
    *("Accra", "Bergen", "Cairo", "Dakar", "Edmonton", "Florence", "Geneva", "Havana"),
    *("Istanbul", "Jakarta", "Kyoto", "Lisbon", "Madrid", "Nairobi", "Oslo", "Prague"),
    *("Quito", "Riga", "Seoul", "Tallinn", "Utrecht", "Vienna", "Warsaw", "Zurich"),
)
SENTENCE = "\nThe secret number of {} is {}.\n"
# A model continues: a question that is repeated in the answer also serves one that was not trained
# to chat.
QUESTION = (
    "\n\nQuestion: What is the secret number of {key}?\nAnswer: The secret number of {key} is"
)
DIGITS = 7
"""Of a secret number. All have as many, so that none is the beginning of another."""
ANSWER_TOKENS = DIGITS + 2
"""Most tokens that an answer may take: a space, and one more for tokenizers that add another."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A haystack with needles, and a question about one of them."""

    prompt: Tokens
    """The haystack with all needles in it, and the question."""
    answer: str
    """The number that is asked for."""


class Haystacks:
    """Makes cases from a text."""

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
        # A token that begins a document, or nothing.
        self._beginning = self._encode_document("")
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

    def case(self, rng: np.random.Generator, *, length: int, needles: int, depth: float) -> Case:
        """A case whose prompt and answer fill `length` tokens.

        Args:
            rng: random numbers.
            length: tokens of everything, where the answer counts as the longest one.
            needles: sentences that are hidden.
            depth: how deep in the haystack the needle lies that is asked for, from 0 to 1.

        Raises:
            ValueError: if there are not enough cities, or there is no room for a haystack.
        """
        if not 1 <= needles <= len(CITIES):
            raise InputError(
                f"needles must be from 1 to {len(CITIES)}, the number of cities; got "
                f"needles={needles}. Use --needles {min(max(needles, 1), len(CITIES))}."
            )
        if not 0 <= depth <= 1:
            raise InputError(f"A depth must be from 0 to 1; got depth={depth}. Use 0.5.")
        keys = [CITIES[i] for i in rng.permutation(len(CITIES))[:needles]]
        values = [_number(rng) for _ in keys]
        sentences = map(SENTENCE.format, keys, values)
        hidden = [self._encode(sentence) for sentence in sentences]
        question = self._encode(QUESTION.format(key=keys[0]))
        others = sum(map(len, [self._beginning, *hidden, question])) + ANSWER_TOKENS
        if (room := length - others) < needles:
            raise InputError(
                "A length must have room for needles, a question, an answer and a haystack; got "
                f"length={length}, of which all but the haystack take {others} tokens. "
                f"Use a length of at least {others + needles}, or fewer --needles."
            )
        places = rng.integers(room + 1, size=needles)
        # What is hidden at one place comes in a random order, but for the needle that has a depth:
        # nothing is before it at depth 0, or after it at depth 1.
        order = rng.permutation(needles).astype(float)
        places[0] = round(depth * room)
        order[0] = -1 if depth < 0.5 else needles
        start = rng.integers(len(self._hay) - room + 1)
        hay = self._hay[start : start + room]
        parts, at = [self._beginning], 0
        for i in np.lexsort((order, places)):
            parts += [hay[at : places[i]], hidden[i]]
            at = places[i]
        prompt = np.concatenate([*parts, hay[at:], question])
        return Case(prompt=prompt, answer=values[0])

    def is_right(self, said: Tokens, answer: str) -> bool:
        """Whether what a model said begins with the answer."""
        return self._tokenizer.decode(np.asarray(said)).strip().startswith(answer)

    def _encode(self, text: str) -> Tokens:
        """The tokens of a text in the middle of a document."""
        return self._encode_document(text)[len(self._beginning) :]

    def _encode_document(self, text: str) -> Tokens:
        """The tokens of a text at the beginning of a document."""
        part = Document(key="", place="the haystack", text=text, is_last=False)
        return self._tokenizer.encode([part])[0].astype(np.int64)


def _number(rng: np.random.Generator) -> str:
    return str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS))

"""Cuts long documents into slices whose tokens, put together, are those of the whole document.

A tokenizer takes about 140 times the size of a text while it works on it, so that a long text must
be cut. A cut is made where the tokens of the text around it, `WINDOW` characters on each side, are
the same whether the two sides are tokenised together or each by itself. So the tokens do not change
if the tokenizer never looks further than `WINDOW` characters beyond the start of a word or a line,
as those do that first split a text by a regular expression or at spaces. If a text has no such
place, its slices grow until it has one.

Some tokenizers put a space before every text. Then the last character before a cut is tokenised
again together with the slice after it, and its tokens are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from startrail_jax.errors import InputError
from trainer.data.documents import Document

# Number of characters of a slice: so few that several are tokenised at once, and so many that cuts
# cost little.
SLICE = 1 << 16
WINDOW = 512
# Places for a cut, best first: after a line, before a word, after a sign between two characters of
# words, as in scripts without spaces.
PLACES = (
    re.compile(r"(?<=\n)(?=\S)"),
    re.compile(r"(?<=\S)(?=\s\S)"),
    re.compile(r"(?<=\w[^\w\s])(?=\w)"),
)
# Number of characters without a place for a cut that are tokenised at once, in some 2 GB of memory.
LONGEST_SLICE = 1 << 24
# Number of places of each kind that are tried in each stretch of text.
TRIES = 8


class Slicer:
    """Turns the parts of documents, as they are read, into slices for a tokenizer."""

    def __init__(
        self, encode: Callable[[str], list[int]], *, length: int = SLICE, window: int = WINDOW
    ) -> None:
        """Starts before a document. Slices have `length` characters, unless one must be longer."""
        self._encode = encode
        self._length = length
        self._window = window
        self._waiting: Document | None = None
        self._limit = length

    def add(self, part: Document) -> Iterator[Document]:
        """The slices that are certain after one more part of the document. All of them must be
        taken before the next part is added."""
        document = part
        if self._waiting is not None:
            document = replace(self._waiting, text=self._waiting.text + part.text)
        while len(document.text) > self._limit + self._window:
            cut = self._find(document.text)
            if cut is None:
                self._limit += self._length // 2
                if self._limit > LONGEST_SLICE:
                    raise InputError(
                        "Text must have a place where it can be cut, such as the end of a line or "
                        f"a space, among any {LONGEST_SLICE:,} characters; got none from byte "
                        f"{document.offset:,} of {document.place!r} on. Leave the document out, or "
                        "divide its lines."
                    )
                continue
            self._limit = self._length
            at, context = cut
            text = document.text[:at]
            yield replace(document, text=text, is_last=False)
            document = replace(
                document,
                text=document.text[at:],
                offset=document.offset + len(text.encode()),
                context=context,
            )
        if part.is_last:
            self._waiting, self._limit = None, self._length
            yield replace(document, is_last=True)
        else:
            self._waiting = document

    def _find(self, text: str) -> tuple[int, str] | None:
        """The best place for a cut in the half slice before the limit, and the context of what
        follows; None if there is none."""
        start, end = self._limit - self._length // 2, self._limit
        for place in PLACES:
            found = [match.start() for match in place.finditer(text, start, end)]
            for at in islice(reversed(found), TRIES):
                for context in ("", text[at - 1]):
                    if self._keeps_tokens(text, at, context):
                        return at, context
        return None

    def _keeps_tokens(self, text: str, at: int, context: str) -> bool:
        before, after = text[max(at - self._window, 0) : at], text[at : at + self._window]
        first = self._encode(context) if context else []
        right = self._encode(context + after)
        if right[: len(first)] != first:
            return False
        return self._encode(before) + right[len(first) :] == self._encode(before + after)

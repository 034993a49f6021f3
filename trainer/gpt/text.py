"""Text to and from tokens while sampling: the tokenizer of a run, its prompt, and its output."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from startrail_jax.errors import InputError
from trainer.data.documents import Document
from trainer.data.files import holds_tokens
from trainer.gpt.config import DataConfig
from trainer.gpt.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    text_tokenizer,
)

# Number of tokens of the prompt that are decoded together with the first new tokens: with some
# tokenizers a word depends on the token before it, and a character may take several tokens.
CONTEXT_TOKENS = 8
# What a decoder returns for bytes that are not a character, or not yet a whole one.
REPLACEMENT = "\ufffd"


class IdTokenizer:
    """Writes every token as its id, for data that consist of tokens."""

    unit = "token"

    def __init__(self, *, end_of_document: int | None):
        self.end_of_document = end_of_document

    def encode(self, documents: Sequence[Document]) -> list[Integer[np.ndarray, " tokens"]]:
        """The ids in each document, which are separated by spaces."""
        texts = ((document, document.text.split()) for document in documents)
        return [
            np.array([self._id(x, document) for x in text], np.int64) for document, text in texts
        ]

    def _id(self, word: str, document: Document) -> int:
        if not word.isdecimal() or len(word) > 9:
            raise InputError(
                "The prompt must be token ids with spaces between, since the data of the run are "
                f"tokens; got {word!r} in {document.place}. Give ids, or the tokenizer.json that "
                "made the data: --tokenizer."
            )
        return int(word)


Tokenizer = ByteTokenizer | FileTokenizer | IdTokenizer


def open_tokenizer(config: DataConfig, *, vocab_size: int) -> Tokenizer:
    """The tokenizer of the data of a run; the data themselves may be gone."""
    path = config.path
    if config.tokenizer is None and path and holds_tokens(path[0], "data.path"):
        return IdTokenizer(end_of_document=config.end_of_document)
    return text_tokenizer(config, vocab_size=vocab_size)


def encode_prompt(tokenizer: Tokenizer, text: str) -> Integer[np.ndarray, " tokens"]:
    """The tokens of a prompt, without a token that ends the document."""
    if any(0xD800 <= ord(x) < 0xE000 for x in text):
        raise InputError(
            "The prompt must be text that can be written in UTF-8; got bytes that are not. Give it "
            "in UTF-8."
        )
    prompt = Document(key="", place="the prompt", text=text, is_last=False)
    (tokens,) = tokenizer.encode([prompt])
    if not len(tokens):
        raise InputError(
            f"The prompt must have at least one {tokenizer.unit}; got {text!r}. Give the model "
            "something to continue: --prompt, --prompt-file or standard input."
        )
    return tokens


class TextStream:
    """Turns tokens into text as they are generated, as far as no later token can change it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Integer[np.ndarray, " tokens"]):
        """Starts after a prompt, whose text is not repeated."""
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        # The tokens whose text is certain, and the tokens after them.
        self._before = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
        self._after: list[int] = []

    def add(self, token: int) -> str:
        """The text that becomes certain with one more token."""
        if isinstance(self._tokenizer, IdTokenizer):
            return f"{token} "
        if isinstance(self._tokenizer, ByteTokenizer):
            # As in `ByteTokenizer.decode`: a token beyond the bytes has no text.
            return self._bytes.decode(bytes([min(token, 255)]))
        self._after.append(token)
        text = self._new_text(self._tokenizer)
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._before, self._after = self._after, []
        return text

    def end(self) -> str:
        """The rest of the text, when no token follows."""
        if isinstance(self._tokenizer, FileTokenizer):
            return self._new_text(self._tokenizer) if self._after else ""
        return self._bytes.decode(b"", final=True)

    def _new_text(self, tokenizer: FileTokenizer) -> str:
        before, whole = (
            tokenizer.decode(np.array(tokens, np.int64))
            for tokens in (self._before, self._before + self._after)
        )
        return whole[len(before) :]

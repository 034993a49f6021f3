"""From text to text: what a language model makes of a prompt."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from trainer.data.files import (
    KIND_OF_SUFFIX,
    TOKEN_KINDS,
    Document,
    find_files,
)
from trainer.gpt.config import DataConfig
from trainer.gpt.corpus import Corpus
from trainer.gpt.generation import Generator
from trainer.gpt.token_choice import Sampling
from trainer.gpt.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
)

# Tokens of the prompt that a tokenizer sees before the first new one: some join words by what was
# before, and a character may take several tokens.
CONTEXT_TOKENS = 8
# What a decoder gives in the place of bytes that are no character, or not yet.
REPLACEMENT = "\ufffd"


class IdTokenizer:
    """The text of a token is its id: for data that are tokens already."""

    unit = "token"

    def __init__(self, *, end_of_document: int | None):
        self.end_of_document = end_of_document

    def encode(self, documents: Sequence[Document]) -> list[Integer[np.ndarray, " tokens"]]:
        """Ids of each document, which are written with spaces between.

        Raises:
            ValueError: if one is no whole number.
        """
        texts = ((document, document.text.split()) for document in documents)
        return [
            np.array([self._id(x, document) for x in text], np.int64) for document, text in texts
        ]

    def _id(self, word: str, document: Document) -> int:
        if not word.isdecimal() or len(word) > 9:
            raise ValueError(
                "The prompt must be token ids with spaces between, as the data of the run are "
                f"tokens; got {word!r} in {document.place}. Give ids, or the tokenizer.json that "
                "made the data: --tokenizer."
            )
        return int(word)


Tokenizer = ByteTokenizer | FileTokenizer | IdTokenizer


def open_tokenizer(config: DataConfig, *, vocab_size: int) -> Tokenizer:
    """What turns text into tokens as in the data of a run, which need not be there any more.

    Args:
        config: of the data.
        vocab_size: token ids that the model knows.

    Raises:
        ImportError: if there is a tokenizer and the package for it is missing.
        ValueError: if the tokenizer cannot be used, or nothing tells which it was.
    """
    options = {"end_of_document": config.end_of_document, "vocab_size": vocab_size}
    if config.tokenizer is not None:
        return FileTokenizer(config.tokenizer, **options)
    if _holds_tokens(config.path):
        return IdTokenizer(end_of_document=config.end_of_document)
    return ByteTokenizer(**options)


def _holds_tokens(path: Path | None) -> bool:
    if path is None:
        return False
    if path.exists():
        return find_files(path, "data.path").kind in TOKEN_KINDS
    if path.suffix not in KIND_OF_SUFFIX and path.suffix != ".txt":
        raise ValueError(
            "The data of the run must be where it began, or their name must tell whether they are "
            f"text or tokens; got data.path={str(path)!r}, which is gone or elsewhere than under "
            f"{str(Path.cwd())!r}. Give the --tokenizer that made them, or run where the run "
            "began; if they were text, of bytes, make data.path null in its config.json."
        )
    return KIND_OF_SUFFIX.get(path.suffix) in TOKEN_KINDS


def encode_prompt(tokenizer: Tokenizer, text: str) -> Integer[np.ndarray, " tokens"]:
    """The tokens of a prompt, without one that would end it.

    Raises:
        ValueError: if the tokenizer cannot encode the text, or there is none.
    """
    if any(0xD800 <= ord(x) < 0xE000 for x in text):
        raise ValueError(
            "The prompt must be text that can be written in UTF-8; got bytes that are none. Give "
            "it in UTF-8."
        )
    (tokens,) = tokenizer.encode([Document(key="", place="the prompt", text=text)])
    tokens = tokens if isinstance(tokenizer, IdTokenizer) else tokens[:-1]
    if not len(tokens):
        raise ValueError(
            f"The prompt must have at least one {tokenizer.unit}; got {text!r}. Give the model "
            "something to continue: --prompt, --prompt-file or standard input."
        )
    return tokens


class TextStream:
    """The text of tokens as they come, up to where no later token can change it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Integer[np.ndarray, " tokens"]):
        """Begins after a prompt, whose text is not repeated."""
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        # Those whose text is known, and those after them.
        self._before = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
        self._after: list[int] = []

    def add(self, token: int) -> str:
        """The text that is certain with one more token."""
        if isinstance(self._tokenizer, IdTokenizer):
            return f"{token} "
        if isinstance(self._tokenizer, ByteTokenizer):
            # As `ByteTokenizer.decode`: beyond the bytes there is no text.
            return self._bytes.decode(bytes([min(token, 255)]))
        self._after.append(token)
        text = self._new_text(self._tokenizer)
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._before, self._after = self._after, []
        return text

    def end(self) -> str:
        """The text that was not certain, now that nothing follows."""
        if isinstance(self._tokenizer, FileTokenizer):
            return self._new_text(self._tokenizer) if self._after else ""
        return self._bytes.decode(b"", final=True)

    def _new_text(self, tokenizer: FileTokenizer) -> str:
        before, whole = (
            tokenizer.decode(np.array(tokens, np.int64))
            for tokens in (self._before, self._before + self._after)
        )
        return whole[len(before) :]


def continue_text(
    program: Any,
    weights: Any,
    corpus: Corpus,
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[str, str]:
    """The start of the held-out part, and how the model goes on with it.

    Args:
        program: the `Program` of a run of a GPT.
        weights: of its model.
        corpus: of its data.
        interrupted: asked before every token, equally often on all processes; True ends the text.

    Returns:
        Prompt and continuation, of `config.sample_length` tokens each if the sequence allows it,
        no document ends before and nothing interrupts; as text, or as token ids where the text of
        a token is not known.
    """
    config = program.config
    generator = Generator(
        config.model,
        program.attention,
        Sampling(temperature=config.temperature, seed=config.seed),
        zero=config.zero,
        zero_axes=config.zero_axes,
        tile=config.tile,
    )
    length = min(config.sample_length, config.seq_len - config.sample_length)
    prompt = _in_one_document(corpus.held_out[0].read(0, length), corpus.end_of_document)
    steps = generator(
        weights,
        [prompt],
        num_tokens=config.sample_length,
        end_of_document=corpus.end_of_document,
    )
    found = []
    while not interrupted() and (step := next(steps, None)) is not None:
        found += [token for token in step if token is not None]
    tokens = np.array(found, np.int32)
    show: Callable[[Any], str] = corpus.decode or (lambda tokens: " ".join(map(str, tokens)))
    return show(prompt), show(tokens)


def _in_one_document(
    tokens: Integer[np.ndarray, " tokens"], end_of_document: int | None
) -> Integer[np.ndarray, " part"]:
    """The longest part of some tokens in which no document ends, if any has a token."""
    if end_of_document is None:
        return tokens
    ends = np.flatnonzero(tokens == end_of_document)
    parts = [part[part != end_of_document] for part in np.split(tokens, ends)]
    return max(parts, key=len) if any(map(len, parts)) else tokens

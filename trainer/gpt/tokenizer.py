"""Tokenizers: bytes of UTF-8, or a Hugging Face tokenizer as transformers loads it."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer, UInt8

from startrail_jax.errors import InputError, UserError
from trainer.data.documents import Document
from trainer.errors import MissingPackageError
from trainer.gpt.config import TOKENIZER, DataConfig

# Ends every document of bytes. No text contains this byte.
NUL = 0
# Tokens that end a document in the vocabularies of GPT-2 and NeoX, Llama 3, Llama 2 and Mistral,
# Gemma, and DeepSeek. Tokens that end a turn of a conversation or a line are not listed.
END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
# Name of what the package tokenizers raises where its own code fails.
PANIC = "PanicException"
OTHER_FILE = "The file fails on a text: give another, or correct it."


CountedTokens = tuple[Integer[np.ndarray, " tokens"], UInt8[np.ndarray, " tokens"]]


class ByteTokenizer:
    """Every token is a byte of UTF-8, except the token that ends a document."""

    unit = "byte"
    digest = "bytes"
    """What the tokens of a text depend on, beside `end_of_document`."""

    def __init__(self, *, end_of_document: int | None, vocab_size: int):
        """`end_of_document`: None for the byte 0; 256 or more if the vocabulary has room for it."""
        self.end_of_document = NUL if end_of_document is None else end_of_document
        if vocab_size < 256:
            raise InputError(
                "model.vocab_size must be at least 256 for text as bytes; got "
                f"vocab_size={vocab_size}. Use --model.vocab-size 256, or give --data.tokenizer."
            )
        self.dtype = np.min_scalar_type(self.num_ids - 1)

    @property
    def num_ids(self) -> int:
        """The number of ids that tokens may have."""
        return max(self.end_of_document, 255) + 1

    def encode(self, documents: Sequence[Document]) -> list[Integer[np.ndarray, " tokens"]]:
        """Tokens of each document or part of one, with the one that ends the document."""
        end = self.end_of_document
        encoded = []
        for document in documents:
            text = document.text.encode()
            if end < 256 and end in text:
                raise InputError(
                    f"Text must not hold the byte {end}, which ends a document; got it at offset "
                    f"{document.offset + text.index(end)} of {document.place!r}. Leave the file "
                    "out if it is not text, or give another --data.end-of-document."
                )
            tokens = np.frombuffer(text, np.uint8).astype(self.dtype)
            last = [end] if document.is_last else []
            encoded.append(np.append(tokens, np.array(last, self.dtype)))
        return encoded

    def encode_parts(self, examples: Sequence[Document]) -> list[CountedTokens]:
        """As `FileTokenizer.encode_parts`."""
        encoded = []
        for example, tokens in zip(examples, self.encode(examples), strict=True):
            text = np.frombuffer(example.text.encode(), np.uint8)
            # All bytes of a character but the first begin with the bits 10.
            starts = np.cumsum(text & 0xC0 != 0x80) - 1
            encoded.append((tokens, _counted(starts, starts + 1, example)))
        return encoded

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """Text to show. Bytes that are not UTF-8 are replaced; a document ends with a new line."""
        text = np.where(tokens > 255, 255, tokens).astype(np.uint8)
        text[tokens == self.end_of_document] = ord("\n")
        return text.tobytes().decode(errors="replace")


class FileTokenizer:
    """A Hugging Face tokenizer, without the tokens that it puts around texts. In a text, the name
    of the token that ends a document becomes that token."""

    unit = "token"

    def __init__(
        self,
        path: Path,
        *,
        end_of_document: int | None,
        begin_of_document: int | None = None,
        vocab_size: int,
    ):
        """`end_of_document`: None for the first of `END_OF_DOCUMENT_NAMES` in the vocabulary."""
        self._path = path
        self._vocab_size = vocab_size
        self._begin = begin_of_document
        self._tokenizer = load_tokenizer(path).backend_tokenizer
        with _library_errors(path, OTHER_FILE):
            text = f"{version('tokenizers')} {self._tokenizer.to_str()}"
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        if begin_of_document is not None:
            self.digest += f" begin {begin_of_document}"
        ends = [self._tokenizer.token_to_id(name) for name in END_OF_DOCUMENT_NAMES]
        ends = [end_of_document, *ends] if end_of_document is not None else ends
        self.end_of_document: int = next((end for end in ends if end is not None), -1)
        if self.end_of_document < 0:
            raise InputError(
                "A tokenizer must have a token that ends a document; got none of "
                f"{', '.join(END_OF_DOCUMENT_NAMES)} in {str(path)!r}. Give the id of the token: "
                "--data.end-of-document."
            )
        self.dtype = np.min_scalar_type(self.num_ids - 1)

    @property
    def num_ids(self) -> int:
        """The number of ids that tokens may have."""
        begin = -1 if self._begin is None else self._begin
        return max([self.end_of_document, begin, *self._tokenizer.get_vocab().values()]) + 1

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, without one that ends it."""
        with _library_errors(self._path, OTHER_FILE):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def id_of(self, name: str) -> int:
        """The id of a token that the tokenizer has."""
        return self._tokenizer.token_to_id(name)

    def name_of(self, token: int) -> str:
        """The name of a token, or its id if it has none."""
        return self._tokenizer.id_to_token(token) or str(token)

    def encode(self, documents: Sequence[Document]) -> list[Integer[np.ndarray, " tokens"]]:
        """Tokens of each document or part of one, with the one that ends the document."""
        texts = [document.context + document.text for document in documents]
        with _library_errors(self._path, OTHER_FILE):
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokens = []
        for document, encoding in zip(documents, encoded, strict=True):
            before = len(self.ids(document.context)) if document.context else 0
            last = [self.end_of_document] if document.is_last else []
            ids = encoding.ids[before:]
            ids = np.array([*self._first(ids, document), *ids, *last], np.int64)
            self.check_largest(int(ids.max(initial=0)), document.place)
            tokens.append(ids.astype(self.dtype))
        return tokens

    def encode_parts(self, examples: Sequence[Document]) -> list[CountedTokens]:
        """Tokens of each text, with the one that ends a document if it asks for that, and whether
        each counts: if any of its characters is in a part that counts, or if it is the one at the
        end."""
        texts, tokenizer = [example.text for example in examples], self._tokenizer
        # Some post-processors take spaces away from the offsets; they change no token here.
        processor, tokenizer.post_processor = tokenizer.post_processor, None
        try:
            with _library_errors(self._path, OTHER_FILE):
                found = tokenizer.encode_batch(texts, add_special_tokens=False)
        finally:
            tokenizer.post_processor = processor
        encoded = []
        for example, encoding in zip(examples, found, strict=True):
            # The template of a conversation has put around it what belongs there.
            last = [self.end_of_document] if example.is_last else []
            first = self._first(encoding.ids, example) if example.is_last else []
            ids = np.array([*first, *encoding.ids, *last], np.int64)
            self.check_largest(int(ids.max(initial=0)), example.place)
            starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            counted = np.append(np.zeros(len(first), np.uint8), _counted(starts, ends, example))
            encoded.append((ids.astype(self.dtype), counted))
        return encoded

    def _first(self, ids: Sequence[int], document: Document) -> list[int]:
        """What is put in front of a document's tokens; nothing if they begin with it, or if there
        are none, as the model would learn to end a text at once."""
        has_text_before = document.offset or document.context
        is_empty = not ids and document.is_last
        if self._begin is None or has_text_before or is_empty or ids[:1] == [self._begin]:
            return []
        return [self._begin]

    def check_largest(self, largest: int, place: str) -> None:
        """Raises ValueError if the largest token of a text is beyond the model's vocabulary."""
        if largest >= self._vocab_size:
            raise InputError(
                "Token ids must be below model.vocab_size; got id "
                f"{largest} in {place!r} with vocab_size={self._vocab_size}. Use "
                f"--model.vocab-size {self.num_ids}, which {str(self._path)!r} needs."
            )

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """Text to show, with the names of special tokens. Ids without a token are left out."""
        with _library_errors(self._path, OTHER_FILE):
            return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def text_tokenizer(config: DataConfig, *, vocab_size: int) -> ByteTokenizer | FileTokenizer:
    """The tokenizer of data that are text."""
    options = {"end_of_document": config.end_of_document, "vocab_size": vocab_size}
    if config.tokenizer is None:
        return ByteTokenizer(**options)
    begin = config.begin_of_document
    return FileTokenizer(config.tokenizer, begin_of_document=begin, **options)


def load_transformers(what: str, path: Path | str) -> Any:
    """The package transformers, which reads a file of a kind."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # Of torch, which is not used.
    try:
        import transformers  # Not above: `--help` must be fast.
    except ImportError as error:
        raise MissingPackageError(
            f"{what} must have the package transformers; got {str(path)!r} without it. Install "
            "the extra: pip install -e '.[hf]'."
        ) from error
    transformers.logging.set_verbosity_error()
    return transformers


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a file that tokenizers or transformers wrote, with the ids that the file
    says. If its name is `TOKENIZER`, the special tokens, chat template and settings of its folder
    count too, but not the class that they name: transformers would make a tokenizer of that class
    anew."""
    with _library_errors(path, "Give the file that lies beside the weights of the model."):
        path.open("rb").close()
        # Beside it may lie a folder of chat templates.
        folder = path.parent
        is_whole = path.name == TOKENIZER
        files = [*folder.iterdir(), *folder.glob("*/*.jinja")] if is_whole else [path]
        state = {(str(x), x.stat().st_mtime_ns, x.stat().st_size) for x in files if x.is_file()}
        return _loaded(path.absolute(), frozenset(state))


@functools.lru_cache(maxsize=1)
def _loaded(path: Path, state: frozenset[Any]) -> Any:
    """`load_tokenizer`, once for files in one state: of a large vocabulary, it takes seconds."""
    kind: Any = load_transformers("Tokenizers", path).PreTrainedTokenizerFast
    if path.name == TOKENIZER:
        found = kind.from_pretrained(str(path.parent), local_files_only=True)
    else:
        found = kind(tokenizer_file=str(path))
    # The file may ask for both, for short inputs.
    found.backend_tokenizer.no_truncation()
    found.backend_tokenizer.no_padding()
    return found


def special_tokens(tokenizer: Any) -> set[str]:
    """The names of the tokens of a tokenizer of transformers that are no text."""
    added = tokenizer.added_tokens_decoder.values()
    return {*(x.content for x in added if x.special), *tokenizer.all_special_tokens}


def beginning_of(path: Path) -> int | None:
    """The token that a tokenizer puts in front of every text; None if it puts none, or several."""
    tokenizer = load_tokenizer(path).backend_tokenizer
    with _library_errors(path, OTHER_FILE):
        found = tokenizer.encode("a", add_special_tokens=True)
    before = found.special_tokens_mask.index(0) if 0 in found.special_tokens_mask else 0
    return found.ids[0] if before == 1 else None


def check_tokenizer_of_model(path: Path, vocab_size: int, begin: int | None) -> str:
    """Compares the tokenizer of a pretrained model, if it has one, with the model, and returns what
    the log must say of it. `begin` is the token with which every document of the run begins."""
    if not path.is_file():
        return ""
    tokenizer = load_tokenizer(path).backend_tokenizer
    with _library_errors(path, OTHER_FILE):
        added = tokenizer.encode("", add_special_tokens=True).tokens
    num_ids = max(tokenizer.get_vocab().values(), default=0) + 1
    if num_ids > vocab_size:
        raise InputError(
            f"The tokenizer of a model must have no ids beyond its vocabulary; got {str(path)!r} "
            f"with {num_ids} ids and vocab_size={vocab_size}. Take both from one model."
        )
    if begin is not None:
        return (
            "; every document and every prompt of sample.py begins with "
            f"{tokenizer.id_to_token(begin) or begin}, and conversations as their template says"
        )
    if added:
        return (
            f"; its tokenizer adds {' '.join(added)} to every text elsewhere, and this program "
            "adds none: texts and prompts begin without it"
        )
    return ""


def _counted(
    starts: Integer[np.ndarray, " texts_tokens"],
    ends: Integer[np.ndarray, " texts_tokens"],
    example: Document,
) -> UInt8[np.ndarray, " tokens"]:
    """How each token counts, by its characters; and the one that ends the document."""
    counted = np.zeros(len(starts) + example.is_last, np.uint8)
    of_text = counted[: len(starts)]
    for first, end in example.counted or ():
        of_text[(starts < end) & (np.maximum(ends, starts + 1) > first) & (first < end)] = 1
    counted[len(starts) :] = 1
    return counted


@contextmanager
def _library_errors(path: Path, way_out: str) -> Iterator[None]:
    """Turns errors of the packages into errors that name the file. They raise plain exceptions and,
    where the code of tokenizers fails, a `PanicException`, which is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        if isinstance(error, (UserError, MemoryError)):
            raise
        raise InputError(
            f"data.tokenizer must be a Hugging Face tokenizer.json; got {str(path)!r}: "
            f"{type(error).__name__}: {error}. {way_out}"
        ) from error

"""The tokens that a language model trains on, and those that are held out.

The tokens are streams in which one token ends every document. Held out are

* with `validation_path`, everything at that path, and nothing at `path`;
* of several documents of text (files, or lines of JSONL), those whose `_share_of_key` is below
  `held_out`. That of a document depends only on its path in the folder (and its line), not on the
  other documents;
* of a single text file, the last part of its characters, a fraction of `held_out`;
* of files of tokens, the last part of each file, a fraction of `held_out`. A document may be cut.

Files of tokens are mapped into memory, so they may be larger than it. Text is read and tokenised in
every process. Nothing here depends on the seed, the hosts or the mesh.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Integer

from startrail_jax.errors import InputError
from trainer.data.files import (
    TOKEN_KINDS,
    Document,
    Files,
    find_files,
    map_tokens,
    read_documents,
    standard_library,
)
from trainer.gpt.config import DataConfig
from trainer.gpt.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
)

# Number of characters that are tokenised at a time: enough to use all cores, and little memory.
CHUNK = 1 << 22
# Number of tokens at both ends of a part of a file that are checked when the file is opened, so
# that a wrong data type is found at once. All other tokens are checked when they are read.
CHECKED_TOKENS = 1 << 16

_WAY_OUT = "Give --data.validation-path, or another --data.held-out."


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """A sequence of tokens: whole documents, or a part of one file."""

    name: str
    """Where the tokens are from, for errors."""
    tokens: Integer[np.ndarray, " tokens"]
    """The tokens, in memory or mapped into it."""
    offset: int = 0
    """Number of tokens of the file before these."""
    vocab_size: int
    """Number of token ids that the model knows."""

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " tokens"]:
        """The tokens from `start` up to `stop`.

        Raises:
            ValueError: if one of them is beyond the vocabulary.
        """
        tokens = self.tokens[start:stop]
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        if wrong.any():
            index = int(wrong.argmax())
            raise InputError(
                "Token ids must be at least 0 and below model.vocab_size; got id "
                f"{tokens[index]} at token {self.offset + start + index} of {self.name!r} with "
                f"vocab_size={self.vocab_size}. Use a larger --model.vocab-size, or correct "
                f"--data.bin-dtype if the file is not a vector of {tokens.dtype}."
            )
        return np.asarray(tokens, np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """The tokens of a run, and the way from tokens back to text."""

    train: tuple[Stream, ...]
    """Tokens to train on: one stream of all text, or one stream for each file of tokens."""
    held_out: tuple[Stream, ...]
    """Tokens that training never sees."""
    end_of_document: int | None
    """Token that ends every document; None if every file is a single document."""
    unit: str
    """What a token is: "byte" or "token"."""
    decode: Callable[[Integer[np.ndarray, " tokens"]], str] | None
    """Turns tokens into text; None if the text of a token is not known."""
    description: str
    """One line for the log."""


def open_corpus(config: DataConfig, *, vocab_size: int) -> Corpus:
    """Opens what `config` names; by default, the source of the Python standard library.

    Args:
        config: what to read.
        vocab_size: number of token ids that the model knows.

    Raises:
        ImportError: if a tokenizer.json is given and the package that reads it is missing.
        ValueError: if the data cannot be read, are of another kind than their names say, are beyond
            the vocabulary, or leave nothing to train on or to hold out.
    """
    end = config.end_of_document
    if end is not None and end >= vocab_size:
        raise InputError(
            "data.end_of_document must be below model.vocab_size; got "
            f"end_of_document={end}, vocab_size={vocab_size}. Use --model.vocab-size {end + 1}."
        )
    path = config.path
    files = standard_library() if path is None else find_files(path, "data.path")
    validation = None
    if config.validation_path is not None:
        validation = find_files(config.validation_path, "data.validation_path")
        if (validation.kind in TOKEN_KINDS) != (files.kind in TOKEN_KINDS):
            raise InputError(
                "data.validation_path must be tokens if data.path is, and text otherwise; got "
                f"{validation.kind} for {validation.name!r} and {files.kind} for {files.name!r}. "
                "Give both in the same form."
            )
    _check_effects(config, files, validation)
    if files.kind in TOKEN_KINDS:
        return _open_tokens(files, validation, config, vocab_size)
    return _open_text(files, validation, config, vocab_size)


def _check_effects(config: DataConfig, files: Files, validation: Files | None) -> None:
    """Raises if an option is set that has no effect on these data."""
    kinds = {files.kind, files.kind if validation is None else validation.kind}
    idle = {
        "bin_dtype": "bin" not in kinds,
        "text_key": "jsonl" not in kinds,
        "held_out": validation is not None,
        "end_of_document": kinds <= set(TOKEN_KINDS) and not config.mask_documents,
    }
    for name, default in vars(DataConfig()).items():
        value = getattr(config, name)
        if idle.get(name) and value != default:
            raise InputError(
                f"data.{name} must be left out where it has no effect; got {name}={value!r} for "
                f"{files.kind} data, validation_path={config.validation_path}, "
                f"mask_documents={config.mask_documents}. Leave it out."
            )


def _open_tokens(
    files: Files, validation: Files | None, config: DataConfig, vocab_size: int
) -> Corpus:
    """A stream for each file, or two streams if the end of each file is held out."""
    if config.tokenizer is not None:
        raise InputError(
            "data.tokenizer must be left out for files of tokens; got "
            f"tokenizer={str(config.tokenizer)!r} for {files.name!r}. Leave it out, or give text."
        )

    def stream(path: Path) -> Stream:
        tokens = map_tokens(path, config.bin_dtype)
        return Stream(name=str(path), tokens=tokens, vocab_size=vocab_size)

    train = [stream(path) for path in files.paths.values()]
    if validation is not None:
        held_out = [stream(path) for path in validation.paths.values()]
    else:
        whole = train
        cuts = [round(len(part) * (1 - config.held_out)) for part in whole]
        both = list(zip(whole, cuts, strict=True))
        train = [replace(part, tokens=part.tokens[:cut]) for part, cut in both]
        held_out = [replace(part, tokens=part.tokens[cut:], offset=cut) for part, cut in both]
    parts = [tuple(part for part in half if len(part)) for half in (train, held_out)]
    lengths = [sum(map(len, part)) for part in parts]
    _check_parts(lengths, files, validation, config, _WAY_OUT)
    for part in (*parts[0], *parts[1]):
        part.read(0, CHECKED_TOKENS)
        part.read(max(len(part) - CHECKED_TOKENS, 0), len(part))
    return Corpus(
        train=parts[0],
        held_out=parts[1],
        end_of_document=config.end_of_document,
        unit="token",
        decode=None,
        description=_describe(
            files,
            validation,
            [
                f"{len(part):,} files, {length:,} tokens"
                for part, length in zip(parts, lengths, strict=True)
            ],
        ),
    )


def _open_text(
    files: Files, validation: Files | None, config: DataConfig, vocab_size: int
) -> Corpus:
    """One stream to train on and one held out, of documents in the order of their files."""
    options = {"end_of_document": config.end_of_document, "vocab_size": vocab_size}
    if config.tokenizer is None:
        tokenizer = ByteTokenizer(**options)
    else:
        tokenizer = FileTokenizer(config.tokenizer, **options)
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    least = 1.0
    for chunk in _chunks(_assign(files, validation, config)):
        encoded = tokenizer.encode([document for _, document in chunk])
        for (held_out, document), tokens in zip(chunk, encoded, strict=True):
            parts[held_out].append(tokens)
            least = min(least, _share_of_key(document.key))
    way_out = _WAY_OUT
    if len(parts[0]) > 1 and not parts[1]:
        # The smallest share that holds out a document, in hundredths.
        way_out = f"Use --data.held-out {int(least * 100 + 1) / 100}, or --data.validation-path."
    # A document without text still has the token that ends it.
    lengths = [sum(len(tokens) - 1 for tokens in part) for part in parts]
    _check_parts(lengths, files, validation, config, way_out)
    streams = [
        Stream(name=source.name, tokens=np.concatenate(part), vocab_size=vocab_size)
        for part, source in zip(parts, (files, validation or files), strict=True)
    ]
    return Corpus(
        train=(streams[0],),
        held_out=(streams[1],),
        end_of_document=tokenizer.end_of_document,
        unit=tokenizer.unit,
        decode=tokenizer.decode,
        description=_describe(
            files,
            validation,
            [
                f"{len(part):,} documents, {len(stream):,} {tokenizer.unit}s"
                for part, stream in zip(parts, streams, strict=True)
            ],
        ),
    )


def _assign(
    files: Files, validation: Files | None, config: DataConfig
) -> Iterator[tuple[bool, Document]]:
    """Every document, and whether it is held out."""
    documents = read_documents(files, text_key=config.text_key)
    if validation is not None:
        yield from ((False, document) for document in documents)
        held_out = read_documents(validation, text_key=config.text_key)
        yield from ((True, document) for document in held_out)
    elif files.kind == "text" and len(files.paths) == 1:
        for document in documents:
            cut = round(len(document.text) * (1 - config.held_out))
            yield False, replace(document, text=document.text[:cut])
            yield True, replace(document, text=document.text[cut:])
    else:
        for document in documents:
            yield _share_of_key(document.key) < config.held_out, document


def _share_of_key(key: str) -> float:
    """A number in [0, 1) that follows from the hash of a document's key, and looks random.

    It is ordered by the remainder of the hash divided by 20. So a share of 1/20 holds out every
    document whose hash is divisible by 20, and a smaller share holds out some of those.
    """
    quotient, remainder = divmod(zlib.crc32(key.encode(errors="surrogateescape")), 20)
    return (remainder + quotient * 20 / 2**32) / 20


def _chunks(
    assigned: Iterable[tuple[bool, Document]],
) -> Iterator[list[tuple[bool, Document]]]:
    """Groups the documents into lists of about `CHUNK` characters."""
    chunk, size = [], 0
    for held_out, document in assigned:
        chunk.append((held_out, document))
        size += len(document.text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _check_parts(
    lengths: list[int],
    files: Files,
    validation: Files | None,
    config: DataConfig,
    way_out: str,
) -> None:
    """Raises if there is nothing to train on, or nothing is held out."""
    for length, source in zip(lengths, (files, validation), strict=True):
        if source is not None and not (length if validation else sum(lengths)):
            raise InputError(
                f"Data must hold text; got {len(source.paths)} empty files in {source.name!r}. "
                "Give others."
            )
    if not all(lengths):
        raise InputError(
            "data.held_out must leave something to train on and something to hold out; got "
            f"{lengths[0]} and {lengths[1]} tokens of {files.name!r} for "
            f"held_out={config.held_out}. {way_out}"
        )


def _describe(files: Files, validation: Files | None, counts: list[str]) -> str:
    place = "" if validation is None else f" from {validation.name}"
    return f"{files.name}: {counts[0]} to train on; {counts[1]} held out{place}"

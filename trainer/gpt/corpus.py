"""The tokens that a language model trains on, and those that are held out.

The tokens are streams in which one token ends every document. Held out are

* with `validation_path`, everything at that path. If some of it lies at `path` too, it is not
  trained on;
* in a folder with a split to hold out, such as val.* or test/, that split (see `find_files`);
* of several documents of text (files, or lines of JSONL), those for which a hash of the path in the
  folder (and the line) is below `held_out`. It does not depend on the other documents;
* of a single text file, the last part of its characters, a fraction of `held_out`;
* of files of tokens, the last part of each file, a fraction of `held_out`. A document may be cut.

Files of tokens are mapped into memory, so they may be larger than it. So are the tokens of text, if
there is a folder to cache them in. Nothing here depends on the seed, the hosts or the mesh.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int32, Integer

from startrail_jax.errors import InputError
from trainer.data.documents import digest_files
from trainer.data.files import (
    RECORD_KINDS,
    TOKEN_KINDS,
    Files,
    digest_of_tokens,
    find_files,
    map_tokens,
    standard_library,
    without,
)
from trainer.gpt.config import DataConfig
from trainer.gpt.encoding import (
    Text,
    check_lengths,
    encode,
)
from trainer.gpt.tokenizer import FileTokenizer, text_tokenizer

# Number of tokens at both ends of a part of a file that are checked when the file is opened, so
# that a wrong data type is found at once. All other tokens are checked when they are read.
CHECKED_TOKENS = 1 << 16
MOST_FOR_BYTES = 1024
"""Largest vocabulary of a model of bytes, which has room for more tokens than it needs."""


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

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " tokens"]:
        """The tokens from `start` up to `stop`."""
        tokens = self.tokens[start:stop]
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        if wrong.any():
            index = int(wrong.argmax())
            raise InputError(
                "Token ids must be at least 0 and below model.vocab_size; got id "
                f"{tokens[index]} at token {self.offset + start + index} of {self.name!r} with "
                f"vocab_size={self.vocab_size}. Use a larger --model.vocab-size, or correct "
                f"--data.bin-dtype if the file is not a vector of {tokens.dtype}. If you correct "
                "the token, a run that has begun needs --allow-changes to go on."
            )
        return np.asarray(tokens, np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """The tokens of a run, and the way from tokens back to text."""

    train: tuple[Stream, ...]
    """Tokens to train on: one stream of all text, or one stream for each file of tokens."""
    held_out: tuple[Stream, ...]
    end_of_document: int | None
    """Token that ends every document; None if every file is a single document."""
    unit: str
    """What a token is: "byte" or "token"."""
    decode: Callable[[Integer[np.ndarray, " tokens"]], str] | None
    """Turns tokens into text; None if the text of a token is not known."""
    description: str
    """One line for the log."""
    digest: str
    """A hash of the content of the files of `train`, in hexadecimal digits."""
    tokens: str | None = None
    """A hash of the tokens of `train`, if they were made of text."""
    shown: str = "held-out text"
    """What `held_out` is called where samples continue it."""
    stops: tuple[int, ...] = ()
    """Tokens that end an answer of a conversation, at which samples stop."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """The files of one path."""

    files: Files
    """Files to train on, and to hold out from if there is no `validation`."""
    validation: Files | None
    """Files that are held out; None if a fraction of `files` is."""

    @property
    def holds_tokens(self) -> bool:
        return self.files.kind in TOKEN_KINDS


def open_corpora(
    config: DataConfig, *, vocab_size: int, cache: Path | None = None
) -> tuple[Corpus, ...]:
    """Opens each path of `config`; by default, the source of the Python standard library. Tokens of
    text are kept in `config.cache`, else in the folder `cache`, else in memory."""
    end = config.end_of_document
    if end is not None and end >= vocab_size:
        raise InputError(
            "data.end_of_document must be below model.vocab_size; got "
            f"end_of_document={end}, vocab_size={vocab_size}. Use --model.vocab-size {end + 1}."
        )
    inputs = find_inputs(config)
    check_effects(config, inputs)
    if inputs[0].holds_tokens:
        return tuple(_open_tokens(x.files, x.validation, config, vocab_size) for x in inputs)
    check_bytes(config, vocab_size)
    folder = config.cache or (cache if config.tokenizer else None)
    texts = (open_text(x.files, x.validation, config, vocab_size) for x in inputs)
    return tuple(_open_text(text, folder, vocab_size) for text in texts)


def find_inputs(config: DataConfig) -> tuple[Input, ...]:
    """The files of each path."""
    found = [find_files(path, "data.path") for path in config.path] or [standard_library()]
    _check_alike(found)
    if config.validation_path is None:
        return tuple(Input(files=files, validation=files.validation) for files in found)
    held_out = find_files(config.validation_path, "data.validation_path")
    held_out = held_out.validation or held_out
    if (held_out.kind in TOKEN_KINDS) != (found[0].kind in TOKEN_KINDS):
        raise InputError(
            "data.validation_path must be tokens if data.path is, and text otherwise; got "
            f"{held_out.kind} for {held_out.name!r} and {found[0].kind} for {found[0].name!r}. "
            "Give both in the same form."
        )
    return tuple(Input(files=without(files, held_out), validation=held_out) for files in found)


def _check_alike(found: Sequence[Files]) -> None:
    """Raises if some paths hold tokens and others text, or if two paths hold the same file, part of
    which one of them could hold out and the other train on."""
    first, *others = found
    for files in others:
        if (files.kind in TOKEN_KINDS) != (first.kind in TOKEN_KINDS):
            raise InputError(
                "All of data.path must be tokens, or all text; got "
                f"{first.kind} for {first.name!r} and {files.kind} for {files.name!r}. Turn the "
                "text into tokens (python -m trainer.gpt.tokenize), or give text for all."
            )
    paths: dict[str, str] = {}
    for files in found:
        held_out = {} if files.validation is None else files.validation.paths
        real = {os.path.realpath(x) for x in (*files.paths.values(), *held_out.values())}
        if common := sorted(real & paths.keys()):
            raise InputError(
                "A file must be in one path of data.path alone; got "
                f"{common[0]!r} in {paths[common[0]]!r} and {files.name!r}. Leave it out of one of "
                "them; data.weights says how often each is read."
            )
        paths |= dict.fromkeys(real, files.name)


def check_effects(
    config: DataConfig,
    inputs: Sequence[Input],
    *,
    form: Literal["text", "examples", "rollouts", "pairs"] = "text",
) -> None:
    """Raises if an option is set that has no effect on these data, whose records are of a form."""
    validation = inputs[0].validation
    files = [x.files for x in inputs] + [x.validation for x in inputs if x.validation is not None]
    kinds = {x.kind for x in files}
    idle = {
        "bin_dtype": "bin" not in kinds,
        "text_key": kinds.isdisjoint(RECORD_KINDS) or form != "text",
        "chat_template": form not in ("examples", "pairs") or config.tokenizer is None,
        "ignored_keys": form == "text",
        "messages": form != "examples",
        # Of tokens, it only tells that the token which ends documents begins them too.
        "begin_of_document": config.begin_of_document != config.end_of_document
        if kinds <= set(TOKEN_KINDS)
        else config.tokenizer is None,
        "validation_fraction": all(x.validation is not None for x in inputs),
        "cache": kinds <= set(TOKEN_KINDS),
        "end_of_document": kinds <= set(TOKEN_KINDS) and not config.mask_documents,
    }
    for name, default in vars(DataConfig()).items():
        value = getattr(config, name)
        if idle.get(name) and value != default:
            raise InputError(
                f"data.{name} must be left out where it has no effect; got {name}={value!r} for "
                f"{' and '.join(sorted(kinds))} data, "
                f"{'no files' if validation is None else validation.name} to hold out, "
                f"mask_documents={config.mask_documents}, loss={config.loss!r}. Leave it out."
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

    largest = np.iinfo(config.bin_dtype).max
    if files.kind == "bin" and largest < vocab_size - 1:
        raise InputError(
            "data.bin_dtype must hold all ids of the model; got "
            f"bin_dtype={config.bin_dtype!r}, whose largest is {largest:,}, with "
            f"vocab_size={vocab_size:,} for {files.name!r}. Use --data.bin-dtype uint32 if the "
            "files hold such, or --model.vocab-size for fewer ids."
        )

    def stream(path: Path) -> Stream:
        tokens = map_tokens(path, config.bin_dtype)
        return Stream(name=str(path), tokens=tokens, vocab_size=vocab_size)

    train = [stream(path) for path in files.paths.values()]
    if validation is not None:
        held_out = [stream(path) for path in validation.paths.values()]
    else:
        both = [(part, round(len(part) * (1 - config.validation_fraction))) for part in train]
        train = [replace(part, tokens=part.tokens[:cut]) for part, cut in both]
        held_out = [replace(part, tokens=part.tokens[cut:], offset=cut) for part, cut in both]
    parts = [tuple(part for part in half if len(part)) for half in (train, held_out)]
    lengths = [sum(map(len, part)) for part in parts]
    check_lengths(lengths, "tokens", files, validation, config)
    for part in (*parts[0], *parts[1]):
        part.read(0, CHECKED_TOKENS)
        part.read(max(len(part) - CHECKED_TOKENS, 0), len(part))
    digests = map(digest_of_tokens, files.paths.values())
    return Corpus(
        train=parts[0],
        held_out=parts[1],
        end_of_document=config.end_of_document,
        unit="token",
        decode=None,
        description=described(
            files,
            validation,
            [
                f"{len(part):,} files, {length:,} tokens"
                for part, length in zip(parts, lengths, strict=True)
            ],
        ),
        digest=hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16],
    )


def check_bytes(config: DataConfig, vocab_size: int) -> None:
    """Raises ValueError if the tokens of text are bytes and the model has a vocabulary of words."""
    if config.tokenizer is None and vocab_size > MOST_FOR_BYTES:
        data = ", ".join(repr(str(x)) for x in config.path) or "Python's standard library"
        use = "--data.tokenizer" if config.path else "--data.path and --data.tokenizer"
        raise InputError(
            f"Without data.tokenizer, tokens are bytes; got {data} and "
            f"model.vocab_size={vocab_size}. Give {use}, or use --model.vocab-size 256."
        )


def open_text(files: Files, validation: Files | None, config: DataConfig, vocab_size: int) -> Text:
    """Loads the tokenizer, and looks through the text."""
    return Text(
        files=files,
        validation=validation,
        digests=digest_files(files),
        validation_digests={} if validation is None else digest_files(validation),
        config=config,
        tokenizer=text_tokenizer(config, vocab_size=vocab_size),
    )


def _open_text(text: Text, cache: Path | None, vocab_size: int) -> Corpus:
    """One stream to train on and one held out, of documents in the order of their files."""
    tokenizer = text.tokenizer
    parts = encode(text, cache)
    sources = (text.files, text.validation or text.files)
    streams = []
    for part, source in zip(parts, sources, strict=True):
        if isinstance(tokenizer, FileTokenizer):
            # The tokens may have been cached for a model with another vocabulary.
            tokenizer.check_largest(part.largest, source.name)
        streams.append(Stream(name=source.name, tokens=part.tokens, vocab_size=vocab_size))
    return Corpus(
        train=(streams[0],),
        held_out=(streams[1],),
        end_of_document=tokenizer.end_of_document,
        unit=tokenizer.unit,
        decode=tokenizer.decode,
        description=described(
            text.files,
            text.validation,
            [f"{x.documents:,} documents, {len(x.tokens):,} {tokenizer.unit}s" for x in parts],
            ends=text.holds_out_ends,
        ),
        digest=text.digest,
        tokens=parts[0].sha256,
    )


def joined(corpora: Sequence[Corpus], weights: Sequence[Fraction]) -> Corpus:
    """The streams of several paths, in their order, which are mixed by their weights."""
    first = corpora[0]
    digests = " ".join(f"{x.digest} {w}" for x, w in zip(corpora, weights, strict=True))
    tokens = " ".join(x.tokens or "" for x in corpora)
    return replace(
        first,
        train=tuple(stream for x in corpora for stream in x.train),
        held_out=tuple(stream for x in corpora for stream in x.held_out),
        digest=hashlib.sha256(digests.encode()).hexdigest()[:16],
        tokens=hashlib.sha256(tokens.encode()).hexdigest() if first.tokens else None,
        stops=tuple(sorted({stop for x in corpora for stop in x.stops})),
    )


def described(
    files: Files, validation: Files | None, counts: list[str], *, ends: bool = False
) -> str:
    """The line of the log about data, of which `counts` tell how much there is in both parts."""
    place = "" if validation is None else f" from {validation.name}"
    if ends and (files.kind != "text" or len(files.paths) > 1):
        place = ", the end of every document, as no choice of whole ones leaves text to both"
    return f"{files.name}: {counts[0]} to train on; {counts[1]} held out{place}{files.remark}"

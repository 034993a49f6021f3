"""Text to tokens: which documents are held out, and two files with the tokens of both parts.

Long documents are tokenised in slices and tokens are written as they are made, so that the memory
that this takes does not grow with the text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Integer, Real

from startrail_jax.errors import InputError
from trainer.data.cache import filled_folder
from trainer.data.documents import Document, read_documents, read_text
from trainer.data.files import Files, map_tokens
from trainer.data.progress_bar import shown_progress
from trainer.data.slices import Slicer
from trainer.gpt.config import DataConfig
from trainer.gpt.tokenizer import ByteTokenizer, FileTokenizer

# Number of characters that are tokenised at a time: enough to use all cores, and little memory.
CHUNK = 1 << 20
# Changes when the same text gives other files than before.
FORMAT = 1

# The files of a folder of tokens. Names of these kinds tell training what is held out.
TRAIN_FILE = "train.npy"
HELD_OUT_FILE = "val.npy"
ABOUT_FILE = ".about.json"

TextTokenizer = ByteTokenizer | FileTokenizer
Part = TypeVar("Part")
Texts = TypeVar("Texts", bound=Document)


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text to train on and text to hold out, and how both become tokens."""

    files: Files
    """Files to train on, and to hold out from if there is no `validation`."""
    validation: Files | None
    digests: Mapping[str, str]
    """The SHA-256 of each of `files`."""
    validation_digests: Mapping[str, str]
    config: DataConfig
    tokenizer: TextTokenizer

    @property
    def digest(self) -> str:
        """A hash of the text to train on and of what decides its tokens."""
        found: Any = self.digests
        if self.files.kind == "text" and len(found) == 1:
            # Names decide nothing here.
            found = list(found.values())
        return self._hash(found, self.validation is None)[:16]

    @property
    def key(self) -> str:
        """A hash of everything that the tokens of both parts depend on."""
        return self._hash(self.digests, self.validation_digests, self.validation is None)[:32]

    @cached_property
    def holds_out_ends(self) -> bool:
        """Whether the end of every document is held out, and not whole documents: those of a single
        text file, or where no whole document would be held out or none would be left."""
        if self.validation is not None:
            return False
        keys: Iterator[str]
        if self.files.kind == "text":
            if len(self.files.paths) == 1:
                return True
            # Of each file, the first part is enough.
            paths = self.files.paths.items()
            keys = (key for key, path in paths if next(read_text(key, path)).text)
        else:
            documents = read_documents(self.files, text_key=self.config.text_key)
            keys = (document.key for document in documents if document.text)
        # Of many documents, the first few are enough to know it.
        found = set()
        for key in keys:
            found.add(share_of_key(key) < self.config.validation_fraction)
            if len(found) == 2:
                return False
        return True

    @property
    def size(self) -> int:
        """Number of bytes of all files, as they are on the disk."""
        parts = [self.files] if self.validation is None else [self.files, self.validation]
        return sum(path.stat().st_size for part in parts for path in part.paths.values())

    def _hash(self, *found: Any) -> str:
        values = [
            FORMAT,
            self.files.kind,
            self.config.text_key,
            self.config.validation_fraction,
            self.tokenizer.digest,
            self.tokenizer.end_of_document,
            found,
        ]
        text = json.dumps(values)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class EncodedPart:
    """The tokens of one part of the data."""

    tokens: Integer[np.ndarray, " tokens"]
    """The tokens, mapped into memory."""
    documents: int
    largest: int
    """The largest of the tokens."""
    sha256: str | None
    """A hash of the .npy file that holds them; None if it is not known."""


def encode(text: Text, cache: Path | None) -> tuple[EncodedPart, EncodedPart]:
    """The tokens to train on and those held out; the folder `cache`, if given, keeps them."""
    with filled_folder(cache, text.key, lambda x: encode_to_folder(text, x)) as (folder, sums):
        return read_encoded(folder, sums)


def encode_to_folder(text: Text, folder: Path) -> None:
    """Writes the tokens to two files in an empty folder."""
    tokenizer = text.tokenizer
    with (
        VectorWriter(folder / TRAIN_FILE, tokenizer.dtype) as train,
        VectorWriter(folder / HELD_OUT_FILE, tokenizer.dtype) as held_out,
        shown_progress(f"tokenising {text.files.name}", text.size) as told,
    ):
        writers = train, held_out
        for chunk in chunks(_slices(_assign(text, told), tokenizer)):
            encoded = tokenizer.encode([document for _, document in chunk])
            for (is_held_out, document), tokens in zip(chunk, encoded, strict=True):
                writers[is_held_out].add(tokens, ends_document=document.is_last)
    # A document without text still has the token that ends it.
    lengths = [writer.length - writer.documents for writer in writers]
    check_lengths(lengths, "tokens", text.files, text.validation, text.config)
    about = {
        "documents": [writer.documents for writer in writers],
        "largest": [writer.largest for writer in writers],
    }
    (folder / ABOUT_FILE).write_text(json.dumps(about), encoding="utf-8")


def read_encoded(
    folder: Path, sums: Mapping[str, str] | None = None
) -> tuple[EncodedPart, EncodedPart]:
    """What `encode_to_folder` wrote, mapped into memory; `sums`: file name -> SHA-256, if known."""
    try:
        about = json.loads((folder / ABOUT_FILE).read_bytes())
        train, held_out = (
            EncodedPart(
                tokens=map_tokens(folder / name, ""),
                documents=documents,
                largest=largest,
                sha256=sums[name] if sums else None,
            )
            for name, documents, largest in zip(
                (TRAIN_FILE, HELD_OUT_FILE), about["documents"], about["largest"], strict=True
            )
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"A folder of tokens must hold whole files; got {str(folder)!r}: {error} Delete the "
            "folder: the tokens are then made again."
        ) from error
    return train, held_out


class VectorWriter:
    """Appends numbers, such as tokens, to a .npy file, and counts them."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.documents = self.length = self.largest = 0
        self._dtype = dtype
        self._file = path.open("wb")
        self._write_header()

    def __enter__(self) -> VectorWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """Writes the length, for which a header of .npy files has room."""
        with self._file:
            self._file.seek(0)
            self._write_header()

    def add(self, tokens: Real[np.ndarray, " tokens"], *, ends_document: bool = False) -> None:
        """Appends numbers; of tokens, the last may end a document."""
        self._file.write(tokens.tobytes())
        self.documents += ends_document
        self.length += len(tokens)
        self.largest = max(self.largest, int(tokens.max(initial=0)))

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _assign(text: Text, on_read: Callable[[int], None]) -> Iterator[tuple[bool, Document]]:
    """Every document or part of one, and whether it is held out."""
    files, held_out, key = text.files, text.config.validation_fraction, text.config.text_key
    documents = read_documents(files, text_key=key, on_read=on_read)
    if text.validation is not None:
        yield from ((False, document) for document in documents)
        documents = read_documents(text.validation, text_key=key, on_read=on_read)
        yield from ((True, document) for document in documents)
    elif text.holds_out_ends:
        for key, parts in itertools.groupby(documents, key=lambda document: document.key):
            if files.kind == "text":
                size = sum(len(part.text) for part in read_text(key, files.paths[key]))
            else:
                parts = list(parts)
                size = sum(len(part.text) for part in parts)
            # Both parts have some characters, if there are two.
            cut = min(max(round(size * (1 - held_out)), 1), max(size - 1, 1))
            yield from _cut_in_two(parts, cut)
    else:
        for document in documents:
            yield share_of_key(document.key) < held_out, document


def _cut_in_two(parts: Iterable[Document], cut: int) -> Iterator[tuple[bool, Document]]:
    """One document as two, the second of which is held out: it begins with character `cut`."""
    seen, first_ended = 0, False
    for part in parts:
        rest = cut - seen
        seen += len(part.text)
        if not first_ended:
            first_ended = seen >= cut or part.is_last
            first = replace(part, text=part.text[:rest], is_last=first_ended)
            yield False, first
            offset = part.offset + len(first.text.encode())
            second = replace(part, text=part.text[rest:], offset=offset)
        else:
            second = part
        if second.text or (first_ended and second.is_last):
            yield True, second


def share_of_key(key: str) -> float:
    """A number in [0, 1) that follows from the hash of a document's key, and looks random. It is
    ordered by the remainder of the hash divided by 20: a share of 1/20 holds out every document
    whose hash is divisible by 20, and a smaller share some of those."""
    quotient, remainder = divmod(zlib.crc32(key.encode(errors="surrogateescape")), 20)
    return (remainder + quotient * 20 / 2**32) / 20


def largest_share(shares: Iterable[float], fraction: float) -> float:
    """The largest of these, which `share_of_key` gives, that is held out. Where the fraction gives
    all to one part, that is the smallest of them."""
    largest, least, most = math.nextafter(fraction, 0), math.inf, -math.inf
    for share in shares:
        least, most = min(least, share), max(most, share)
        if least <= largest < most:  # Of many, the first few are enough to know it.
            return largest
    return least if least < most else largest


def _slices(
    assigned: Iterable[tuple[bool, Document]], tokenizer: TextTokenizer
) -> Iterator[tuple[bool, Document]]:
    """The same text, in slices that can be tokenised one by one."""
    if isinstance(tokenizer, ByteTokenizer):
        yield from assigned
        return
    slicer = Slicer(tokenizer.ids)
    for held_out, part in assigned:
        yield from ((held_out, document) for document in slicer.add(part))


def chunks(assigned: Iterable[tuple[Part, Texts]]) -> Iterator[list[tuple[Part, Texts]]]:
    """Groups the documents, each with its part, into lists of about `CHUNK` characters."""
    chunk, size = [], 0
    for part, document in assigned:
        chunk.append((part, document))
        size += len(document.text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def check_lengths(
    lengths: list[int],
    unit: str,
    files: Files,
    validation: Files | None,
    config: DataConfig,
) -> None:
    """Raises if there is nothing to train on, or nothing is held out."""
    for length, source in zip(lengths, (files, validation), strict=True):
        if source is not None and not (length if validation else sum(lengths)):
            raise InputError(
                f"Data must hold text; got {len(source.paths)} empty files in {source.name!r}. "
                "Give others."
            )
    if not all(lengths):
        # One cannot be shared out.
        ways = "or --data.validation-path"
        if sum(lengths) > 1:
            ways = "--data.validation-path, or another --data.validation-fraction"
        raise InputError(
            "data.validation_fraction must leave something to train on and something to hold out; "
            f"got {lengths[0]} and {lengths[1]} {unit} of {files.name!r} for "
            f"validation_fraction={config.validation_fraction}. Give more data, {ways}."
        )

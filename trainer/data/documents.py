"""The documents in text files and tables: scanned once, then read in parts of bounded size."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError
from trainer.data.array_records import read_array_record
from trainer.data.files import (
    COLUMN_KINDS,
    LISTED_FILES,
    RECORD_KINDS,
    TABLE_KINDS,
    Files,
    is_gzip,
)
from trainer.data.opening import check_expansion, open_regular, reading
from trainer.data.progress import SECONDS_BEFORE_LINE, shown_progress
from trainer.data.tables import read_arrow, read_parquet

# Number of bytes of a text file that are read at a time.
BLOCK_BYTES = 1 << 20
# A line is kept in memory as a whole, and a small compressed file may hold a very long one.
LONGEST_LINE = 1 << 28
# What reads the rows of each kind of table.
TABLES = {"parquet": read_parquet, "arrow": read_arrow, "array_record": read_array_record}


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of text, or a part of a long one."""

    key: str
    """Key of the file (and line, in a JSONL file). It decides whether the document is held out."""
    place: str
    """Where the document is, for errors."""
    text: str
    """The text of the document, or of the part."""
    offset: int = 0
    """Number of bytes of the document before this part."""
    context: str = ""
    """The last text before this part, if its tokens must be made with it; it gives none itself."""
    is_last: bool = True
    """Whether the document ends with this part; only then does a token that says so follow."""
    counted: tuple[tuple[int, int], ...] | None = None
    """The parts of the text that the loss counts: their first characters, and the characters after
    their last. None for all of it."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a JSONL file, or one row of a table."""

    key: str
    """Key of the file and number of the line. It decides whether the record is held out."""
    place: str
    """Where the line is, for errors."""
    fields: dict[str, Any]
    """The object that the line holds."""
    what: str = "line of a JSONL file"
    """What it is, for errors."""


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What is found out about a file of text before its documents are read."""

    digest: str
    """A hash of its content. A compressed file has that of the file in it."""
    characters: int
    """Number of its characters; 0 for a table, whose bytes are hashed as they are."""
    size: int
    """Number of its bytes on the disk."""


def scan_files(files: Files) -> dict[str, Scan]:
    """Reads every file, by its key.

    Raises:
        ValueError: if files cannot be read or are not UTF-8; all of them are named.
    """
    scans: dict[str, Scan] = {}
    failed: dict[str, InputError] = {}
    total = sum(path.stat().st_size for path in files.paths.values() if path.exists())
    with shown_progress(f"reading {files.name}", total, after=SECONDS_BEFORE_LINE) as advance:
        for key, path in files.paths.items():
            try:
                scans[key] = _scan(path, advance, is_table=files.kind in TABLE_KINDS)
            except InputError as error:
                failed[key] = error
    if failed:
        first, *others = failed.values()
        listed = "".join(f"\n  {error}" for error in others[: LISTED_FILES - 1])
        more = len(others) - (LISTED_FILES - 1)
        also = f"\n{len(others)} other files cannot be read either:{listed}" if others else ""
        raise InputError(f"{first}{also}" + (f"\n  and {more:,} more" if more > 0 else ""))
    return scans


def read_documents(
    files: Files, *, text_key: str, on_read: Callable[[int], None] = lambda size: None
) -> Iterator[Document]:
    """The documents of files, in order; long text files in parts.

    Args:
        files: of the kind "text" (a file is a document) or of `RECORD_KINDS` (a line or a row is).
        text_key: the key or column with the text of a record. Blank lines of JSONL are skipped.
        on_read: is told of every number of bytes of the files that are read.

    Raises:
        ValueError: if a file cannot be read or is not UTF-8, or a line is not JSON with that key.
    """
    if files.kind in RECORD_KINDS:
        for record in read_records(files, on_read, columns=(text_key,)):
            if text_key not in record.fields and files.kind in COLUMN_KINDS:
                raise InputError(
                    f"Every row of a table must have text under {text_key!r}; got null in column "
                    f"{text_key!r} of {record.place!r}. Fill or remove the row."
                )
            text = _text_of(record, text_key)
            yield Document(key=record.key, place=record.place, text=text)
        return
    for key, path in files.paths.items():
        yield from _read_text(key, path, on_read)


def _scan(path: Path, advance: Callable[[int], None], *, is_table: bool) -> Scan:
    digest, characters, size = hashlib.sha256(), 0, 0

    def read(count: int) -> None:
        nonlocal size
        size += count
        advance(count)

    if is_table:
        with reading(path), open_regular(path) as file:
            while raw := file.read(BLOCK_BYTES):
                digest.update(raw)
                read(len(raw))
    else:
        for raw, text, _ in _blocks(path, read):
            digest.update(raw)
            characters += len(text)
    return Scan(digest=digest.hexdigest(), characters=characters, size=size)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, io.BufferedIOBase]]:
    """A file to read, and the file on the disk, which differs from it if that is compressed."""
    with reading(path), open_regular(path) as raw:
        if not is_gzip(path):
            yield raw, raw
            return
        try:
            with gzip.GzipFile(fileobj=raw) as file:
                yield file, raw
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(
                f"{str(path)!r} must be a whole gzip file; got {type(error).__name__}: {error}. "
                "Write or copy it again, or leave it out."
            ) from error


def _blocks(
    path: Path, on_read: Callable[[int], None] = lambda size: None
) -> Iterator[tuple[bytes, str, int]]:
    """The content of a file: bytes, the whole characters that end in them, and their offset."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = told = 0
    with _opened(path) as (file, on_disk):
        size = os.fstat(on_disk.fileno()).st_size
        while True:
            raw = file.read(BLOCK_BYTES)
            # Bytes of a character that began in the block before.
            start = offset - len(decoder.getstate()[0])
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise _not_utf8(error, str(path), start) from None
            offset += len(raw)
            if file is not on_disk:
                check_expansion(path, size, offset)
            told, before = on_disk.tell(), told
            on_read(told - before)
            if not raw:
                return
            yield raw, text, start


def _read_text(key: str, path: Path, on_read: Callable[[int], None]) -> Iterator[Document]:
    """A file as one document, in parts; an empty file has one part too."""
    waiting = Document(key=key, place=str(path), text="")
    for _, text, start in _blocks(path, on_read):
        if waiting.text:
            yield replace(waiting, is_last=False)
        waiting = Document(key=key, place=str(path), text=text, offset=start)
    yield waiting


def read_records(
    files: Files,
    on_read: Callable[[int], None] = lambda size: None,
    *,
    columns: Collection[str],
) -> Iterator[Record]:
    """The objects in JSONL files, or the rows of tables, in order. Blank lines are skipped.

    Args:
        files: of one of `RECORD_KINDS`.
        on_read: is told of every number of bytes of the files that are read.
        columns: the columns of tables that are needed.

    Raises:
        ImportError: if the package is missing that reads a table.
        ValueError: if a file cannot be read or is not UTF-8, or a line is not a JSON object.
    """
    for key, path in files.paths.items():
        if files.kind == "jsonl":
            yield from _read_jsonl(key, path, on_read)
        else:
            yield from _read_table(key, path, files.kind, columns, on_read)


def _read_table(
    key: str, path: Path, kind: str, columns: Collection[str], on_read: Callable[[int], None]
) -> Iterator[Record]:
    told = 0
    for number, (fields, offset) in enumerate(TABLES[kind](path, columns), start=1):
        told, before = offset, told
        on_read(told - before)
        yield Record(
            key=f"{key}:{number}", place=f"{path}:{number}", fields=fields, what="row of a table"
        )


def _read_jsonl(key: str, path: Path, on_read: Callable[[int], None]) -> Iterator[Record]:
    offset = told = 0
    with _opened(path) as (file, on_disk):
        size = os.fstat(on_disk.fileno()).st_size
        lines = iter(lambda: file.readline(LONGEST_LINE + 1), b"")
        for number, raw in enumerate(lines, start=1):
            place = f"{path}:{number}"
            if len(raw) > LONGEST_LINE:
                raise InputError(
                    f"A line of a JSONL file must have at most {LONGEST_LINE:,} bytes; got more in "
                    f"{place!r}. Divide the document, or remove the line."
                )
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(error, str(path), offset) from None
            offset += len(raw)
            if file is not on_disk:
                check_expansion(path, size, offset)
            told, before = on_disk.tell(), told
            on_read(told - before)
            if line.strip():
                fields = _object_of_line(line, place)
                yield Record(key=f"{key}:{number}", place=place, fields=fields)


def _not_utf8(error: UnicodeDecodeError, place: str, offset: int) -> InputError:
    return InputError(
        f"Text must be UTF-8; got byte {error.object[error.start]:#04x} at offset "
        f"{offset + error.start} of {place!r}. Convert the file to UTF-8, or leave it out."
    )


def _object_of_line(line: str, place: str) -> dict[str, Any]:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"Every line of a JSONL file must be JSON; got {error} in {place!r}. Mend or remove "
            "the line."
        ) from None
    if not isinstance(fields, dict):
        raise InputError(
            f"Every line of a JSONL file must be an object; got {type(fields).__name__} in "
            f"{place!r}. Mend or remove the line."
        )
    return fields


def _text_of(record: Record, text_key: str) -> str:
    if text_key not in record.fields:
        raise InputError(
            f"Every {record.what} must be an object with the key {text_key!r}; got the keys "
            f"{list(record.fields)} in {record.place!r}. Name the key that holds the text: "
            "--data.text-key. Conversations, or prompts and completions, need --data.loss-on "
            "completion."
        )
    text = record.fields[text_key]
    if not isinstance(text, str):
        raise InputError(
            f"The text of a {record.what} must be a string; got {type(text).__name__} for "
            f"{text_key!r} in {record.place!r}. Mend or remove the line, or give another "
            "--data.text-key."
        )
    check_unicode(text, record.place)
    return text


def check_unicode(text: str, place: str) -> None:
    """Raises ValueError if a text from JSON has half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"Text must be Unicode; got the lone surrogate {text[error.start]!a} in {place!r}. "
            "Mend or remove the line."
        ) from None

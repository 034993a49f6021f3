"""The documents in files of text, JSON Lines and tables."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from startrail_jax.errors import InputError
from trainer.data.files import RECORD_KINDS, Files, is_gzip
from trainer.data.opening import reading
from trainer.data.progress_bar import shown_progress
from trainer.data.tables import read_rows
from trainer.sums import sha256_of

# Characters of a text file that are read at a time.
BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of text, or a part of a long one."""

    key: str
    """Key of the file (and line, of records). It decides whether the document is held out."""
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
    """The parts of the text that the loss counts, [first, end) in characters; None for all."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a JSONL file, or one row of a table."""

    key: str
    """Key of the file and number of the line. It decides whether the record is held out."""
    place: str
    """Where the line is, for errors."""
    fields: dict[str, Any]
    """The object that the line holds."""


def digest_files(files: Files) -> dict[str, str]:
    """The SHA-256 of every file, by its key."""
    digests = {}
    with reading(Path(files.name)):
        total = sum(path.stat().st_size for path in files.paths.values())
    with shown_progress(f"reading {files.name}", total) as advance:
        for key, path in files.paths.items():
            with reading(path):
                digests[key] = sha256_of(path, advance)
    return digests


def read_documents(
    files: Files, *, text_key: str, on_read: Callable[[int], None] = lambda size: None
) -> Iterator[Document]:
    """The documents of files, in order; long text files in parts. `on_read` is told of every number
    of bytes that are read."""
    if files.kind in RECORD_KINDS:
        for record in read_records(files, on_read, columns=(text_key,)):
            text = record.fields.get(text_key)
            if not isinstance(text, str):
                got = f"the keys {list(record.fields)}" if text is None else type(text).__name__
                raise InputError(
                    f"Every record must have text under the key {text_key!r}; got {got} in "
                    f"{record.place!r}. Mend or remove it, or name the key: --data.text-key. "
                    "Conversations, or prompts and completions, need --data.loss answers."
                )
            check_unicode(text, record.place)
            yield Document(key=record.key, place=record.place, text=text)
        return
    for key, path in files.paths.items():
        yield from read_text(key, path, on_read)


def read_text(
    key: str, path: Path, on_read: Callable[[int], None] = lambda size: None
) -> Iterator[Document]:
    """A file as one document, in parts; an empty file has one part too."""
    waiting = Document(key=key, place=str(path), text="")
    offset = 0
    with _opened(path, on_read) as file:
        while text := file.read(BLOCK):
            if waiting.text:
                yield replace(waiting, is_last=False)
            waiting = Document(key=key, place=str(path), text=text, offset=offset)
            offset += len(text.encode())
    yield waiting


def read_records(
    files: Files,
    on_read: Callable[[int], None] = lambda size: None,
    *,
    columns: Collection[str] | None = None,
    without: Collection[str] = (),
) -> Iterator[Record]:
    """The objects in JSONL files, or the rows of tables, in order. Blank lines are skipped.

    `columns` are those needed of tables (None for all); a table may lack some. `on_read` is told of
    every number of bytes that are read.
    """
    for key, path in files.paths.items():
        is_table = files.kind == "table"
        rows = read_rows(path, columns, without) if is_table else _read_jsonl(path, on_read)
        for number, found in rows:
            fields = {name: value for name, value in found.items() if name not in without}
            yield Record(key=f"{key}:{number}", place=f"{path}:{number}", fields=fields)
        if is_table:
            on_read(path.stat().st_size)


@contextmanager
def _opened(path: Path, on_read: Callable[[int], None]) -> Iterator[TextIO]:
    """A file of UTF-8, unpacked if it is compressed, without a byte-order mark. `on_read` is told
    of its bytes on the disk."""

    class Told(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            count = super().readinto(buffer)
            on_read(count or 0)
            return count

    try:
        with reading(path), io.BufferedReader(Told(path), BLOCK) as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if is_gzip(path) else raw
            # As they are: no end of a line is converted.
            yield io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{str(path)!r} must be a whole gzip file; got {type(error).__name__}: {error}. "
            "Write or copy it again, or leave it out."
        ) from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(
            f"Text must be UTF-8; got byte {byte:#04x} in {str(path)!r}"
            f"{', as files of UTF-16 begin' if byte in (0xFE, 0xFF) else ''}. "
            "Convert the file to UTF-8, or leave it out."
        ) from None


def _read_jsonl(path: Path, on_read: Callable[[int], None]) -> Iterator[tuple[int, dict[str, Any]]]:
    with _opened(path, on_read) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                found: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _no_object(error, path, number) from error
            if not isinstance(found, dict):
                raise _no_object(type(found).__name__, path, number)
            yield number, found


def _no_object(got: object, path: Path, number: int) -> InputError:
    return InputError(
        f"Every line of a JSONL file must be a JSON object; got {got} in '{path}:{number}'. Mend "
        "or remove the line."
    )


def check_unicode(text: str, place: str) -> None:
    """Raises ValueError if a text from JSON has half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"Text must be Unicode; got the lone surrogate {text[error.start]!a} in {place!r}. "
            "Mend or remove the line."
        ) from None

"""Files of data: which files there are, and the documents or tokens in them."""

from __future__ import annotations

import difflib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from jaxtyping import Integer

from startrail_jax.errors import InputError

# Folders of tests, of installed packages, and of tables that a program has generated. Many of those
# tables are nearly equal, so training would see what is held out.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)

Kind = Literal["text", "jsonl", "bin", "npy"]
KIND_OF_SUFFIX: dict[str, Kind] = {".jsonl": "jsonl", ".bin": "bin", ".npy": "npy"}
TOKEN_KINDS = ("bin", "npy")


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of data, all of one kind."""

    name: str
    """What the files are, for the log and for errors."""
    kind: Kind
    """Kind of the files."""
    paths: dict[str, Path]
    """Path of each file by its key, sorted. A key is a path relative to the folder."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of text."""

    key: str
    """Key of the file (and line, in a JSONL file). It decides whether the document is held out."""
    place: str
    """Where the document is, for errors."""
    text: str
    """The text of the document."""


def standard_library(folder: Path | None = None) -> Files:
    """The source code of the standard library of the running Python.

    Args:
        folder: folder of the library; None to ask the interpreter.

    Raises:
        ValueError: if the folder has no source files; some interpreters keep their library in a zip
            file.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    keys = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    keys = [key for key in keys if EXCLUDED_FOLDERS.isdisjoint(PurePosixPath(key).parts)]
    if not keys:
        raise InputError(
            "The standard library must have source files; got 0 *.py files in "
            f"{str(folder)!r}. Use a Python that comes with its library as files, or give "
            "--data.path."
        )
    return Files(
        name=f"standard library of Python {platform.python_version()}",
        kind="text",
        paths={key: folder / key for key in keys},
    )


def find_files(path: Path, option: str) -> Files:
    """A file, or all files in a folder and its subfolders, without hidden ones.

    Args:
        path: the file or folder.
        option: the setting that names the path, for errors: "data.path".

    Raises:
        ValueError: if the path is missing, empty or unreadable, or the files are of several kinds.
    """
    with _reading(path):
        if not os.path.lexists(path):
            raise InputError(f"{option} must exist; got {str(path)!r}. {_near(path)}")
        keys = [path.name] if not path.is_dir() else sorted(walk_files(path))
    if not keys:
        raise InputError(
            f"{option} must hold files; got an empty folder, {str(path)!r} (files whose names "
            "start with a dot are left out). Give another."
        )
    paths = {key: path / key if path.is_dir() else path for key in keys}
    first: dict[Kind, str] = {}
    for key, file in paths.items():
        first.setdefault(_kind(file), key)
    if len(first) > 1:
        found = ", ".join(f"{key!r} ({kind})" for kind, key in first.items())
        raise InputError(
            f"All files of {option} must be of one kind; got {found} in {str(path)!r}. Give a "
            "folder for each kind, or a file."
        )
    return Files(name=str(path), kind=next(iter(first)), paths=paths)


def read_documents(files: Files, *, text_key: str) -> Iterator[Document]:
    """The documents of text or JSONL files, in order.

    Args:
        files: of the kind "text" (a file is a document) or "jsonl" (a line is).
        text_key: the key under which a line of JSONL holds its text. Blank lines are skipped.

    Raises:
        ValueError: if a file cannot be read or is not UTF-8, or a line is not JSON with that key.
    """
    for key, path in files.paths.items():
        _check_regular(path)
        if files.kind == "jsonl":
            yield from _read_jsonl(key, path, text_key)
            continue
        with _reading(path):
            raw = path.read_bytes()
        yield Document(key=key, place=str(path), text=_decode(raw, str(path), 0))


def map_tokens(path: Path, bin_dtype: str) -> Integer[np.ndarray, " tokens"]:
    """The tokens of a .npy or .bin file, mapped into memory.

    Args:
        path: the file.
        bin_dtype: data type of the tokens in a .bin file, little-endian.

    Raises:
        ValueError: if the file cannot be read, is empty or truncated, or is not a vector of
            integers.
    """
    _check_regular(path)
    with _reading(path):
        size = path.stat().st_size
        if _kind(path) == "npy":
            tokens = _map_npy(path)
        else:
            dtype = np.dtype(bin_dtype).newbyteorder("<")
            if size % dtype.itemsize:
                raise InputError(
                    f"The size of {str(path)!r} must be a multiple of {dtype.itemsize} bytes for "
                    f"bin_dtype={bin_dtype!r}; got {size} bytes. It may be truncated: write or "
                    "copy it again, or correct --data.bin-dtype."
                )
            # An empty file cannot be mapped.
            tokens = np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
    if not len(tokens):
        raise InputError(f"{str(path)!r} must hold tokens; got none. Remove it, or write it again.")
    return tokens


def walk_files(folder: Path) -> Iterator[str]:
    """Relative paths of the files in a folder and its subfolders, without hidden ones.

    Links are followed.

    Raises:
        OSError: if a folder cannot be listed.
        ValueError: if a link leads to a folder that was found already.
    """

    def refuse(error: OSError) -> None:
        raise error

    seen: dict[str, str] = {}
    # Without `onerror`, a folder that cannot be listed would be left out silently.
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        place = os.path.realpath(root)
        if place in seen:
            raise InputError(
                f"A folder of data must be reached in one way only; got {root!r}, which is "
                f"{seen[place]!r}. Remove the link."
            )
        seen[place] = root
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield (Path(root) / name).relative_to(folder).as_posix()


def _kind(path: Path) -> Kind:
    return KIND_OF_SUFFIX.get(path.suffix.lower(), "text")


def _near(path: Path) -> str:
    """A sentence about what may have been meant by a path that does not exist."""
    if not path.parent.is_dir():
        return f"There is no folder {str(path.parent)!r} either."
    near = difflib.get_close_matches(path.name, os.listdir(path.parent))
    if not near:
        return f"Nothing in {str(path.parent)!r} has a similar name."
    return f"Did you mean {' or '.join(repr(str(path.parent / name)) for name in near)}?"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns an error of the operating system into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{str(error.filename or path)!r} must be readable; got {type(error).__name__}: "
            f"{error.strerror or error}. Correct its permissions or the link to it, or leave it "
            "out."
        ) from error


def _check_regular(path: Path) -> None:
    """Raises for a pipe or a device, which could be read without end. A link is followed."""
    with _reading(path):
        path.stat()
        if not path.is_file():
            raise InputError(
                f"{str(path)!r} must be a regular file; got a folder, pipe or device. Leave it out."
            )


def _decode(raw: bytes, place: str, offset: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"Text must be UTF-8; got byte {raw[error.start]:#04x} at offset "
            f"{offset + error.start} of {place!r}. Convert the file to UTF-8, or leave it out."
        ) from None


def _read_jsonl(key: str, path: Path, text_key: str) -> Iterator[Document]:
    offset = 0
    with _reading(path), path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"{path}:{number}"
            line = _decode(raw, str(path), offset)
            offset += len(raw)
            if line.strip():
                text = _text_of_line(line, place, text_key)
                yield Document(key=f"{key}:{number}", place=place, text=text)


def _text_of_line(line: str, place: str, text_key: str) -> str:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"Every line of a JSONL file must be JSON; got {error} in {place!r}. Mend or remove "
            "the line."
        ) from None
    if not isinstance(record, dict) or text_key not in record:
        given = f"the keys {list(record)}" if isinstance(record, dict) else type(record).__name__
        raise InputError(
            f"Every line of a JSONL file must be an object with the key {text_key!r}; got {given} "
            f"in {place!r}. Name the key that holds the text: --data.text-key."
        )
    text = record[text_key]
    if not isinstance(text, str):
        raise InputError(
            f"The text of a JSONL line must be a string; got {type(text).__name__} for "
            f"{text_key!r} in {place!r}. Mend or remove the line, or give another --data.text-key."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"Text must be Unicode; got the lone surrogate {text[error.start]!a} in {place!r}. "
            "Mend or remove the line."
        ) from None
    return text


def _map_npy(path: Path) -> np.ndarray:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{str(path)!r} must be a whole .npy file of integers; got {error}. It may be "
            "truncated: write or copy it again."
        ) from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(
            f"{str(path)!r} must hold a vector of integers; got shape {tokens.shape} of "
            f"{tokens.dtype}. Write the tokens one after another."
        )
    return tokens

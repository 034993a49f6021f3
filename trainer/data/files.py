"""Files of data: which files there are, of which kind, and the tokens in files of tokens."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Integer

from startrail_jax.errors import InputError
from trainer.data.opening import reading
from trainer.data.tables import HELD_OUT, TRAIN, splits_of_tables
from trainer.data.tables import KIND_OF_SUFFIX as TABLES
from trainer.places import way_to

# Folders of tests, of installed packages, and of tables that a program has generated. Many of those
# tables are nearly equal, so training would see what is held out.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)

Kind = Literal["text", "jsonl", "table", "bin", "npy"]
KIND_OF_SUFFIX: dict[str, Kind] = {
    **{".jsonl": "jsonl", ".bin": "bin", ".npy": "npy"},
    **dict.fromkeys(TABLES, "table"),
}
TOKEN_KINDS = ("bin", "npy")
RECORD_KINDS = ("jsonl", "table")
"""Kinds of files of which each line or row is a document."""
GZIP = ".gz"
NO_TEXT = frozenset(
    {".json", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".array_record", ".arrayrecord"}
)
"""Suffixes of files that are no plain text, and are not read."""
# Names of folders, and of files before suffix and number, that say which split they are of.
SPLIT_NAME = re.compile(rf"({'|'.join((TRAIN, *HELD_OUT))})([-_.]?[0-9].*)?", re.IGNORECASE)
# In this order, if a folder has splits in several forms; the last one is any other text.
SPLIT_SUFFIXES = (".bin", ".npy", ".jsonl", ".txt", "")
LISTED_FILES = 5
LLM_C = {20240520: "uint16", 20240801: "uint32"}
"""The first number in a file of tokens of llm.c -> the data type of its tokens."""
LLM_C_HEADER = 1024
"""Bytes before the first token in these files."""

# Of a file of tokens that is larger, so many bytes are hashed, in blocks that are spread evenly.
HASHED_BYTES = 1 << 28
HASHED_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of data, all of one kind."""

    name: str
    """What the files are, for the log and for errors."""
    kind: Kind
    paths: dict[str, Path]
    """Path of each file by its key, sorted. A key is a path relative to the folder."""
    validation: Files | None = None
    """The files whose names say that they are to be held out from these."""
    remark: str = ""
    """End of the line in the log that describes the data."""


def standard_library(folder: Path | None = None) -> Files:
    """The source code of the standard library: of the running Python, or in `folder`."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    keys: list[str] = []
    for parent, folders, names in os.walk(folder):
        # The excluded folders hold most of the files, so that it is worth not to enter them.
        folders[:] = set(folders) - EXCLUDED_FOLDERS
        sources = (Path(parent, name) for name in names if name.endswith(".py"))
        keys += (path.relative_to(folder).as_posix() for path in sources)
    keys.sort()
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

    Files and folders named `train`, and `val` or another of `HELD_OUT`, are the two parts of the
    data, and other files are left out; names may be numbered. Without `train`, all files but those
    held out are trained on; in folders of text, such names then mean nothing, since a program has a
    folder of tests, too. The splits of a folder of tables are its parts.
    """
    with reading(path):
        if not os.path.lexists(path):
            raise InputError(f"{option} must exist; got {str(path)!r}. {way_to(path)}")
        keys = [path.name] if not path.is_dir() else sorted(walk_files(path))
    if not keys:
        raise InputError(
            f"{option} must hold files; got an empty folder, {str(path)!r} (files whose names "
            "start with a dot are left out). Give another."
        )
    paths = {key: path / key if path.is_dir() else path for key in keys}
    parts = None
    if path.is_dir():
        is_table = any(kind_of(Path(key)) == "table" for key in keys)
        parts = _parts_of_tables(keys, path) if is_table else _parts_by_name(keys, path)
    if parts is None:
        return Files(name=str(path), kind=_one_kind(keys, path, option), paths=paths)
    used = [*parts[0], *parts[1]]
    kind = _one_kind(used, path, option)
    train, held_out = ({key: paths[key] for key in part} for part in parts)
    others = [key for key in keys if key not in used]
    remark = f"; {len(others):,} other files left out ({list_names(others)})" if others else ""
    validation = Files(name=list_names(held_out), kind=kind, paths=held_out) if held_out else None
    return Files(name=str(path), kind=kind, paths=train, validation=validation, remark=remark)


def without(files: Files, others: Files) -> Files:
    """The files that are not among others, for whatever names or links."""
    found = {os.path.realpath(path) for path in others.paths.values()}
    kept = {key: path for key, path in files.paths.items() if os.path.realpath(path) not in found}
    if not kept:
        raise InputError(
            "data.path must hold files besides those of data.validation_path, which are not "
            f"trained on; got the same {len(files.paths)} for both, {files.name!r} and "
            f"{others.name!r}. Give other files for one of them, or leave data.validation_path out."
        )
    left_out = [key for key in files.paths if key not in kept]
    remark = f"; not trained on, since held out: {list_names(left_out)}" if left_out else ""
    return replace(files, paths=kept, remark=files.remark + remark)


def map_tokens(path: Path, bin_dtype: str) -> Integer[np.ndarray, " tokens"]:
    """The tokens of a .npy or .bin file (little-endian, of `bin_dtype`), mapped into memory."""
    with reading(path):
        size = path.stat().st_size
        if kind_of(path) == "npy":
            tokens = _map_vector(path)
        else:
            dtype = np.dtype(bin_dtype).newbyteorder("<")
            if size % dtype.itemsize:
                raise InputError(
                    f"The size of {str(path)!r} must be a multiple of {dtype.itemsize} bytes for "
                    f"bin_dtype={bin_dtype!r}; got {size} bytes. It may be truncated: write or "
                    "copy it again, or correct --data.bin-dtype."
                )
            _check_no_header(path)
            # An empty file cannot be mapped.
            tokens = np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
    if not len(tokens):
        raise InputError(f"{str(path)!r} must hold tokens; got none. Remove it, or write it again.")
    return tokens


def _check_no_header(path: Path) -> None:
    with path.open("rb") as file:
        magic = int.from_bytes(file.read(4), "little")
    if magic in LLM_C:
        raise InputError(
            f"A .bin file must hold tokens alone; got {str(path)!r}, which begins with the header "
            f"of llm.c ({magic}). Cut its {LLM_C_HEADER:,} bytes off, `tail -c +{LLM_C_HEADER + 1} "
            f"FILE`, and use --data.bin-dtype {LLM_C[magic]}."
        )


def _map_vector(path: Path) -> Integer[np.ndarray, " tokens"]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # The header is an expression, which may be wrong in any way.
        raise InputError(
            f"{str(path)!r} must be a whole .npy file of integers; got {type(error).__name__}: "
            f"{error}. It may be truncated: write or copy it again."
        ) from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(
            f"{str(path)!r} must hold a vector of integers; got shape {tokens.shape} of "
            f"{tokens.dtype}. Write the tokens one after another."
        )
    return tokens


def walk_files(folder: Path) -> Iterator[str]:
    """Relative paths of all files below a folder but hidden ones; links are followed."""

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


def kind_of(path: Path) -> Kind:
    """What a file holds, by its name. A gzip file is of the kind of the file in it."""
    inner = path.with_suffix("") if is_gzip(path) else path
    return KIND_OF_SUFFIX.get(inner.suffix.lower(), "text")


def is_gzip(path: Path) -> bool:
    """Whether a file is compressed, by its name."""
    return path.suffix.lower() == GZIP


def list_names(keys: Iterable[str]) -> str:
    """The first few of several names, and how many more there are."""
    names = list(keys)
    more = f" and {len(names) - LISTED_FILES:,} more" if len(names) > LISTED_FILES else ""
    return ", ".join(map(repr, names[:LISTED_FILES])) + more


def digest_of_tokens(path: Path) -> str:
    """A hash of the size and content of a file of tokens. Of one above `HASHED_BYTES`, only so many
    bytes count: of blocks spread evenly over it, the first and the last among them."""
    digest = hashlib.sha256()
    with reading(path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(b"%d " % size)
        if size > HASHED_BYTES:
            blocks = HASHED_BYTES // HASHED_BLOCK
            starts = [(size - HASHED_BLOCK) * block // (blocks - 1) for block in range(blocks)]
        else:
            starts = range(0, size, HASHED_BLOCK)
        for start in starts:
            file.seek(start)
            digest.update(file.read(HASHED_BLOCK))
    return digest.hexdigest()


def _one_kind(keys: list[str], path: Path, option: str) -> Kind:
    """The kind of all files."""
    kinds: dict[Kind, str] = {}
    for key in keys:
        file = Path(key)
        kind, is_packed = kind_of(file), is_gzip(file)
        inner = (file.with_suffix("") if is_packed else file).suffix.lower()
        if inner in NO_TEXT or (is_packed and kind not in ("text", "jsonl")):
            raise InputError(
                f"{option} must be text or *.jsonl (both also as *.gz), *.parquet, *.arrow, *.bin "
                f"or *.npy; got {key!r} in {str(path)!r}. Unpack or convert such files, or leave "
                "them out. (One JSON object a line is *.jsonl.)"
            )
        kinds.setdefault(kind, key)
    if len(kinds) > 1:
        found = ", ".join(f"{key!r} ({kind})" for kind, key in kinds.items())
        raise InputError(
            f"All files of {option} must be of one kind; got {found} in {str(path)!r}. Give a "
            "folder for each kind, or a file."
        )
    return next(iter(kinds))


Parts = tuple[list[str], list[str]]
"""The files to train on, and those to hold out."""


def _parts_of_tables(keys: list[str], folder: Path) -> Parts | None:
    key_of = {os.path.realpath(folder / key): key for key in keys}
    splits, is_whole = splits_of_tables(folder)
    named = {name: [key_of[os.path.realpath(x)] for x in paths] for name, paths in splits.items()}
    used = {key for split in named.values() for key in split}
    tables = [key for key in keys if kind_of(Path(key)) == "table" and key not in used]
    if tables and not is_whole:
        # Beside a split that is held out, datasets leaves out files without a name.
        named[""] = tables
    return _parts(named, folder) or (named.get(TRAIN) or next(iter(named.values())), [])


def _parts_by_name(keys: list[str], folder: Path) -> Parts | None:
    """The parts of files of the first form whose names say so."""
    for suffix in SPLIT_SUFFIXES:
        splits: dict[str, list[str]] = {}
        for key in keys:
            name = key.removesuffix(GZIP) if suffix not in (".bin", ".npy") else key
            if name.endswith(suffix):
                splits.setdefault(_split_of(name.removesuffix(suffix)), []).append(key)
        is_text = suffix in (".txt", "")
        if (TRAIN in splits or not is_text) and (parts := _parts(splits, folder)):
            return parts
    return None


def _parts(splits: Mapping[str, list[str]], folder: Path) -> Parts | None:
    """The parts of files whose splits have names, empty for those without one; None if there is
    nothing to hold out, or nothing else."""
    held_out = next((splits[name] for name in HELD_OUT if name in splits), [])
    train = splits.get(TRAIN) or splits.get("", [])
    if train and held_out:
        return train, held_out
    if train or len(splits) < 2:
        return None
    raise InputError(
        f"A folder must have a split 'train', or one split alone; got the splits {sorted(splits)} "
        f"in {str(folder)!r}. Give the files of one split, in a folder of their own, and those of "
        "another as --data.validation-path."
    )


def _split_of(name: str) -> str:
    """The split that a path without its suffix names; empty for none."""
    matches = (SPLIT_NAME.fullmatch(part) for part in name.split("/"))
    return next((match[1].lower() for match in matches if match), "")


def holds_tokens(path: Path, option: str) -> bool:
    """Whether a path holds tokens, by the names of its files; or by its own if it is gone."""
    names = [path.name]
    if path.is_dir():
        # Of a folder of folders, one file is enough to know it.
        names = [x.name for x in os.scandir(path) if x.is_file() and not x.name.startswith(".")]
        names = names or list(itertools.islice(walk_files(path), 1))
    elif not path.exists() and not path.suffix:
        raise InputError(
            f"{option} must exist, or its name must tell whether it is text or tokens; got "
            f"{str(path)!r}, which is not below {str(Path.cwd())!r}. Start the program where the "
            "run began, or correct the path."
        )
    return any(kind_of(Path(name)) in TOKEN_KINDS for name in names)

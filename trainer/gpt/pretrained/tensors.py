"""The tensors of a folder of *.safetensors files. Nothing is unpickled.

Of each tensor only the slices are read that are asked for. Files are not mapped into memory: the
pages of a mapping that were read count as memory of the process, in the end as much as its weights
once more, and a file that shrinks meanwhile would end the process (SIGBUS). safetensors reads
without a mapping as well, but then a whole tensor for every part of it.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from startrail_jax.errors import InputError, UnsupportedError
from trainer.data.opening import read_object, reading

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "*.pth", "*.pt", "*.ckpt")

LONGEST_NAME = 255
"""Bytes of the name of a file, in the file systems of Linux and macOS."""
IGNORED = ".rotary_emb.inv_freq"
"""Ending of tensors that old checkpoints have, and that follow from config.json."""
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The types of tensors that are read, as safetensors and as numpy name them; widest first."""
AT_ONCE = 16 << 20
"""Bytes that are read at a time where only some columns of them are wanted."""


@dataclass(frozen=True)
class OpenFile:
    """A file that must stay as it is while it is read."""

    path: Path
    file: io.BufferedReader
    state: tuple[int, ...]
    """What is another if the file is another, or its content changes."""

    def check(self) -> None:
        """Raises ValueError if the file has changed."""
        if _state(os.fstat(self.file.fileno())) != self.state:
            raise self.changed()

    def check_name(self) -> None:
        """Raises ValueError if its name is that of another file, or it has changed."""
        with reading(self.path):
            if _state(self.path.stat()) != self.state:
                raise self.changed()

    def read(self, target: memoryview, begin: int) -> None:
        """Fills a buffer with bytes from `begin` on."""
        with reading(self.path):
            while target:
                count = os.preadv(self.file.fileno(), [target], begin)
                if not count:
                    raise self.changed()
                target, begin = target[count:], begin + count

    def changed(self) -> InputError:
        """The error about a file that has changed."""
        return InputError(
            f"{str(self.path)!r} must stay as it is while it is read; got another size or time of "
            "change. Wait until its download has ended, or download it again."
        )


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in an open file, whose parts are numpy arrays: `stored[:3, 5:7]`."""

    file: OpenFile
    offset: int
    """The place of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: str
    """Its type, as safetensors names it."""

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        """A part, as an array of its own.

        Args:
            index: slices of step 1, one for each of the first dimensions.

        Raises:
            ValueError: if the file cannot be read, or has changed since it was opened.
        """
        slices = index if isinstance(index, tuple) else (index,)
        slices += (slice(None),) * (len(self.shape) - len(slices))
        chosen = [x.indices(size) for x, size in zip(slices, self.shape, strict=True)]
        starts, stops, steps = zip(*chosen, strict=True)
        assert set(steps) == {1}, "other slices are not read"
        dtype = jnp.dtype(DTYPES[self.dtype])
        part = np.empty([max(b - a, 0) for a, b in zip(starts, stops, strict=True)], dtype)
        row = math.prod(self.shape[1:]) * dtype.itemsize
        if part.shape[1:] == self.shape[1:]:
            self._read(part, starts[0] * row)
        else:
            # The disk is read in long pieces, of which the columns are copied.
            count = max(AT_ONCE // row, 1)
            columns = tuple(slice(a, b) for a, b in zip(starts[1:], stops[1:], strict=True))
            for begin in range(0, len(part), count):
                rows = part[begin : begin + count]
                block = np.empty((len(rows), *self.shape[1:]), dtype)
                self._read(block, (starts[0] + begin) * row)
                rows[...] = block[:, *columns]
        self.file.check()
        return part

    def _read(self, target: Shaped[np.ndarray, "..."], begin: int) -> None:
        """Fills an array with bytes of the tensor from `begin` on."""
        content: Any = target.reshape(-1).view(np.uint8)
        self.file.read(memoryview(content), self.offset + begin)


@contextmanager
def open_tensor_file(path: Path) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of a file by name, in a `with` block. safetensors checks the file.

    Another file that takes its name afterwards is not looked at.

    Raises:
        ValueError: if the file cannot be read, is damaged, or changes.
    """
    with ExitStack() as stack:
        with reading(path):
            file = stack.enter_context(path.open("rb"))
        opened = OpenFile(path, file, _state(os.fstat(file.fileno())))
        try:
            with safe_open(path, framework="numpy", backend="pread"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{str(path)!r} must be a whole safetensors file; got {error}. Download it again."
            ) from error
        opened.check_name()
        with reading(path):
            header, begin = _header(file)
        yield {
            name: StoredTensor(
                file=opened,
                offset=begin + described["data_offsets"][0],
                shape=tuple(described["shape"]),
                dtype=described["dtype"],
            )
            for name, described in header.items()
        }


def _header(file: io.BufferedReader) -> tuple[dict[str, Any], int]:
    """What a file says of its tensors, and where their bytes begin.

    The format is 8 bytes with the length of the header, the header as JSON, and the tensors
    (https://huggingface.co/docs/safetensors).
    """
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The open files of a checkpoint."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor."""
    dtypes: Mapping[str, str]
    """Type of every tensor, as safetensors names it."""
    slices: Mapping[str, Any]
    """What gives parts of a tensor, as numpy arrays, when it is indexed with slices."""

    @property
    def dtype(self) -> str:
        """The type that holds the values of all tensors."""
        kinds = {DTYPES[kind] for kind in self.dtypes.values()}
        return kinds.pop() if len(kinds) == 1 else "float32"

    def check(self, wanted: Mapping[str, tuple[int, ...]], *, tied: Mapping[str, str]) -> None:
        """Raises unless these are the tensors of a model.

        Args:
            wanted: the shapes of the model's tensors.
            tied: names of tensors that may be there if they equal another one.

        Raises:
            ValueError: if a tensor is missing, unknown, or of another shape.
            NotImplementedError: if a tensor is of a type that is not read.
        """
        unknown = [name for name in self.shapes if name not in wanted and name not in tied]
        missing = [name for name in wanted if name not in self.shapes]
        lines = [
            *(f"  {name}: {list(wanted[name])} in the model, not in the files" for name in missing),
            *(f"  {name}: {list(self.shapes[name])} in the files, not in the model"
              for name in unknown),
            *(f"  {name}: {list(self.shapes[name])} in the files, {list(shape)} in the model"
              for name, shape in wanted.items()
              if name in self.shapes and self.shapes[name] != shape),
        ]  # fmt: skip
        if lines:
            more = f"\n  and {len(lines) - 5} more" if lines[5:] else ""
            listed = "\n".join(lines[:5])
            raise InputError(
                f"The tensors must be those of the model that config.json and the flags describe; "
                f"got {str(self.folder)!r} with others:\n{listed}{more}\n"
                "Leave out flags --model.*, or download the files again."
            )
        for name, kind in self.dtypes.items():
            if kind not in DTYPES:
                raise UnsupportedError(
                    f"Tensors must be of type {', '.join(DTYPES)}; got {name} of type {kind} in "
                    f"{str(self.folder)!r}, which is not supported. Use a checkpoint that is not "
                    "quantised."
                )
        for name, other in tied.items():
            if name in self.shapes and not self._are_equal(name, other):
                raise InputError(
                    f"{name} must equal {other}, since config.json says that they are tied; got "
                    f"{str(self.folder)!r}, where they differ. Correct tie_word_embeddings in "
                    "config.json, or download the files again."
                )

    def _are_equal(self, name: str, other: str) -> bool:
        if self.shapes[name] != self.shapes[other] or self.dtypes[name] != self.dtypes[other]:
            return False
        rows = self.shapes[name][0]
        parts = [slice(start, min(start + 4096, rows)) for start in range(0, rows, 4096)]
        return all(
            np.array_equal(self.slices[name][part], self.slices[other][part]) for part in parts
        )


@contextmanager
def open_tensors(folder: Path) -> Iterator[Tensors]:
    """Opens the files of a checkpoint, and reads what their headers say.

    Raises:
        ValueError: if a file is missing or damaged, or changes.
    """
    index = _index(folder)
    slices: dict[str, StoredTensor] = {}
    with ExitStack() as stack:
        for path in _files(folder, index):
            found = stack.enter_context(open_tensor_file(path))
            twice = slices.keys() & found.keys()
            strays = [name for name in found if index and index.get(name) != path.name]
            if twice or strays:
                name = min(twice or strays)
                raise InputError(
                    f"Every tensor must be in the file that {INDEX} names, once; got {name} in "
                    f"{str(path)!r}. Download the files again."
                )
            slices |= found
        lost = sorted((index or {}).keys() - slices.keys())
        if lost:
            raise InputError(
                f"Every tensor of {INDEX} must be in its file; got no {lost[0]} in "
                f"{str(folder / (index or {})[lost[0]])!r}. Download the files again."
            )
        slices = {name: x for name, x in slices.items() if not name.endswith(IGNORED)}
        yield Tensors(
            folder=folder,
            shapes={name: x.shape for name, x in slices.items()},
            dtypes={name: x.dtype for name, x in slices.items()},
            slices=slices,
        )


def _index(folder: Path) -> dict[str, str] | None:
    """Tensor -> file; None for a checkpoint of one file."""
    if (folder / ONE_FILE).exists():
        return None
    path = folder / INDEX
    if not path.exists():
        pickles = sorted(found.name for kind in PICKLES for found in folder.glob(kind))
        why = f", but {pickles[0]}, which is never unpickled" if pickles else ""
        raise InputError(
            f"init_from must hold {ONE_FILE} or {INDEX}; got {str(folder)!r} with neither{why}. "
            "Download the safetensors files of the model, or convert it with save_pretrained of "
            "transformers."
        )
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(map(_is_name, files.values())):
        raise InputError(
            f"weight_map must name a file of the folder for every tensor in {str(path)!r}; got "
            "something else. Download it again."
        )
    return files


def _is_name(name: Any) -> bool:
    """Whether a file can have a name, which does not lead out of its folder."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    return name == Path(name).name and len(os.fsencode(name)) <= LONGEST_NAME


def _files(folder: Path, index: Mapping[str, str] | None) -> list[Path]:
    names = [ONE_FILE] if index is None else sorted(set(index.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise InputError(
            f"All files that {INDEX} names must be there; got {str(folder)!r} without "
            f"{', '.join(missing)}. Download them."
        )
    return [folder / name for name in names]

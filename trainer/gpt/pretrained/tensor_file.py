"""A *.safetensors file, of whose tensors only the parts are read that are asked for.

It is not mapped into memory. The pages of a mapping that were read count as memory of the process,
in the end as much as its weights once more, and a file that shrinks meanwhile would end the process
(SIGBUS). safetensors reads without a mapping as well, but then a whole tensor for every part of it.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from startrail_jax.errors import InputError
from trainer.data.opening import open_regular, reading
from trainer.errors import MissingPackageError

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The types of tensors that are read, as safetensors and as numpy name them; widest first."""
AT_ONCE = 16 << 20
"""Bytes that are read at a time where only some columns of them are wanted."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in an open file, whose parts are numpy arrays: `stored[:3, 5:7]`."""

    path: Path
    file: io.BufferedReader
    state: tuple[int, ...]
    """What `_state` gave when the file was opened."""
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
        assert set(steps) == {1}, "nobody asks for other slices"
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
        if _state(os.fstat(self.file.fileno())) != self.state:
            raise _changed(self.path)
        return part

    def _read(self, target: Shaped[np.ndarray, "..."], begin: int) -> None:
        """Fills an array with bytes of the tensor from `begin` on."""
        content: Any = target.reshape(-1).view(np.uint8)
        left = memoryview(content)
        with reading(self.path):
            while left:
                count = os.preadv(self.file.fileno(), [left], self.offset + begin)
                if not count:
                    raise _changed(self.path)
                left, begin = left[count:], begin + count


@contextmanager
def open_tensor_file(path: Path) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of a file by name, in a `with` block. safetensors checks the file.

    Another file that takes its name afterwards is not looked at.

    Raises:
        ImportError: if the package `safetensors` is missing.
        ValueError: if the file cannot be read, is damaged, or changes.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingPackageError(
            f"init_from must have the package safetensors; got {str(path.parent)!r} without it. "
            "Run pip install safetensors."
        ) from error
    with ExitStack() as stack:
        with reading(path):
            file = stack.enter_context(open_regular(path))
        state = _state(os.fstat(file.fileno()))
        try:
            with safe_open(path, framework="numpy", backend="pread"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{str(path)!r} must be a whole safetensors file; got {error}. Download it again."
            ) from error
        with reading(path):
            if _state(path.stat()) != state:
                raise _changed(path)
            header, begin = _header(file)
        yield {
            name: StoredTensor(
                path=path,
                file=file,
                state=state,
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


def _state(found: os.stat_result) -> tuple[int, ...]:
    """What is another if a file is another, or its content changes."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _changed(path: Path) -> InputError:
    return InputError(
        f"{str(path)!r} must stay as it is while it is read; got another size or time of change. "
        "Wait until its download has ended, or download it again."
    )

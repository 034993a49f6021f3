"""Arrays in *.npy and *.npz files, whose headers are checked before anything is unpacked.

A file of a few megabytes may claim terabytes, and a compressed one may really hold a thousand times
its size. So nothing is allocated before the header of an array, its size in the archive and the
size of the file agree, and the caller has seen which shapes are claimed.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# A header may say that it has 4 GiB; numpy writes 128 bytes, and reads no more than this.
LONGEST_HEADER = 10_000
# Arrays of an archive together may have this size, or so many times that of their file. Floating
# latents become hardly smaller by compression.
UNPACKED_BYTES = 1 << 26
UNPACKED_PER_BYTE = 32
READ_BYTES = 1 << 20
ENCRYPTED = 1
SUFFIX = ".npy"


class BadArrayError(ValueError):
    """An array that cannot be read, or must not be. The caller names the file."""


@dataclass(frozen=True, kw_only=True)
class ArrayHeader:
    """What a file says about an array before its values."""

    shape: tuple[int, ...]
    """Number of values in each dimension."""
    dtype: np.dtype
    """Data type of the values, which are no objects."""
    fortran_order: bool
    """Whether the first dimension changes fastest."""
    offset: int
    """Number of bytes before the values."""

    @property
    def size(self) -> int:
        """Number of bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"shape {self.shape} of {self.dtype}"


def read_header(raw: bytes) -> ArrayHeader:
    """The header of an array in the format .npy.

    Args:
        raw: the first bytes of the array, `LONGEST_HEADER` of them if there are as many.

    Raises:
        BadArrayError: if there is none, or it is one of objects.
    """
    start = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(start)
        if version == (1, 0):
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(start)
        elif version == (2, 0):
            shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(start)
        else:
            shape, fortran_order, dtype = (), False, None
    # The header is an expression of Python, whose parser fails in many ways, RecursionError and
    # MemoryError among them.
    except Exception as error:
        raise BadArrayError(f"{type(error).__name__}: {error}") from error
    if dtype is None:
        raise BadArrayError(f"an array in version {version} of the format .npy")
    if dtype.hasobject:
        raise BadArrayError("an array of objects")
    # True is an int for Python, and for the parser of numpy too.
    if any(type(size) is not int or size < 0 for size in shape):
        raise BadArrayError(f"an array of the shape {shape}")
    return ArrayHeader(shape=shape, dtype=dtype, fortran_order=fortran_order, offset=start.tell())


class Archive:
    """The arrays of an *.npz file."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        """Reads the list of the arrays.

        Args:
            file: the file, which must stay open.
        """
        self._file_size = file.seek(0, io.SEEK_END)
        self._zip = zipfile.ZipFile(file)

    def names(self) -> list[str]:
        """The names of all arrays."""
        return [name.removesuffix(SUFFIX) for name in self._zip.namelist()]

    def header(self, name: str) -> ArrayHeader:
        """The header of an array, whose size agrees with that of the archive.

        Raises:
            BadArrayError: if the array is no array, or the sizes cannot be true.
        """
        member = self._member(name)
        with self._zip.open(member) as file:
            header = read_header(file.read(LONGEST_HEADER))
        if header.offset + header.size != member.file_size:
            raise BadArrayError(
                f"{header.offset + header.size:,} bytes of {name!r} by its header ({header}), and "
                f"{member.file_size:,} by the archive"
            )
        if member.compress_size > self._file_size or (
            member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size
        ):
            raise BadArrayError(
                f"{member.compress_size:,} bytes for the {member.file_size:,} of {name!r} in a "
                f"file of {self._file_size:,}"
            )
        return header

    def read(self, headers: Mapping[str, ArrayHeader]) -> dict[str, np.ndarray]:
        """The arrays by name, and nothing else of the file.

        Args:
            headers: what `header` returned for each array that is wanted.

        Raises:
            BadArrayError: if the arrays are too large for their file, or damaged.
        """
        size = sum(header.size for header in headers.values())
        limit = max(UNPACKED_BYTES, UNPACKED_PER_BYTE * self._file_size)
        if size > limit:
            found = "; ".join(f"{name!r}, {header}" for name, header in headers.items())
            raise BadArrayError(
                f"arrays of {size:,} bytes in a file of {self._file_size:,}, where at most "
                f"{UNPACKED_PER_BYTE} times as many ({limit:,}) are unpacked: {found}"
            )
        return {name: self._read(name, header) for name, header in headers.items()}

    def _member(self, name: str) -> zipfile.ZipInfo:
        member = self._zip.NameToInfo.get(name + SUFFIX) or self._zip.getinfo(name)
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadArrayError(f"{name!r} compressed by method {member.compress_type}")
        if member.flag_bits & ENCRYPTED:
            raise BadArrayError(f"{name!r} encrypted")
        return member

    def _read(self, name: str, header: ArrayHeader) -> np.ndarray:
        # As bytes, whatever the data type is.
        values = np.empty(header.size, np.uint8)
        done = 0
        with self._zip.open(self._member(name)) as file:
            file.read(header.offset)
            while done < header.size:
                block = file.read(min(READ_BYTES, header.size - done))
                if not block:
                    raise BadArrayError(f"only {done:,} of {header.size:,} bytes of {name!r}")
                values[done : done + len(block)] = np.frombuffer(block, np.uint8)
                done += len(block)
        if not header.size:
            return np.zeros(header.shape, header.dtype)
        order = "F" if header.fortran_order else "C"
        return values.view(header.dtype).reshape(header.shape, order=order)


@contextmanager
def opened_archive(path: Path) -> Iterator[Archive]:
    """The arrays of an *.npz file, in a `with` block.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no regular file.
        zipfile.BadZipFile: if it is no archive.
    """
    with path.open("rb") as file:
        yield Archive(file)

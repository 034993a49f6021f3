"""Checksums of a checkpoint: of the values of its arrays, its position in the data, its settings.

The checksum of an array depends on its bits and their places alone, and not on the mesh, the
processes or the files: it is computed on the devices, each of which reads only its own part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

from startrail_jax.errors import InputError
from trainer.run.folder import CHECKSUMS_FILE

DIGEST = "sha256"


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """What a checkpoint must hold."""

    step: int
    """The step at which it was saved."""
    arrays: dict[str, tuple[str, str]]
    """Type and shape of every array, and the checksum of its values, by its name."""
    data: str
    """Digest of the position in the data."""
    settings: dict[str, str] = field(default_factory=dict)
    """The settings that the result depends on, as flags, by their names."""

    @staticmethod
    def of(
        step: int, arrays: Mapping[str, Any], data: str, settings: Mapping[str, str]
    ) -> Checksums:
        """The checksums of what is about to be saved. All processes must call it."""
        values = checksums_of(arrays)
        return Checksums(
            step=step,
            arrays={name: (describe(x), values[name]) for name, x in arrays.items()},
            data=digest(data),
            settings=dict(settings),
        )

    def write(self, folder: Path) -> None:
        """Writes a file to the folder of a checkpoint, with a digest of its own."""
        values = asdict(self)
        text = json.dumps({**values, DIGEST: digest(_canonical(values))}, indent=1)
        (folder / CHECKSUMS_FILE).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Checksums:
        """Reads what `write` wrote."""
        try:
            values = json.loads((folder / CHECKSUMS_FILE).read_bytes())
            if values.pop(DIGEST) != digest(_canonical(values)):
                raise InputError("its digest is another")
            arrays = {name: (kind, value) for name, (kind, value) in values["arrays"].items()}
            return Checksums(**{**values, "arrays": arrays})
        except FileNotFoundError as error:
            raise InputError(f"its {CHECKSUMS_FILE} is missing") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"its {CHECKSUMS_FILE} is damaged") from error

    def differing(self, arrays: Mapping[str, Any]) -> list[str]:
        """Names of the arrays whose values are not those that were saved, in all processes."""
        values = checksums_of(arrays)
        return [name for name, value in values.items() if self.arrays[name][1] != value]


def describe(array: Any) -> str:
    """Type and shape of an array: "float32[3, 5]"."""
    return f"{array.dtype}{list(array.shape)}"


def digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def checksums_of(arrays: Mapping[str, Shaped[Array, "..."]]) -> dict[str, str]:
    """The checksum of the values of every array: 64 bits, as 16 hexadecimal digits. All processes
    must call it with the same arrays, of which each may hold a part."""
    sums = {}
    for name, array in arrays.items():
        # One program at a time: those of simulated devices would wait for each other.
        first, second = map(int, jax.block_until_ready(_sums(array)))
        sums[name] = f"{first:08x}{second:08x}"
    return sums


@jax.jit
def _sums(array: Shaped[Array, "..."]) -> tuple[UInt32[Array, ""], UInt32[Array, ""]]:
    """Two sums over all words of an array, modulo 2^32, which every sharding computes alike.

    With a word w at place i, and a permutation m of all numbers of 32 bits,

        first = sum_i m(w_i xor (c i)),    second = sum_i m(w_i xor (c i)) (2 i + 1).

    A change of one word, and so of one bit, changes one term of the first sum, and so the sum. m is
    no linear function, as otherwise two changes of the highest bits, such as of two signs, would
    cancel each other.
    """
    total = (jnp.uint32(0), jnp.uint32(0))
    array = jax.device_put(array, jax.memory.Space.Device)  # Moments may be in the host's memory.
    for part, words in enumerate(_words(array)):
        place = jnp.full(words.shape, part, jnp.uint32)
        stride = 2  # At most two words for each element.
        for dim in reversed(range(words.ndim)):
            index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
            place += index * jnp.uint32(stride % 2**32)
            stride *= words.shape[dim]
        mixed = _mix(words ^ (place * jnp.uint32(0x9E3779B9)))
        # Both in one loop: two sums would keep all that is mixed, as large as the array.
        sums = jax.lax.reduce(
            (mixed, mixed * (2 * place + 1)),
            (jnp.uint32(0), jnp.uint32(0)),
            _add,
            tuple(range(words.ndim)),
        )
        total = _add(total, sums)
    return total


def _add(x: Any, y: Any) -> Any:
    return x[0] + y[0], x[1] + y[1]


def _words(array: Shaped[Array, "..."]) -> Iterable[UInt32[Array, "..."]]:
    """The bits of every element, as one or two words of 32 bits."""
    if array.dtype == bool:
        return (array.astype(jnp.uint32),)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return (*_words(array.real), *_words(array.imag))
    if array.dtype.itemsize <= 4:
        bits = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
        return (jax.lax.bitcast_convert_type(array, bits).astype(jnp.uint32),)
    halves = jax.lax.bitcast_convert_type(array, jnp.uint32)
    return (halves[..., 0], halves[..., 1])


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A permutation of the numbers of 32 bits (https://nullprogram.com/blog/2018/07/31/)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _canonical(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)

"""Weights in safetensors files as the first weights of a run, on any mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from startrail_jax.errors import InputError
from trainer.parallel.partition import path_name
from trainer.task import InitialWeights
from trainer.weights.files import Tensors
from trainer.weights.places import Place

ALIGNMENT = 64
"""Alignment in bytes that XLA wants for the address of an array."""
TILE = 128
"""Rows and columns that are transposed at a time: they fit in the cache of a core."""


@dataclass(frozen=True, kw_only=True)
class TensorWeights(InitialWeights):
    """Weights in the files of another library, which fit the model of a run."""

    tensors: Tensors
    places: Mapping[str, Place]
    """Place of each weight of the model, by path."""
    description: str
    absent: tuple[str, ...] = ()
    """Paths of the weights that the files do not have, which are 0 at first."""

    def read(self, weights: PyTree[jax.ShapeDtypeStruct]) -> PyTree[Shaped[Array, "..."]]:
        """Reads each device's own slices from the files. All processes must call it."""

        def read_one(path: tuple[Any, ...], weight: Any) -> Array:
            name = path_name(path)
            if name in self.absent:
                return jnp.zeros(weight.shape, weight.dtype, device=weight.sharding)
            place = self.places[name]

            def part(index: Any) -> Shaped[np.ndarray, "..."]:
                return self._part(place, index, weight.dtype)

            return jax.make_array_from_callback(weight.shape, weight.sharding, part)

        return jax.tree_util.tree_map_with_path(read_one, weights)

    def _part(
        self, place: Place, index: tuple[slice, ...], dtype: Any
    ) -> Shaped[np.ndarray, "..."]:
        """The part of a weight that lies on one device."""
        numbers, in_tensor = place.numbers(index)
        shard: Any = None
        for at, number in np.ndenumerate(numbers):
            tensor = place.tensors[number]
            values = place.read(self.tensors.slices[tensor], in_tensor)
            if shard is None:
                shard = _aligned((*numbers.shape, *values.shape), dtype)
            self._fill(shard[at], values, tensor)
        return shard

    def _fill(self, target: Shaped[np.ndarray, "..."], values: Any, tensor: str) -> None:
        """Copies values of a tensor, and raises unless they are finite in its type."""
        with np.errstate(over="ignore"):  # What no number of its type holds is refused below.
            fill(target, values)
        if not np.isfinite(target).all():
            raise InputError(
                f"Weights must be finite numbers; got NaN or infinity in {tensor} of "
                f"{self.tensors.folder}, as {target.dtype}. Download the files again, or save the "
                "model anew in a type that holds its numbers."
            )


def _aligned(shape: tuple[int, ...], dtype: Any) -> Shaped[np.ndarray, "..."]:
    """An empty array that a device on the host uses as it is, and would otherwise copy."""
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + size].view(dtype).reshape(shape)


def fill(target: Shaped[np.ndarray, "..."], values: Shaped[np.ndarray, "..."]) -> None:
    """Copies values, whose dimensions may lie in memory in another order, into an array.

    Where numpy would copy one value from each line of the cache, these tiles take a quarter of the
    time.
    """
    last = values.ndim - 1
    fastest = min(range(values.ndim), key=lambda dim: (values.strides[dim], -dim))
    if fastest == last:
        target[...] = values
        return
    steps = [TILE if dim in (fastest, last) else 1 for dim in range(values.ndim)]
    starts = (range(0, size, step) for size, step in zip(values.shape, steps, strict=True))
    for corner in itertools.product(*starts):
        index = tuple(slice(at, at + step) for at, step in zip(corner, steps, strict=True))
        tile = values[index].swapaxes(fastest, last).copy()  # In the order of `values`.
        target[index] = tile.swapaxes(fastest, last).copy()

"""Where the weights of a model lie in the files of PyTorch's libraries.

PyTorch keeps the matrix of a projection as [outputs, inputs], and one tensor for each layer; here a
kernel is [*inputs, *outputs], and those of all layers are one array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped

Groups = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor, the dimensions of the weight of which it is made, in order."""

AS_IT_IS: Groups = ((0,),)
TRANSPOSED: Groups = ((1,), (0,))
OF_HEADS: Groups = ((0, 1),)
"""A bias or a scale, [heads, head_dim]."""
IN_ROWS: Groups = ((1, 2), (0,))
"""A projection to heads, [inputs, heads, head_dim]."""
IN_COLUMNS: Groups = ((2,), (0, 1))
"""A projection from heads, [heads, head_dim, outputs]."""
OF_CONV: Groups = ((1, 2), (), (0,))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one weight, or that of all layers together, lies in a checkpoint."""

    tensors: tuple[str, ...]
    """Its tensors: one for each layer, or a single one."""
    stacked: bool
    """Whether its first dimension counts layers."""
    shape: tuple[int, ...]
    """Its shape, without layers."""
    groups: Groups
    """How the dimensions of a tensor are made of its own; one of size 1 is made of none."""
    rows: tuple[int, int] | None = None
    """The first of its rows in a tensor that has other weights too, and the rows of all of them."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors."""
        rows, *rest = self.tensor_shape
        return (rows if self.rows is None else self.rows[1], *rest)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of its part of each of its tensors."""
        return tuple(math.prod(self.shape[dim] for dim in group) for group in self.groups)

    def read(self, tensor: Any, index: Sequence[slice]) -> Shaped[np.ndarray, "..."]:
        """A part of the weight of one layer, of which as little is read as slices allow.

        Args:
            tensor: its tensor, or what gives parts of it when it is indexed with slices.
            index: the part: for each dimension of the weight, a slice of step 1.
        """
        ranges = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        cover, split, inner = [], [], []
        for group in self.groups:
            if not group:
                cover.append(slice(0, 1))
                continue
            first, *rest = group
            # Of the first dimension only what is wanted, and of the others, which lie within it,
            # everything.
            size = math.prod(self.shape[dim] for dim in rest)
            start, stop = ranges[first]
            cover.append(slice(start * size, stop * size))
            split += [stop - start, *(self.shape[dim] for dim in rest)]
            inner += [slice(None), *(slice(*ranges[dim]) for dim in rest)]
        if self.rows is not None:
            before = self.rows[0]
            cover[0] = slice(cover[0].start + before, cover[0].stop + before)
        block = np.asarray(tensor[tuple(cover)]).reshape(split)[tuple(inner)]
        return block.transpose(np.argsort(self._order))

    def to_tensor(self, weight: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """The tensor of the weight of one layer, or its rows of that, contiguous."""
        return np.ascontiguousarray(weight.transpose(self._order).reshape(self.tensor_shape))

    @property
    def _order(self) -> list[int]:
        return [dim for group in self.groups for dim in group]


def by_tensor(found: Mapping[str, Place]) -> dict[str, list[tuple[str, int]]]:
    """For each tensor, the weights whose rows it has, in their order: path, and layer of the path.

    Args:
        found: what `places` gives.
    """
    tensors: dict[str, list[tuple[str, int]]] = {}
    for path, place in found.items():
        for layer, name in enumerate(place.tensors):
            tensors.setdefault(name, []).append((path, layer))
    return {
        name: sorted(parts, key=lambda x: (found[x[0]].rows or (0,))[0])
        for name, parts in tensors.items()
    }

"""Places of the weights of a model in the files of PyTorch's libraries.

PyTorch keeps the matrix of a projection as [outputs, inputs], and one tensor for each layer; here a
kernel is [*inputs, *outputs], and the kernels of all layers are one array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped

Groups = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor, the dimensions of the weight that it joins, in order."""

AS_IT_IS: Groups = ((0,),)
TRANSPOSED: Groups = ((1,), (0,))
OF_HEADS: Groups = ((0, 1),)
"""A bias or a scale, [heads, head_dim]."""
IN_ROWS: Groups = ((1, 2), (0,))
"""A projection to heads, [inputs, heads, head_dim]."""
IN_BOTH: Groups = ((0,), (1,))
"""A matrix with the same dimensions in both."""
IN_COLUMNS: Groups = ((2,), (0, 1))
"""A projection from heads, [heads, head_dim, outputs]."""
OF_CONV: Groups = ((1, 2), (), (0,))


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a tensor that is one of its weights."""

    index: int
    """Number of the weight among the weights of the tensor."""
    sizes: tuple[int, ...]
    """Rows of each of the weights, in every group of rows."""
    groups: int = 1
    """Number of groups of rows; each group has rows of all weights."""
    dim: int = 0
    """Dimension of the rows: 1 in a tensor of all experts, whose first dimension counts them."""
    columns: bool = False
    """True if the weights take turns in the last dimension instead, with one number each."""

    def taken(self, tensor: Any, cover: list[slice]) -> Shaped[np.ndarray, "..."]:
        """Reads a part of the weight, and as little as possible of the tensor."""
        count, before = len(self.sizes), sum(self.sizes[: self.index])
        if self.columns:
            last = cover[-1]
            cover = [*cover[:-1], slice(last.start * count, last.stop * count)]
            return np.asarray(tensor[tuple(cover)])[..., self.index :: count]
        if self.groups == 1:
            rows = cover[self.dim]
            of_weight = slice(rows.start + before, rows.stop + before)
            return np.asarray(tensor[(*cover[: self.dim], of_weight, *cover[self.dim + 1 :])])
        rows, *columns = cover
        grouped = np.asarray(tensor[(slice(0, self.groups * sum(self.sizes)), *columns)])
        grouped = grouped.reshape(self.groups, -1, *grouped.shape[1:])
        weight = grouped[:, before : before + self.sizes[self.index]]
        return weight.reshape(-1, *weight.shape[2:])[rows]

    def joined(self, parts: Sequence[Shaped[np.ndarray, "..."]]) -> Shaped[np.ndarray, "..."]:
        """The tensor of all its weights, in their order."""
        if self.columns:
            return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
        if self.groups == 1:
            return np.concatenate(parts, axis=self.dim)
        grouped = [x.reshape(self.groups, -1, *x.shape[1:]) for x in parts]
        return np.concatenate(grouped, axis=1).reshape(-1, *parts[0].shape[1:])

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, from the shape of the weight's part."""
        if self.columns:
            return (*shape[:-1], shape[-1] * len(self.sizes))
        rows = self.groups * sum(self.sizes)
        return (*shape[: self.dim], rows, *shape[self.dim + 1 :])


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a weight in a checkpoint: of one weight, or of all layers together."""

    tensors: tuple[str, ...]
    """Its tensors: one for each layer, or for each expert of each layer; or a single one."""
    stacked: bool
    """True if its first dimension counts layers."""
    experts: int | None = None
    """Number of experts if each has tensors of its own; the second dimension then counts
    experts."""
    shape: tuple[int, ...]
    """Shape of the weight without the dimensions of layers and of experts with own tensors."""
    groups: Groups
    """Dimensions of the weight that each dimension of a tensor joins; none for a dimension of size
    1."""
    share: Share | None = None
    """Part of the tensors that is this weight, if they hold other weights too."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors."""
        shape = self.tensor_shape
        return shape if self.share is None else self.share.whole_shape(shape)

    def numbers(self, index: Sequence[slice]) -> tuple[np.ndarray, Sequence[slice]]:
        """The numbers of the tensors that hold a part of the weight, as an array over its first
        dimensions (layers and experts); and the slices of the part within each tensor's weight."""
        every = np.arange(len(self.tensors))
        if not self.stacked:
            return every.reshape(()), index
        if self.experts is None:
            return every[index[0]], index[1:]
        return every.reshape(-1, self.experts)[index[0], index[1]], index[2:]

    def weight_of(self, weight: Any, number: int) -> Any:
        """The weight of one tensor, from the array of all layers and experts."""
        if not self.stacked:
            return weight
        return weight[number] if self.experts is None else weight[divmod(number, self.experts)]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of its part of each of its tensors."""
        return tuple(math.prod(self.shape[dim] for dim in group) for group in self.groups)

    def read(self, tensor: Any, index: Sequence[slice]) -> Shaped[np.ndarray, "..."]:
        """Reads a part of the weight of one layer, by a slice of step 1 for each dimension, and as
        little else as slices allow."""
        ranges = [
            dim_slice.indices(size)[:2] for dim_slice, size in zip(index, self.shape, strict=True)
        ]
        cover, split, inner = [], [], []
        for group in self.groups:
            if not group:
                cover.append(slice(0, 1))
                continue
            first, *inner_dims = group
            # Of the first dimension only what is wanted, and of the others, which lie within it,
            # everything.
            size = math.prod(self.shape[dim] for dim in inner_dims)
            start, stop = ranges[first]
            cover.append(slice(start * size, stop * size))
            split += [stop - start, *(self.shape[dim] for dim in inner_dims)]
            inner += [slice(None), *(slice(*ranges[dim]) for dim in inner_dims)]
        if self.share is None:
            block = np.asarray(tensor[tuple(cover)])
        else:
            block = self.share.taken(tensor, cover)
        block = block.reshape(split)[tuple(inner)]
        return block.transpose(np.argsort(self._order))

    def to_tensor(self, weight: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """The tensor of the weight of one layer, or the rows of a tensor that are this weight,
        contiguous."""
        return np.ascontiguousarray(weight.transpose(self._order).reshape(self.tensor_shape))

    @property
    def _order(self) -> list[int]:
        return [dim for group in self.groups for dim in group]


def by_tensor(places: Mapping[str, Place]) -> dict[str, list[tuple[str, int]]]:
    """The weights of each tensor, in their order: path, and number of the tensor in its place."""
    tensors: dict[str, list[tuple[str, int]]] = {}
    for path, place in places.items():
        for number, name in enumerate(place.tensors):
            tensors.setdefault(name, []).append((path, number))

    def order(entry: tuple[str, int]) -> int:
        share = places[entry[0]].share
        return 0 if share is None else share.index

    return {name: sorted(parts, key=order) for name, parts in tensors.items()}

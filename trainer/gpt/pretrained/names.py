"""Which tensor of a Hugging Face checkpoint each weight is, and in which order of dimensions.

PyTorch keeps the matrix of a projection as [outputs, inputs], and one tensor for each layer; here a
kernel is [*inputs, *outputs], and those of all layers are one array. Both rotate the channel pairs
(i, i + head_dim / 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped

from trainer.parallel.partition import STACKED

Groups = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor, the dimensions of the weight of which it is made, in order."""

AS_IT_IS: Groups = ((0,),)
TRANSPOSED: Groups = ((1,), (0,))
OF_MODEL: Mapping[str, tuple[str, Groups]] = {
    "embedding/embedding": ("model.embed_tokens.weight", ((0,), (1,))),
    "norm/scale": ("model.norm.weight", AS_IT_IS),
    "head/kernel": ("lm_head.weight", TRANSPOSED),
}
"""Weight -> tensor, outside of the layers."""
OF_LAYER: Mapping[str, tuple[str, Groups]] = {
    "attention_norm/scale": ("input_layernorm.weight", AS_IT_IS),
    "attention/query/kernel": ("self_attn.q_proj.weight", ((1, 2), (0,))),
    "attention/key/kernel": ("self_attn.k_proj.weight", ((1, 2), (0,))),
    "attention/value/kernel": ("self_attn.v_proj.weight", ((1, 2), (0,))),
    "attention/out/kernel": ("self_attn.o_proj.weight", ((2,), (0, 1))),
    "attention/query_bias": ("self_attn.q_proj.bias", ((0, 1),)),
    "attention/key_bias": ("self_attn.k_proj.bias", ((0, 1),)),
    "attention/value_bias": ("self_attn.v_proj.bias", ((0, 1),)),
    "attention/sinks": ("self_attn.sinks", AS_IT_IS),
    "attention/query_norm/scale": ("self_attn.q_norm.weight", AS_IT_IS),
    "attention/key_norm/scale": ("self_attn.k_norm.weight", AS_IT_IS),
    "mlp_norm/scale": ("post_attention_layernorm.weight", AS_IT_IS),
    "mlp/gate/kernel": ("mlp.gate_proj.weight", TRANSPOSED),
    "mlp/up/kernel": ("mlp.up_proj.weight", TRANSPOSED),
    "mlp/down/kernel": ("mlp.down_proj.weight", TRANSPOSED),
}
"""Weight of a layer -> tensor of a layer."""
AFTER_BLOCKS: Mapping[str, tuple[str, Groups]] = {
    "attention_out_norm/scale": ("post_attention_layernorm.weight", AS_IT_IS),
    "mlp_norm/scale": ("pre_feedforward_layernorm.weight", AS_IT_IS),
    "mlp_out_norm/scale": ("post_feedforward_layernorm.weight", AS_IT_IS),
}
"""What has another name in a model that normalises what a block adds, as Gemma does."""


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
    """How the dimensions of a tensor are made of its own."""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors."""
        return tuple(math.prod(self.shape[dim] for dim in group) for group in self.groups)

    def read(self, tensor: Any, index: Sequence[slice]) -> Shaped[np.ndarray, "..."]:
        """A part of the weight of one layer, of which as little is read as slices allow.

        Args:
            tensor: its tensor, or what gives parts of it when it is indexed with slices.
            index: the part: for each dimension of the weight, a slice of step 1.
        """
        ranges = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        cover, split, inner = [], [], []
        for first, *rest in self.groups:
            # Of the first dimension only what is wanted, and of the others, which lie within it,
            # everything.
            size = math.prod(self.shape[dim] for dim in rest)
            start, stop = ranges[first]
            cover.append(slice(start * size, stop * size))
            split += [stop - start, *(self.shape[dim] for dim in rest)]
            inner += [slice(None), *(slice(*ranges[dim]) for dim in rest)]
        block = np.asarray(tensor[tuple(cover)]).reshape(split)[tuple(inner)]
        return block.transpose(np.argsort(self._order))

    def to_tensor(self, weight: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """The tensor of the weight of one layer, contiguous."""
        return np.ascontiguousarray(weight.transpose(self._order).reshape(self.tensor_shape))

    @property
    def _order(self) -> list[int]:
        return [dim for group in self.groups for dim in group]


def places(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Place]]:
    """The place of every weight of a model.

    Args:
        shapes: the shape of every weight by its path: `blocks/mlp/up/kernel`.
    """
    of_layer = dict(OF_LAYER)
    if any(path.endswith("attention_out_norm/scale") for path in shapes):
        of_layer |= AFTER_BLOCKS
    for path, shape in shapes.items():
        part, _, rest = path.partition("/")
        if part == STACKED:
            name, groups = of_layer[rest]
            tensors = tuple(f"model.layers.{layer}.{name}" for layer in range(shape[0]))
            yield path, Place(tensors=tensors, stacked=True, shape=shape[1:], groups=groups)
        else:
            name, groups = OF_MODEL[path]
            yield path, Place(tensors=(name,), stacked=False, shape=shape, groups=groups)

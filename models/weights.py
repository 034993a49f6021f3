"""Weights by the names of their dimensions. Imports no jax.

These names, which are like the logical axes of Flax, determine shapes, the division among devices,
the matrices that adapters and Muon change, and the products of a token:

    "heads head_dim"                an array
    "width | heads head_dim"        a matrix that every token is multiplied with: inputs | outputs
    "experts: width | expert_mlp"   one for each expert

References:
    Split over `tensor`: Megatron-LM, https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Norms = Literal["before", "both", "after"]
"""Norms of a block: before its mixer and its feed-forward, after each of them, or both."""
Model = Any
"""The config of a model, such as a `models.config.GPTConfig`, which holds the options of its parts
and therefore imports their files."""
LAYERS, EXPERTS, RANK = "layers", "experts", "rank"
ADAPTERS = ("lora_a", "lora_b")
"""The narrow matrices beside a kernel, [*inputs, rank] and [rank, *outputs]: see `models.lora`."""

OVER_TENSOR: Mapping[str, tuple[str, ...]] = {
    "heads": (),
    "kv_heads": ("tensor", "head"),
    "global_kv_heads": ("tensor", "head"),
    "key_heads": ("tensor",),
    "value_heads": (),
    "mlp": (),
    "expert_mlp": (),
    "shared_mlp": (),
}
"""The dimensions that are split over `tensor`. There may be fewer key heads than devices: their
entries name the mesh axes that divide the heads that use them, and each device then takes a copy of
the key heads that it needs."""


@dataclass(frozen=True)
class Weight:
    """A weight of a model."""

    stacks: tuple[str, ...]
    """Leading dimensions that count weights which lie beside each other: layers, and experts."""
    inputs: tuple[str, ...]
    """Dimensions that a product with a token contracts; none for an array that is not a matrix."""
    outputs: tuple[str, ...]
    """The other dimensions."""
    init: str = "normal"
    """Initial values: "zeros", "ones", "normal" of variance 1 / inputs, "out" of a variance that
    falls with depth, or a name that its module knows."""
    projects: bool = False
    """True for a projection of a layer, which may have adapters, and which Muon updates."""
    precise: bool = False
    """True if it is used in float32, although it is not a vector."""
    decays: bool = True
    """True if weight decay applies to it."""
    of_text: bool = False
    """True if it multiplies the tokens of a text or of an image, and no tokens of the sequence."""
    shared: bool = False
    """True if every device along `tensor` uses all of it, for heads of its own: a projection to
    latents, or the matrix of an adapter on the side of its kernel that is not split."""

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of all dimensions."""
        return (*self.stacks, *self.inputs, *self.outputs)

    @property
    def is_vector(self) -> bool:
        """True if it is small and used in float32: one dimension for each layer, or `precise`."""
        return self.precise or len(self.dims) == 1 + self.is_stacked

    @property
    def is_stacked(self) -> bool:
        """True if it is one array for all layers."""
        return LAYERS in self.stacks

    @property
    def of_experts(self) -> bool:
        """True for a weight of experts, which lies with its expert; tokens may be sent there."""
        return EXPERTS in self.stacks

    @property
    def tensor_dim(self) -> int | None:
        """The dimension that is split over `tensor`; None if it is whole on every device."""
        return next((i for i, name in enumerate(self.dims) if name in OVER_TENSOR), None)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape, from the sizes of dimensions by name."""
        return tuple(sizes[name] for name in self.dims)

    def elements(self, sizes: Mapping[str, int]) -> int:
        """The number of elements."""
        return math.prod(self.shape(sizes))

    def adapter(self, name: str) -> Weight:
        """The matrix of an adapter of this kernel, by its name in `ADAPTERS`."""
        sides = {"outputs": (RANK,)} if name == ADAPTERS[0] else {"inputs": (RANK,)}
        narrow = replace(self, **sides)
        shared = self.tensor_dim is not None and narrow.tensor_dim is None
        return replace(narrow, shared=self.shared or shared)


def weight(
    text: str, init: str = "normal", *, precise: bool = False, decays: bool = True
) -> Weight:
    """A weight of these dimensions."""
    *stacks, matrix = text.split(":")
    *inputs, outputs = matrix.split("|")
    stacks, inputs = (tuple(" ".join(x).split()) for x in (stacks, inputs))
    return Weight(stacks, inputs, tuple(outputs.split()), init, False, precise, decays)


def projection(text: str, init: str = "normal") -> Weight:
    """A matrix of a layer, between activations."""
    return replace(weight(text, init), projects=True)


def shared_projection(text: str) -> Weight:
    """A projection that every device along `tensor` uses as a whole."""
    return replace(projection(text), shared=True)


def bias(text: str, *, precise: bool = False) -> Weight:
    """A bias, which begins as 0 and is not decayed."""
    return weight(text, "zeros", precise=precise, decays=False)


def scale(text: str, *, precise: bool = False) -> Weight:
    """The scale of a norm, which is not decayed."""
    return weight(text, "ones", precise=precise, decays=False)


def below(name: str, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights of a part of a model, by their paths in the model."""
    return {f"{name}/{path}": x for path, x in weights.items()}


def stacked(name: str, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights of the layers of a part of a model, each an array for all layers."""
    layers = {path: replace(x, stacks=(LAYERS, *x.stacks)) for path, x in weights.items()}
    return below(name, layers)


def layer_weights(weights: Mapping[str, Weight], stack: str) -> dict[str, Weight]:
    """The weights of one layer of a stack, by path in the layer: the reverse of `stacked`."""
    return {
        path.removeprefix(f"{stack}/"): replace(x, stacks=x.stacks[1:])
        for path, x in weights.items()
        if path.startswith(f"{stack}/")
    }


def find(weights: Mapping[str, Weight], path: str) -> Weight | None:
    """The weight at a path, or whose moment or adapter has this path; None for any other path.

    Args:
        weights: all weights of a model, by path, without adapters.
        path: such as `blocks/mlp/up/kernel`, or `0/mu/blocks/mlp/up/lora_a` in the state of an
            optimizer.
    """
    names = path.split("/")
    adapter = names[-1] if names[-1] in ADAPTERS else None
    if adapter:
        names[-1] = "kernel"
    for first in range(len(names)):
        declared = weights.get("/".join(names[first:]))
        if declared is not None:
            return declared.adapter(adapter) if adapter else declared
    return None


def projections(weights: Mapping[str, Weight]) -> dict[str, None]:
    """The names of the projections of layers, such as "query", each once and in their order."""
    return dict.fromkeys(path.split("/")[-2] for path, x in weights.items() if x.projects)


def layer_stacks(weights: Mapping[str, Weight]) -> tuple[str, ...]:
    """The names of the parts of a model that hold one array for all of their layers."""
    return tuple(dict.fromkeys(path.split("/")[0] for path, x in weights.items() if x.is_stacked))

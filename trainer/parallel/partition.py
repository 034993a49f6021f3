"""How weights, gradients and optimizer state lie on the mesh, and how a device gets what it needs.

Every array is split over `tensor` as Megatron-LM does, and over the axes of ZeRO as its level says:

    level   weights and moments   used by a layer           gradients
    0       whole                 as they are               summed once a step, whole
    1       split                 collected once a step     summed once a step, then split
    2       split                 collected once a step     summed and split layer by layer
    3       split                 collected by each layer   summed and split layer by layer

Weights travel in the type of the activations, gradients in float32. Axes of the mesh that ZeRO does
not split over sum their shares of the gradient after it (hybrid ZeRO).

References:
    ZeRO, https://arxiv.org/abs/1910.02054; LoongTrain's hybrid ZeRO,
    https://arxiv.org/abs/2406.18485; Megatron-LM, https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from startrail_jax.varying import vary
from trainer.config import SHARDED_AXES

# Megatron's split: the dimension of each kernel that lies over `tensor`. Heads and MLP channels are
# split where they are made and summed where they are used up.
TENSOR_DIMS = {"query": 1, "key": 1, "value": 1, "out": 0, "gate": 1, "up": 1, "down": 0}

# Weights of all layers are stacked: their first dimension counts layers, and is never split.
STACKED = "blocks"


@dataclasses.dataclass(frozen=True)
class Split:
    """Which dimensions of an array lie over `tensor` and over the axes of ZeRO."""

    tensor: int | None = None
    """Dimension over `tensor`; None if the array is the same on all of it."""
    zero: int | None = None
    """Dimension over the axes of ZeRO; None if no dimension can be, or ZeRO is off."""
    vector: bool = False
    """Whether it is a vector, as a norm's scale: small, and used in float32."""
    copied_heads: bool = False
    """Whether there are fewer key heads than `tensor` has devices: each takes its own when used."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """The placement of a model's weights on a mesh, and of all that has their shape."""

    mesh: Mesh
    """With the axes of `startrail_jax.make_mesh`."""
    level: int = 0
    """ZeRO level, 0 to 3."""
    zero_axes: tuple[str, ...] = SHARDED_AXES
    """Mesh axes that ZeRO splits over; those of degree 1 do not matter."""
    dtype: Any = jnp.float32
    """Type in which weights are used, and travel."""

    @property
    def zero(self) -> tuple[str, ...]:
        """The axes that ZeRO splits over, in order of the mesh; none at level 0."""
        return tuple(x for x in self._axes(self.zero_axes) if self.level)

    @property
    def replicas(self) -> tuple[str, ...]:
        """All axes over which devices see other tokens: gradients are summed over them."""
        return self._axes(SHARDED_AXES)

    @property
    def tensor(self) -> tuple[str, ...]:
        """The axis `tensor`, if its degree is not 1."""
        return self._axes(("tensor",))

    def _axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            name for name in self.mesh.axis_names if name in names and self.mesh.shape[name] > 1
        )

    def size(self, axes: tuple[str, ...]) -> int:
        """Number of devices along mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    # Where arrays lie.

    def splits(self, state: Any) -> Any:
        """The `Split` of every array of a tree of weights, or of an optimizer's state.

        One rule serves both, since the path of a moment ends in the path of its weight. Over
        `tensor` goes what `TENSOR_DIMS` says; over ZeRO's axes, the largest other dimension that
        they divide.

        Args:
            state: arrays or their shapes.

        Raises:
            ValueError: if the tensor degree does not divide a dimension that must be split.
        """
        return jax.tree_util.tree_map_with_path(self._split, state)

    def _split(self, path: tuple[Any, ...], x: Any) -> Split:
        names = path_name(path).split("/")
        stacked = int(STACKED in names)
        layer = names[names.index("kernel") - 1] if "kernel" in names else None
        dim = TENSOR_DIMS.get(layer or "") if self.tensor else None
        copied = False
        if dim is not None:
            dim += stacked
            remainder = x.shape[dim] % self.mesh.shape["tensor"]
            copied = remainder > 0 and layer in ("key", "value")
            if remainder and not copied:
                raise ValueError(
                    "mesh.tensor must divide heads and mlp_width; got "
                    f"tensor={self.mesh.shape['tensor']} for dimension {dim} of "
                    f"{'/'.join(names)}, of size {x.shape[dim]}. Change one of them."
                )
        fits = [
            i
            for i in range(stacked, len(x.shape))
            if self.zero and i != dim and x.shape[i] % self.size(self.zero) == 0
        ]
        return Split(
            tensor=None if copied else dim,
            zero=max(fits, key=lambda i: x.shape[i], default=None),
            vector=len(x.shape) == stacked + 1,
            copied_heads=copied,
        )

    def spec(self, split: Split) -> PartitionSpec:
        """The PartitionSpec of an array."""
        entries = {}
        if split.tensor is not None:
            entries[split.tensor] = "tensor"
        if split.zero is not None:
            entries[split.zero] = self.zero
        return PartitionSpec(*(entries.get(i) for i in range(max(entries, default=-1) + 1)))

    def specs(self, state: Any) -> Any:
        """The PartitionSpec of every array of weights, of their gradients or of moments."""
        return jax.tree.map(self.spec, self.splits(state), is_leaf=_is_split)

    def shardings(self, state: Any) -> Any:
        """The same as NamedSharding."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(state))

    def unsplit(self, state: Any) -> dict[str, int]:
        """Bytes of the weights that ZeRO leaves whole, as no dimension can be split, by path."""
        splits = jax.tree.leaves(self.splits(state), is_leaf=_is_split)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return {
            path_name(path): x.size * x.dtype.itemsize
            for (path, x), split in zip(leaves, splits, strict=True)
            if self.zero and split.zero is None
        }

    # What a device does with its part, inside a `shard_map` over the whole mesh.

    def sources(self, weights: Any, splits: Any) -> Any:
        """What layers take their weights from: at levels 1 and 2 whole copies, collected now."""
        if self.level not in (1, 2):
            return weights

        def whole(weights: Any, splits: Any) -> Any:
            return self._map(self._collect, weights, splits)

        def collect(name: str) -> Any:
            if name != STACKED:
                return whole(weights[name], splits[name])
            # Layer by layer: collectives join what is contiguous, so that of all layers at once
            # there would be a second copy.
            of_layer = self.of_layer(splits[name])
            return lax.map(lambda layer: whole(layer, of_layer), weights[name])

        return {name: collect(name) for name in weights}

    def sinks(self, weights: Any, splits: Any) -> Any:
        """Zeros, in whose place gradients arise: differentiate with respect to these.

        Whole at levels 0 and 1, where every device holds its own share of the sum; split at levels
        2 and 3.
        """

        def sink(x: Array, split: Split) -> Array:
            shape = list(x.shape)
            if self.level == 1 and split.zero is not None:
                shape[split.zero] *= self.size(self.zero)
            return vary(jnp.zeros(shape, jnp.float32), *self._sink_axes(split))

        return self._map(sink, weights, splits)

    def _sink_axes(self, split: Split) -> tuple[str, ...]:
        """The axes over which what arises in a sink differs between devices."""
        tensor = () if split.tensor is None else self.tensor
        if self.level < 2:
            return (*self.replicas, *tensor)
        return (*(() if split.zero is None else self.zero), *tensor)

    def use(self, sources: Any, sinks: Any, splits: Any) -> Any:
        """The whole weights; their gradients go to the sinks.

        In float32, so that gradients are, with the values of `dtype`: at level 0, where nothing
        travels, too, for products in float32 that a model may have.
        """

        def one(source: Array, split: Split, sink: Array) -> Array:
            weight: Any = _weight(self, split, source, sink)
            return self._own_heads(weight) if split.copied_heads else weight

        return self._map(one, sources, splits, sinks)

    def spread(self, x: Array) -> Array:
        """Activations that go into products split over `tensor`; their gradient is summed."""
        return vary(x, *self.tensor)

    def join(self, x: Array) -> Array:
        """The sum over `tensor` of what split products gave."""
        return lax.psum(x, self.tensor) if self.tensor else x

    def reduce(self, gradients: Any, splits: Any) -> Any:
        """The gradients of a step, summed over devices as far as they are not yet."""
        if self.level >= 2:
            return gradients
        return self._map(self._sum, gradients, splits)

    def of_layer(self, splits: Any) -> Any:
        """The splits of one layer's weights, from those of the weights of all layers, stacked."""

        def one(split: Split) -> Split:
            tensor, zero = (None if x is None else x - 1 for x in (split.tensor, split.zero))
            return dataclasses.replace(split, tensor=tensor, zero=zero)

        return jax.tree.map(one, splits, is_leaf=_is_split)

    def _map(self, function: Any, arrays: Any, splits: Any, *others: Any) -> Any:
        """Maps over trees of arrays beside the one of splits, whose leaves come second."""
        leaves, structure = jax.tree.flatten(arrays)
        flat = [jax.tree.leaves(splits, is_leaf=_is_split), *map(jax.tree.leaves, others)]
        return jax.tree.unflatten(structure, map(function, leaves, *flat))

    def _collect(self, x: Array, split: Split) -> Array:
        """The whole of an array that lies split over ZeRO's axes, in the type of use."""
        x = x if split.vector else x.astype(self.dtype)
        if split.zero is None:
            return x
        return lax.all_gather(x, self.zero, axis=split.zero, tiled=True)

    def _sum(self, gradient: Array, split: Split) -> Array:
        """Sums a device's share over all replicas; leaves it its own part."""
        left = self.replicas
        if split.zero is not None:
            gradient = lax.psum_scatter(
                gradient, self.zero, scatter_dimension=split.zero, tiled=True
            )
            left = tuple(axis for axis in left if axis not in self.zero)
        return lax.psum(gradient, left) if left else gradient

    def _own_heads(self, kernel: Float[Array, "width K H"]) -> Float[Array, "width k H"]:
        """Of a kernel that is the same on all of `tensor`, the key heads of this device's queries.

        `head` * `tensor` devices split the query heads, and each needs one key head; those along
        `head` trade theirs later.
        """
        head, tensor = (self.mesh.shape[axis] for axis in ("head", "tensor"))
        ranks = lax.axis_index("tensor") * head + jnp.arange(head)
        needed = ranks // (head * tensor // kernel.shape[1])
        return jnp.take(vary(kernel, "tensor"), needed, axis=1)


def path_name(path: tuple[Any, ...]) -> str:
    """The name of an array of a state: blocks/mlp/up/kernel."""
    # Flax keeps an array in a variable, as its "value".
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def _is_split(x: Any) -> bool:
    return isinstance(x, Split)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weight(partition: Partition, split: Split, source: Array, sink: Array) -> Array:
    """A weight as it is used; its gradient is that of the sink, whose value is never read."""
    whole = partition._collect(source, split) if partition.level == 3 else source
    if partition.level == 0 and not split.vector:
        kept = jnp.finfo(partition.dtype)
        whole = lax.reduce_precision(whole, kept.nexp, kept.nmant)
    return vary(whole, *partition.replicas).astype(jnp.float32)


def _weight_forward(*arguments: Any) -> tuple[Array, None]:
    return _weight(*arguments), None


def _weight_backward(
    partition: Partition, split: Split, _: None, gradient: Array
) -> tuple[None, Array]:
    return None, partition._sum(gradient, split) if partition.level >= 2 else gradient


_weight.defvjp(_weight_forward, _weight_backward)

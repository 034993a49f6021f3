"""Sharding of weights, gradients and optimizer state, and gathering of whole weights.

Every array is split over `tensor` as in Megatron-LM, and over the axes of ZeRO according to its
level:

    level   weights and moments   weights are            gradients are
    0       whole                 used as they are       summed once a step
    1       split                 gathered once a step   summed and split once a step
    2       split                 gathered once a step   summed and split layer by layer
    3       split                 gathered by a layer    summed and split layer by layer

Weights are gathered in the type of the activations; gradients are summed in float32. Where ZeRO
splits over some axes only, gradients are summed over the others afterwards (hybrid ZeRO).

References:
    ZeRO, https://arxiv.org/abs/1910.02054; LoongTrain's hybrid ZeRO,
    https://arxiv.org/abs/2406.18485; Megatron-LM, https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from models.weights import ADAPTERS, OVER_TENSOR, Weight, find, layer_stacks
from startrail_jax.devices.nodes import slowest_first
from startrail_jax.errors import InputError
from startrail_jax.xla.varying import vary
from trainer.config import SEQUENCE_ROLES, SHARDED_AXES
from trainer.frozen import frozen_names


@dataclasses.dataclass(frozen=True)
class Split:
    """The dimensions of an array that are split over `tensor` and over the axes of ZeRO."""

    tensor: int | None = None
    """Dimension that is split over `tensor`; None if the array is replicated over it."""
    zero: int | None = None
    """Dimension that is split over the axes of ZeRO; None if none can be, or ZeRO is off."""
    vector: bool = False
    """True for a vector or the scale of a norm, which is small and used in float32."""
    copied_heads: tuple[str, ...] = ()
    """Axes that divide the heads of an array that is replicated over `tensor`, since there are
    fewer key heads than devices; each device takes the heads that it needs. Empty for other
    arrays."""
    stays: bool = False
    """True if each device uses its shard as it is, as for experts to which tokens are sent."""
    shared: bool = False
    """True if every device along `tensor` uses all of it: a matrix of an adapter on the side of the
    kernel that is not split."""


class Parameter(NamedTuple):
    """A weight of a model on one device, as `Partition.gather` takes it."""

    weight: Array
    """The shard of the device, or the whole weight if weights are gathered once a step."""
    gradient_slot: Array | None
    """An array in whose place the gradient of the weight arises; None for no gradient."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """The sharding of a model's weights, gradients and moments on a mesh."""

    mesh: Mesh | AbstractMesh
    """A mesh with the axes of `startrail_jax.make_mesh`."""
    declared: Mapping[str, Weight]
    """All weights of the model, by path, without adapters: see `Objective.weights`."""
    level: int = 0
    """ZeRO level, 0 to 3."""
    zero_axes: tuple[str, ...] = SHARDED_AXES
    """Mesh axes that ZeRO splits over; axes of degree 1 make no difference."""
    dtype: Any = jnp.float32
    """Type in which weights are gathered and used."""
    dispatches: bool = False
    """True if tokens are sent to experts, which level 3 divides and then does not gather."""

    @property
    def zero(self) -> tuple[str, ...]:
        """The axes that ZeRO splits over, slowest first; none at level 0."""
        return tuple(x for x in self._axes(self.zero_axes) if self.level)

    @property
    def replicas(self) -> tuple[str, ...]:
        """All axes whose devices have different tokens, over which gradients are summed; slowest
        first."""
        return self._axes(SHARDED_AXES)

    @property
    def of_row(self) -> tuple[str, ...]:
        """All axes whose devices share rows, slowest first; those along `tensor` have the same
        tokens."""
        return self._axes((*SEQUENCE_ROLES, "tensor"))

    @property
    def tensor(self) -> tuple[str, ...]:
        """The axis `tensor`, if its degree is not 1."""
        return self._axes(("tensor",))

    @property
    def all(self) -> tuple[str, ...]:
        """All axes whose degree is not 1, slowest first."""
        return self._axes(self.mesh.axis_names)

    def _axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in self._used_axes if name in names)

    @functools.cached_property
    def _used_axes(self) -> tuple[str, ...]:
        # A collective goes round its devices in the order of the axes that it names: the slowest
        # first, so that it enters every node once.
        return tuple(name for name in slowest_first(self.mesh) if self.mesh.shape[name] > 1)

    @functools.cached_property
    def stacks(self) -> tuple[str, ...]:
        """The parts of the model that are stacked layers."""
        return layer_stacks(self.declared)

    def size(self, axes: tuple[str, ...]) -> int:
        """Number of devices along mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    # How arrays are sharded.

    def check_declared(self, weights: Any) -> None:
        """Raises unless all weights of a model are declared, with their dimensions."""
        for path, x in jax.tree_util.tree_leaves_with_path(weights):
            name = path_name(path)
            declared = find(self.declared, name)
            if declared is None or len(declared.dims) != x.ndim:
                dims = "nothing" if declared is None else f"dimensions {' '.join(declared.dims)}"
                raise InputError(
                    "Objective.sizes must name the dimensions of every weight; got "
                    f"{dims} for {name}, of shape {x.shape}. Declare it as models.weights says."
                )

    def splits(self, state: Any) -> Any:
        """The `Split` of every array of a tree of weights, or of an optimizer's state, where the
        path of a moment ends in the path of its weight. ZeRO's axes split the first dimension,
        along which collectives join and divide arrays without moving them in memory; or, if they do
        not divide it, the largest dimension that they divide."""
        return jax.tree_util.tree_map_with_path(self._split, state)

    def _split(self, path: tuple[Any, ...], x: Any) -> Split:
        name = path_name(path)
        declared = find(self.declared, name)
        dim = declared.tensor_dim if declared is not None and self.tensor else None
        copied: tuple[str, ...] = ()
        if declared is not None and dim is not None:
            remainder = x.shape[dim] % self.mesh.shape["tensor"]
            copied = OVER_TENSOR[declared.dims[dim]] if remainder else ()
            if remainder and not copied:
                raise InputError(
                    "mesh.tensor must divide heads, mlp_width and the width of experts; got "
                    f"tensor={self.mesh.shape['tensor']} for {declared.dims[dim]} of {name}, of "
                    f"size {x.shape[dim]}. Change one of them."
                )
        stacked = int(declared is not None and declared.is_stacked)
        fits = [
            i
            for i in range(stacked, len(x.shape))
            if self.zero and i != dim and x.shape[i] % self.size(self.zero) == 0
        ]
        return Split(
            tensor=None if copied else dim,
            zero=stacked if stacked in fits else max(fits, key=lambda i: x.shape[i], default=None),
            stays=self.dispatches and declared is not None and declared.of_experts,
            vector=len(x.shape) == 1 if declared is None else declared.is_vector,
            copied_heads=copied,
            shared=bool(self.tensor) and declared is not None and declared.shared,
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
        return jax.tree.map(self.spec, self.splits(state))

    def shardings(self, state: Any) -> Any:
        """The NamedSharding of every array of weights, of their gradients or of moments."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(state))

    def sharded(self, shapes: Any) -> Any:
        """Shapes of weights or of moments, with their shardings."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            self.shardings(shapes),
        )

    def unsplit(self, state: Any) -> dict[str, int]:
        """Bytes, by path, of the weights that ZeRO leaves whole because it can split no
        dimension."""
        return {
            path_name(path): x.size * x.dtype.itemsize
            for path, x in jax.tree_util.tree_leaves_with_path(state)
            if self.zero and self._split(path, x).zero is None
        }

    # What one device does with its shards, inside a `shard_map` over the whole mesh.

    def gather_once(self, weights: Any, splits: Any) -> Any:
        """Gathers the whole weights for all of a step at levels 1 and 2; returns the shards at
        other levels."""
        if self.level not in (1, 2):
            return weights

        def whole(weights: Any, splits: Any) -> Any:
            return jax.tree.map(self._all_gather, weights, splits)

        def gather(name: str) -> Any:
            if name not in self.stacks:
                return whole(weights[name], splits[name])
            # Layer by layer: a collective makes one contiguous array, which for all layers at once
            # would be a second copy.
            of_layer = self.of_layer(splits[name])
            return lax.map(lambda layer: whole(layer, of_layer), weights[name])

        return {name: gather(name) for name in weights}

    def gradient_slots(self, weights: Any, splits: Any) -> Any:
        """Zeros in whose place the gradients of the weights arise; differentiate by these. At
        levels 0 and 1 they have the shapes of whole weights, since every device holds its own
        addend of a gradient; at levels 2 and 3, of shards."""

        def slot(x: Array, split: Split) -> Array:
            shape = list(x.shape)
            if self.level == 1 and split.zero is not None:
                shape[split.zero] *= self.size(self.zero)
            return vary(jnp.zeros(shape, jnp.float32), *self._slot_axes(split))

        return jax.tree.map(slot, weights, splits)

    def _slot_axes(self, split: Split) -> tuple[str, ...]:
        """The axes over which the gradient in a slot differs between devices."""
        tensor = () if split.tensor is None else self.tensor
        if self.level < 2:
            return (*self.replicas, *tensor)
        return (*(() if split.zero is None else self.zero), *tensor)

    def gather(self, parameters: Any, splits: Any) -> Any:
        """The whole weights of a tree of `Parameter`s; their gradients arise in the slots.

        The weights are float32, as then are their gradients, with values rounded to `dtype`: at
        level 0 too, since a model may use a weight in float32.
        """

        def whole(parameter: Parameter, split: Split) -> Array:
            if parameter.gradient_slot is None:
                weight = _gathered(self, split, parameter.weight)
            else:
                weight: Any = _gathered_with_slot(self, split, *parameter)
            if split.shared:
                return vary(weight, *self.tensor)
            return self._own_heads(weight, split.copied_heads) if split.copied_heads else weight

        return jax.tree.map(whole, parameters, splits, is_leaf=lambda x: isinstance(x, Parameter))

    def copy_to_tensor(self, x: Array) -> Array:
        """`Hooks.copy_to_tensor`: the identity; the gradient is summed over `tensor`."""
        return vary(x, *self.tensor)

    def reduce_from_tensor(self, x: Array) -> Array:
        """`Hooks.reduce_from_tensor`: the sum over `tensor`."""
        return lax.psum(x, self.tensor) if self.tensor else x

    def sum_over_tokens(self, x: Array) -> Array:
        """`Hooks.sum_over_tokens`."""
        return lax.psum(lax.stop_gradient(x), self.replicas) if self.replicas else x

    def mean_over_tensor(self, x: Array, parts: int = 1) -> Array:
        """`Hooks.mean_over_tensor`: the mean over `tensor`, or over each of so many parts of it."""
        if not self.tensor:
            return x
        if parts == 1:
            return lax.pmean(vary(x, *self.tensor), self.tensor)
        is_of = lax.axis_index("tensor") * parts // self.mesh.shape["tensor"] == jnp.arange(parts)
        # The sum of the devices of each part, at its own place.
        means = lax.pmean(jnp.where(is_of, vary(x, *self.tensor)[..., None], 0), self.tensor)
        return jnp.sum(jnp.where(is_of, means, 0), axis=-1) * parts

    def reduce(self, gradients: Any, splits: Any) -> Any:
        """Sums the gradients of a step over devices; at levels 2 and 3 they are summed already."""
        if self.level >= 2:
            return gradients
        return jax.tree.map(self._sum, gradients, splits)

    def of_layer(self, splits: Any) -> Any:
        """The splits of one layer's weights, from the splits of the stacked weights of all
        layers."""

        def one(split: Split) -> Split:
            tensor, zero = (None if x is None else x - 1 for x in (split.tensor, split.zero))
            return dataclasses.replace(split, tensor=tensor, zero=zero)

        return jax.tree.map(one, splits)

    def _all_gather(self, x: Array, split: Split) -> Array:
        """Gathers an array that is split over ZeRO's axes, in the type in which it is used."""
        x = x if split.vector else x.astype(self.dtype)
        if split.zero is None or split.stays:
            return x
        return lax.all_gather(x, self.zero, axis=split.zero, tiled=True)

    def _sum(self, gradient: Array, split: Split) -> Array:
        """Sums the addends of all replicas; for a split array, each device gets its shard of the
        sum."""
        left = self.replicas
        if split.zero is not None:
            # A device has all tokens of the experts that are its own.
            if not split.stays:
                gradient = lax.psum_scatter(
                    gradient, self.zero, scatter_dimension=split.zero, tiled=True
                )
            left = tuple(axis for axis in left if axis not in self.zero)
        return lax.psum(gradient, left) if left else gradient

    def _own_heads(
        self, kernel: Float[Array, "*width K H"], axes: tuple[str, ...]
    ) -> Float[Array, "*width k H"]:
        """The key heads that this device needs, from a kernel or bias with all key heads: one head,
        or the heads of all devices along `head`, which exchange them in the attention."""
        head = self.mesh.shape["head"] if "head" in axes else 1
        ranks = lax.axis_index("tensor") * head + jnp.arange(head)
        needed = ranks // (head * self.mesh.shape["tensor"] // kernel.shape[-2])
        return jnp.take(vary(kernel, "tensor"), needed, axis=kernel.ndim - 2)


def path_name(path: tuple[Any, ...]) -> str:
    """The name of an array of a state: blocks/mlp/up/kernel."""
    # Flax keeps the array of a variable as its "value".
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def split_adapters(weights: Any) -> tuple[Any, Any]:
    """The adapters of a model (an empty tree if it has none), and its other weights."""
    adapters, base = nnx.split_state(weights, lambda path, _: path[-1] in ADAPTERS, ...)
    return adapters, base


def split_frozen(weights: Any, patterns: Sequence[str]) -> tuple[Any, Any]:
    """The weights that are trained, and the frozen ones (None if there are none), as two trees.

    Args:
        weights: all weights of a model. If it has adapters, these alone are trained.
        patterns: `TrainConfig.frozen`, for a model without adapters.

    Raises:
        InputError: if a pattern matches no weight, or if they match all.
    """
    adapters, base = split_adapters(weights)
    if adapters:
        return adapters, base
    if not patterns:
        return weights, None
    names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(weights)]
    frozen = frozen_names(names, patterns)
    fixed, trained = nnx.split_state(
        weights, lambda path, _: "/".join(map(str, path)) in frozen, ...
    )
    return trained, fixed


def join_frozen(trained: Any, frozen: Any) -> Any:
    """Joins the two trees that `split_frozen` or `split_adapters` returns."""
    return trained if frozen is None else nnx.merge_state(trained, frozen)


def _gathered(partition: Partition, split: Split, weight: Array) -> Array:
    """A weight as it is used."""
    gathered = partition._all_gather(weight, split) if partition.level == 3 else weight
    if partition.level == 0 and not split.vector and weight.dtype != partition.dtype:
        kept = jnp.finfo(partition.dtype)
        gathered = lax.reduce_precision(gathered, kept.nexp, kept.nmant)
    return vary(gathered, *partition.replicas).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered_with_slot(
    partition: Partition, split: Split, weight: Array, gradient_slot: Array
) -> Array:
    """A weight as it is used. Its gradient arises in the slot, whose value is never read."""
    return _gathered(partition, split, weight)


def _gathered_with_slot_forward(*arguments: Any) -> tuple[Array, None]:
    return _gathered_with_slot(*arguments), None


def _gathered_with_slot_backward(
    partition: Partition, split: Split, _: None, gradient: Array
) -> tuple[None, Array]:
    return None, partition._sum(gradient, split) if partition.level >= 2 else gradient


_gathered_with_slot.defvjp(_gathered_with_slot_forward, _gathered_with_slot_backward)

"""A model on a mesh: its sharded weights, and the model that one device runs.

The model runs inside one `shard_map` over the whole mesh, as the program of one device. So every
collective is written in this folder or in the attention.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from models.hooks import Hooks
from models.periods import ATTENTION, LayerOfGroup, layer_of
from startrail_jax.attention import Attention
from startrail_jax.devices.degrees import Degrees
from startrail_jax.devices.nodes import slowest_first
from startrail_jax.linear.attention import LinearAttention
from trainer.parallel.ordering import gradient_first
from trainer.parallel.partition import Parameter, Partition, path_name, split_frozen
from trainer.parallel.tiling import in_tiles

MakeModel = Callable[[Callable[..., Array], Hooks], nnx.Module]
"""(attention_fn, hooks) -> a model with initial weights"""
Layer = Callable[..., Any]
"""(weights, x, ...) -> x or (x, cache)"""


class ShardedModel:
    """A model whose weights are sharded as a `Partition` says."""

    def __init__(
        self,
        make_model: MakeModel,
        attention: Attention,
        partition: Partition,
        *,
        tile: int | None,
        frozen: Sequence[str] = (),
        remat: Callable[[Layer], Layer] = lambda layer: layer,
        linear_backend: str = "xla",
    ) -> None:
        """Derives the sharding of the weights without making them. The MLP treats `tile` tokens of
        a device at a time; None for all. Weights that match `frozen` are not trained."""
        self.attention = attention
        self.partition = partition
        self._make_model = make_model
        self._tile = tile
        self._linear_backend = linear_backend
        self._remat = remat
        self._graph, shapes = nnx.split(nnx.eval_shape(self.make))
        partition.check_declared(shapes)
        self.splits = partition.splits(shapes)
        """The `Split` of every weight."""
        self.specs = partition.specs(shapes)
        """The PartitionSpec of every weight."""
        trained, _ = split_frozen(shapes, frozen)
        self.trained_splits = partition.splits(trained)
        self.trained_specs = partition.specs(trained)
        """The `Split` and the PartitionSpec of every weight that is trained: see `split_frozen`."""
        self.weight_shapes: Any = partition.sharded(shapes)
        """Shapes and shardings of the weights."""

    def make(self) -> nnx.Module:
        """The model with initial weights, which are global arrays."""
        hooks = Hooks(
            wrap_layer=self._wrap_layer,
            tiled=partial(in_tiles, tile=self._tile, dtype=self.partition.dtype),
            copy_to_tensor=self.partition.copy_to_tensor,
            reduce_from_tensor=self.partition.reduce_from_tensor,
            mean_over_tensor=self.partition.mean_over_tensor,
            sum_over_tokens=self.partition.sum_over_tokens,
            expert_axes=self.partition.zero if self.partition.dispatches else (),
            attend_whole=self.attend_whole,
            linear_attention=lambda rule: LinearOnDevice(self.linear(rule)),
            latent_attention=self.attend_latents,
        )
        return self._make_model(self.attend, hooks)

    def on_each_device(
        self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """A function of global (weights, ...) that runs `function` on the shards of each device."""
        return jax.shard_map(
            function,
            mesh=self.partition.mesh,
            in_specs=(self.specs, *in_specs),
            out_specs=out_specs,
        )

    # The methods below run on one device, inside `on_each_device`.

    def local(self, weights: Any, gradient_slots: Any = None) -> Any:
        """The model of one device, whose layers gather their weights when they run. Slots are for
        the trained weights; None where nothing is differentiated."""
        state = {}
        for name in weights:
            slots = None if gradient_slots is None else gradient_slots.get(name)
            if name in self.partition.stacks:
                state[name] = _parameters(weights[name], slots)
            else:
                state[name] = self.gather(name, weights[name], slots)
        return nnx.merge(self._graph, nnx.State(state))

    def gather(self, name: str, weights: Any, gradient_slots: Any = None) -> Any:
        """The whole weights of one part of the model, such as "embedding"."""
        return self.partition.gather(_parameters(weights, gradient_slots), self.splits[name])

    def with_part(self, name: str, weights: Any) -> Any:
        """The model with the whole weights of one part, and shapes in place of the other
        weights."""
        shapes = {other: x for other, x in self.weight_shapes.items() if other != name}
        return nnx.merge(self._graph, nnx.State(shapes | {name: weights}))

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        segment_ids: Array | None = None,
        visible_until: Array | None = None,
        local_window_size: tuple[int, int] | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """The attention of one device's tokens: an `AttentionFn`."""
        attention = self.windowed(local_window_size)
        options = {"sinks": sinks, "visible_until": visible_until}
        out, _ = attention.local(query, key, value, segment_ids, segment_ids, **options)
        return out

    def attend_latents(
        self,
        query: Array,
        latent: Array,
        rotated_key: Array | None,
        key_kernel: Array,
        value_kernel: Array,
        *,
        segment_ids: Array | None = None,
        visible_until: Array | None = None,
    ) -> Array:
        """The latent attention of one device's tokens: `Hooks.latent_attention`."""
        arrays = query, latent, rotated_key, key_kernel, value_kernel
        ids = segment_ids, segment_ids
        out, _ = self.attention.latent_local(*arrays, *ids, visible_until=visible_until)
        return out

    def attend_whole(
        self, query: Array, key: Array, value: Array, key_ids: Array | None = None
    ) -> Array:
        """Attention of a device's tokens to others that it has whole, as `Hooks.attend_whole`."""
        query_ids = None if key_ids is None else jnp.zeros(query.shape[:2], jnp.int32)
        return self._alone.local(query, key, value, query_ids, key_ids)[0]

    @functools.cached_property
    def _alone(self) -> Attention:
        """The attention of each device by itself, to tokens that it has whole."""
        attention = dataclasses.replace(self.attention, mask=None, causal=False)
        mesh = attention.mesh
        if attention.degrees.sequence == 1:
            return attention
        names = tuple(x for x in slowest_first(mesh) if x != "tensor" and mesh.shape[x] > 1)
        devices = math.prod(mesh.shape[name] for name in names)
        degrees = Degrees(data=devices, tensor=attention.degrees.tensor)
        order: dict[str, Any] = {"layout": "contiguous", "inner": 1}
        return dataclasses.replace(attention, axis=names, degrees=degrees, axis_names=None, **order)

    def windowed(self, size: tuple[int, int] | None) -> Attention:
        """The attention of a layer with a window, given as `local_window_size`."""
        if size is None:
            return self.attention
        return dataclasses.replace(self.attention, window=size[0] + 1)

    def linear(self, rule: str) -> LinearAttention:
        """The linear attention of layers, on the mesh and in the layout of attention."""
        names = ("mesh", "layout", "axis_names", "axis")
        options = {name: getattr(self.attention, name) for name in names}
        degrees = None if self.attention.axis is None else self.attention.degrees
        return LinearAttention(**options, degrees=degrees, rule=rule, backend=self._linear_backend)

    def _wrap_layer(self, layer: Layer, stack: str = ATTENTION) -> Layer:
        splits = self.partition.of_layer(self.splits[stack])

        def run(parameters: Any, x: Array, *context: Any) -> Any:
            layer_parameters = layer_of(parameters)
            weights = self.partition.gather(layer_parameters, splits)
            if isinstance(parameters, LayerOfGroup):
                weights, x = _in_order(layer_parameters, weights, x)
            return layer(weights, x, *context)

        return self._remat(run)


@dataclasses.dataclass(frozen=True)
class LinearOnDevice:
    """The linear attention of one device's tokens: a `LinearAttentionFn`."""

    attention: LinearAttention

    def __call__(
        self,
        *arrays: Array,
        segment_ids: Array | None = None,
        visible_until: Array | None = None,
    ) -> Array:
        return self.attention.local(*arrays, segment_ids=segment_ids, visible_until=visible_until)

    def causal_conv(
        self,
        x: Array,
        kernel: Array,
        *,
        segment_ids: Array | None = None,
        visible_until: Array | None = None,
    ) -> Array:
        ends = visible_until
        return self.attention.conv_local(x, kernel, segment_ids=segment_ids, visible_until=ends)


def _in_order(parameters: Any, weights: Any, x: Array) -> tuple[Any, Array]:
    """Makes the backward pass complete the gradients of a layer before it goes on."""
    of_weights, structure = jax.tree.flatten(weights)
    slots = [x.gradient_slot for x in structure.flatten_up_to(parameters)]
    trained = [i for i, slot in enumerate(slots) if slot is not None]
    ordered, x = gradient_first([of_weights[i] for i in trained], x)
    for i, weight in zip(trained, ordered, strict=True):
        of_weights[i] = weight
    return structure.unflatten(of_weights), x


def _parameters(weights: Any, gradient_slots: Any) -> Any:
    """A tree of `Parameter`s. Weights that are not trained have no slot."""
    slots = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(gradient_slots)}
    return jax.tree_util.tree_map_with_path(
        lambda path, weight: Parameter(weight, slots.get(path_name(path))), weights
    )

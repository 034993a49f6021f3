"""The state of training: weights, the optimizer's moments, and the average of the weights.

A step is compiled from the shapes and shardings of a state and of a batch, without either.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int32

from startrail_jax.attention import Attention
from trainer.config import TrainConfig
from trainer.data.batches import shardings
from trainer.objective import Objective
from trainer.parallel.partition import (
    Partition,
    join_frozen,
    path_name,
    split_adapters,
    split_frozen,
)
from trainer.printable import size_of


class TrainState(NamedTuple):
    """The state of a run between two steps."""

    weights: Any
    """Weights that are trained, float32: all weights of the model, some of them, or its
    adapters."""
    optimizer: Any
    """Adam's moments, and its count of steps."""
    average: Any = None
    """Exponential moving average of the weights, float32; None for a run without one."""
    frozen: Any = None
    """Weights that no step changes; None if all are trained."""

    @property
    def model(self) -> Any:
        """All weights of the model."""
        return join_frozen(self.weights, self.frozen)

    @property
    def result(self) -> Any:
        """All weights of the model that the run results in: their average, if there is one."""
        return self.model if self.average is None else join_frozen(self.average, self.frozen)

    @property
    def base(self) -> Any:
        """The weights of the model without its adapters."""
        return split_adapters(self.model)[1]

    @property
    def changing(self) -> TrainState:
        """The state without the frozen weights."""
        return self._replace(frozen=None)


def initial_state(
    config: TrainConfig, optimizer: optax.GradientTransformation, weights: Any
) -> TrainState:
    """The state before the first step, with an average if `config` has one."""
    trained, frozen = split_frozen(weights, config.frozen)
    average = None if config.ema_decay is None else trained
    return TrainState(trained, optimizer.init(trained), average, frozen)


def state_shapes(
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    weight_shapes: Any,
    partition: Partition,
) -> TrainState:
    """Shapes and shardings of a state."""
    shapes = jax.eval_shape(
        lambda weights: initial_state(config, optimizer, weights), weight_shapes
    )
    state = partition.sharded(shapes)
    if not config.offload_optimizer:
        return state
    return state._replace(optimizer=jax.tree.map(_on_host, state.optimizer))


def _on_host(x: Any) -> Any:
    """The shape of an array in the memory of the host; single numbers stay on the device."""
    sharding = x.sharding.with_memory_kind("pinned_host") if x.ndim else x.sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def moved(optimizer: Any, memory: Any) -> Any:
    """The moments in another memory, within a program."""
    return jax.tree.map(lambda x: jax.device_put(x, memory) if x.ndim else x, optimizer)


def batch_shapes(objective: Objective, attention: Attention) -> Any:
    """Shapes and shardings of a batch of a run."""
    mesh: Any = attention.mesh
    shapes = objective.batch_shapes(attention.layout)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings(shapes, NamedSharding(mesh, attention.sequence_spec)),
    )


def updated_average(decay: float, average: Any, weights: Any, count: Int32[Array, ""]) -> Any:
    """The moving average after an update: average + (1 - d) * (weights - average). The decay d
    rises to `decay`, so that the initial weights are soon forgotten."""
    # `optax.incremental_update` computes (1 - d) * weights + d * average, whose rounding error is a
    # third larger: a quarter of the averages would differ in their last bit.
    decay_now = jnp.minimum(decay, (1.0 + count) / (10.0 + count))
    return jax.tree.map(lambda mean, new: mean + (1 - decay_now) * (new - mean), average, weights)


def bytes_of_device(arrays: Any) -> int:
    """Bytes of one device's shards of a tree of arrays, or of their shapes and shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(arrays)
    )


def describe_state(state: TrainState) -> list[str]:
    """The parameters of a model, and the memory that their state takes, as lines of the log."""

    def millions(weights: Any) -> str:
        return f"{sum(x.size for x in jax.tree.leaves(weights)) / 1e6:,.2f} million"

    line = f"model: {millions(state.model)} parameters"
    if state.frozen is None:
        return [line]
    # Norms are few, and float32 whatever the others are.
    dtype = max(jax.tree.leaves(state.frozen), key=lambda x: x.size).dtype
    trained = bytes_of_device((state.weights, state.average))
    has_adapters = bool(split_adapters(state.weights)[0])
    frozen = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.frozen)]
    return [
        f"{line}, of which {'adapters' if has_adapters else 'some'} are trained: "
        f"{millions(state.weights)}",
        *([] if has_adapters else [f"frozen: {', '.join(frozen)}"]),
        f"state of a device: {'adapters' if has_adapters else 'trained weights'} "
        f"{size_of(trained)}, optimizer "
        f"{size_of(bytes_of_device(state.optimizer))}, frozen weights "
        f"{size_of(bytes_of_device(state.frozen))} in {dtype}",
    ]


def step_bytes(analysis: Any) -> int:
    """The bytes of a device that a compiled program takes, by its `memory_analysis()`."""
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


def describe_memory(analysis: Any) -> str:
    """The memory that a compiled program takes of a device, as a line of the log."""
    state, total = analysis.argument_size_in_bytes, step_bytes(analysis)
    host = analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes
    line = f"{size_of(total)} (state and batch {size_of(state)}, the rest for a step)"
    return f"{line}, and {size_of(host)} of the host's" if host else line

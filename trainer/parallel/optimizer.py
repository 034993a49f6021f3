"""AdamW or Muon, with clipping, linear warm-up and the course of the learning rate after it."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from models.layers import ADAPTERS
from trainer.config import OptimizerConfig
from trainer.parallel.partition import (
    STACKED,
    TENSOR_DIMS,
    Partition,
    Split,
    counts_experts,
    path_name,
)

# Root mean square of the entries of an update of AdamW, roughly. Muon's are scaled to it, whatever
# the shape of a matrix, so that one learning rate and one weight decay serve both.
# Reference: https://arxiv.org/abs/2502.16982
RMS_OF_ADAMW = 0.2
MOMENTUM = 0.95
NOT_DECAYED = ("scale", "_bias", "sinks", "decay_rate")
"""What the names of the weights have in them that weight decay leaves alone."""


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate by the number of earlier updates; not 0 in the first update or the last."""
    peak = config.learning_rate
    final = peak * (config.final_share or 0.0)
    warmup = config.warmup(steps)
    if config.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=peak,
            warmup_steps=warmup,
            decay_steps=steps + 1,
            end_value=final,
        )
    elif config.schedule == "wsd":
        decay = min(round(config.decay_of_wsd * steps), steps - warmup)
        schedule = optax.join_schedules(
            [
                optax.linear_schedule(0.0, peak, max(warmup, 1)),
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, final, decay + 1),
            ],
            [warmup, steps - decay],
        )
    else:
        after = {
            "linear": optax.linear_schedule(peak, final, steps + 1 - warmup),
            "constant": optax.constant_schedule(peak),
            "inverse_sqrt": lambda count: peak * jnp.sqrt(max(warmup, 1) / (count + warmup)),
        }
        rise = optax.linear_schedule(0.0, peak, max(warmup, 1))
        schedule = optax.join_schedules([rise, after[config.schedule]], [warmup])
    return lambda count: schedule(count + 1)


def make_optimizer(
    config: OptimizerConfig, steps: int, partition: Partition | None = None
) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` steps; the devices of `partition` share Muon's products.

    Scales of norms, biases and sinks are not decayed. They are recognised by their names, not by
    their dimensions: stacked for all layers, they are matrices.
    """
    rate = learning_rate(config, steps)
    adamw = optax.adamw(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=_decayed,
    )
    clip = optax.clip_by_global_norm(config.clip_norm)
    if config.kind == "adamw":
        return optax.chain(clip, adamw)
    muon = optax.chain(
        _scale_by_muon(MOMENTUM if config.momentum is None else config.momentum, partition),
        optax.stateless(_as_large_as_adamw),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    return optax.chain(clip, optax.partition({"muon": muon, "adamw": adamw}, _kinds))


def _kinds(weights: Any) -> Any:
    """What updates each weight. Muon is made for the matrices between the activations of layers."""

    return jax.tree_util.tree_map_with_path(
        lambda path, x: "adamw" if _matrix(path, x) is None else "muon", weights
    )


def _scale_by_muon(beta: float, partition: Partition | None) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_muon`, of which every device computes the products of some layers. In
    optax's own, XLA splits products as the weights lie, over contracted dimensions, so that every
    device would hold the squares of all layers."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        moment = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        # Nesterov's step.
        ahead = optax.tree.bias_correction(moment, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(updates, beta, count)
        steps = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        updates = jax.tree_util.tree_map_with_path(partial(_orthogonal, partition), steps)
        return updates, MuonState(count, moment, state.ns_coeffs)

    return optax.GradientTransformation(scale_by_muon(beta=beta).init, update)


def _orthogonal(partition: Partition | None, path: tuple[Any, ...], x: Any) -> Any:
    """A weight of all layers whose matrices are made orthogonal, by the devices of each layer."""
    # Without an average, what is left of Muon does that alone.
    muon = scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=_matrix(path, x))
    if partition is None:
        return muon.update(x, muon.init(x))[0]
    layers, stages = len(x), _stages(partition, partition.splits({path_name(path): x}))
    # Layers of zeros, whose step is zeros, where the devices do not divide the layers.
    missing = -layers % partition.size((*partition.zero, *partition.tensor))
    x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    for sharding in stages:
        x = lax.with_sharding_constraint(x, sharding)
    x, _ = muon.update(x, muon.init(x))
    for sharding in stages[::-1]:
        x = lax.with_sharding_constraint(x, sharding)
    return x[:layers]


def _stages(partition: Partition, splits: dict[str, Split]) -> list[NamedSharding]:
    """From a weight's own sharding to whole layers on a device: an exchange among devices each.
    With both exchanges at once, XLA would gather the whole array on every device."""
    (split,) = splits.values()
    specs = [partition.spec(split)]
    if partition.zero:
        of_tensor = partition.spec(dataclasses.replace(split, zero=None))
        specs.append(PartitionSpec(partition.zero, *of_tensor[1:]))
    if partition.tensor:
        specs.append(PartitionSpec((*partition.zero, *partition.tensor)))
    return [NamedSharding(partition.mesh, spec) for spec in specs]


def _as_large_as_adamw(updates: Any, _: Any) -> Any:
    """Orthogonal matrices, scaled: an m x n one has entries of root mean square max(m, n)^-1/2."""

    def scaled(path: tuple[Any, ...], x: Any) -> Any:
        matrix = _matrix(path, x)
        assert matrix is not None, "the others are masked"
        rows, columns = (
            math.prod(x.shape[dim] for dim in dims)
            for dims in (matrix.reduction_axis, matrix.output_axis)
        )
        return x * (RMS_OF_ADAMW * math.sqrt(max(rows, columns)))

    return jax.tree_util.tree_map_with_path(scaled, updates)


def _matrix(path: tuple[Any, ...], x: Any) -> Any:
    """The `MuonDimensionNumbers` of a projection of attention or MLP, or of its adapter's matrices;
    None for all else. Every layer is made orthogonal by itself. The heads of a projection and the
    channels of a head are the rows, or the columns, of one matrix."""
    *parents, layer, name = ("", *path_name(path).split("/"))
    if (
        not {*STACKED}.intersection(parents)
        or layer not in TENSOR_DIMS
        or name not in ("kernel", *ADAPTERS)
    ):
        return None
    # A kernel is [layers, *inputs, *outputs], adapters [layers, *inputs, rank] and the reverse;
    # those of experts, which count them first, are made orthogonal one by one.
    dims = tuple(range(1 + counts_experts(layer), x.ndim))
    one_output = name == "lora_a" or (name == "kernel" and layer == "out")
    cut = len(dims) - 1 if one_output else 1
    return MuonDimensionNumbers(reduction_axis=dims[:cut], output_axis=dims[cut:])


def _decayed(weights: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(x in path_name(path) for x in NOT_DECAYED), weights
    )

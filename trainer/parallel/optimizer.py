"""Optimizers, with clipping, linear warm-up and a decay of the learning rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from models.weights import Weight, find
from trainer.config import OptimizerConfig
from trainer.parallel.partition import Partition, Split, path_name

# Root mean square of the entries of an update of AdamW, roughly. Muon's are scaled to it, whatever
# the shape of a matrix, so that one learning rate and one weight decay serve both.
# Reference: https://arxiv.org/abs/2502.16982
RMS_OF_ADAMW = 0.2
MOMENTUM = 0.95


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
    config: OptimizerConfig,
    steps: int,
    weights: Mapping[str, Weight],
    partition: Partition | None = None,
) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` steps, for a model of these weights; the devices of
    `partition` share Muon's products."""
    rate = learning_rate(config, steps)
    rule = OPTIMIZERS[config.kind](config, rate, weights, partition)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)


def _adamw(
    config: OptimizerConfig, rate: Any, weights: Mapping[str, Weight], partition: Partition | None
) -> optax.GradientTransformation:
    del partition
    return optax.adamw(rate, eps=config.epsilon, **_decays(config, weights))


def _lion(
    config: OptimizerConfig, rate: Any, weights: Mapping[str, Weight], partition: Partition | None
) -> optax.GradientTransformation:
    del partition
    return optax.lion(rate, **_decays(config, weights))


def _muon(
    config: OptimizerConfig, rate: Any, weights: Mapping[str, Weight], partition: Partition | None
) -> optax.GradientTransformation:
    momentum = MOMENTUM if config.momentum is None else config.momentum
    muon = optax.chain(
        _scale_by_muon(momentum, weights, partition),
        optax.stateless(partial(_as_large_as_adamw, weights)),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    adamw = _adamw(config, rate, weights, partition)
    return optax.partition({"muon": muon, "adamw": adamw}, partial(_rules, weights))


def _decays(config: OptimizerConfig, weights: Mapping[str, Weight]) -> dict[str, Any]:
    """The decays of moments and weights, as optax names them."""
    return {
        "b1": config.beta1,
        "b2": config.beta2,
        "weight_decay": config.weight_decay,
        "mask": partial(_decayed, weights),
    }


OPTIMIZERS = {"adamw": _adamw, "lion": _lion, "muon": _muon}
"""`optimizer.kind` -> the update of clipped gradients."""


def _rules(declared: Mapping[str, Weight], weights: Any) -> Any:
    """The optimizer of each weight, by name. Muon is made for the matrices between the activations
    of layers."""

    return jax.tree_util.tree_map_with_path(
        lambda path, x: "adamw" if _matrix(declared, path) is None else "muon", weights
    )


def _scale_by_muon(
    beta: float, declared: Mapping[str, Weight], partition: Partition | None
) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_muon`, but every device computes the products of some layers. With
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
        updates = jax.tree_util.tree_map_with_path(partial(_orthogonal, declared, partition), steps)
        return updates, MuonState(count, moment, state.ns_coeffs)

    return optax.GradientTransformation(scale_by_muon(beta=beta).init, update)


def _orthogonal(
    declared: Mapping[str, Weight], partition: Partition | None, path: tuple[Any, ...], x: Any
) -> Any:
    """Makes the matrices of a weight of all layers orthogonal; the devices share the layers."""
    # Without an average, what is left of Muon does that alone.
    muon = scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=_matrix(declared, path))
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
    """The shardings from a weight's own to whole layers on a device; each step is one exchange
    among devices. With both exchanges at once, XLA would gather the whole array on every device."""
    (split,) = splits.values()
    specs = [partition.spec(split)]
    if partition.zero:
        of_tensor = partition.spec(dataclasses.replace(split, zero=None))
        specs.append(PartitionSpec(partition.zero, *of_tensor[1:]))
    if partition.tensor:
        specs.append(PartitionSpec((*partition.zero, *partition.tensor)))
    return [NamedSharding(partition.mesh, spec) for spec in specs]


def _as_large_as_adamw(declared: Mapping[str, Weight], updates: Any, _: Any) -> Any:
    """Orthogonal matrices, scaled: an m x n one has entries of root mean square max(m, n)^-1/2."""

    def scaled(path: tuple[Any, ...], x: Any) -> Any:
        matrix = _matrix(declared, path)
        assert matrix is not None, "the others are masked"
        rows, columns = (
            math.prod(x.shape[dim] for dim in dims)
            for dims in (matrix.reduction_axis, matrix.output_axis)
        )
        return x * (RMS_OF_ADAMW * math.sqrt(max(rows, columns)))

    return jax.tree_util.tree_map_with_path(scaled, updates)


def _matrix(declared: Mapping[str, Weight], path: tuple[Any, ...]) -> Any:
    """The `MuonDimensionNumbers` of a projection of a layer, or of its adapter's matrices; None for
    all else. Every layer, and every expert, is made orthogonal by itself. The heads of a projection
    and the channels of a head are the rows, or the columns, of one matrix."""
    weight = find(declared, path_name(path))
    if weight is None or not weight.projects:
        return None
    first, end = len(weight.stacks), len(weight.dims)
    dims, cut = tuple(range(first, end)), len(weight.inputs)
    return MuonDimensionNumbers(reduction_axis=dims[:cut], output_axis=dims[cut:])


def _decayed(declared: Mapping[str, Weight], weights: Any) -> Any:
    """Masks the weights that are decayed. Scales of norms, biases and sinks are not, although they
    are matrices when all layers are stacked."""

    def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
        weight = find(declared, path_name(path))
        return weight is None or weight.decays

    return jax.tree_util.tree_map_with_path(is_decayed, weights)

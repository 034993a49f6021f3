"""A training step on a mesh whose devices need not be there: its state, and its memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array

from models.hooks import Hooks
from models.weights import LAYERS, layer_stacks
from startrail_jax.attention import Attention
from startrail_jax.calls.latents import joined
from startrail_jax.devices.degrees import ROLES, Degrees
from startrail_jax.errors import InputError
from startrail_jax.masks import Window
from startrail_jax.rings.choices import choose_exchange
from startrail_jax.rings.latents import Expansion
from startrail_jax.rings.sizes import Sizes
from startrail_jax.rings.sparse_plan import plan_sparse
from trainer.config import TrainConfig
from trainer.objective import Objective
from trainer.parallel.checks import check_step, make_attention, make_partition, parts_of_batch
from trainer.parallel.optimizer import make_optimizer
from trainer.parallel.partition import Partition, Split, path_name, split_adapters, split_frozen
from trainer.parallel.remat import Remat
from trainer.parallel.splits import check_parts
from trainer.parallel.state import TrainState, batch_shapes, bytes_of_device, state_shapes
from trainer.planner.here import jax_share, memory_of
from trainer.planner.memory import FLOAT32, LAYER, LOSS, Footprint, StepSizes, footprint_of
from trainer.planner.search import REMAT

_SHARE_OF_CPU = 0.92
SURE = 0.9
"""A step whose estimate is this share of the memory fits: estimates are within 10 %."""


class AbstractStep:
    """A training step on a mesh, as far as shapes tell. `Program` has its functions."""

    def __init__(
        self,
        config: TrainConfig,
        attention: Attention,
        objective: Objective,
        limit: int | None = None,
    ) -> None:
        """Checks the settings against the mesh, and chooses what layers recompute.

        `limit` is the bytes of a device within which remat "auto" stays; None for no limit.
        """
        self.config = config
        self.attention = attention
        self.objective = objective
        mesh: Any = attention.mesh
        self.partition: Partition = make_partition(mesh, config, objective)
        check_step(config, attention.degrees, self.partition)
        if config.whole_documents:
            check_parts(config, attention.degrees)
        default = make_optimizer(config.optimizer, config.steps, objective.weights, self.partition)
        self.optimizer = objective.make_optimizer(default)
        self.remat: Remat = self._first_within(limit) if config.remat == "auto" else config.remat
        """What layers recompute."""

    @classmethod
    def of_degrees(
        cls, config: TrainConfig, objective: Objective, degrees: Degrees, limit: int | None = None
    ) -> AbstractStep:
        """The step on a mesh of some degrees, on any devices."""
        sizes = tuple(vars(degrees)[role] for role in ROLES)
        mesh = AbstractMesh(sizes, ROLES, (AxisType.Auto,) * len(ROLES))
        return cls(config, make_attention(mesh, config, objective), objective, limit)

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shapes and shardings of the state, to compile without it, and to restore it with."""
        return state_shapes(self.config, self.optimizer, self._shapes.weights, self.partition)

    def memory(self, remat: Remat | None = None) -> Footprint:
        """The memory that the step takes of a device, in closed form; with another remat, too."""
        return footprint_of(dataclasses.replace(self.sizes, remat=remat or self.remat))

    def fits(self, limit: int, remat: Remat | None = None) -> bool:
        """True if the step surely fits in so many bytes of a device."""
        return self.memory(remat).device_bytes <= SURE * limit

    def _first_within(self, limit: int | None) -> Remat:
        """The first of the planner's levels that surely fits or, if none does, the one that needs
        least."""
        known: Any = REMAT[:-1] if self.config.attention.keep_gathered else REMAT
        fits = (x for x in known if limit is None or self.fits(limit, x))
        return next(fits, known[-1])

    @property
    def _shapes(self) -> _Shapes:
        leaves, tree = jax.tree.flatten(self.objective.batch_shapes(self.attention.layout))
        return _traced(self.objective, tree, tuple(leaves))

    @cached_property
    def sizes(self) -> StepSizes:
        """What the memory depends on, found out from shapes alone. The remat is that of the config:
        no size depends on it."""
        config, objective, partition = self.config, self.objective, self.partition
        degrees, shapes, state = self.attention.degrees, self._shapes, self.state_shapes
        parts = parts_of_batch(config, degrees.data)
        _check_sizes(objective, shapes.weights)
        sizes = shapes.attention
        rows_of_part = sizes.batch // degrees.data // parts
        tokens = rows_of_part * (sizes.query_tokens // degrees.sequence)
        # Elements of each weight, and of each part of the model, when ZeRO has gathered them.
        stacks, tensor = partition.stacks, partition.size(partition.tensor)
        splits = partition.splits(shapes.weights)
        shards = partition.size(partition.zero) if partition.dispatches else 1

        def used(x: Any, split: Split) -> int:
            return (
                x.size // (1 if split.tensor is None else tensor) // (shards if split.stays else 1)
            )

        elements = jax.tree.map(used, shapes.weights, splits)
        trained, _ = split_frozen(shapes.weights, config.frozen)
        whole, fixed = (
            {name: sum(jax.tree.leaves(part[name])) for name in part}
            for part in (elements, split_frozen(elements, config.frozen)[1] or {})
        )
        stacked = (_layers(x, stacks) for x in (elements, splits))
        moved = jax.tree.map(lambda n, split: n if (split.zero or 0) > 1 else 0, *stacked)
        of_stacks = _layers(shapes.weights, stacks)
        layers = {stack: jax.tree.leaves(x)[0].shape[0] for stack, x in of_stacks.items()}
        model = dataclasses.replace(objective.sizes, causal=objective.causal)
        words = model.sizes.get("vocab", shapes.outputs[-1])
        return StepSizes(
            model=model,
            degrees=degrees,
            zero=config.zero,
            remat=config.remat,
            keep_gathered=config.attention.keep_gathered,
            head_chunks=config.attention.head_chunks,
            offload=config.offload,
            offload_optimizer=config.offload_optimizer,
            accumulation=parts,
            tile=config.tile or tokens,
            tokens=tokens,
            weight_bytes=bytes_of_device(state.weights),
            optimizer_bytes=bytes_of_device(state.optimizer),
            largest_bytes=max(map(bytes_of_device, jax.tree.leaves(state.optimizer)), default=0),
            average_bytes=bytes_of_device(state.average),
            frozen_bytes=bytes_of_device(state.frozen),
            batch_bytes=bytes_of_device(batch_shapes(objective, self.attention)),
            shard_elements=bytes_of_device(state.weights) // FLOAT32,
            whole_elements=sum(whole.values()),
            stacked_elements=sum(_layers(whole, stacks).values()),
            layer_elements=max(whole[part] // n for part, n in layers.items()),
            turn_trained=sum(
                n * (whole[part] - fixed.get(part, 0)) // layers[part]
                for part, n in shapes.turn.items()
            ),
            moved_elements=sum(jax.tree.leaves(moved)),
            frozen_elements=sum(fixed.values()),
            expert_shards=shards,
            rows=rows_of_part,
            **_seen(self.attention, objective, sizes, rows_of_part),
            loops=shapes.loops,
            turn_layers=sum(shapes.turn.values()),
            stacked_bytes=sum(
                bytes_of_device(_layers(x, stacks)) for x in (state.weights, state.frozen or {})
            ),
            vocabularies={
                name: (whole[name] - fixed.get(name, 0), LOSS if name == objective.head else LAYER)
                for name in trained
                if name not in stacks and _is_vocabulary(trained[name], words)
            },
        )


def step_limit(devices: Sequence[Any], whole: int | None = None) -> int:
    """Bytes that a step may take on each device: what jax has of a GPU of `whole` bytes (None to
    ask it). All processes must ask."""
    share = _SHARE_OF_CPU if devices[0].platform == "cpu" else jax_share()
    fallback = int(share * (memory_of(devices[0]) if whole is None else whole))
    own = [x.memory_stats() or {} for x in devices if x.process_index == jax.process_index()]
    limit = min((x.get("bytes_limit", fallback) for x in own), default=fallback)
    # In MiB, which 32 bits hold.
    return int(np.min(multihost_utils.process_allgather(np.int32(limit >> 20)))) << 20


def _check_sizes(objective: Objective, weights: Any) -> None:
    """Raises unless the sizes of dimensions are those of the arrays."""
    declared = objective.sizes
    for path, x in jax.tree_util.tree_leaves_with_path(split_adapters(weights)[1]):
        dims = declared.weights[path_name(path)].dims
        sizes = {**declared.sizes_at(path_name(path)), LAYERS: x.shape[0]}
        if tuple(sizes.get(name) for name in dims) != x.shape:
            shown = ", ".join(f"{name}={sizes.get(name)}" for name in dims if name != LAYERS)
            raise InputError(
                "Objective.sizes must have the sizes of the dimensions of all weights; got "
                f"{shown} for {path_name(path)}, of shape {x.shape}. Correct them."
            )


def _seen(
    attention: Attention, objective: Objective, sizes: Sizes, rows: int
) -> dict[str, int | bool]:
    """What layers send: whether some use the rings, and keys that others receive in all rows."""
    in_rings, keys = False, []
    for window in set(objective.sizes.layer_windows):
        mask = attention.resolved_mask if window is None else Window(window - 1, 0)
        schedule = dataclasses.replace(attention.schedule, mask=mask)
        if choose_exchange(schedule, attention.degrees, sizes)[0] == "rings":
            in_rings = True
            continue
        plan = plan_sparse(mask, attention.layout, sizes.query_tokens)
        keys.append(0 if plan is None else plan.permuted + plan.shared)
    return dict(in_rings=in_rings, has_sparse=bool(keys), sparse_keys=rows * max(keys, default=0))


class _Shapes(NamedTuple):
    """Shapes of a model's arrays, on all devices together."""

    weights: Any
    attention: Sizes
    """As it is called: tokens are all those of a row, those of text included."""
    outputs: tuple[int, ...]
    loops: int
    """Number of loops over layers."""
    turn: Mapping[str, int]
    """How many layers of each part a turn has, of the loop whose turns have most layers."""


# A plan asks for many meshes of a run, whose batches have few shapes.
@lru_cache(maxsize=8)
def _traced(objective: Objective, tree: Any, leaves: tuple[Any, ...]) -> _Shapes:
    """The shapes in a forward pass for a batch of the run."""
    calls = []

    def attention_fn(query: Array, key: Array, value: Array, **_: Any) -> Array:
        calls.append(Sizes.of(query, key, value, packed=False))
        return query

    def latent_attention(
        query: Array, latent: Array, rotated: Any, *kernels: Array, **_: Any
    ) -> Array:
        expansion = Expansion(*kernels)
        keys = joined(latent, rotated)
        calls.append(Sizes.of(query, keys, None, packed=False, expansion=expansion))
        return jnp.zeros((*query.shape[:3], kernels[1].shape[2]), query.dtype)

    def make_model() -> nnx.Module:
        hooks = Hooks(linear_attention=lambda rule: _NoLinear(), latent_attention=latent_attention)
        return objective.make_model(attention_fn, hooks, nnx.Rngs(0))

    def outputs(batch: Any) -> Array:
        model, batch = make_model(), objective.prepare(batch, training=True)
        return objective.outputs(model, objective.hidden(model, batch))

    abstract = nnx.eval_shape(make_model)
    weights = nnx.state(abstract)
    stretches = getattr(abstract, "stretches", None)
    if stretches is None:
        loops, turn = 1, dict.fromkeys(layer_stacks(objective.weights), 1)
    else:
        loops = len(stretches)
        turn = Counter(kind.stack for kind in max((x.kinds for x in stretches), key=len))
    shape = jax.eval_shape(outputs, jax.tree.unflatten(tree, leaves)).shape
    return _Shapes(weights, calls[0], shape, loops, turn)


def _layers(parts: Any, stacks: Sequence[str]) -> dict[str, Any]:
    """The parts of a model that are layers."""
    return {name: x for name, x in parts.items() if name in stacks}


class _NoLinear:
    """Linear attention that gives the shapes of its outputs alone."""

    def __call__(self, query: Array, key: Array, value: Array, *_: Array, **__: Any) -> Array:
        return value

    def causal_conv(self, x: Array, kernel: Array, **_: Any) -> Array:
        return x


def _is_vocabulary(weights: Any, words: int) -> bool:
    """Whether weights outside of the layers are a large embedding or head, with a row per word. One
    with fewer words than channels is smaller than a kernel of a layer, and is left out."""
    (shape, *_) = (x.shape for x in jax.tree.leaves(weights))
    return len(shape) == 2 and words in shape and words == max(shape)

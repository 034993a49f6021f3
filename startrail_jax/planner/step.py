"""Time and memory of a whole training step: attention, the rest of the model, ZeRO and remat."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.planner.grid import Call, Settings
from startrail_jax.planner.layers import loops_of
from startrail_jax.planner.links import Cost, Links
from startrail_jax.planner.memory import (
    LAYER,
    LOSS,
    REPEATS_MLP,
    REPEATS_PROJECTIONS,
    Footprint,
    StepSizes,
    footprint_of,
)
from startrail_jax.planner.timing import Timing

_FLOAT32 = 4
_ADAM_BYTES = 28
"""Bytes that AdamW reads and writes for each weight: weight, two moments and gradient."""
_LARGEST_TILE = 2048

# What adds up to the seconds of a step.
COMPUTE = ("attention", "products", "other kernels", "recomputation", "optimizer")
"""The parts in which kernels run."""
EXPOSED = ("attention waits", "tensor waits", "zero waits", "offload waits")
"""The parts in which a device waits for messages."""


@dataclass(frozen=True, kw_only=True)
class Savings:
    """The settings that trade time for memory."""

    zero: int
    """ZeRO level."""
    remat: str
    """What the backward pass of a layer recomputes: see `trainer.parallel.remat`."""
    offload: bool
    """Whether layers save to the memory of the host."""
    tiled: bool
    """Whether the loss treats at most 2048 tokens at a time, and the MLP where it is recomputed."""


def tile_of(settings: Settings, tokens: np.ndarray) -> np.ndarray:
    """The largest tile up to 2048 tokens."""
    return np.minimum(tokens // settings.tensor, _LARGEST_TILE)


def is_legal(settings: Settings, savings: Savings, tokens: np.ndarray) -> np.ndarray:
    """Which settings `train.py` takes together with these savings."""
    legal = np.ones(len(settings), bool)
    if savings.zero:
        legal &= settings.replicas > 1
    if savings.offload:
        legal &= savings.remat != "none"
    if savings.tiled:
        # Without a tile there is nothing to save where a device has few tokens.
        legal &= (tokens > _LARGEST_TILE) & (tile_of(settings, tokens) >= _LARGEST_TILE // 8)
    return legal


class Step:
    """A training step in many settings, with any savings."""

    def __init__(self, timing: Timing, rows: Any = slice(None)) -> None:
        """A step in some of the settings whose attentions are timed: all, or those of an index."""
        self._rows = rows
        self.timing, self.call, self.cluster = timing, timing.call, timing.cluster
        self.settings = timing.settings.take(rows)
        self.forward, self.backward = (x.take(rows) for x in timing.passes)
        """Attention of all layers."""
        windows = list(self.call.windows)
        seen = np.array([timing.sends_sparse(x)[rows] for x in windows])
        self._in_rings, self._has_sparse = ~seen.all(0), seen.any(0)
        self._sparse_keys = np.max([timing.received_keys(x)[rows] for x in windows], axis=0)
        self._links = Links(self.settings, timing.cluster)
        self.tokens = self.call.padded(self.settings.sequence) * self.call.batch
        self.tokens = self.tokens // self.settings.replicas
        """Tokens of a device."""
        model, settings = self.call.model, self.settings
        few_keys = model.kv_heads % settings.tensor != 0
        keys = 2 * model.width * model.kv_heads * model.head_dim
        matrices = (model.layer_matrices - keys) // settings.tensor
        matrices = matrices + np.where(few_keys, keys, keys // settings.tensor)
        self.layer_elements = matrices + model.layer_elements - model.layer_matrices
        self.layer_elements = self.layer_elements + model.layer_adapters
        """Weights of a layer on a device, when ZeRO has gathered them."""
        self.whole_elements = model.layers * self.layer_elements + model.other_elements
        """All weights, likewise."""
        self.layer_trained = self.layer_elements
        if model.lora_rank:
            self.layer_trained = np.full_like(self.layer_elements, model.layer_adapters)
        """Weights of a layer that have gradients, and the same outside of the layers."""
        self.other_trained = 0 if model.lora_rank else model.other_elements
        self.trained = model.layers * self.layer_trained + self.other_trained
        """All weights that have gradients."""

    def take(self, row: Any) -> Step:
        """The same step in one of its settings."""
        return Step(self.timing, np.arange(len(self.timing.settings))[self._rows][[row]])

    def parts(self, savings: Savings) -> dict[str, np.ndarray]:
        """The seconds of a step, by what they are spent on: `COMPUTE` and `EXPOSED`."""
        model, layers = self.call.model, self.call.model.layers
        repeats = savings.remat == "full"
        forward, backward = self.forward, self.backward
        compute = forward.compute + backward.compute
        waits = forward.seconds + backward.seconds - compute
        waits = waits + repeats * (forward.seconds - forward.compute)
        if savings.remat not in ("none", "full"):
            waits = waits + self.timing.exchanges_again_seconds[savings.offload][self._rows]
        layer = self._products(model.layer_matrices)
        adapters = self._products(model.layer_adapters)
        # What is recomputed of a layer stops before the last product of the MLP.
        matrix = model.width * model.mlp_width
        of_mlp = (model.mlp_matrices - 1) * matrix * (savings.remat in REPEATS_MLP)
        of_rest = model.layer_matrices - model.mlp_matrices * matrix
        again = self._products(of_mlp + of_rest * (savings.remat in REPEATS_PROJECTIONS))
        head = model.passes * self._products(model.outputs * model.width)
        # A layer sums the outputs of attention and MLP over `tensor`, and the gradients of both
        # inputs.
        sums = 4 + (savings.remat in REPEATS_PROJECTIONS)
        shard = self.trained / (self.settings.replicas if savings.zero else 1)
        return {
            "attention": compute,
            "products": layers * (model.passes * layer + 3 * adapters) + head,
            "other kernels": self._between,
            "recomputation": layers * again + repeats * forward.compute,
            "optimizer": _ADAM_BYTES * shard / self.cluster.gpu.memory_rate,
            "attention waits": waits,
            "tensor waits": layers * sums * self._tensor_sum().seconds,
            "zero waits": self._zero(savings.zero, layer, layer + again),
            "offload waits": self._offload(savings),
        }

    def _zero(self, level: int, forward: np.ndarray, again: np.ndarray) -> np.ndarray:
        """Seconds that a device waits for weights and sums of gradients.

        Args:
            level: ZeRO level.
            forward: seconds of a layer's matrix products in the forward pass.
            again: the same in what remat repeats.
        """
        layers = self.call.model.layers
        if level == 0:
            return self._summed(self.trained, whole=True).seconds
        if level == 1:
            gather = self._gathered(self.whole_elements).seconds
            return gather + self._summed(self.trained, whole=False).seconds
        other = self.call.model.other_elements
        hides = self.cluster.overlaps
        gather = self._gathered(self.layer_elements).seconds
        scatter = self._summed(self.layer_trained, whole=False).seconds
        backward = again + forward
        outside = self._summed(self.other_trained, whole=False).seconds
        if level == 2:
            once = self._gathered(self.whole_elements).seconds
            return once + outside + layers * np.maximum(scatter - hides * backward, 0)
        there = np.maximum(gather - hides * forward, 0)
        back = np.maximum(gather + scatter - hides * backward, 0)
        return outside + self._gathered(other).seconds + layers * (there + back)

    def _offload(self, savings: Savings) -> np.ndarray:
        """Seconds that a device waits for the memory of the host."""
        if not savings.offload:
            return np.zeros(len(self.settings))
        layers = self.call.model.layers
        saved = self.footprint(savings).host_bytes / layers
        seconds = saved / self.cluster.gpu.host_rate
        busy = self.forward.compute / layers + self._products(self.call.model.layer_matrices)
        return layers * 2 * np.maximum(seconds - busy, 0)

    def _products(self, elements: int) -> np.ndarray:
        """Seconds of the matrix products of all tokens with so many weights, forward."""
        flops = 2 * self.tokens * elements / self.settings.tensor
        return flops / (self.timing.speed * self.cluster.gpu.matrix_efficiency)

    @functools.cached_property
    def _between(self) -> np.ndarray:
        """Seconds of the kernels between the matrix products, by the bytes that they move.

        In the forward pass of a layer, sums and norms read and write four arrays of the width for
        attention and four for the MLP; rotary positions move query and key, and the gate its hidden
        channels. The backward pass moves twice as much, and as much again to recompute what the
        forward pass has not saved, or to read what it has. The loss writes float32 outputs, reads
        them twice and writes their gradient.
        """
        model, tensor = self.call.model, self.settings.tensor
        heads = 2 * (model.heads + model.kv_heads) * model.head_dim
        elements = 8 * model.width + (heads + model.mlp_matrices * model.mlp_width) / tensor
        layers = model.layers * 4 * elements * model.itemsize
        moved = self.tokens * (layers + 4 * _FLOAT32 * model.outputs / tensor)
        return moved / self.cluster.gpu.memory_rate

    def _tensor_sum(self) -> Cost:
        """One sum over `tensor` of an activation [tokens, width]."""
        size, parts = (
            self.tokens * self.call.model.width * self.call.model.itemsize,
            self.settings.tensor,
        )
        received, inside = 2 * size * (parts - 1) / parts, self._links.inside["tensor"]
        return self._links.collective("all_reduce", parts, inside, received)

    def _gathered(self, elements: np.ndarray | int) -> Cost:
        """The weights of all devices brought together, in the type in which they are used."""
        return self._links.over_replicas("all_gather", self.call.model.itemsize * elements)

    def _summed(self, elements: np.ndarray | int, *, whole: bool) -> Cost:
        """Gradients summed over all devices, each of which gets all of them or its own part."""
        kind = "all_reduce" if whole else "reduce_scatter"
        return self._links.over_replicas(kind, _FLOAT32 * elements)

    def sizes(self, savings: Savings) -> StepSizes:
        """The sizes on which the memory of the step depends."""
        model, settings, tokens = self.call.model, self.settings, self.tokens
        shards = settings.replicas if savings.zero else 1
        trained = self.trained // shards
        frozen = self.whole_elements - self.trained
        loops = loops_of(self.call.model.layer_windows)
        stacked = model.layers * self.layer_elements // shards
        itemsize = model.frozen_itemsize if model.lora_rank else _FLOAT32
        return StepSizes(
            model=model,
            degrees=settings,
            zero=savings.zero,
            remat=savings.remat,
            keep_gathered=False,
            offload=savings.offload,
            accumulation=1,
            tile=tile_of(settings, tokens) if savings.tiled else tokens,
            tokens=tokens,
            weight_bytes=_FLOAT32 * trained,
            optimizer_bytes=2 * _FLOAT32 * trained,
            average_bytes=_FLOAT32 * trained * model.average,
            frozen_bytes=itemsize * (frozen // shards),
            batch_bytes=tokens * _batch_bytes(self.call),
            shard_elements=trained,
            whole_elements=self.whole_elements,
            layer_elements=self.layer_elements,
            moved_elements=_moved_elements(self.call, settings),
            frozen_elements=frozen,
            frozen_layer_elements=self.layer_elements - self.layer_trained,
            in_rings=self._in_rings,
            sparse_keys=self._sparse_keys * (self.call.batch // settings.data),
            has_sparse=self._has_sparse,
            period=max(period for period, _ in loops),
            loops=len(loops),
            stacked_bytes=itemsize * stacked,
            vocabularies=_vocabularies(self.call),
        )

    def footprint(self, savings: Savings) -> Footprint:
        """The memory of the step."""
        return footprint_of(self.sizes(savings))


def _batch_bytes(call: Call) -> int:
    """Bytes of a batch for each token: ids, targets, positions and documents, or a patch."""
    return _FLOAT32 * (call.model.outputs + 4 if call.model.takes_values else 4)


def _moved_elements(call: Call, settings: Settings) -> np.ndarray:
    """Elements of the matrices whose first dimension the axes of ZeRO do not split: those from
    heads and hidden channels, which `tensor` splits, or whose number they do not divide."""
    model, tensor = call.model, settings.tensor

    def taken(size: int) -> np.ndarray:
        return ((tensor > 1) | (size % settings.replicas > 0)).astype(np.int64)

    out = taken(model.heads) * (model.width * model.heads * model.head_dim)
    down = taken(model.mlp_width) * (model.width * model.mlp_width)
    return model.layers * (out + down) // tensor


def _vocabularies(call: Call) -> Mapping[str, tuple[Any, str]]:
    """The large weights outside of the layers."""
    model = call.model
    if model.takes_values or model.outputs <= model.width or model.lora_rank:
        return {}
    size = model.outputs * model.width
    if model.tied_head:
        return {"embedding": (size, LOSS)}
    return {"embedding": (size, LAYER), "head": (size, LOSS)}

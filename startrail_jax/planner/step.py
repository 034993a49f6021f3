"""Time and memory of a whole training step: attention, the rest of the model, ZeRO and remat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.planner.grid import Call, Settings
from startrail_jax.planner.layers.loops import loops_of
from startrail_jax.planner.memory import LAYER, LOSS, Footprint, StepSizes, footprint_of
from startrail_jax.planner.timing import Timing

_FLOAT32 = 4
_LARGEST_TILE = 2048

# What adds up to the seconds of a step.
COMPUTE = ("attention", "products", "recomputation", "optimizer")
"""The parts in which kernels run."""
EXPOSED = ("attention waits", "tensor waits", "zero waits", "offload waits")
"""The parts in which a device waits for messages."""


@dataclass(frozen=True, kw_only=True)
class Savings:
    """The settings that trade time for memory."""

    zero: int
    """ZeRO level."""
    remat: str
    """What the backward pass of a layer recomputes: "none", "attention_saved" or "full"."""
    offload: bool
    """Whether layers save to the memory of the host."""
    tiled: bool
    """Whether the MLP and the loss treat at most 2048 tokens at a time."""


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

    def __init__(self, timing: Timing) -> None:
        self.timing, self.call = timing, timing.call
        self.forward, self.backward = (timing.all_layers(backward=x) for x in (False, True))
        """Attention of all layers."""
        self._sum = timing.tensor_sum()
        model, settings = self.call.model, timing.settings
        few_keys = model.kv_heads % settings.tensor != 0
        keys = 2 * model.width * model.kv_heads * model.head_dim
        matrices = (model.layer_matrices - keys) // settings.tensor
        matrices = matrices + np.where(few_keys, keys, keys // settings.tensor)
        self.layer_elements = matrices + model.layer_elements - model.layer_matrices
        """Weights of a layer on a device, when ZeRO has gathered them."""
        self.whole_elements = model.layers * self.layer_elements + model.other_elements
        """All weights, likewise."""

    def parts(self, savings: Savings) -> dict[str, np.ndarray]:
        """The seconds of a step, by what they are spent on: `COMPUTE` and `EXPOSED`."""
        timing, model = self.timing, self.call.model
        layers = model.layers
        repeats = savings.remat == "full"
        forward, backward = self.forward, self.backward
        compute = forward.compute + backward.compute
        waits = forward.seconds + backward.seconds - compute
        waits = waits + repeats * (forward.seconds - forward.compute)
        if savings.remat == "attention_saved":
            waits = waits + timing.exchanges_again().seconds
        layer = timing.products(model.layer_matrices)
        mlp = timing.products(model.mlp_matrices * model.width * model.mlp_width)
        again = (savings.remat != "none") * layer + savings.tiled * mlp
        head = 3 * timing.products(model.outputs * model.width)
        # A layer sums the outputs of attention and MLP over `tensor`, and the gradients of both
        # inputs; what is recomputed stops before the last sum.
        sums = 4 + (savings.remat != "none") + savings.tiled
        shard = self.whole_elements / (timing.settings.replicas if savings.zero else 1)
        return {
            "attention": compute,
            "products": layers * 3 * layer + head,
            "recomputation": layers * again + repeats * forward.compute,
            "optimizer": timing.update(shard),
            "attention waits": waits,
            "tensor waits": layers * sums * self._sum.seconds,
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
        timing, layers = self.timing, self.call.model.layers
        if level == 0:
            return timing.summed(self.whole_elements, whole=True).seconds
        if level == 1:
            gather = timing.gathered(self.whole_elements).seconds
            return gather + timing.summed(self.whole_elements, whole=False).seconds
        other = np.full(len(timing.settings), self.call.model.other_elements)
        hides = timing.cluster.overlaps
        gather = timing.gathered(self.layer_elements).seconds
        scatter = timing.summed(self.layer_elements, whole=False).seconds
        backward = again + forward
        outside = timing.summed(other, whole=False).seconds
        if level == 2:
            once = timing.gathered(self.whole_elements).seconds
            return once + outside + layers * np.maximum(scatter - hides * backward, 0)
        there = np.maximum(gather - hides * forward, 0)
        back = np.maximum(gather + scatter - hides * backward, 0)
        return outside + timing.gathered(other).seconds + layers * (there + back)

    def _offload(self, savings: Savings) -> np.ndarray:
        """Seconds that a device waits for the memory of the host."""
        if not savings.offload:
            return np.zeros(len(self.timing.settings))
        sizes = self.sizes(savings)
        saved = footprint_of(sizes).host_bytes / sizes.layers
        seconds = saved / self.timing.cluster.gpu.host_rate
        busy = self.forward.compute / sizes.layers + self.timing.products(
            self.call.model.layer_matrices
        )
        return sizes.layers * 2 * np.maximum(seconds - busy, 0)

    def sizes(self, savings: Savings) -> StepSizes:
        """The sizes on which the memory of the step depends."""
        model, settings, tokens = self.call.model, self.timing.settings, self.timing.tokens
        sharded = self.whole_elements // (settings.replicas if savings.zero else 1)
        weights = sharded if savings.zero == 3 else self.whole_elements
        if savings.zero in (1, 2):
            weights = sharded
        loops = loops_of(self.call.model.layer_windows)
        stacked = model.layers * self.layer_elements
        stacked = stacked // (settings.replicas if savings.zero else 1)
        return StepSizes(
            degrees=settings,
            zero=savings.zero,
            remat=savings.remat,
            keep_gathered=False,
            causal=self.call.causal,
            qk_norm=model.qk_norm,
            modulated=model.modulated,
            offload=savings.offload,
            accumulation=1,
            tile=tile_of(settings, tokens) if savings.tiled else tokens,
            tokens=tokens,
            itemsize=model.itemsize,
            layers=model.layers,
            width=model.width,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            mlp_width=model.mlp_width,
            mlp_matrices=model.mlp_matrices,
            outputs=model.outputs,
            weight_bytes=_FLOAT32 * weights,
            optimizer_bytes=2 * _FLOAT32 * sharded,
            average_bytes=_FLOAT32 * sharded * model.average,
            batch_bytes=tokens * _batch_bytes(self.call),
            shard_elements=weights,
            whole_elements=self.whole_elements,
            layer_elements=self.layer_elements,
            moved_elements=_moved_elements(self.call, settings),
            period=max(period for period, _ in loops),
            loops=len(loops),
            stacked_bytes=_FLOAT32 * stacked,
            vocabularies=_vocabularies(self.call),
        )

    def footprint(self, savings: Savings) -> Footprint:
        """The memory of the step."""
        return footprint_of(self.sizes(savings))


def _batch_bytes(call: Call) -> int:
    """Bytes of a batch for each token: ids, targets, positions and documents, or a patch."""
    return _FLOAT32 * (call.model.outputs + 4 if call.model.takes_values else 4)


def _moved_elements(call: Call, settings: Settings) -> np.ndarray:
    """Elements of the matrices whose longest dimension but that of `tensor` is not their first.

    The axes of ZeRO split that one, if they divide it.
    """
    model, tensor = call.model, settings.tensor
    out = model.width * model.heads * model.head_dim
    matrix = model.width * model.mlp_width
    wide, narrow = model.mlp_width > model.width, model.mlp_width < model.width
    alone = out + matrix * ((model.mlp_matrices - 1) * wide + narrow)
    return model.layers * np.where(tensor > 1, out + matrix, alone) // tensor


def _vocabularies(call: Call) -> Mapping[str, tuple[Any, str]]:
    """The large weights outside of the layers."""
    model = call.model
    if model.takes_values or model.outputs <= model.width:
        return {}
    size = model.outputs * model.width
    if model.tied_head:
        return {"embedding": (size, LOSS)}
    return {"embedding": (size, LAYER), "head": (size, LOSS)}

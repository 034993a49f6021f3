"""Time and memory of a whole training step: attention, the rest of the model, ZeRO and remat."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.parts.recurrence import Recurrence
from models.patterns import loops_of, turn_of
from models.weights import OVER_TENSOR, Weight
from trainer.planner.grid import Call, Settings
from trainer.planner.links import Cost, Links
from trainer.planner.memory import (
    LAYER,
    LOSS,
    REPEATS_MLP,
    REPEATS_PROJECTIONS,
    SAVED,
    Footprint,
    StepSizes,
    footprint_of,
)
from trainer.planner.models import SENT_TO_EXPERTS, LayerKind, shared_elements
from trainer.planner.timing import Timing, Timings

_FLOAT32 = 4
_ADAM_BYTES = 28
"""Bytes that AdamW reads and writes for each weight: weight, two moments and gradient."""
_LARGEST_TILE = 2048
_LINEAR_FORWARD_STATES, _LINEAR_STATES = 1.9, 7.1
"""Bytes that linear attention moves in a forward pass, and in both passes: in states [key_dim,
value_dim] of each token and head, of float32. An H200 took 13.8 and 50.8 ms for 16,384 tokens with
32 states [128, 128]."""

# What adds up to the seconds of a step.
COMPUTE = (
    *("attention", "linear attention", "products", "other kernels", "recomputation", "optimizer"),
)
"""The parts in which kernels run."""
EXPOSED = ("attention waits", "state waits", "tensor waits", "zero waits", "offload waits")
"""The parts in which a device waits for messages."""


@dataclass(frozen=True, kw_only=True)
class Savings:
    """The settings that trade time for memory."""

    zero: int
    remat: str
    """Arrays that the backward pass of a layer recomputes: see `trainer.parallel.remat`."""
    offload: bool
    """True if layers save to the memory of the host."""
    tiled: bool
    """True if the loss treats at most 2048 tokens at a time, and so does the MLP if it is
    recomputed."""
    offload_optimizer: bool = False
    """True if the moments of the optimizer are in the memory of the host."""


def tile_of(settings: Settings, tokens: np.ndarray) -> np.ndarray:
    """The largest tile up to 2048 tokens."""
    return np.minimum(tokens // settings.tensor, _LARGEST_TILE)


def is_legal(settings: Settings, savings: Savings, tokens: np.ndarray) -> np.ndarray:
    """Masks the settings that `train.py` takes together with these savings."""
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

    def __init__(self, timing: Timing | Timings, rows: Any = slice(None)) -> None:
        """Takes the settings whose attentions are timed: all, or the rows of an index."""
        self._rows = rows
        self.timing, self.call, self.cluster = timing, timing.call, timing.cluster
        self.settings = timing.settings.take(rows)
        self.forward, self.backward = (x.take(rows) for x in timing.passes)
        """Costs of the attention of all layers."""
        windows = list(self.call.windows)
        seen = np.array([timing.sends_sparse(x)[rows] for x in windows])
        self._in_rings, self._has_sparse = ~seen.all(0), seen.any(0)
        self._sparse_keys = np.max([timing.received_keys(x)[rows] for x in windows], axis=0)
        self._links = Links(self.settings, timing.cluster)
        self.tokens = self.call.padded(self.settings.sequence) * self.call.batch
        self.tokens = self.tokens // self.settings.replicas
        """Tokens of a device."""
        model = self.call.model
        self.kinds = model.kinds
        self.layer_elements = [
            layer_kind.on_device(self.settings.tensor) for layer_kind in self.kinds
        ]
        """Weights of a layer of each kind on a device, when ZeRO has gathered them."""
        self.stacked_elements = self._of_layers(self.layer_elements)
        """Weights of all layers, and all weights of the model, on a device when ZeRO has gathered
        them."""
        self.whole_elements = self.stacked_elements + model.other_elements
        shares = model.frozen
        rows = zip(self.layer_elements, self.kinds, shares.layers, strict=True)
        self.layer_trained = [
            x - _part(share, x - layer_kind.adapters) for x, layer_kind, share in rows
        ]
        """Weights of a layer of each kind that have gradients, and such weights outside of the
        layers."""
        self.other_trained = model.other_elements - int(shares.outside * model.other_elements)
        self.trained = self._of_layers(self.layer_trained) + self.other_trained
        """All weights that have gradients."""

        devices, tensor = self.settings.replicas, self.settings.tensor
        self._dispatches = model.dispatches(self.tokens, devices, tensor)
        """True where tokens are sent to experts at ZeRO 3."""
        stay = model.expert_elements // tensor * self._dispatches
        self._staying = [stay * (layer_kind.feed_forward == "experts") for layer_kind in self.kinds]
        """Weights of a layer of each kind that are not gathered if tokens are sent to experts."""
        self._staying_trained = [x - _part(shares.experts, x) for x in self._staying]

    def _of_layers(self, each: Iterable[Any]) -> Any:
        """The sum over all layers of an amount for a layer of each kind."""
        return sum(layer_kind.count * x for layer_kind, x in zip(self.kinds, each, strict=True))

    def take(self, row: Any) -> Step:
        """The step in one of its settings."""
        return Step(self.timing, np.arange(len(self.timing.settings))[self._rows][[row]])

    def parts(self, savings: Savings) -> dict[str, np.ndarray]:
        """The seconds of a step, by the names in `COMPUTE` and `EXPOSED`."""
        model = self.call.model
        repeats = savings.remat == "full"
        forward, backward = self.forward, self.backward
        compute = forward.compute + backward.compute
        waits = forward.seconds + backward.seconds - compute
        waits = waits + repeats * (forward.seconds - forward.compute)
        if savings.remat not in ("none", "full"):
            waits = waits + self.timing.exchanges_again_seconds[savings.offload][self._rows]
        layer = [
            self._products(
                layer_kind.active
                - layer_kind.expanding
                + layer_kind.padded
                + self._of_texts(layer_kind)
            )
            for layer_kind in self.kinds
        ]
        adapters = [self._products(layer_kind.active_adapters) for layer_kind in self.kinds]
        # What is recomputed of a layer stops before the last product of the MLP.
        again = [
            self._products(
                layer_kind.again_always
                + layer_kind.again * (savings.remat in REPEATS_MLP)
                + (layer_kind.mixing - layer_kind.expanding)
                * (savings.remat in REPEATS_PROJECTIONS)
            )
            for layer_kind in self.kinds
        ]
        rows = zip(model.passes, layer, adapters, strict=True)
        products = [passes * x + 3 * y for passes, x, y in rows]
        head = (3 - model.frozen.head) * self._products(model.outputs * model.width)
        # A layer sums the outputs of attention and MLP over `tensor`, and the gradients of both
        # inputs.
        sums = self._of_layers(
            2 * x.parts + (x.mixer != "none") * (savings.remat in REPEATS_PROJECTIONS)
            for x in self.kinds
        )
        shard = self.trained / (self.settings.replicas if savings.zero else 1)
        backs = [x + y for x, y in zip(layer, again, strict=True)]
        return {
            "attention": compute,
            "linear attention": self._linear(_LINEAR_STATES + repeats * _LINEAR_FORWARD_STATES),
            "products": self._of_layers(products) + head,
            "other kernels": self._between,
            "recomputation": self._of_layers(again) + repeats * forward.compute,
            "optimizer": _ADAM_BYTES * shard / self.cluster.gpu.memory_rate,
            "attention waits": waits,
            "state waits": (2 + repeats) * self._states,
            "tensor waits": sums * self._tensor_sum().seconds,
            "zero waits": self._zero(savings.zero, layer, backs),
            "offload waits": self._offload(savings),
        }

    def _linear(self, states: float) -> np.ndarray:
        """Seconds of the recurrences of all layers, which move `states` states a token."""
        moved = np.zeros(len(self.settings))
        for layers, recurrence in self._recurrences:
            size = _FLOAT32 * recurrence.values * recurrence.key_dim / self.settings.tensor
            moved = moved + layers * self.tokens * states * size
        return moved / self.cluster.gpu.memory_rate

    @property
    def _recurrences(self) -> list[tuple[int, Recurrence]]:
        """The number of layers with each recurrence, and the recurrence."""
        model = self.call.model
        return [(model.layer_mixers.count(x), y) for x, y in model.recurrences.items()]

    @functools.cached_property
    def _states(self) -> np.ndarray:
        """Seconds of the messages of the recurrences of all layers in one pass, as in
        `startrail_jax.linear.cost` for zigzag order: up the line of devices and down again."""
        seconds = np.zeros(len(self.settings))
        for layers, recurrence in self._recurrences:
            seconds += layers * self._states_of(recurrence)
        return seconds

    def _states_of(self, recurrence: Recurrence) -> np.ndarray:
        """Seconds of these messages in one layer."""
        waits = np.zeros(len(self.settings))
        for devices in {*self.settings.sequence.tolist()} - {1}:
            rows = np.flatnonzero(self.settings.sequence == devices)
            size = _FLOAT32 * self.call.batch * recurrence.heads
            size = size / self.settings.tensor[rows] / self.settings.data[rows]
            state = size * recurrence.key_dim * recurrence.value_dim
            map_bytes = state + size * recurrence.factor_elements(recurrence.key_dim)
            ranks, steps = np.arange(devices), (devices - 1).bit_length()
            inside = np.minimum(self.cluster.gpus_per_node // self.settings.tensor[rows], devices)
            inside = np.maximum(inside, 1)
            in_middle = 2 * state * (devices - 1) / devices
            seconds = self._links.collective("all_reduce", devices, inside, in_middle).seconds
            for step, distance in enumerate((*(2**i for i in range(steps)), 1)):
                targets = np.where(ranks + distance < devices, ranks + distance, ranks)
                across, within = self._links.of_pairs(rows, targets[None], np.ones(1))
                for moved in (map_bytes if step < steps - 1 else state, map_bytes):
                    sent = across * moved, within * moved, 1, np.where(within > 0, moved, 0)
                    seconds = seconds + self._links.messages(*sent).seconds
            waits[rows] = seconds
        return waits

    def _zero(
        self, level: int, forwards: Sequence[np.ndarray], backwards: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Seconds that a device waits for weights and sums of gradients."""
        if level == 0:
            return self._summed(self.trained, to_all=True).seconds
        if level == 1:
            gather = self._gathered(self.whole_elements).seconds
            return gather + self._summed(self.trained, to_all=False).seconds
        other = self.call.model.other_elements
        hides = self.cluster.overlaps
        outside = self._summed(self.other_trained, to_all=False).seconds
        exposed = []
        layers, trained_layers = self.layer_elements, self.layer_trained
        if level == 3:
            layers = np.subtract(layers, self._staying)
            trained_layers = np.subtract(trained_layers, self._staying_trained)
        rows = zip(layers, trained_layers, self._staying, forwards, backwards, strict=True)
        for elements, trained, staying, forward, back in rows:
            gather = self._gathered(elements).seconds
            scatter = self._summed(trained, to_all=False).seconds
            backward = back + forward
            if level == 2:
                exposed.append(np.maximum(scatter - hides * backward, 0))
                continue
            first = np.maximum(gather - hides * forward, 0)
            exposed.append(first + np.maximum(gather + scatter - hides * backward, 0))
            if np.any(staying):
                size = self.call.model.dispatched_bytes(self.tokens) * (staying > 0)
                sent = self._links.over_replicas("all_to_all", size)
                exposed[-1] += SENT_TO_EXPERTS * sent.seconds
        once = self._gathered(self.whole_elements if level == 2 else other).seconds
        return outside + once + self._of_layers(exposed)

    def _offload(self, savings: Savings) -> np.ndarray:
        """Seconds that a device waits for the memory of the host."""
        waits = np.zeros(len(self.settings))
        if not (savings.offload or savings.offload_optimizer):
            return waits
        footprint, rate = self.footprint(savings), self.cluster.gpu.host_rate
        if savings.offload_optimizer:
            waits = waits + 2 * footprint["optimizer"] / rate
        if not savings.offload:
            return waits
        model, layers = self.call.model, self.call.model.layers
        seconds = footprint[SAVED] / layers / rate
        mixing = self.forward.compute + self._linear(_LINEAR_FORWARD_STATES)
        busy = mixing / layers + self._products(model.matrices / layers)
        return waits + layers * 2 * np.maximum(seconds - busy, 0)

    def _products(self, elements: float | np.ndarray) -> np.ndarray:
        """Seconds of the matrix products of all tokens with so many weights, forward."""
        flops = 2 * self.tokens * elements / self.settings.tensor
        return flops / (self.timing.speed * self.cluster.gpu.matrix_efficiency)

    def _of_texts(self, layer_kind: LayerKind) -> np.ndarray:
        """The weights that would take as long as attention to a text, and its keys and values."""
        model = self.call.model
        pairs = 2 * model.heads * model.head_dim * model.whole_tokens
        rows = self.call.batch // self.settings.data
        return pairs + layer_kind.text_matrices * model.text_tokens * rows / self.tokens

    @functools.cached_property
    def _between(self) -> np.ndarray:
        """Seconds of the kernels between the matrix products, by the bytes that they move.

        In the forward pass of a layer, sums and norms read and write four arrays of the width for
        attention and four for the MLP; rotary positions move query and key, and the gate its hidden
        channels; linear attention has a convolution and more norms. The backward pass moves twice
        as much, and as much again to recompute what is not saved, or to read what is. The loss
        writes float32 outputs, reads them twice and writes their gradient.
        """
        model, tensor = self.call.model, self.settings.tensor
        elements = self._of_layers(
            4 * layer_kind.parts * model.width + layer_kind.moved / tensor
            for layer_kind in self.kinds
        )
        layers = 4 * elements * model.itemsize
        moved = self.tokens * (layers + 4 * _FLOAT32 * model.outputs / tensor)
        return moved / self.cluster.gpu.memory_rate

    def _tensor_sum(self) -> Cost:
        """A sum over `tensor` of an activation [tokens, width]."""
        model, parts = self.call.model, self.settings.tensor
        size = self.tokens * model.width * model.itemsize
        received, inside = 2 * size * (parts - 1) / parts, self._links.inside["tensor"]
        return self._links.collective("all_reduce", parts, inside, received)

    def _gathered(self, elements: np.ndarray | int) -> Cost:
        """The weights of all devices brought together, in the type in which they are used."""
        return self._links.over_replicas("all_gather", self.call.model.itemsize * elements)

    def _summed(self, elements: np.ndarray | int, *, to_all: bool) -> Cost:
        """Gradients summed over all devices; each device gets all sums (`to_all`) or its shard."""
        collective = "all_reduce" if to_all else "reduce_scatter"
        return self._links.over_replicas(collective, _FLOAT32 * elements)

    def sizes(self, savings: Savings) -> StepSizes:
        """The sizes on which the memory of the step depends."""
        model, settings, tokens = self.call.model, self.settings, self.tokens
        stays = self._dispatches & (savings.zero == 3)
        layers = np.subtract(self.layer_elements, np.multiply(self._staying, stays))
        trained_layers = np.subtract(self.layer_trained, np.multiply(self._staying_trained, stays))
        shards = settings.replicas if savings.zero else 1
        trained = self.trained // shards
        frozen = self.whole_elements - self.trained
        loops = loops_of(tuple(zip(model.layer_kinds, model.layer_feed_forwards, strict=True)))
        turn = turn_of(loops, model.layer_pairs)
        stacked = self.stacked_elements // shards
        itemsize = model.frozen_itemsize if model.lora_rank else _FLOAT32
        matrix = model.largest_feed_forward // model.mlp_matrices // settings.tensor
        largest = np.maximum(
            matrix * model.layers // sum(turn.values()), model.outputs * model.width
        )
        return StepSizes(
            model=model,
            degrees=settings,
            zero=savings.zero,
            remat=savings.remat,
            keep_gathered=False,
            offload=savings.offload,
            offload_optimizer=savings.offload_optimizer,
            accumulation=1,
            tile=tile_of(settings, tokens) if savings.tiled else tokens,
            tokens=tokens,
            weight_bytes=_FLOAT32 * trained,
            optimizer_bytes=2 * _FLOAT32 * trained,
            largest_bytes=_FLOAT32 * np.minimum(largest // shards, trained),
            average_bytes=_FLOAT32 * trained * model.average,
            frozen_bytes=itemsize * (frozen // shards),
            # Ids, targets, positions and documents, or a patch.
            batch_bytes=tokens * _FLOAT32 * (4 + model.outputs * model.takes_values),
            shard_elements=trained,
            whole_elements=self.whole_elements,
            stacked_elements=self.stacked_elements,
            moved_elements=_moved_elements(self.call, settings),
            frozen_elements=frozen,
            layer_elements=np.max(layers, axis=0),
            turn_trained=sum(
                turn[layer_kind.mixer, layer_kind.feed_forward] * x
                for layer_kind, x in zip(self.kinds, trained_layers, strict=True)
            ),
            expert_shards=np.where(stays, settings.replicas, 1),
            rows=self.call.batch // settings.data,
            in_rings=self._in_rings,
            sparse_keys=self._sparse_keys * (self.call.batch // settings.data),
            has_sparse=self._has_sparse,
            loops=len(loops),
            turn_layers=sum(turn.values()),
            stacked_bytes=itemsize * stacked,
            vocabularies=_vocabularies(self.call),
        )

    def footprint(self, savings: Savings) -> Footprint:
        return footprint_of(self.sizes(savings))


def _moved_elements(call: Call, settings: Settings) -> np.ndarray:
    """Elements of the weights of layers that the axes of ZeRO split along another dimension than
    the first, because `tensor` splits the first one or they do not divide its size."""
    tensor, replicas = settings.tensor, settings.replicas

    def is_split(name: str, sizes: Mapping[str, int]) -> np.ndarray:
        copied = bool(OVER_TENSOR[name]) & (sizes[name] % tensor != 0)
        return (tensor > 1) & ~copied

    def is_moved(weight: Weight, sizes: Mapping[str, int]) -> np.ndarray:
        first, *later = (
            (sizes[name] % replicas == 0) & (i != weight.tensor_dim or ~is_split(name, sizes))
            for i, name in enumerate(weight.dims)
        )
        return ~first & functools.reduce(np.logical_or, later, False)

    moved = np.zeros_like(tensor)
    for layer_kind in call.model.kinds:
        for x in layer_kind.weights.values():
            elements = shared_elements(x, layer_kind.sizes, tensor)
            moved += layer_kind.count * is_moved(x, layer_kind.sizes) * elements
    return moved


def _vocabularies(call: Call) -> Mapping[str, tuple[Any, str]]:
    """The large weights outside of the layers."""
    model = call.model
    words, frozen = model.sizes.get("vocab", model.outputs), model.frozen
    if model.takes_values or words <= model.width:
        return {}
    phases = {"embedding": LAYER}
    if words == model.outputs:
        phases[model.head] = LOSS
    return {
        name: (words * model.width, x) for name, x in phases.items() if not getattr(frozen, name)
    }


def _part(share: float, elements: np.ndarray) -> np.ndarray:
    """The share of a number of elements, in whole numbers."""
    return np.rint(share * elements).astype(np.int64)

"""The memory that a training step takes of a device, in closed form.

Exact, to the byte, are the state (weights and optimizer), the batch, the gradients that the step
sums, and the arrays that layers save for the backward pass with a `remat` other than "none". The
rest is an estimate: the arrays that a layer holds while its backward pass runs, or the loss,
whichever is more, and the weights and gradients that are being gathered and summed. Whole steps
compiled for GPUs, of recipes and of settings drawn at random, took 0.91 to 1.15 of the sum
(`benchmarks/compiled/run.py`).

This module is arithmetic, also on NumPy arrays: degrees, and all that depends on them, may have an
element for each setting. `trainer/parallel/abstract_step.py` finds the sizes of a run.

References: ZeRO's arithmetic, https://arxiv.org/abs/1910.02054; activations of a transformer,
https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from models.parts.recurrence import Recurrence
from startrail_jax.linear.sizes import LayerSizes
from startrail_jax.rings.sizes import heads_at_once
from trainer.planner.models import DISPATCHES, ModelSizes
from trainer.planner.quantities import GIB

FLOAT32 = 4
"""Bytes of a number."""

REPEATS_PROJECTIONS = ("attention_saved", "full")
REPEATS_MLP = ("projections_saved", *REPEATS_PROJECTIONS)
"""The values of `remat` whose backward passes compute the projections around attention again, and
those that compute the MLP again; only a recomputed MLP is tiled."""

Amount = Any
"""An integer, or an array of them: one for each setting."""

FORWARD, LOSS, LAYER = "a layer's forward pass", "the loss", "a layer's backward pass"
UPDATE = "the update"
"""Phases of a step, which do not run at the same time."""
SAVED = "saved for the backward pass"  # The name of a part.


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes on which the memory of a step depends. Bytes, tokens and elements are per device."""

    model: ModelSizes
    """The model, with the `outputs` and the heads of all devices together."""
    degrees: Any
    """`startrail_jax.Degrees`, or anything else with the six degrees."""
    zero: int
    remat: str
    """Arrays that layers save: see `remat.rematerialised`."""
    keep_gathered: bool
    """True if layers also save the units that attention has gathered."""
    head_chunks: int = 1
    """Number of parts in which a device attends its heads."""
    offload: bool
    offload_optimizer: bool = False
    accumulation: int
    """Parts of a batch that are computed one after another."""
    tile: Amount
    """Tokens that the loss treats at a time if it has as many, and the MLP if it is recomputed."""

    tokens: Amount
    """Tokens of one part of a batch."""
    weight_bytes: Amount
    optimizer_bytes: Amount
    largest_bytes: Amount = 0
    """Bytes of a moment of the largest weight."""
    average_bytes: Amount
    """Bytes of the average of the weights; 0 for a run without one."""
    frozen_bytes: Amount = 0
    """Bytes of the weights that no step changes, beside `weight_bytes`; 0 if all are trained."""
    batch_bytes: Amount
    shard_elements: Amount
    """Elements of the weights that are trained, as the state holds them."""
    whole_elements: Amount
    """Elements of all weights when ZeRO has gathered them."""
    stacked_elements: Amount
    """Elements of the weights of all layers when ZeRO has gathered them."""
    moved_elements: Amount = 0
    """Elements of the weights of all layers, when ZeRO has gathered them, that it splits along
    another dimension than their first. A collective joins shards along the first one."""
    frozen_elements: Amount = 0
    """Elements of `whole_elements` that have no gradient."""
    layer_elements: Amount
    """Elements of the weights of the largest layer when ZeRO has gathered them."""
    turn_trained: Amount
    """Weights that have gradients, of the layers of a turn of the loop with most layers."""
    expert_shards: Amount = 1
    """Devices over which the experts of a layer are divided, so that tokens are sent to them."""
    rows: Amount = 1
    """Sequences of one part of a batch."""
    in_rings: Amount = True
    """True if the keys of some layer go round the rings."""
    sparse_keys: Amount = 0
    """Keys that a device receives, for all of its sequences, in a layer that sends only the keys
    that its window shows: the most of any such layer. 0 if there is no such layer."""
    has_sparse: Amount = False
    """True if some layer sends only the keys that its window shows."""
    loops: int
    """Number of loops over layers: see `loops_of`."""
    turn_layers: int = 1
    """Number of layers of a turn of the loop with most layers."""
    stacked_bytes: Amount = 0
    """Bytes of the weights of all layers, as the state holds them, with frozen ones; used if there
    are several loops."""
    vocabularies: Mapping[str, tuple[Amount, str]]
    """For each large weight outside of the layers, its elements and the phase of its gradient."""

    @property
    def stream(self) -> Amount:
        """Bytes of one activation of all tokens, [tokens, width]."""
        return self.tokens * self.model.width * self.model.itemsize


@dataclass(frozen=True, kw_only=True)
class Part:
    """A use of memory."""

    name: str
    size: Amount
    """Bytes of one device."""
    exact: bool = True
    host: bool = False
    """True if it is in the host's memory."""
    phase: str | None = None
    """The phase in which it exists; None for all of the step."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of a training step, for one device."""

    parts: tuple[Part, ...]

    @property
    def state_bytes(self) -> Amount:
        """Weights, optimizer and average, on the device: exact."""
        names = ("weights", "optimizer", "average", "frozen weights")
        return sum(item.size for item in self.parts if item.name in names and not item.host)

    @property
    def device_bytes(self) -> Amount:
        """Device memory in the phase that takes most: an estimate."""
        return _plain(self.always_bytes + functools.reduce(np.maximum, self.phases.values(), 0))

    @property
    def always_bytes(self) -> Amount:
        """Device memory of the parts that exist in all phases."""
        return sum(item.size for item in self.parts if item.phase is None and not item.host)

    @property
    def host_bytes(self) -> Amount:
        """Pinned memory of the host."""
        return sum(item.size for item in self.parts if item.host)

    @property
    def phases(self) -> dict[str, Amount]:
        """Bytes that each phase adds."""
        sizes: dict[str, Amount] = {}
        for item in self.parts:
            if item.phase is not None:
                sizes[item.phase] = sizes.get(item.phase, 0) + item.size
        return sizes

    def __getitem__(self, name: str) -> Amount:
        """Bytes of a part; 0 if there is no part of that name."""
        return sum(item.size for item in self.parts if item.name == name)

    def table(self) -> str:
        """A line for each part, in GiB, and the sums."""
        largest = max(self.phases, key=lambda phase: self.phases[phase], default=None)
        lines = []
        for item in self.parts:
            accuracy = "exact" if item.exact else "estimate"
            place = "host" if item.host else "device"
            counts = "" if item.phase in (None, largest) else ", at another time"
            line = f"{item.name:<36}{item.size / GIB:>9.3f} GiB  {accuracy}, {place}{counts}"
            lines.append(line)
        lines.append(f"{'device, at most at a time':<36}{self.device_bytes / GIB:>9.3f} GiB")
        lines.append(f"{'host':<36}{self.host_bytes / GIB:>9.3f} GiB")
        return "\n".join(lines)


def footprint_of(sizes: StepSizes) -> Footprint:
    return Footprint(parts=tuple(replace(item, size=_plain(item.size)) for item in _parts(sizes)))


def _plain(size: Amount) -> Amount:
    """A number of Python, where there is one setting."""
    return size if isinstance(size, np.ndarray) else int(size)


def _parts(sizes: StepSizes) -> Iterator[Part]:
    yield Part(name="weights", size=sizes.weight_bytes)
    yield Part(name="optimizer", size=sizes.optimizer_bytes, host=sizes.offload_optimizer)
    if sizes.offload_optimizer:
        # Those that are updated, and those on their way to the host.
        moments = 3 * sizes.largest_bytes
        yield Part(name="moments in the update", size=moments, exact=False, phase=UPDATE)
    if np.any(sizes.average_bytes):
        yield Part(name="average", size=sizes.average_bytes)
    if np.any(sizes.frozen_bytes):
        yield Part(name="frozen weights", size=sizes.frozen_bytes)
    yield Part(name="batch", size=sizes.batch_bytes)
    trained_elements = sizes.whole_elements - sizes.frozen_elements
    summed = FLOAT32 * (sizes.shard_elements if sizes.zero >= 2 else trained_elements)
    # Whole gradients arise in the backward pass, unless they are sums over parts of a batch. The
    # shards of sums begin as zeros, which XLA sets up early.
    late = sizes.zero < 2 and sizes.accumulation == 1 and not sizes.offload_optimizer
    yield Part(name="gradients", size=summed, phase=LAYER if late else None)
    if sizes.accumulation > 1:
        yield Part(name="gradients of one part", size=summed, exact=False, phase=LAYER)
    saved = _saved(sizes)
    yield saved
    if sizes.turn_layers > 1 and not sizes.offload and sizes.remat != "none":
        # What all layers of a turn saved is copied before its first layer needs it.
        copied = saved.size * (sizes.turn_layers - 1) // sizes.model.layers
        yield Part(name="saved by layers of a turn", size=copied, exact=False, phase=LAYER)
    yield from _gathered_and_summed(sizes)
    attention = functools.reduce(
        np.maximum, map(_backward_bytes, _by_mixer(sizes).values()), np.int64(0)
    )
    for recurrence in sizes.model.recurrences.values():
        # What its backward pass works on, and its inputs and gradients.
        backward_bytes = _of_recurrence(sizes, recurrence, "backward_bytes")
        attention = np.maximum(
            attention, backward_bytes + 4 * _recurrence_inputs(sizes, recurrence)
        )
    inner = 6 * sizes.stream + np.maximum(attention, _mlp_bytes(sizes))
    yield Part(name="attention or MLP", size=inner, exact=False, phase=LAYER)
    yield Part(name="outputs and loss", size=_loss_bytes(sizes), exact=False, phase=LOSS)
    if sizes.zero in (1, 2):
        attention = functools.reduce(
            np.maximum, map(_forward_bytes, _by_mixer(sizes).values()), np.int64(0)
        )
        inner = 4 * sizes.stream + attention
        yield Part(name="attention", size=inner, exact=False, phase=FORWARD)


def _by_mixer(sizes: StepSizes) -> dict[str, StepSizes]:
    """The sizes for each mixer with attention, with the heads of its layers."""
    return {mixer: replace(sizes, model=x) for mixer, x in sizes.model.attentions.items()}


def _backward_bytes(sizes: StepSizes) -> Amount:
    """The backward pass of an attention, by what its layers send."""
    attention = np.maximum(
        sizes.in_rings * _of_chunks(sizes, _attention_bytes(sizes)),
        sizes.has_sparse * _sparse_attention_bytes(sizes),
    )
    attention = attention + _expanded_bytes(sizes, 2)
    if sizes.model.qk_norm:
        # What the norms took: the query as it was projected, and the key in float32.
        attention = attention + _shard_bytes(sizes, 1, FLOAT32 / sizes.model.itemsize / 2)
    return attention


def _forward_bytes(sizes: StepSizes) -> Amount:
    """The forward pass of an attention, by what its layers send."""
    attention = np.maximum(
        sizes.in_rings * _of_chunks(sizes, _forward_attention_bytes(sizes)),
        sizes.has_sparse * _sparse_forward_bytes(sizes),
    )
    return attention + _expanded_bytes(sizes, 1)


def _expanded_bytes(sizes: StepSizes, arrays: int) -> Amount:
    """Keys and values, or so many arrays like them, that a device makes of a unit of latents at a
    time; and the keys before their rotated parts lie beside them."""
    model, degrees = sizes.model, sizes.degrees
    if model.latent_dim is None:
        return 0
    head_dims = model.head_dim + model.value_head_dim
    tokens = sizes.tokens * degrees.head * degrees.group
    heads = np.vectorize(heads_at_once, otypes=[np.int64])(
        model.heads // (degrees.head * degrees.tensor), tokens, head_dims, model.itemsize
    )
    size = tokens * heads * arrays * (head_dims + model.sizes["latent_key_dim"]) * model.itemsize
    return size if np.ndim(size) else int(size)


def _saved(sizes: StepSizes) -> Part:
    """Arrays that layers save for the backward pass: see `remat.rematerialised`."""
    model = sizes.model
    name, tensor = SAVED, sizes.degrees.tensor
    hidden = sizes.tokens * model.mlp_width // tensor * model.itemsize
    shared = sizes.tokens * model.shared_width // tensor * model.itemsize
    exchanged = (sizes.degrees.head > 1) & np.asarray(sizes.in_rings, bool)
    if sizes.remat == "none":
        # A derivative needs float32 arrays of norms, residuals and modulations, 16-bit operands of
        # products, query, key, value and output, and six arrays of the MLP's hidden channels. Below
        # level 3 float32 copies of the weights are saved too.
        if sizes.zero == 3:
            wide, narrow = 8, 3 if model.modulated else 1
        else:
            wide, narrow = 8 if model.modulated else 6, 3
        if model.norms_over_heads:
            # Another attention, whose norm and input are float32; and norms over all heads.
            wide, narrow = (wide + 6, narrow - 2) if sizes.zero == 3 else (wide + 3, narrow + 1)
        elif model.text_tokens:
            wide, narrow = (wide + 3, narrow) if sizes.zero == 3 else (wide + 2, narrow + 1)
        layer = (wide * FLOAT32 // model.itemsize + narrow) * sizes.stream
        copies = 0 if sizes.zero == 3 else FLOAT32 * sizes.stacked_elements
        # What is exchanged, or joined from parts, is saved before and after.
        outs = np.where(exchanged | (sizes.head_chunks > 1), 2, 1)

        def of_attention(sizes: StepSizes) -> Amount:
            kept = _shard_bytes(sizes, 1 + outs + 2 * sizes.model.is_gated, 1)
            if model.norms_over_heads:
                split = 2 * (np.asarray(tensor) > 1)
                precise = FLOAT32 * _shard_bytes(sizes, 6 + split, 0) // model.itemsize
                kept = kept + precise + _shard_bytes(sizes, 2 - split, 0)
            elif model.text_tokens:
                kept = kept + _shard_bytes(sizes, 3, 0)
            if sizes.keep_gathered:
                # In place of the shards.
                kept += _unit_bytes(sizes, sizes.degrees.team - 1, sizes.degrees.group - 1)
            return mixing + kept

        feeding = layer // 2
        mixing = layer - feeding
        mixers: dict[str, Amount] = {x: of_attention(y) for x, y in _by_mixer(sizes).items()}
        mixers["none"] = 0
        # Beside its projections, a recurrence has convolved and normalised ones, and float32 arrays
        # of its norms.
        for mixer, x in model.recurrences.items():
            inputs = 13 * _recurrence_inputs(sizes, x)
            mixers[mixer] = mixing + _recurrence_states(sizes, x) + inputs
        feeds = (feeding + 6 * x for x in (hidden, shared))
        size = _of_layers(sizes, mixers, *feeds) + copies
        return Part(name=name, size=size, exact=False)
    layer, attentions = sizes.stream, _by_mixer(sizes)
    mixers = dict.fromkeys((*model.recurrences, *attentions, "none"), layer)
    if sizes.remat != "full":
        # With `head` > 1 the output is saved both before and after the exchange, but the host's
        # memory holds only the one before.
        outs = np.where(exchanged & (not sizes.offload), 2, 1)
        for mixer, own in attentions.items():
            # Attention to texts and images is not exchanged.
            of_out = own.model.value_head_dim * model.itemsize
            of_head = outs * of_out + FLOAT32 + model.whole_attentions * (of_out + FLOAT32)
            mixers[mixer] = layer + sizes.tokens * (model.heads // tensor) * of_head
            if sizes.keep_gathered:
                mixers[mixer] += _unit_bytes(own, sizes.degrees.team, sizes.degrees.group)
        for mixer, x in model.recurrences.items():
            mixers[mixer] = layer + _recurrence_states(sizes, x)
    if sizes.remat in ("projections_saved", "products_saved"):
        for mixer, own in attentions.items():
            shards = _shard_bytes(own, 1 + own.model.is_gated, 1)
            shards += sizes.tokens * own.model.sizes.get("query_rank", 0) * model.itemsize
            mixers[mixer] = mixers[mixer] + shards + sizes.stream + _of_texts(sizes)
        for mixer, x in model.recurrences.items():
            mixers[mixer] = mixers[mixer] + _recurrence_inputs(sizes, x) + sizes.stream
    count = (model.mlp_matrices - 1) * (sizes.remat == "products_saved")
    size = _of_layers(sizes, mixers, count * hidden, count * shared)
    if sizes.remat in ("projections_saved", "products_saved"):
        size = size - model.unread_outputs * sizes.stream
    return Part(name=name, size=size, host=sizes.offload)


def _of_texts(sizes: StepSizes) -> Amount:
    """Bytes of the projections around attention to a text, for tokens and for the text."""
    model, tensor = sizes.model, sizes.degrees.tensor
    if not model.text_tokens:
        return 0
    keys = 2 * sizes.rows * model.text_tokens * (model.heads // tensor) * model.head_dim
    return _shard_bytes(sizes, 1, 0) + sizes.stream + keys * model.itemsize


def _of_layers(
    sizes: StepSizes, of_mixers: Mapping[str, Amount], of_mlp: Amount, of_experts: Amount
) -> Amount:
    """The sum over all layers of an amount for each mixer and each feed-forward."""
    model = sizes.model
    mixers, feeds = Counter(model.layer_mixers), Counter(model.layer_feed_forwards)
    mixing = sum(mixers[name] * size for name, size in of_mixers.items())
    return mixing + feeds["mlp"] * of_mlp + feeds["experts"] * of_experts


def _recurrence_inputs(sizes: StepSizes, recurrence: Recurrence) -> Amount:
    """Bytes of query, key, value, the gate of the output, gates and decays, as projected."""
    tensor = sizes.degrees.tensor
    keys = 2 * np.maximum(recurrence.key_heads // tensor, 1) * recurrence.key_dim
    gates = recurrence.gates * recurrence.heads + recurrence.decays
    shared = 2 * (recurrence.rank or 0)  # Of the gate of the output and of the decays.
    channels = keys + (2 * recurrence.values + gates) // tensor + shared
    return sizes.tokens * channels * sizes.model.itemsize


def _recurrence_states(sizes: StepSizes, recurrence: Recurrence) -> Amount:
    """Bytes that a recurrence keeps for its backward pass: states, maps and the output."""
    kept = (_of_recurrence(sizes, recurrence, x) for x in ("kept_bytes", "output_bytes"))
    return sum(kept)


def _of_recurrence(sizes: StepSizes, recurrence: Recurrence, name: str) -> Amount:
    """A property of `LayerSizes`, for each setting."""
    rule: Any = recurrence

    def one(rows: int, tokens: int, tensor: int) -> int:
        on_device = recurrence.on_device(int(tensor))
        layer = LayerSizes(
            rule=rule,
            batch=int(rows),
            heads=on_device.heads,
            key_heads=on_device.key_heads,
            key_dim=on_device.key_dim,
            value_dim=on_device.value_dim,
            tokens=int(tokens),
            itemsize=sizes.model.itemsize,
            slices=2,  # In zigzag order, as all models of train.py that have it.
        )
        return getattr(layer, name)

    rows = np.maximum(sizes.rows, 1)
    amounts = np.vectorize(one, otypes=[np.int64])(rows, sizes.tokens // rows, sizes.degrees.tensor)
    return amounts if amounts.ndim else int(amounts)


def _gathered_and_summed(sizes: StepSizes) -> Iterator[Part]:
    """Weights in the type in which they are used, and float32 gradients until they are summed."""
    model = sizes.model
    mlp = _mlp_elements(sizes)
    if sizes.zero in (1, 2):
        yield Part(name="weights, as used", size=model.itemsize * sizes.whole_elements)
        # A collective puts shards one after another. XLA brings them in order once, for all layers,
        # and keeps both until the backward pass of the last layer, which it takes out of the loop
        # over layers; it does not where that is itself in a loop.
        moved = model.itemsize * sizes.moved_elements if sizes.accumulation == 1 else 0
        for phase in (FORWARD, LOSS):
            yield Part(name="weights, moved", size=moved, exact=False, phase=phase)
    else:
        # The weights of the MLP are used up when attention runs: `_mlp_bytes` has them.
        used = model.itemsize * (sizes.layer_elements - mlp)
        yield Part(name="weights of layers, as used", size=used, exact=False, phase=LAYER)
    if sizes.loops > 1:
        # Each loop goes over a part of the stacked weights, which is a copy.
        copied = sizes.stacked_bytes
        if sizes.zero in (1, 2):
            copied = model.itemsize * sizes.stacked_elements
        yield Part(name="weights of layers, for each loop", size=copied, exact=False)
    # From level 2 on, XLA sums the gradients of a turn of the loop while the next turn computes, of
    # which those of the MLP are there when attention runs; not if the step of training forbids it.
    trained, waits = sizes.turn_trained, sizes.zero >= 2 and not sizes.offload_optimizer
    pending = mlp * trained // sizes.layer_elements if waits else 0
    size = FLOAT32 * (trained + pending)
    yield Part(name="gradients of layers, whole", size=size, exact=False, phase=LAYER)
    for name, (elements, phase) in sizes.vocabularies.items():
        # At lower levels, "gradients" has them too. There, that of the head takes the place of its
        # tokens' outputs if these are one tile; a loop over tiles adds it up beside them.
        if sizes.zero >= 2 or phase == LOSS:
            size = FLOAT32 * elements
            if sizes.zero < 2:
                tiled = sizes.tile < sizes.tokens // sizes.degrees.tensor
                size = np.multiply(size, tiled, dtype=np.int64)
            yield Part(name=f"gradient of {name}, whole", size=size, exact=False, phase=phase)


def _shard_bytes(sizes: StepSizes, queries: Amount, pairs: Amount) -> Amount:
    """Bytes of so many arrays like a device's query, and so many pairs of key and value."""
    model = sizes.model
    tensor = sizes.degrees.tensor
    keys = pairs * np.maximum(model.kv_heads // tensor, 1) * model.key_channels
    channels = queries * (model.heads // tensor) * model.head_dim + keys
    return sizes.tokens * channels * model.itemsize


def _unit_bytes(sizes: StepSizes, query_shares: Amount, key_shares: Amount) -> Amount:
    """Bytes of so many shares of the query, and so many of key and value."""
    query, key = _unit_elements(sizes, query_shares, key_shares)
    return sizes.model.itemsize * (query + 2 * key)


def _unit_elements(
    sizes: StepSizes, query_shares: Amount, key_shares: Amount
) -> tuple[Amount, Amount]:
    """Elements of so many shares of the query, and of so many of the key; half of a latent."""
    model = sizes.model
    degrees = sizes.degrees
    heads, parts = model.heads // degrees.tensor, degrees.head * degrees.tensor
    # Where there are fewer key heads than devices along `head`, each device has one.
    keys = np.maximum(model.kv_heads // parts, 1) * degrees.head
    query = query_shares * sizes.tokens * heads * model.head_dim
    return query, key_shares * sizes.tokens * keys * (model.key_channels // 2)


def _of_chunks(sizes: StepSizes, attention: Amount) -> Amount:
    """A pass of an attention that needs `attention` bytes for all heads, if it treats some heads at
    a time. Beside it there are the units of the next heads, and copies of the arrays that are cut
    and joined (query, key, value, output and their gradients): half of them at a time, since used
    arrays are freed."""
    if sizes.head_chunks == 1:
        return attention
    following = _unit_bytes(sizes, sizes.degrees.team, sizes.degrees.group)
    cut = _unit_bytes(sizes, 2, 1)
    return (attention + following) // sizes.head_chunks + cut


def _forward_attention_bytes(sizes: StepSizes) -> Amount:
    """The forward pass of an attention: units, arriving units, and up to four partial outputs."""
    ring = sizes.degrees.ring
    query, key = _unit_elements(sizes, sizes.degrees.team, sizes.degrees.group)
    held = np.where(ring > 1, 2, 1)
    return sizes.model.itemsize * ((1 + np.minimum(ring, 4)) * query + 2 * held * key)


def _attention_bytes(sizes: StepSizes) -> Amount:
    """The backward pass of an attention: arrays that `rings._backward` gathers, sends and sums. In
    a ring, each travelling array exists twice, and so does every float32 gradient: the sum so far
    and either the next sum or an arriving one."""
    degrees, itemsize = sizes.degrees, sizes.model.itemsize
    query, key = _unit_elements(sizes, degrees.team, degrees.group)
    gathered = 2 * itemsize * (query + key)
    results = itemsize * (query + 2 * key)
    alone = gathered + results + FLOAT32 * np.maximum(query, key)
    queries_travel = (2 * itemsize + FLOAT32) * query <= (2 * itemsize + 2 * FLOAT32) * key
    travels = np.where(queries_travel, query, 2 * key)
    stays = np.where(queries_travel, 2 * key, query)
    sums = FLOAT32 * (2 * stays + travels)
    # A full mask takes one kernel call, and two rounds give two results each, which are added up
    # when the query unit and its gradient, and the key unit, are no longer needed.
    twice = itemsize * (3 * query + 2 * key) + 2 * results
    adding = gathered + sums if sizes.model.causal else twice
    in_flight = 2 * itemsize * np.where(queries_travel, query, key)
    if itemsize == FLOAT32:
        # Kernels of 16 bits give results of their own; the loop over tiles adds to what stays.
        results, sums = itemsize * travels, FLOAT32 * (stays + travels)
        adding = gathered + in_flight + results + sums
    turning = gathered + in_flight + results + sums + FLOAT32 * travels
    return np.select([degrees.ring == 1, degrees.ring == 2], [alone, adding], turning)


def _sparse_elements(sizes: StepSizes) -> tuple[Amount, Amount, Amount]:
    """Elements of the query of a device, of its key, and of the keys that it receives if only the
    keys that a window shows are sent."""
    model = sizes.model
    tensor = sizes.degrees.tensor
    key = np.maximum(model.kv_heads // tensor, 1) * model.head_dim
    query = model.heads // tensor * model.head_dim
    return sizes.tokens * query, sizes.tokens * key, sizes.sparse_keys * key


def _sparse_forward_bytes(sizes: StepSizes) -> Amount:
    """The forward pass of an attention that sends only the keys that a window shows: received keys,
    and two partial outputs."""
    query, key, received = _sparse_elements(sizes)
    return sizes.model.itemsize * (3 * query + 2 * key + 2 * received)


def _sparse_attention_bytes(sizes: StepSizes) -> Amount:
    """The backward pass of an attention that sends only the keys that a window shows: arrays that
    `rings.sparse` holds, receives and sums. Gradients of the query, of own keys, and of received
    keys are float32."""
    query, key, received = _sparse_elements(sizes)
    held = 2 * query + 2 * key + 2 * received
    results = query + 2 * key
    return sizes.model.itemsize * (held + results) + FLOAT32 * (query + 2 * key + 2 * received)


def _mlp_elements(sizes: StepSizes) -> Amount:
    """Elements of the matrices of one MLP, or of all experts of a layer, on a device."""
    return sizes.model.largest_feed_forward // sizes.degrees.tensor // sizes.expert_shards


def _mlp_bytes(sizes: StepSizes) -> Amount:
    """The backward pass of an MLP, one tile at a time: hidden channels, and the loop's weights."""
    model = sizes.model
    tile = np.minimum(sizes.tile if sizes.remat in REPEATS_MLP else sizes.tokens, sizes.tokens)
    hidden = model.mlp_width // sizes.degrees.tensor
    activations = 2 * model.mlp_matrices * tile * hidden * model.itemsize
    weights = _mlp_elements(sizes)
    used = 0 if sizes.zero in (1, 2) else model.itemsize * weights
    summed = np.where(tile < sizes.tokens, FLOAT32 * weights, 0)
    if model.experts:
        # Not in tiles of tokens: a loop over the rows of experts adds up float32 outputs, and
        # gradients of inputs and weights. There are logits, probabilities and their gradients.
        stream = (2 * FLOAT32 + 2 * model.itemsize) * model.width
        shared = 6 * model.shared_width // sizes.degrees.tensor * model.itemsize
        activations = sizes.tokens * (stream + shared + 3 * FLOAT32 * model.experts)
        summed = FLOAT32 * weights * (1 - model.frozen.experts)
        # Inputs, outputs and their gradients, of one message.
        message = model.dispatched_bytes(sizes.tokens) / (DISPATCHES + 1)
        activations = activations + 6 * message * (sizes.expert_shards > 1)
    return activations + used + summed


def _loss_bytes(sizes: StepSizes) -> Amount:
    """Outputs and their float32 gradient, one tile at a time, and the head as it is used."""
    model = sizes.model
    tokens = sizes.tokens // sizes.degrees.tensor
    tile = np.minimum(sizes.tile, tokens)
    outputs = 2 * tile * model.outputs * FLOAT32
    head = 0 if sizes.zero in (1, 2) else model.outputs * model.width * model.itemsize
    return outputs + head + 4 * sizes.stream

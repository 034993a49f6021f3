"""What a training step takes of a device's memory, in closed form; compiles nothing.

Exact, to the byte, are the state (weights and optimizer), the batch, the gradients that the step
sums, and what is kept for the backward pass or offloaded with a `remat` other than "none". The rest
is an estimate: what a layer holds while its backward pass runs, or the loss, whichever is more, and
weights and gradients that are under way. Compiled for GPUs in bfloat16, whole steps take 0.75 to
1.3 of it; `benchmarks/memory.py` prints both.

References:
    ZeRO's arithmetic, https://arxiv.org/abs/1910.02054; activations of a transformer,
    https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from startrail_jax.mesh import Degrees
from trainer.config import TrainConfig
from trainer.dit.config import (
    DiTConfig,
    DiTTrainConfig,
)
from trainer.gpt.config import GPTConfig

GIB = 2**30

# As models/dit.py has them, which imports jax.
TIME_CHANNELS, BYTES = 256, 256

_FLOAT32 = 4
_WIDTHS = {"float32": 4, "bfloat16": 2}

LAYER, LOSS = "a layer's backward pass", "the loss"
"""Phases of a step: they do not run at the same time."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One array of the model, as `models.gpt.GPT` or `models.dit.DiT` makes it."""

    name: str
    shape: tuple[int, ...]
    """Of one layer, where there is one in each."""
    layers: int = 0
    """How many of it are stacked; 0 for one that stands alone."""
    tensor_dim: int | None = None
    """Dimension that lies over `tensor`."""
    key_heads: bool = False
    """Whether it stays whole over `tensor` where its heads are too few."""

    @property
    def size(self) -> int:
        """Elements of all layers."""
        return math.prod(self.shape) * max(self.layers, 1)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something that lies in memory."""

    name: str
    size: int
    """Bytes of one device."""
    exact: bool = True
    host: bool = False
    """Whether it lies in the host's memory."""
    phase: str | None = None
    """While what it lives; None for all of the step."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of a training step, for one device."""

    parts: tuple[Part, ...]

    @property
    def state_bytes(self) -> int:
        """Weights, optimizer and average: exact."""
        return sum(self[name] for name in ("weights", "optimizer", "average"))

    @property
    def device_bytes(self) -> int:
        """Device memory in the phase that takes most: an estimate."""
        return self.always_bytes + max(self.phases.values(), default=0)

    @property
    def always_bytes(self) -> int:
        """Device memory of what belongs to no phase."""
        return sum(part.size for part in self.parts if part.phase is None and not part.host)

    @property
    def host_bytes(self) -> int:
        """Pinned memory of the host."""
        return sum(part.size for part in self.parts if part.host)

    @property
    def phases(self) -> dict[str, int]:
        """Bytes that each phase adds."""
        sizes: dict[str, int] = {}
        for part in self.parts:
            if part.phase is not None:
                sizes[part.phase] = sizes.get(part.phase, 0) + part.size
        return sizes

    def __getitem__(self, name: str) -> int:
        """Bytes of a part; 0 if there is none of that name."""
        return sum(part.size for part in self.parts if part.name == name)

    def table(self) -> str:
        """One line for each part, in GiB, and the sum."""
        largest = max(self.phases, key=lambda phase: self.phases[phase], default=None)
        lines = []
        for part in self.parts:
            kind = "exact" if part.exact else "estimate"
            place = "host" if part.host else "device"
            counts = "" if part.phase in (None, largest) else ", at another time"
            line = f"{part.name:<36}{part.size / GIB:>9.3f} GiB  {kind}, {place}{counts}"
            lines.append(line)
        lines.append(f"{'device, at most at a time':<36}{self.device_bytes / GIB:>9.3f} GiB")
        lines.append(f"{'host':<36}{self.host_bytes / GIB:>9.3f} GiB")
        return "\n".join(lines)


def weights_of(model: GPTConfig | DiTConfig, patch_elements: int = 0) -> tuple[Weight, ...]:
    """All arrays of a model.

    Args:
        model: its sizes.
        patch_elements: of a diffusion transformer, the numbers in a patch.
    """
    return _of_dit(model, patch_elements) if isinstance(model, DiTConfig) else _of_gpt(model)


def _of_gpt(model: GPTConfig) -> tuple[Weight, ...]:
    width, heads, head_dim, layers = model.width, model.heads, model.head_dim, model.layers

    def stacked(name: str, *shape: int, tensor: int | None, key_heads: bool = False) -> Weight:
        return Weight(name=name, shape=shape, layers=layers, tensor_dim=tensor, key_heads=key_heads)

    hidden = ("gate", "up") if model.mlp == "swiglu" else ("up",)
    blocks = [
        stacked("attention_norm", width, tensor=None),
        stacked("query", width, heads, head_dim, tensor=1),
        stacked("key", width, model.kv_heads, head_dim, tensor=1, key_heads=True),
        stacked("value", width, model.kv_heads, head_dim, tensor=1, key_heads=True),
        stacked("out", heads, head_dim, width, tensor=0),
        stacked("mlp_norm", width, tensor=None),
        *(stacked(name, width, model.mlp_width, tensor=1) for name in hidden),
        stacked("down", model.mlp_width, width, tensor=0),
    ]
    ends = [
        Weight(name="embedding", shape=(model.vocab_size, width)),
        Weight(name="norm", shape=(width,)),
    ]
    if not model.tied_head:
        ends.append(Weight(name="head", shape=(width, model.vocab_size)))
    return (*blocks, *ends)


def _of_dit(model: DiTConfig, patch_elements: int) -> tuple[Weight, ...]:
    width, heads, head_dim = model.width, model.heads, model.head_dim

    def stream(name: str, *shape: int, tensor: int | None) -> Weight:
        return Weight(name=name, shape=shape, layers=model.layers, tensor_dim=tensor)

    of_stream = [
        stream("modulation", width, 6, width, tensor=None),
        *(stream(name, width, heads, head_dim, tensor=1) for name in ("query", "key", "value")),
        stream("out", heads, head_dim, width, tensor=0),
        stream("up", width, model.mlp_width, tensor=1),
        stream("down", model.mlp_width, width, tensor=0),
    ]
    ends = {
        "patches": (patch_elements, width),
        "time_in": (TIME_CHANNELS, width),
        "time_out": (width, width),
        "classes": (model.classes + 1, width),
        "modulation": (width, 2, width),
        "head": (width, patch_elements),
    }
    if model.caption_length:
        of_stream *= 2
        ends["bytes"] = (BYTES, width)
    return (*of_stream, *(Weight(name=name, shape=shape) for name, shape in ends.items()))


def num_parameters(model: GPTConfig | DiTConfig, patch_elements: int = 0) -> int:
    """Parameters of a model. Arguments as of `weights_of`."""
    return sum(weight.size for weight in weights_of(model, patch_elements))


def footprint(config: TrainConfig, degrees: Degrees) -> Footprint:
    """The memory of a training step of `Program`.

    Args:
        config: model, ZeRO, remat, offload, tile, accumulation and batch.
        degrees: of the mesh, all chosen.
    """
    step = _DiTStep if isinstance(config, DiTTrainConfig) else _Step
    return Footprint(parts=tuple(step(config, degrees).parts()))


class _Step:
    """The arithmetic; all sizes in bytes of one device."""

    def __init__(self, config: Any, degrees: Degrees) -> None:
        self.config = config
        self.degrees = degrees
        self.model = config.model
        self.width = _WIDTHS[config.model.dtype]
        self.weights = self.all_weights()
        self.blocks = [weight for weight in self.weights if weight.layers]
        axes = config.zero_axes if config.zero else ()
        self.zero = math.prod(getattr(degrees, axis) for axis in axes)
        self.rows = config.batch_size // degrees.data
        self.tokens_of_step = self.rows * self.tokens_of_row() // degrees.sequence
        self.tokens = self.tokens_of_step // config.accumulation
        """Of this device, at a time."""
        self.stream = self.tokens * config.model.width * self.width
        """One array as large as what goes from layer to layer."""

    def all_weights(self) -> tuple[Weight, ...]:
        return weights_of(self.config.model)

    def tokens_of_row(self) -> int:
        return self.config.seq_len

    def batch(self) -> int:
        arrays = 5 if self.config.data.mask_documents else 4
        return arrays * _FLOAT32 * self.tokens_of_step

    def outputs(self) -> int:
        """Numbers that the head gives for a token."""
        return self.config.model.vocab_size

    def elements(self, weight: Weight, *, split: bool) -> int:
        """Elements of a weight on this device; over ZeRO's axes only if `split`."""
        size, shape, tensor = weight.size, weight.shape, self.degrees.tensor
        if weight.tensor_dim is not None and tensor > 1:
            copied = weight.key_heads and shape[weight.tensor_dim] % tensor
            size //= 1 if copied else tensor
        dims = [d for i, d in enumerate(shape) if tensor == 1 or i != weight.tensor_dim]
        fits = any(dim % self.zero == 0 for dim in dims)
        return size // self.zero if split and fits else size

    def total(self, weights: list[Weight] | tuple[Weight, ...], *, split: bool) -> int:
        """Elements of several weights on this device."""
        return sum(self.elements(weight, split=split) for weight in weights)

    @property
    def layer(self) -> int:
        """Elements of the weights of one layer, whole over ZeRO's axes."""
        return self.total(self.blocks, split=False) // self.model.layers

    def parts(self) -> Iterator[Part]:
        config, split = self.config, self.total(self.weights, split=True)
        yield Part(name="weights", size=_FLOAT32 * split)
        # Adam and the learning rate count their steps.
        yield Part(name="optimizer", size=2 * _FLOAT32 * split + 2 * _FLOAT32)
        if config.ema_decay is not None:
            yield Part(name="average", size=_FLOAT32 * split)
        yield Part(name="batch", size=self.batch())
        summed = self.total(self.weights, split=config.zero >= 2)
        yield Part(name="gradients", size=_FLOAT32 * summed)
        if config.accumulation > 1:
            yield Part(name="gradients of one part", size=_FLOAT32 * summed, exact=False)
        yield self.saved()
        yield from self.under_way()
        inner = 6 * self.stream + max(self.attention(), self.mlp())
        yield Part(name="attention or MLP", size=inner, exact=False, phase=LAYER)
        yield Part(name="outputs and loss", size=self.loss(), exact=False, phase=LOSS)

    def under_way(self) -> Iterator[Part]:
        """Weights in the type of use, and float32 gradients that are not yet summed and split."""
        level = self.config.zero
        if level in (1, 2):
            whole = self.total(self.weights, split=False)
            yield Part(name="weights, as used", size=self.width * whole)
        # A layer's are collected while the one before computes, and summed while the next does.
        else:
            used = self.width * self.layer * (2 if level else 1)
            yield Part(name="weights of layers, as used", size=used, exact=False, phase=LAYER)
        size = _FLOAT32 * self.layer * (2 if level >= 2 else 1)
        yield Part(name="gradients of layers, whole", size=size, exact=False, phase=LAYER)
        if level >= 2:
            for name, phase in self.ends().items():
                size = _FLOAT32 * self.outputs() * self.model.width
                yield Part(name=f"gradient of {name}, whole", size=size, exact=False, phase=phase)

    def ends(self) -> dict[str, str]:
        """Large weights outside of layers, and the phase in which each gets its gradient."""
        return {"embedding": LAYER, "embedding" if self.model.tied_head else "head": LOSS}

    def saved(self) -> Part:
        """What layers keep for the backward pass: see `memory.rematerialised`."""
        name = "saved for the backward pass"
        config, model, degrees = self.config, self.model, self.degrees
        heads = model.heads // degrees.tensor
        if config.remat == "none":
            # Seen in compiled programs: float32 arrays of norms, rotation and residuals, 16-bit
            # operands of products, and six arrays of the MLP's hidden channels.
            hidden = self.tokens * model.mlp_width // degrees.tensor * self.width
            tiled = config.tile is not None and config.tile < self.tokens and config.zero < 3
            layer = (9 * _FLOAT32 // self.width + 4) * self.stream + (0 if tiled else 6 * hidden)
            return Part(name=name, size=model.layers * layer, exact=False)
        layer = self.stream
        if config.remat == "attention_saved":
            # With `head` > 1 the output is kept before and after the exchange.
            outs = 2 if degrees.head > 1 else 1
            layer += self.tokens * heads * (outs * model.head_dim * self.width + _FLOAT32)
        return Part(name=name, size=model.layers * layer, host=config.offload)

    def attention(self) -> int:
        """The backward pass of one attention: what `rings._backward` gathers, sends and sums.

        In a ring what travels is there twice, and so is every float32 gradient: the sum so far and
        the next, or the one that arrives.
        """
        model, degrees, width = self.model, self.degrees, self.width
        heads, keys = model.heads // degrees.tensor, model.kv_heads / degrees.tensor
        # Fewer key heads than devices that share them: each has one.
        keys = max(keys / degrees.head, 1.0) * degrees.head
        query = degrees.team * self.tokens * heads * model.head_dim
        key = int(degrees.group * self.tokens * keys * model.head_dim)
        gathered = 2 * width * (query + key)
        results = width * (query + 2 * key)
        if degrees.ring == 1:
            return gathered + results + _FLOAT32 * max(query, key)
        queries_travel = (2 * width + _FLOAT32) * query <= (2 * width + 2 * _FLOAT32) * key
        travels, stays = (query, 2 * key) if queries_travel else (2 * key, query)
        sums = _FLOAT32 * (2 * stays + travels)
        if degrees.ring == 2:
            return gathered + sums
        in_flight = 2 * width * (query if queries_travel else key)
        return gathered + in_flight + results + sums + _FLOAT32 * travels

    def mlp(self) -> int:
        """The backward pass of one MLP, a tile at a time: hidden channels, and loops' weights."""
        tile = min(self.config.tile or self.tokens, self.tokens)
        matrices = 3 if self.model.mlp == "swiglu" else 2
        hidden = self.model.mlp_width // self.degrees.tensor
        activations = 2 * matrices * tile * hidden * self.width
        looped = tile < self.tokens
        weights = matrices * self.model.width * hidden * _FLOAT32 if looped else 0
        return activations + weights

    def loss(self) -> int:
        """Outputs and their gradient in float32, a tile at a time, and the weights of the head."""
        tokens = self.tokens // self.degrees.tensor
        tile = min(self.config.tile or tokens, tokens)
        outputs = 2 * tile * self.outputs() * _FLOAT32
        head = self.outputs() * self.model.width * _FLOAT32
        return outputs + (head if tile < tokens else 0) + 4 * self.stream


class _DiTStep(_Step):
    """Of a diffusion transformer, what is not as of a GPT. Text is counted as tokens of image."""

    def all_weights(self) -> tuple[Weight, ...]:
        return weights_of(self.config.model, self.config.patch_elements)

    def tokens_of_row(self) -> int:
        return sum(self.padded(n) for n in (self.config.num_tokens, self.model.caption_length))

    def padded(self, tokens: int) -> int:
        return -(-tokens // self.degrees.sequence) * self.degrees.sequence

    def batch(self) -> int:
        images = self.padded(self.config.num_tokens) * self.config.patch_elements
        text = self.padded(self.model.caption_length)
        of_row = (images + text) // self.degrees.sequence
        # And its label and number.
        return _FLOAT32 * self.rows * (of_row + 2)

    def outputs(self) -> int:
        return self.config.patch_elements

    def ends(self) -> dict[str, str]:
        return {}

"""A GPT: which layers it has, and its weights. `models.gpt` computes it. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models.config import GPTConfig
from models.parts import attention, experts, gated_delta, mlp, ssd
from models.parts.recurrence import Recurrence
from models.weights import Norms, Weight, below, scale, stacked, weight


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """What follows the mixer of a layer."""

    prefix: str
    """Part of the name of the stacked layers that have it: see `stack_name`."""
    weights: Callable[[GPTConfig], dict[str, Weight]]
    """Its weights, by their paths in it."""
    sizes: Callable[[GPTConfig], dict[str, int]] = lambda config: {}
    """The sizes of their dimensions, by name, but for those of a recurrence."""


@dataclass(frozen=True, kw_only=True)
class Mixer(FeedForward):
    """What a layer mixes tokens with."""

    module: str
    """The module that computes it, `module:class`."""
    norms: Callable[[GPTConfig], Norms] = lambda config: config.norms
    """Where its layers have norms."""
    recurrence: Callable[[GPTConfig], Recurrence] | None = None
    """The states that a layer keeps; None for one that keeps keys and values."""


MIXERS = {
    "attention": Mixer(
        prefix="",
        module="models.attention:GPTAttention",
        weights=attention.weights,
        sizes=attention.sizes,
    ),
    "linear": Mixer(
        prefix="linear_",
        module="models.gated_delta:GatedDeltaNet",
        weights=gated_delta.weights,
        norms=gated_delta.norms,
        recurrence=gated_delta.recurrence,
    ),
    "ssd": Mixer(
        prefix="ssd_",
        module="models.ssd:Mamba2",
        weights=ssd.weights,
        recurrence=ssd.recurrence,
    ),
}
"""What a layer mixes tokens with, by its name in `GPTConfig.mixers`."""
FEED_FORWARDS = {
    "mlp": FeedForward(prefix="", weights=mlp.weights, sizes=mlp.sizes),
    "experts": FeedForward(prefix="expert_", weights=experts.weights, sizes=experts.sizes),
}
"""What follows it, by its name in `GPTConfig.feed_forwards`."""


def stack_name(mixer: str, feed_forward: str) -> str:
    """The part of a model that holds the stacked weights of such layers."""
    return f"{MIXERS[mixer].prefix}{FEED_FORWARDS[feed_forward].prefix}blocks"


def stack_pairs(config: GPTConfig) -> dict[str, tuple[str, str]]:
    """The stacks of a model, in the order of their first layers: mixer and feed-forward of each."""
    pairs = zip(config.layer_mixers, config.layer_feed_forwards, strict=True)
    return {stack_name(*pair): pair for pair in pairs}


def recurrences_of(config: GPTConfig) -> dict[str, Recurrence]:
    """The recurrence of each mixer of a model that has one."""
    mixers = {name: MIXERS[name].recurrence for name in dict.fromkeys(config.layer_mixers)}
    return {name: make(config) for name, make in mixers.items() if make is not None}


def gpt_weights(config: GPTConfig) -> dict[str, Weight]:
    """All weights of a GPT, by path."""
    declared = {"embedding/embedding": weight("vocab width", "embedding")}
    for stack, (mixer, feed_forward) in stack_pairs(config).items():
        layer = below("attention", MIXERS[mixer].weights(config))
        layer |= below("mlp", FEED_FORWARDS[feed_forward].weights(config))
        norms = MIXERS[mixer].norms(config)
        names = [f"{x}_norm" for x in ("attention", "mlp") if norms != "after"]
        names += [f"{x}_out_norm" for x in ("attention", "mlp") if norms != "before"]
        declared |= stacked(stack, layer | {f"{name}/scale": scale("width") for name in names})
    declared["norm/scale"] = scale("width")
    if not config.tied_head:
        declared["head/kernel"] = weight("width | vocab")
    return declared


def gpt_dims(config: GPTConfig) -> dict[str, int]:
    """The sizes of the dimensions of all weights, but for the number of layers of each stack, and
    for recurrences, which have their own."""
    sizes = {"width": config.width, "vocab": config.vocab_size}
    for mixer, feed_forward in stack_pairs(config).values():
        sizes |= MIXERS[mixer].sizes(config) | FEED_FORWARDS[feed_forward].sizes(config)
    return sizes

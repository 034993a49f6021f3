"""A GPT: its layers and their weights. `models.gpt` computes it. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models.config import GPTConfig
from models.parts import attention, experts, gated_delta, kda, latent, mlp, ssd
from models.parts.recurrence import Recurrence
from models.weights import Norms, Weight, below, scale, stacked, weight


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """The feed-forward of a layer, which follows its mixer."""

    prefix: str
    """Prefix in the name of a stack of such layers: see `stack_name`."""
    weights: Callable[[GPTConfig], dict[str, Weight]]
    """Weights by path in the feed-forward or mixer."""
    sizes: Callable[[GPTConfig], dict[str, int]] = lambda config: {}
    """Sizes of the dimensions of the weights, by name; a `Recurrence` has its own."""


@dataclass(frozen=True, kw_only=True)
class Mixer(FeedForward):
    """The mixer of a layer, which combines tokens."""

    module: str | None
    """The module that computes it, `module:class`; None for a layer without one."""
    norms: Callable[[GPTConfig], Norms] = lambda config: config.norms
    """Place of the norms in its layers."""
    recurrence: Callable[[GPTConfig], Recurrence] | None = None
    """The states that a layer keeps; None for one that keeps keys and values."""


MIXERS = {
    "attention": Mixer(
        prefix="",
        module="models.attention:GPTAttention",
        weights=attention.weights,
        sizes=attention.sizes,
    ),
    "global_attention": Mixer(
        prefix="global_",
        module="models.attention:GlobalAttention",
        weights=attention.global_weights,
        sizes=attention.global_sizes,
    ),
    "latent": Mixer(
        prefix="latent_",
        module="models.latent:LatentAttention",
        weights=latent.weights,
        sizes=latent.sizes,
    ),
    "linear": Mixer(
        prefix="linear_",
        module="models.gated_delta:GatedDeltaNet",
        weights=gated_delta.weights,
        norms=gated_delta.norms,
        recurrence=gated_delta.recurrence,
    ),
    "kda": Mixer(
        prefix="kda_",
        module="models.kda:KimiDeltaAttention",
        weights=kda.weights,
        recurrence=kda.recurrence,
    ),
    "ssd": Mixer(
        prefix="ssd_",
        module="models.ssd:Mamba2",
        weights=ssd.weights,
        recurrence=ssd.recurrence,
    ),
    "none": Mixer(prefix="feed_", module=None, weights=lambda config: {}),
}
"""Mixers by their names in `GPTConfig.mixers`."""
FEED_FORWARDS = {
    "none": FeedForward(prefix="mix_", weights=lambda config: {}),
    "mlp": FeedForward(prefix="", weights=mlp.weights, sizes=mlp.sizes),
    "experts": FeedForward(prefix="expert_", weights=experts.weights, sizes=experts.sizes),
}
"""Feed-forwards by their names in `GPTConfig.feed_forwards`."""


def stack_name(mixer: str, feed_forward: str) -> str:
    """The part of a model with the stacked weights of layers with this mixer and this
    feed-forward."""
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
        norms, parts = MIXERS[mixer].norms(config), {"attention": mixer, "mlp": feed_forward}
        added = [name for name, part in parts.items() if part != "none"]
        names = [f"{x}_norm" for x in added if norms != "after"]
        names += [f"{x}_out_norm" for x in added if norms != "before"]
        layer |= {f"{name}/scale": scale("width") for name in names}
        layer |= {"layer_scalar": scale("scalar")} if config.layer_scalar else {}
        declared |= stacked(stack, layer)
    declared["norm/scale"] = scale("width")
    if config.head != "embedding":
        outputs = "scores" if config.scores else "vocab"
        declared[f"{config.head}/kernel"] = weight(f"width | {outputs}")
    return declared


def gpt_dims(config: GPTConfig) -> dict[str, int]:
    """Sizes of the dimensions of all weights, without the number of layers of each stack. A
    `Recurrence` has its own sizes."""
    sizes = {"width": config.width, "vocab": config.vocab_size}
    sizes |= {"scores": 1} if config.scores else {}
    sizes |= {"scalar": 1} if config.layer_scalar else {}
    for mixer, feed_forward in stack_pairs(config).values():
        sizes |= MIXERS[mixer].sizes(config) | FEED_FORWARDS[feed_forward].sizes(config)
    return sizes

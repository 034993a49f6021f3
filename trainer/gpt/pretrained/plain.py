"""The simplest form of the config of a model, to compare models. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from models.config import GPTConfig, RopeConfig
from models.parts.attention import ATTENTIONS, GlobalConfig, keys_of
from models.patterns import shortest


def plain(model: GPTConfig) -> GPTConfig:
    """The simplest config of a model: two models are equal if their simplest configs are."""
    if model.scale_dim == model.head_dim and "latent" not in model.layer_mixers:
        model = replace(model, scale_dim=None)
    model = _plain_latent(_plain_global(model))
    stretches = model.rope.stretches if stretches_some(model) else "all"
    channels = None if model.rope.channels == model.head_dim else model.rope.channels
    rope = replace(model.rope, stretches=stretches, channels=channels)
    feed_forwards = pattern(model.layer_feed_forwards)
    model = replace(model, mixers=pattern(model.layer_mixers), feed_forwards=feed_forwards)
    if "experts" in feed_forwards:
        width = model.experts.of_model(model).width
        # Without dense layers, there is no MLP.
        mlp_width = model.mlp_width if "mlp" in feed_forwards else width
        biased = model.experts.has_choice_bias
        experts = replace(model.experts, width=width, choice_bias=biased)
        model = replace(model, experts=experts, mlp_width=mlp_width)
    if "linear" in model.mixers:
        linear = model.linear.of_model(model)
        norm_eps = None if linear.norm_eps == model.norm_eps else linear.norm_eps
        norms = None if linear.norms == model.norms else linear.norms
        model = replace(model, linear=replace(linear, norm_eps=norm_eps, norms=norms))
    if "kda" in model.mixers:
        kda = model.kda.of_model(model)
        norm_eps = None if kda.norm_eps == model.norm_eps else kda.norm_eps
        rank = None if kda.rank == kda.head_dim else kda.rank
        model = replace(model, kda=replace(kda, norm_eps=norm_eps, rank=rank))
    if "ssd" in model.mixers:
        ssd = model.ssd.of_model(model)
        norm_eps = None if ssd.norm_eps == model.norm_eps else ssd.norm_eps
        model = replace(model, ssd=replace(ssd, norm_eps=norm_eps))
    rope = replace(rope, bases=pattern(_like_attention(model, model.layer_bases)))
    return replace(model, rope=rope, windows=pattern(_like_attention(model, model.layer_windows)))


def pattern(layers: Sequence[Any]) -> tuple[Any, ...]:
    """The shortest list that gives the entries of all layers when it repeats; `none` stands for
    None."""
    return tuple("none" if x is None else x for x in shortest(layers))


def few_digits(x: float) -> float:
    """A number with 12 digits, so that one which an export has computed is read again as it was.
    Float32 has 7."""
    return float(f"{x:.12g}")


def without_rope(model: GPTConfig) -> tuple[GPTConfig, tuple[bool, ...]]:
    """The model without the options that config.json has in another form, or not at all."""
    same = replace(without_losses(model), rope=RopeConfig(), dtype="float32")
    return same, tuple(base is None for base in model.layer_bases)


def without_losses(model: GPTConfig) -> GPTConfig:
    """The model in its simplest form, without the options that change no logits."""
    model = plain(model)
    if "experts" not in model.feed_forwards:
        return model
    losses: dict[str, Any] = {
        **dict.fromkeys(("balance_loss", "balance_rate", "z_loss"), 0.0),
        "balance_over": "layer",
    }
    return replace(model, experts=replace(model.experts, **losses))


def stretches_some(model: GPTConfig) -> bool:
    """True if only the layers without a window have stretched positions, and others have a
    window."""
    rope = model.rope
    mixed = set(model.layer_windows) != {None}
    return rope.stretches == "global" and rope.scaling != "none" and mixed


def _plain_global(model: GPTConfig) -> GPTConfig:
    """The model with layers of global attention only if they differ from those of attention."""
    if "global_attention" not in model.layer_mixers:
        return model
    own = model.global_attention.of_model(model)
    half = (model.rope.channels or own.head_dim) // 2
    own = replace(
        own,
        head_dim=None if own.head_dim == model.head_dim else own.head_dim,
        kv_heads=None if own.kv_heads == model.kv_heads else own.kv_heads,
        rotary_pairs=None if own.rotary_pairs == half else own.rotary_pairs,
    )
    mixers: Any = model.layer_mixers
    if own == GlobalConfig():
        mixers = ("attention" if x == "global_attention" else x for x in mixers)
    return replace(model, mixers=tuple(mixers), global_attention=own)


def _plain_latent(model: GPTConfig) -> GPTConfig:
    """The model with the sizes of latent attention, and with no others if it has that alone."""
    if "latent" not in model.layer_mixers:
        return model
    own = model.latent.of_model(model)
    model = replace(model, latent=own)
    if model.scale_dim == own.key_dim + own.rotary_dim:
        model = replace(model, scale_dim=None)
    if len(keys_of(model)) > 1:
        return model
    rope = replace(model.rope, channels=None)
    return replace(model, kv_heads=model.heads, head_dim=own.rotary_dim or 2, rope=rope)


def _like_attention(model: GPTConfig, layers: Sequence[Any]) -> tuple[Any, ...]:
    """An entry for each layer: layers without attention get the entry of the first layer with
    attention."""
    pairs = tuple(zip(model.layer_mixers, layers, strict=True))
    first = next(entry for mixer, entry in pairs if mixer in ATTENTIONS)
    return tuple(entry if mixer in ATTENTIONS else first for mixer, entry in pairs)

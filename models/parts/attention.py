"""Attention of a GPT: its weights and sizes. `models.attention` computes it.

While it decodes, a layer keeps the keys and values of all tokens, [seq, kv_heads, head_dim] each.
Between the passes it keeps its output and its log-sum-exp, and more if `--remat` says so. Its
messages depend on the mesh: `startrail_jax.communication` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.checks import check_minimum, check_used
from models.weights import Model, Weight, bias, projection, scale
from startrail_jax.errors import InputError

ATTENTIONS = ("attention", "global_attention", "latent")
"""The mixers that keep keys and values, or latents."""


@dataclass(frozen=True, kw_only=True)
class GlobalConfig:
    """Layers of attention with sizes of their own, and without a window, as in Gemma 4."""

    head_dim: int | None = None
    """Number of channels of a head; an even number. The default is `model.head_dim`."""
    kv_heads: int | None = None
    """Number of key and value heads, a divisor of `model.heads`. The default is
    `model.kv_heads`."""
    values_from_keys: bool = False
    """True if the projection to keys also makes the values: the keys before their norm and their
    rotary positions."""
    rotary_pairs: int | None = None
    """Number of channel pairs of each head that turn: the first ones, each by the angle that it has
    where all pairs turn. The default is all."""

    def __post_init__(self) -> None:
        for name in ("head_dim", "kv_heads", "rotary_pairs"):
            check_minimum(f"model.global_attention.{name}", getattr(self, name), 1)

    def check(self, model: Model) -> None:
        """Raises unless the options fit a model."""
        check_used(
            "global_attention",
            self,
            used="global_attention" in model.layer_mixers,
            needs="layers of global attention",
            got=f"mixers={model.mixers}",
            flags="--model.mixers attention attention global_attention",
        )
        sizes = self.of_model(model)
        if sizes.head_dim % 2:
            raise InputError(
                "model.global_attention.head_dim must be even for rotary positions; got "
                f"head_dim={sizes.head_dim}. Use {sizes.head_dim + 1}."
            )
        if model.heads % sizes.kv_heads:
            raise InputError(
                "model.global_attention.kv_heads must divide model.heads; got "
                f"kv_heads={sizes.kv_heads}, heads={model.heads}. Use kv_heads={model.heads} or "
                "kv_heads=1."
            )
        channels = model.rope.channels
        if channels is not None and channels > sizes.head_dim:
            raise InputError(
                "model.rope.channels must be at most model.global_attention.head_dim; got "
                f"channels={channels}, head_dim={sizes.head_dim}. Leave it out for all."
            )
        most = (channels or sizes.head_dim) // 2
        if sizes.rotary_pairs is not None and sizes.rotary_pairs > most:
            raise InputError(
                "model.global_attention.rotary_pairs must be at most half of the channels that "
                f"turn; got rotary_pairs={sizes.rotary_pairs} for {2 * most} channels. Leave it "
                "out for all."
            )

    def of_model(self, model: Model) -> Any:
        """The options with all sizes filled in; the model gives the defaults."""
        return replace(
            self,
            head_dim=self.head_dim or model.head_dim,
            kv_heads=self.kv_heads or model.kv_heads,
        )


@dataclass(frozen=True)
class Keys:
    """Sizes of the keys, and of the values, of a token in a layer."""

    heads: int
    """Key heads; 1 for latents."""
    head_dim: int
    value_dim: int | None = None
    """Channels of a value head; None for `head_dim`."""
    latent_dim: int | None = None
    """Channels of a latent with the rotated part of its key; None for keys and values."""


def keys_of(config: Model) -> dict[str, Keys]:
    """The keys in the layers of each mixer that a model has and that keeps keys."""
    own, latent = (x.of_model(config) for x in (config.global_attention, config.latent))
    sizes = (
        Keys(config.kv_heads, config.head_dim),
        Keys(own.kv_heads, own.head_dim),
        Keys(
            heads=1,
            head_dim=latent.key_dim + latent.rotary_dim,
            value_dim=latent.value_dim,
            latent_dim=latent.rank + latent.rotary_dim,
        ),
    )
    found = dict(zip(ATTENTIONS, sizes, strict=True))
    return {mixer: keys for mixer, keys in found.items() if mixer in config.layer_mixers}


def weights(config: Model) -> dict[str, Weight]:
    """The weights, in the order in which they are drawn."""
    return _weights(config, "")


def global_weights(config: Model) -> dict[str, Weight]:
    """The weights of a layer of global attention."""
    declared = _weights(config, "global_")
    if config.global_attention.values_from_keys:
        declared = {path: x for path, x in declared.items() if not path.startswith("value")}
    return declared


def _weights(config: Model, prefix: str) -> dict[str, Weight]:
    """The weights, by dimensions with a prefix in their names."""
    head_dim, query_dim, kv_heads = (f"{prefix}{x}" for x in ("head_dim", "query_dim", "kv_heads"))
    declared = {
        "query/kernel": projection(f"width | heads {query_dim}"),
        "key/kernel": projection(f"width | {kv_heads} {head_dim}"),
        "value/kernel": projection(f"width | {kv_heads} {head_dim}"),
        "out/kernel": projection(f"heads {head_dim} | width", "out"),
    }
    if config.qkv_bias:
        declared["query_bias"] = bias(f"heads {query_dim}")
        declared["key_bias"] = declared["value_bias"] = bias(f"{kv_heads} {head_dim}")
    if config.qk_norm and config.qk_norm_over == "head":
        declared["query_norm/scale"] = declared["key_norm/scale"] = scale(head_dim)
    elif config.qk_norm:
        declared["query_norm/heads_scale"] = scale(f"heads {head_dim}", precise=True)
        declared["key_norm/heads_scale"] = scale(f"{kv_heads} {head_dim}", precise=True)
    if config.sinks:
        declared["sinks"] = bias("heads")
    if config.out_bias:
        declared["out_bias"] = bias("width")
    return declared


def sizes(config: Model) -> dict[str, int]:
    """Sizes by name of dimension. A gate has as many channels as the query, and lies beside it."""
    return {
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "query_dim": config.head_dim * (2 if config.attention_gate else 1),
    }


def global_sizes(config: Model) -> dict[str, int]:
    """Sizes by name of dimension of a layer of global attention."""
    own = config.global_attention.of_model(config)
    return {
        "heads": config.heads,
        "global_kv_heads": own.kv_heads,
        "global_head_dim": own.head_dim,
        "global_query_dim": own.head_dim * (2 if config.attention_gate else 1),
    }


def moved(sizes: Mapping[str, int]) -> int:
    """Elements of a token, over all heads, that rotary positions and a gate, which run between the
    matrix products, read and write in a forward pass."""
    queries, keys = (sizes[name] * sizes["head_dim"] for name in ("heads", "kv_heads"))
    is_gated = sizes["query_dim"] > sizes["head_dim"]
    return 2 * (queries + keys) + 3 * queries * is_gated

"""Multi-head latent attention: its options, weights and sizes. `models.latent` computes it.

While it decodes, a layer keeps the latents of all tokens with the rotated parts of their keys,
[seq, rank + rotary_dim]. Devices send each other these in place of keys and values: see
`startrail_jax.Attention.latent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.checks import check_minimum, check_range, check_used
from models.weights import Model, Weight, projection, scale, shared_projection
from startrail_jax.errors import InputError

EXPANDING = ("attention/key/kernel", "attention/value/kernel")
"""The weights of a layer that make keys and values of latents, of all tokens that a device visits
rather than of its own."""
UNUSED = ("qkv_bias", "out_bias", "qk_norm", "sinks", "value_norm", "attention_gate")
"""Options of attention that latent attention does not have."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Layers of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434)."""

    rank: int = 512
    """Number of channels of the latent of a token, of which keys and values are made."""
    query_rank: int | None = None
    """Number of channels of the latent of which queries are made. The default is none: they are
    projected from the input of the layer."""
    key_dim: int | None = None
    """Number of channels of a query and a key head without rotary positions. The default is
    `model.head_dim`."""
    rotary_dim: int = 64
    """Number of further channels of a head, in which all heads share one key. Rotary positions turn
    them, if a layer has any. An even number; 0 for none."""
    value_dim: int | None = None
    """Number of channels of a value head. The default is `key_dim`."""
    norm_eps: float | None = None
    """Number that the norms of latents add to the mean square. The default is `model.norm_eps`."""

    def __post_init__(self) -> None:
        for name in ("rank", "query_rank", "key_dim", "value_dim"):
            check_minimum(f"model.latent.{name}", getattr(self, name), 1)
        check_minimum("model.latent.rotary_dim", self.rotary_dim, 0)
        if self.rotary_dim % 2:
            raise InputError(
                "model.latent.rotary_dim must be even for rotary positions; got "
                f"rotary_dim={self.rotary_dim}. Use {self.rotary_dim + 1}, or 0 for none."
            )
        check_range("model.latent.norm_eps", self.norm_eps, "above 0 and below 1")

    def check(self, model: Model) -> None:
        """Raises unless the options fit a model."""
        used = "latent" in model.layer_mixers
        check_used(
            "latent",
            self,
            used=used,
            needs="layers of latent attention",
            got=f"mixers={model.mixers}",
            flags="--model.mixers latent",
        )
        given = [name for name in UNUSED if used and getattr(model, name)]
        if given:
            raise InputError(
                f"Latent attention has none of {', '.join(UNUSED)}; got "
                f"{', '.join(f'{name}=True' for name in given)} with mixers={model.mixers}. Leave "
                "them out."
            )

    def of_model(self, model: Model) -> Any:
        """The options with all sizes filled in; the model gives the defaults."""
        key_dim = self.key_dim or model.head_dim
        return replace(
            self,
            key_dim=key_dim,
            value_dim=self.value_dim or key_dim,
            norm_eps=self.norm_eps or model.norm_eps,
        )


def weights(config: Model) -> dict[str, Weight]:
    """The weights, in the order in which they are drawn."""
    own = config.latent
    declared = {"query/kernel": projection("width | heads latent_query_dim")}
    if own.query_rank is not None:
        declared = {
            "query_down/kernel": shared_projection("width | query_rank"),
            "query_norm/scale": scale("query_rank"),
            "query/kernel": projection("query_rank | heads latent_query_dim"),
        }
    declared["latent/kernel"] = shared_projection("width | latent_rank")
    if own.rotary_dim:
        declared["rotated/kernel"] = shared_projection("width | rotary_dim")
    return declared | {
        "latent_norm/scale": scale("latent_rank"),
        "key/kernel": projection("latent_rank | heads latent_key_dim"),
        "value/kernel": projection("latent_rank | heads latent_value_dim"),
        "out/kernel": projection("heads latent_value_dim | width", "out"),
    }


def sizes(config: Model) -> dict[str, int]:
    """Sizes by name of dimension."""
    own = config.latent.of_model(config)
    found = {
        "heads": config.heads,
        "latent_rank": own.rank,
        "rotary_dim": own.rotary_dim,
        "latent_key_dim": own.key_dim,
        "latent_query_dim": own.key_dim + own.rotary_dim,
        "latent_value_dim": own.value_dim,
    }
    return found if own.query_rank is None else found | {"query_rank": own.query_rank}


def moved(sizes: Mapping[str, int]) -> int:
    """Elements of a token that norms and rotary positions, which run between the matrix products,
    read and write in a forward pass."""
    queries = 2 * sizes["heads"] * sizes["rotary_dim"] * (sizes["rotary_dim"] > 0)
    latents = 2 * (sizes["latent_rank"] + sizes["rotary_dim"] + sizes.get("query_rank", 0))
    # The rotated channels of a query lie beside the others: all are written once more.
    return queries + latents + sizes["heads"] * sizes["latent_query_dim"]

"""Gated DeltaNet: its options, weights and recurrence. `models.gated_delta` computes it.

See `models.parts.recurrence` for the memory and the messages of a recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from models.checks import check_minimum, check_range, check_used
from models.parts.recurrence import CONVOLUTIONS, PROJECTIONS, Recurrence
from models.weights import Model, Norms, Weight, projection, scale, weight
from startrail_jax.errors import InputError


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """Layers of linear attention: Gated DeltaNet (https://arxiv.org/abs/2412.06464)."""

    heads: int | None = None
    """Number of heads of values, each with a state of its own. The default is `model.heads`."""
    key_heads: int | None = None
    """Number of heads of queries and keys, a divisor of `heads`. The default is `heads`."""
    key_dim: int | None = None
    """Number of channels of a head of queries and keys. The default is `model.head_dim`."""
    value_dim: int | None = None
    """Number of channels of a head of values. The default is `key_dim`."""
    conv: int = 4
    """Number of tokens that the short convolution sees, the token itself included."""
    largest_beta: float = 1.0
    """Largest share of an old value that a token replaces; 2 allows states that change their sign
    (https://arxiv.org/abs/2411.12537)."""
    norm_eps: float | None = None
    """Number that the norm of the outputs adds to the mean square. The default is
    `model.norm_eps`."""
    norms: Norms | None = None
    """Place of the norms in such layers. The default is `model.norms`."""

    def __post_init__(self) -> None:
        for name in ("heads", "key_heads", "key_dim", "value_dim", "conv"):
            check_minimum(f"model.linear.{name}", getattr(self, name), 1)
        if not 0 < self.largest_beta <= 2:
            raise InputError(
                "model.linear.largest_beta must be above 0 and at most 2, above which states "
                f"grow; got largest_beta={self.largest_beta}. Use 1 or 2."
            )
        check_range("model.linear.norm_eps", self.norm_eps, "above 0 and below 1")

    def check(self, model: Model) -> None:
        """Raises unless the options fit a model."""
        check_used(
            "linear",
            self,
            used="linear" in model.layer_mixers,
            needs="layers of linear attention",
            got=f"mixers={model.mixers}",
            flags="--model.mixers linear linear linear attention",
        )
        sizes = self.of_model(model)
        if sizes.heads % sizes.key_heads:
            raise InputError(
                "model.linear.key_heads must divide model.linear.heads; got "
                f"key_heads={sizes.key_heads}, heads={sizes.heads}. Use key_heads={sizes.heads} or "
                "key_heads=1."
            )

    def of_model(self, model: Model) -> Any:
        """The options with all sizes filled in; the model gives the defaults."""
        heads, key_dim = self.heads or model.heads, self.key_dim or model.head_dim
        return replace(
            self,
            heads=heads,
            key_heads=self.key_heads or heads,
            key_dim=key_dim,
            value_dim=self.value_dim or key_dim,
            norm_eps=self.norm_eps or model.norm_eps,
        )


def weights(config: Model) -> dict[str, Weight]:
    """The weights, in the order in which they are drawn."""
    del config  # All of its layers have them.
    return {
        **PROJECTIONS,
        "out_gate/kernel": projection("width | value_heads value_dim"),
        "decay/kernel": projection("width | value_heads"),
        "beta/kernel": projection("width | value_heads"),
        "out/kernel": projection("value_heads value_dim | width", "out"),
        **CONVOLUTIONS,
        "decay_rate": weight("value_heads", "decay_rate", decays=False),
        "decay_bias": weight("value_heads", "step_bias", decays=False),
        "out_norm/scale": scale("value_dim"),
    }


def options(config: Model) -> Any:
    """Its options with all sizes filled in."""
    return config.linear.of_model(config)


def recurrence(config: Model) -> Recurrence:
    """The delta rule: it reads a state, corrects it and reads it again."""
    sizes = options(config)
    names = ("heads", "key_heads", "key_dim", "value_dim", "conv")
    heads = {name: getattr(sizes, name) for name in names}
    return Recurrence(rule="gated_delta", delta=True, gates=2, **heads)


def norms(config: Model) -> Norms:
    """Place of the norms in its layers."""
    return config.linear.norms or config.norms

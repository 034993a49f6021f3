"""Mamba-2: its options, weights and recurrence. `models.ssd` computes it.

See `models.parts.recurrence` for the memory and the messages of a recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from models.checks import check_minimum, check_range, check_used
from models.parts.recurrence import CONVOLUTIONS, PROJECTIONS, Recurrence
from models.weights import Model, Weight, bias, projection, scale, weight
from startrail_jax.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SSDConfig:
    """Layers of state-space duality: Mamba-2 (https://arxiv.org/abs/2405.21060)."""

    heads: int | None = None
    """Number of heads, each with a state of its own. The default is `model.heads`."""
    head_dim: int | None = None
    """Number of channels of a head. The default is `model.head_dim`."""
    groups: int = 1
    """Number of groups of heads, a divisor of `heads`: the heads of a group share B and C, by which
    they write and read states, and are normalised together."""
    state_dim: int = 128
    """Number of channels of B and C, and rows of a state."""
    conv: int = 4
    """Number of tokens that the short convolution sees, the token itself included."""
    conv_bias: bool = True
    """True if the convolution has a bias."""
    least_step: float = 0.0
    """Least step of a token, after the softplus: 0.001 in Nemotron-H."""
    norm_eps: float | None = None
    """Number that the norm of the outputs adds to the mean square. The default is
    `model.norm_eps`."""

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "groups", "state_dim", "conv"):
            check_minimum(f"model.ssd.{name}", getattr(self, name), 1)
        check_range("model.ssd.least_step", self.least_step, "at least 0 and finite")
        check_range("model.ssd.norm_eps", self.norm_eps, "above 0 and below 1")

    def check(self, model: Model) -> None:
        """Raises unless the options fit a model."""
        check_used(
            "ssd",
            self,
            used="ssd" in model.layer_mixers,
            needs="layers of Mamba-2",
            got=f"mixers={model.mixers}",
            flags="--model.mixers ssd ssd attention",
        )
        heads = self.of_model(model).heads
        if heads % self.groups:
            raise InputError(
                "model.ssd.groups must divide model.ssd.heads; got "
                f"groups={self.groups}, heads={heads}. Use groups={heads} or groups=1."
            )

    def of_model(self, model: Model) -> Any:
        """The options with all sizes filled in; the model gives the defaults."""
        return replace(
            self,
            heads=self.heads or model.heads,
            head_dim=self.head_dim or model.head_dim,
            norm_eps=self.norm_eps or model.norm_eps,
        )


def weights(config: Model) -> dict[str, Weight]:
    """The weights, in the order in which they are drawn. In the words of the paper, query, key and
    value are C, B and x, the rate of decay is the logarithm of -A, and the skip is D."""
    declared = {
        **PROJECTIONS,
        "out_gate/kernel": projection("width | value_heads value_dim"),
        "step/kernel": projection("width | value_heads"),
        "out/kernel": projection("value_heads value_dim | width", "out"),
        **CONVOLUTIONS,
        "decay_rate": weight("value_heads", "decay_rate", decays=False),
        "step_bias": weight("value_heads", "step_bias", decays=False),
        "skip": weight("value_heads", "ones", decays=False),
        "out_scale": scale("value_heads value_dim", precise=True),
    }
    if config.ssd.conv_bias:
        for name in ("query", "key", "value"):
            heads = "value_heads value_dim" if name == "value" else "key_heads key_dim"
            declared[f"{name}_conv_bias"] = bias(heads, precise=True)
    return declared


def options(config: Model) -> Any:
    """Its options with all sizes filled in."""
    return config.ssd.of_model(config)


def recurrence(config: Model) -> Recurrence:
    """A recurrence whose states decay, and to which tokens are added."""
    sizes = options(config)
    return Recurrence(
        rule="ssd",
        delta=False,
        gates=1,
        heads=sizes.heads,
        key_heads=sizes.groups,
        key_dim=sizes.state_dim,
        value_dim=sizes.head_dim,
        conv=sizes.conv,
    )

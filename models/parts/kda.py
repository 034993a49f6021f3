"""Kimi Delta Attention: its options, weights and recurrence. `models.kda` computes it.

See `models.parts.recurrence` for the memory and the messages of a recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from models.checks import check_minimum, check_range, check_used
from models.parts.recurrence import CONVOLUTIONS, PROJECTIONS, Recurrence
from models.weights import Model, Weight, projection, scale, shared_projection, weight


@dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """Layers of Kimi Delta Attention (Kimi Linear, https://arxiv.org/abs/2510.26692)."""

    heads: int | None = None
    """Number of heads, each with a state of its own. The default is `model.heads`."""
    head_dim: int | None = None
    """Number of channels of a head. The default is `model.head_dim`."""
    rank: int | None = None
    """Number of channels between the two matrices that make the decay of each channel, and between
    those that make the gate of the output. The default is `head_dim`."""
    conv: int = 4
    """Number of tokens that the short convolution sees, the token itself included."""
    norm_eps: float | None = None
    """Number that the norm of the outputs adds to the mean square. The default is
    `model.norm_eps`."""

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "rank", "conv"):
            check_minimum(f"model.kda.{name}", getattr(self, name), 1)
        check_range("model.kda.norm_eps", self.norm_eps, "above 0 and below 1")

    def check(self, model: Model) -> None:
        """Raises unless the options fit a model."""
        check_used(
            "kda",
            self,
            used="kda" in model.layer_mixers,
            needs="layers of Kimi Delta Attention",
            got=f"mixers={model.mixers}",
            flags="--model.mixers kda kda kda attention",
        )

    def of_model(self, model: Model) -> Any:
        """The options with all sizes filled in; the model gives the defaults."""
        head_dim = self.head_dim or model.head_dim
        return replace(
            self,
            heads=self.heads or model.heads,
            head_dim=head_dim,
            rank=self.rank or head_dim,
            norm_eps=self.norm_eps or model.norm_eps,
        )


def weights(config: Model) -> dict[str, Weight]:
    """The weights, in the order in which they are drawn."""
    del config  # All of its layers have them.
    return {
        **PROJECTIONS,
        "out_gate_down/kernel": shared_projection("width | gate_rank"),
        "out_gate/kernel": projection("gate_rank | value_heads value_dim"),
        "decay_down/kernel": shared_projection("width | gate_rank"),
        "decay/kernel": projection("gate_rank | value_heads key_dim"),
        "beta/kernel": projection("width | value_heads"),
        "out/kernel": projection("value_heads value_dim | width", "out"),
        **CONVOLUTIONS,
        "decay_rate": weight("value_heads", "decay_rate", decays=False),
        "decay_bias": weight("value_heads key_dim", "step_bias", precise=True, decays=False),
        "out_norm/scale": scale("value_dim"),
    }


def options(config: Model) -> Any:
    """Its options with all sizes filled in."""
    return config.kda.of_model(config)


def recurrence(config: Model) -> Recurrence:
    """The delta rule with a decay for each channel of a key."""
    own = options(config)
    return Recurrence(
        rule="kda",
        delta=True,
        by_channel=True,
        gates=1,
        heads=own.heads,
        key_heads=own.heads,
        key_dim=own.head_dim,
        value_dim=own.head_dim,
        rank=own.rank,
        conv=own.conv,
    )

"""Settings of low-rank adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from startrail_jax.errors import InputError
from trainer.config import check_minimum


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, which are trained in place of the weights of the model (LoRA,
    https://arxiv.org/abs/2106.09685)."""

    rank: int | None = None
    """Rank of the adapters, such as 16. By default there are none, and all weights are trained."""
    alpha: float | None = None
    """The adapters add alpha / rank times their product. The default is twice the rank."""
    targets: tuple[Literal["query", "key", "value", "out", "gate", "up", "down"], ...] = (
        "query",
        "value",
    )
    """Projections that have adapters, in every layer: four of attention and three of the MLP."""
    base_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type in which the frozen matrices and biases of the model are kept. The default is that
    of the activations, model.dtype, which changes no result. Norms stay float32."""

    def __post_init__(self) -> None:
        if self.rank is None:
            given = [x for x in ("alpha", "base_dtype") if getattr(self, x) is not None]
            given += ["targets"] * (self.targets != ("query", "value"))
            if given:
                raise InputError(
                    f"lora.{given[0]} needs adapters; got {given[0]}={getattr(self, given[0])} "
                    "without a rank. Add --lora.rank 16, or leave it out."
                )
            return
        check_minimum("lora.rank", self.rank, 1)
        if not 0 < self.scale < math.inf:
            raise InputError(
                f"lora.alpha must be above 0 and finite; got alpha={self.alpha}. Leave it out for "
                "the default."
            )
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise InputError(
                "lora.targets must name projections, each once; got "
                f"targets={' '.join(self.targets) or 'none'}. Use --lora.targets query value."
            )

    @property
    def scale(self) -> float:
        """Factor of the product of the adapters."""
        assert self.rank is not None, "there are adapters"
        return 2.0 if self.alpha is None else self.alpha / self.rank

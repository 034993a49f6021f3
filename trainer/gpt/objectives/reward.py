"""A reward model from preferences. Imports no jax: `--help` must be fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from models.checks import check_range
from trainer.gpt.objectives.loss import PairLoss, measured, sides_of


@dataclass(frozen=True, kw_only=True)
class Reward(PairLoss):
    """Bradley and Terry's loss of pairs of answers, which trains a model of scores.

    The reward of an answer is the score of its last token, which the model reads. Of a chosen
    answer with reward c and a rejected one with r, the loss is

        -log sigmoid(c - r) + centre (c + r)^2

    The loss of a batch is the mean over its pairs.

    References:
        InstructGPT, https://arxiv.org/abs/2203.02155 (equation 1); centred rewards,
        https://arxiv.org/abs/2312.09244 (section 2).
    """

    counts: ClassVar[Literal["targets", "ends"]] = "ends"

    centre: float = 0.0
    """Weight of the squared sum of both rewards, which keeps their mean near 0, such as 0.01."""

    def __post_init__(self) -> None:
        check_range("reward.centre", self.centre, "at least 0 and finite")

    def numbers(self, logits: Any, batch: Any) -> Any:
        return logits

    def losses(
        self, numbers: Any, batch: Any, sums: Callable[[Any, Any], Any]
    ) -> tuple[Any, dict[str, Any]]:
        import jax
        import jax.numpy as jnp

        # The end of each answer alone counts.
        pair, sides = sides_of(batch)
        chosen, rejected = (sums(jnp.where(side, numbers[..., 0], 0), pair) for side in sides)
        losses = -jax.nn.log_sigmoid(chosen - rejected) + self.centre * (chosen + rejected) ** 2
        return losses, measured(chosen, rejected)

"""A reward model from preferences. Imports no jax: `--help` must be fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from models.checks import check_range
from trainer.gpt.objectives.loss import RowLoss


@dataclass(frozen=True, kw_only=True)
class Reward(RowLoss):
    """Bradley and Terry's loss of pairs of answers, which trains a model of scores.

    The reward of an answer is the score of its last token, which the model reads. Of a chosen
    answer with reward c and a rejected one with r, the loss is

        -log sigmoid(c - r) + centre (c + r)^2

    The loss of a batch is the mean over its pairs.

    References:
        InstructGPT, https://arxiv.org/abs/2203.02155 (equation 1); centred rewards,
        https://arxiv.org/abs/2312.09244 (section 2).
    """

    form: ClassVar[Literal["rollouts", "pairs"]] = "pairs"
    counts: ClassVar[Literal["targets", "ends"]] = "ends"

    centre: float = 0.0
    """Weight of the squared sum of both rewards, which keeps their mean near 0, such as 0.01."""

    def __post_init__(self) -> None:
        check_range("reward.centre", self.centre, "at least 0 and finite")

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def mean_over(self) -> Literal["tokens", "examples"]:
        return "examples"

    @property
    def metrics(self) -> tuple[str, ...]:
        return "margin", "accuracy", "chosen_reward", "rejected_reward"

    def numbers(self, logits: Any, batch: Any) -> Any:
        return logits

    def losses(
        self, numbers: Any, batch: Any, sums: Callable[[Any, Any], Any]
    ) -> tuple[Any, dict[str, Any]]:
        import jax
        import jax.numpy as jnp

        scores = numbers[..., 0]
        # The documents of a row are chosen and rejected answers in turn.
        pair, is_chosen = batch.segment_ids // 2, batch.segment_ids % 2 == 0
        # The end of each answer alone counts.
        chosen, rejected = (
            sums(jnp.where(side, scores, 0), pair) for side in (is_chosen, ~is_chosen)
        )
        margin = chosen - rejected
        losses = -jax.nn.log_sigmoid(margin) + self.centre * (chosen + rejected) ** 2
        return losses, {
            "margin": margin,
            "accuracy": (margin > 0).astype(jnp.float32),
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }

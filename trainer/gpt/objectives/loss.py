"""What an objective of post-training is: its settings, what it reads, and a loss of rows.

Imports no jax: `--help` must be fast.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLoss(ABC):
    """The loss of an objective; its fields are the settings with the prefix of its name.

    `trainer.objective.Objective` describes `numbers`, and `losses` as `loss`. Here `numbers` gets
    the logits of the tokens; `batch` is a `trainer.gpt.batches.TokenBatch` whose `numbers` are
    those of `reads`, and whose `segment_ids` are the documents.
    """

    form: ClassVar[Literal["rollouts", "pairs"]] = "rollouts"
    """What the records of the data are."""
    counts: ClassVar[Literal["targets", "ends"]] = "targets"
    """What counts of an answer in a pair: its tokens as targets, or its last token alone, which is
    read then, for its score."""
    holds_out: ClassVar[bool] = True
    """True if a fraction of the data is held out to evaluate with."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """The names of the numbers of tokens that it needs of the data: lists of records, or
        "advantages", "rewards" and "counts", the sum of the weights of a rollout."""

    @property
    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The type of each of these numbers, and the dimensions that it has for each token."""
        return {name: ("float32", ()) for name in self.reads}

    @property
    @abstractmethod
    def mean_over(self) -> Literal["tokens", "examples"]:
        """What the loss of a batch is the mean of; examples are rollouts or pairs, and the mean
        over one is that over its tokens."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics of `loss`, which are means of the same kind."""

    @abstractmethod
    def numbers(self, logits: Any, batch: Any) -> Any:
        """Float32 [B T n] of logits, float32 [B T vocab]; or of scores, float32 [B T 1], if the
        model gives these."""

    @abstractmethod
    def losses(
        self, numbers: Any, batch: Any, sums: Callable[[Any, Any], Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Losses, float32 [b t], and metrics."""

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the settings that are not the defaults."""
        return tuple(x for x, value in vars(self).items() if value != getattr(type(self), x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairLoss(RowLoss):
    """A loss of pairs of answers, each of which has a reward."""

    form: ClassVar[Literal["rollouts", "pairs"]] = "pairs"

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def mean_over(self) -> Literal["tokens", "examples"]:
        return "examples"

    @property
    def metrics(self) -> tuple[str, ...]:
        return "margin", "accuracy", "chosen_reward", "rejected_reward"


def sides_of(batch: Any) -> tuple[Any, tuple[Any, Any]]:
    """The pair of each token, and whether it is of the chosen or of the rejected answer: the
    documents of a row are chosen and rejected answers in turn."""
    is_chosen = batch.segment_ids % 2 == 0
    return batch.segment_ids // 2, (is_chosen, ~is_chosen)


def measured(chosen: Any, rejected: Any) -> dict[str, Any]:
    """The metrics of `PairLoss`, from the rewards of both answers."""
    margin = chosen - rejected
    return {
        "margin": margin,
        "accuracy": (margin > 0).astype(margin.dtype),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }

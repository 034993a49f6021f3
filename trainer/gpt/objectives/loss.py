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
    """What the records of the data are. Of pairs, the documents of a row are chosen and rejected
    answers in turn, from a chosen one on."""
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

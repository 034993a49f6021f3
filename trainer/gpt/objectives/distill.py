"""Distillation from the likeliest tokens of a teacher. Imports no jax: `--help` must be fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from models.checks import check_minimum, check_range
from trainer.gpt.objectives.loss import RowLoss

TEACHER = ("teacher_ids", "teacher_logprobs", "teacher_rest")
"""What is read of a record's `teacher`, from the likeliest token on; the last is the logarithm of
p_0."""


@dataclass(frozen=True, kw_only=True)
class Distill(RowLoss):
    """The KL divergence between a teacher and the model, over the teacher's k likeliest tokens.

    Of the teacher's probabilities p_1 to p_k and the model's q_1 to q_k of the same tokens, all
    others count as one, p_0 = 1 - sum p_i and q_0 = 1 - sum q_i:

        forward    sum p_i (log p_i - log q_i),  i from 0
        reverse    sum q_i (log q_i - log p_i)

    This is at most the divergence over the whole vocabulary, and 0 only where all q_i = p_i. To it
    comes nll_weight times -log q of the target. The loss of a batch is the mean over the tokens
    that count.

    References:
        Hinton et al., https://arxiv.org/abs/1503.02531; the reverse divergence: MiniLLM,
        https://arxiv.org/abs/2306.08543.
    """

    kl: Literal["forward", "reverse"] = "forward"
    """Which divergence: forward covers all that the teacher does, reverse avoids what it does
    not."""
    top_k: int = 64
    """Number k of tokens in each place. Of a file with more, the likeliest are taken."""
    temperature: float = 1.0
    """Divisor of the model's logits: the one with which score.py wrote the teacher's."""
    nll_weight: float = 0.0
    """Weight of the negative log-probability of the target."""

    def __post_init__(self) -> None:
        check_minimum("distill.top_k", self.top_k, 1)
        check_range("distill.temperature", self.temperature, "above 0 and finite")
        check_minimum("distill.nll_weight", self.nll_weight, 0)

    @property
    def reads(self) -> tuple[str, ...]:
        return TEACHER

    @property
    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        kinds = ("int32", (self.top_k,)), ("float32", (self.top_k,)), ("float32", ())
        return dict(zip(TEACHER, kinds, strict=True))

    @property
    def mean_over(self) -> Literal["tokens", "examples"]:
        return "tokens"

    @property
    def metrics(self) -> tuple[str, ...]:
        return "kl", "nll", "agreement"

    def numbers(self, logits: Any, batch: Any) -> Any:
        import jax.numpy as jnp

        from trainer.gpt.objectives.logprobs import logprobs_and_entropy, logprobs_of

        ids, teacher, teacher_rest = (batch.numbers[name] for name in TEACHER)
        nll = -logprobs_and_entropy(logits, batch.targets)[..., 0]
        own, rest = logprobs_of(logits / self.temperature, ids)
        apart, apart_rest = own - teacher, rest - teacher_rest
        if self.kl == "forward":
            kl = -(jnp.exp(teacher) * apart).sum(-1) - jnp.exp(teacher_rest) * apart_rest
        else:
            kl = (jnp.exp(own) * apart).sum(-1) + jnp.exp(rest) * apart_rest
        agrees = (jnp.argmax(logits, -1) == ids[..., 0]).astype(jnp.float32)
        return jnp.stack([kl, nll, agrees], axis=-1)

    def losses(
        self, numbers: Any, batch: Any, sums: Callable[[Any, Any], Any]
    ) -> tuple[Any, dict[str, Any]]:
        kl, nll, agreement = (numbers[..., n] for n in range(3))
        losses = kl + self.nll_weight * nll
        return losses, {"kl": kl, "nll": nll, "agreement": agreement}

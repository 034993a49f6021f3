"""Preferences between two answers to a prompt. Imports no jax: `--help` must be fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from models.checks import check_minimum, check_range
from startrail_jax.errors import InputError
from trainer.gpt.objectives.loss import PairLoss, measured, sides_of

REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
"""The sums of the log-probabilities that a reference gives both answers, by TRL's names."""


@dataclass(frozen=True, kw_only=True)
class Preference(PairLoss):
    """Losses of pairs of answers: DPO, IPO, SLiC's hinge and SimPO.

    Of a chosen answer with log-probability c, the sum over its tokens, and a rejected one with r,
    which are c' and r' in the reference, let h = (c - c') - (r - r'). The loss of a pair is

        sigmoid    -(1 - smoothing) log sigmoid(beta h) - smoothing log sigmoid(-beta h)
        ipo        (h - 1 / (2 beta))^2
        hinge      max(0, 1 - beta h)
        simpo      -log sigmoid(beta h - gamma), where c' = r' = 0

    plus sft_weight times the mean of -log p over the chosen answer. For simpo, and with
    `normalised`, means over the tokens of an answer take the place of sums. The loss of a batch is
    the mean over its pairs.

    References:
        DPO, https://arxiv.org/abs/2305.18290 (equation 7), with smoothing
        https://ericmitchell.ai/cdpo.pdf; IPO, https://arxiv.org/abs/2310.12036 (equation 17);
        SLiC, https://arxiv.org/abs/2305.10425; SimPO, https://arxiv.org/abs/2405.14734
        (equation 6); the loss of the chosen answer beside it, https://arxiv.org/abs/2404.19733.
    """

    loss: Literal["sigmoid", "ipo", "hinge", "simpo"] = "sigmoid"
    """The loss of a pair: that of DPO, of IPO, SLiC's hinge, or SimPO, which needs no reference."""
    beta: float = 0.1
    """Factor of the difference h: how strongly the policy is held to the reference. SimPO uses 2 to
    10."""
    normalised: bool = False
    """Whether log-probabilities of answers are means over their tokens. SimPO's always are."""
    smoothing: float = 0.0
    """Share of the pairs of "sigmoid" whose labels are taken to be wrong (conservative DPO)."""
    gamma: float = 0.0
    """Margin by which the chosen answer must be better, for "simpo"."""
    sft_weight: float = 0.0
    """Weight of the mean negative log-probability of the chosen answer's tokens."""

    def __post_init__(self) -> None:
        check_range("preference.beta", self.beta, "above 0 and finite")
        for name in ("gamma", "sft_weight"):
            check_minimum(f"preference.{name}", getattr(self, name), 0)
        if not 0 <= self.smoothing < 0.5:
            raise InputError(
                "preference.smoothing must be at least 0 and below 0.5; got smoothing="
                f"{self.smoothing}. Leave it out for DPO."
            )
        owners = {"smoothing": "sigmoid", "gamma": "simpo"}
        for name, loss in owners.items():
            if getattr(self, name) and self.loss != loss:
                raise InputError(
                    f"preference.{name} needs preference.loss={loss!r}; got {name}="
                    f"{getattr(self, name)}, loss={self.loss!r}. Leave it out."
                )
        if self.normalised and self.loss == "simpo":
            raise InputError(
                "preference.normalised says what SimPO is anyway; got normalised=True, "
                "loss='simpo'. Leave it out."
            )

    @property
    def reads(self) -> tuple[str, ...]:
        return () if self.loss == "simpo" else REFERENCES

    def numbers(self, logits: Any, batch: Any) -> Any:
        from trainer.gpt.objectives.logprobs import logprobs_and_entropy

        return logprobs_and_entropy(logits, batch.targets)[..., :1]

    def losses(
        self, numbers: Any, batch: Any, sums: Callable[[Any, Any], Any]
    ) -> tuple[Any, dict[str, Any]]:
        import jax
        import jax.numpy as jnp

        logprobs, one = numbers[..., 0], jnp.ones_like(numbers[..., 0])
        pair, sides = sides_of(batch)
        totals = [sums(jnp.where(side, logprobs, 0), pair) for side in sides]
        counts = [jnp.maximum(sums(jnp.where(side, one, 0), pair), 1) for side in sides]
        rewards = totals
        if self.loss != "simpo":
            rewards = [x - batch.numbers[y] for x, y in zip(totals, REFERENCES, strict=True)]
        if self.loss == "simpo" or self.normalised:
            rewards = [x / count for x, count in zip(rewards, counts, strict=True)]
        apart = rewards[0] - rewards[1]
        margin = self.beta * apart
        if self.loss == "sigmoid":
            losses = -(1 - self.smoothing) * jax.nn.log_sigmoid(margin)
            losses -= self.smoothing * jax.nn.log_sigmoid(-margin)
        elif self.loss == "ipo":
            losses = (apart - 1 / (2 * self.beta)) ** 2
        elif self.loss == "hinge":
            losses = jax.nn.relu(1 - margin)
        else:
            losses = -jax.nn.log_sigmoid(margin - self.gamma)
        if self.sft_weight:
            losses -= self.sft_weight * totals[0] / counts[0]
        return losses, measured(*(self.beta * x for x in rewards))

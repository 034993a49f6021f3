"""Policy gradients on rollouts that were made elsewhere. Imports no jax: `--help` must be fast."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from models.checks import check_minimum, check_range
from startrail_jax.errors import InputError
from trainer.gpt.objectives.loss import RowLoss


@dataclass(frozen=True, kw_only=True)
class Policy(RowLoss):
    """Policy gradients: REINFORCE with importance weights, PPO, GRPO, DAPO, Dr. GRPO, GSPO, CISPO.

    Of a token with log-probability lp, old log-probability o and advantage A, with ratio
    r = exp(lp - o), or for `ratio="sequence"` r = exp(mean of lp - o over the counted tokens of its
    rollout), and with sg for what has no gradient, the loss is

        ppo      -min(r A, clip(r, 1 - low, 1 + high) A), and -r A without clipping
        cispo    -sg(clip(r, 1 - low, 1 + high)) A lp

    times min(exp(o - e), truncate) if the engine has the log-probability e, plus kl_weight times
    lp - ref for `kl="k1"`, or exp(ref - lp) - (ref - lp) - 1 for `kl="k3"`, minus entropy_weight
    times the entropy. It is averaged as `mean` says.

    | objective | settings |
    | REINFORCE with importance weights | clip None |
    | PPO, arXiv 1707.06347 (equation 7) | the defaults |
    | GRPO, arXiv 2402.03300 (equation 3) | mean sequence, kl_weight 0.04 |
    | DAPO, arXiv 2503.14476 | mean batch, clip 0.2 0.28 |
    | Dr. GRPO, arXiv 2503.20783 | mean constant, no deviation |
    | GSPO, arXiv 2507.18071 | ratio sequence, mean sequence, clip 3e-4 4e-4 |
    | CISPO, arXiv 2506.13585 | surrogate cispo, clip 1 4 |
    """

    holds_out: ClassVar[bool] = False

    surrogate: Literal["ppo", "cispo"] = "ppo"
    """What is clipped: the objective of PPO, or the weight of a log-probability as in CISPO."""
    ratio: Literal["token", "sequence"] = "token"
    """Whether the ratio of new to old probability is that of a token, or the geometric mean over
    the counted tokens of its rollout, as in GSPO."""
    clip: tuple[float, float] | None = (0.2, 0.2)
    """How far below and above 1 the ratio is clipped; None for no clipping. A first number of 1
    does not clip below."""
    mean: Literal["batch", "sequence", "constant"] = "batch"
    """What the loss is averaged over: all counted tokens of the batch, as in DAPO; the means over
    each rollout, as in GRPO; or, as in Dr. GRPO, rollouts whose sums are divided by `length`."""
    length: float | None = None
    """The constant by which the sum over a rollout is divided with `mean="constant"`, such as the
    largest number of tokens of an answer."""
    old: Literal["logprobs", "old_logprobs", "current"] = "logprobs"
    """The old log-probabilities: the engine's (`logprobs` of the file), those that score.py has
    written (`old_logprobs`), or those of the model as it is, where each rollout is used once."""
    truncate: float | None = None
    """Largest weight of a token for the difference between old and engine's probabilities
    (truncated importance sampling); None for no such weights. Needs `old` other than "logprobs"."""
    kl: Literal["k1", "k3"] = "k3"
    """Estimator of the KL divergence to the reference (http://joschu.net/blog/kl-approx.html). In a
    loss, the gradient of k1 is 0 in expectation."""
    kl_weight: float = 0.0
    """Weight of that divergence, which needs `ref_logprobs` in the file; 0 for none."""
    entropy_weight: float = 0.0
    """Weight of the entropy, which is maximised."""
    temperature: float = 1.0
    """Divisor of the logits: that of the sampler whose log-probabilities the file has."""
    deviation: bool = True
    """Whether advantages made of `reward` and `group` are divided by the standard deviation of
    their group, plus 1e-4. Otherwise the mean alone is subtracted, as in Dr. GRPO."""

    def __post_init__(self) -> None:
        low, high = self.clip or (0.5, 0.5)
        if not (0 < low <= 1 and 0 < high < math.inf):
            raise InputError(
                "policy.clip must be two numbers above 0, the first of them at most 1; got clip="
                f"{low} {high}. Use --policy.clip 0.2 0.28, or None for no clipping."
            )
        for name in ("length", "truncate", "temperature"):
            check_range(f"policy.{name}", getattr(self, name), "above 0 and finite")
        for name in ("kl_weight", "entropy_weight"):
            check_minimum(f"policy.{name}", getattr(self, name), 0)
        if (self.mean == "constant") != (self.length is not None):
            raise InputError(
                "policy.length is the constant of policy.mean='constant'; got "
                f"mean={self.mean!r}, length={self.length}. Give both, such as --policy.mean "
                "constant --policy.length 4096, or neither."
            )
        if self.surrogate == "cispo" and self.clip is None:
            raise InputError(
                "policy.surrogate='cispo' clips the ratio; got clip=None. Give --policy.clip."
            )
        if self.truncate is not None and self.old == "logprobs":
            raise InputError(
                "policy.truncate bounds the ratio of old to engine's probabilities, which are the "
                f"same for old='logprobs'; got truncate={self.truncate}. Use --policy.old current "
                "or old_logprobs."
            )
        if self.kl != type(self).kl and not self.kl_weight:
            raise InputError(
                f"policy.kl needs a weight; got kl={self.kl!r}, kl_weight=0. Give "
                "--policy.kl-weight, or leave it out."
            )

    @property
    def reads(self) -> tuple[str, ...]:
        return (
            *("advantages", "rewards"),
            *(() if self.old == "current" else (self.old,)),
            *(() if self.truncate is None else ("logprobs",)),
            *(("ref_logprobs",) if self.kl_weight else ()),
            *(("counts",) if self.mean == "constant" else ()),
        )

    @property
    def mean_over(self) -> Literal["tokens", "examples"]:
        return "tokens" if self.mean == "batch" else "examples"

    @property
    def metrics(self) -> tuple[str, ...]:
        return (
            *("ratio", "approx_kl", "entropy", "advantage", "reward"),
            *(("clipped",) if self.clip else ()),
            *(("truncated",) if self.truncate else ()),
            *(("kl",) if self.kl_weight else ()),
        )

    def numbers(self, logits: Any, batch: Any) -> Any:
        from trainer.gpt.objectives.logprobs import logprobs_and_entropy

        return logprobs_and_entropy(logits / self.temperature, batch.targets)

    def losses(
        self, numbers: Any, batch: Any, sums: Callable[[Any, Any], Any]
    ) -> tuple[Any, dict[str, Any]]:
        import jax.numpy as jnp
        from jax.lax import stop_gradient

        logprobs, entropy = numbers[..., 0], numbers[..., 1]
        given = batch.numbers
        advantages = given["advantages"]
        old = stop_gradient(logprobs) if self.old == "current" else given[self.old]
        apart = logprobs - old
        if self.ratio == "sequence":
            count = sums(jnp.ones_like(apart), batch.segment_ids)
            apart = sums(apart, batch.segment_ids) / jnp.maximum(count, 1)
        ratio = jnp.exp(apart)
        metrics = {
            "ratio": ratio,
            "approx_kl": ratio - 1 - apart,
            "entropy": entropy,
            "advantage": advantages,
            "reward": given["rewards"],
        }
        gained = ratio * advantages
        if self.clip is not None:
            low, high = 1 - self.clip[0], 1 + self.clip[1]
            clipped = jnp.clip(ratio, low, high)
            if self.surrogate == "cispo":
                gained = stop_gradient(clipped) * advantages * logprobs
                is_clipped = ratio != clipped
            else:
                is_clipped = clipped * advantages < gained
                gained = jnp.where(is_clipped, clipped * advantages, gained)
            metrics["clipped"] = is_clipped.astype(jnp.float32)
        if self.truncate is not None:
            weight = jnp.exp(stop_gradient(old) - given["logprobs"])
            gained = jnp.minimum(weight, self.truncate) * gained
            metrics["truncated"] = (weight > self.truncate).astype(jnp.float32)
        losses = -gained
        if self.kl_weight:
            above = logprobs - given["ref_logprobs"]
            metrics["kl"] = above if self.kl == "k1" else jnp.exp(-above) + above - 1
            losses += self.kl_weight * metrics["kl"]
        if self.entropy_weight:
            losses -= self.entropy_weight * entropy
        if self.length is not None:
            losses *= given["counts"] / self.length
        return losses, metrics

"""How the next token is chosen from a language model's logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key

from models.checks import check_range
from startrail_jax.errors import InputError

# Float32 may round a lower temperature to 0, which would make the logits NaN.
LEAST_TEMPERATURE = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn, by its probability softmax(logits / temperature). `top_k` keeps the k
    likeliest tokens, of equally likely ones those with the smaller ids. Of these, normalised again,
    `top_p` keeps the fewest likeliest that add up to at least p: nucleus sampling,
    https://arxiv.org/abs/1904.09751."""

    temperature: float = 1.0
    """Divisor of the logits; 0, or less than 1e-30, takes the likeliest token."""
    top_k: int | None = None
    """Number of tokens to choose from; None for all."""
    top_p: float = 1.0
    """Probability that the tokens to choose from have together; 1 for all tokens."""
    seed: int = 0
    """Seed of the random draws, below 2**32."""

    def __post_init__(self) -> None:
        way_out = "Use 0 for the likeliest token, 1 for the probabilities of the model."
        check_range("temperature", self.temperature, "at least 0 and finite", way_out)
        if self.top_k is not None and self.top_k < 1:
            raise InputError(
                f"top_k must be at least 1; got top_k={self.top_k}. Leave it out for all tokens."
            )
        if not 0 < self.top_p <= 1:
            raise InputError(
                f"top_p must be above 0 and at most 1; got top_p={self.top_p}. Leave it out for "
                "all tokens."
            )
        check_range("seed", self.seed, "at least 0 and below 2**32", "Use another.")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature < LEAST_TEMPERATURE


def kept_tokens(logits: Float32[Array, " vocab"], sampling: Sampling) -> Bool[Array, " vocab"]:
    """Whether each token may be chosen. At temperature 0 only the likeliest may, of several the one
    with the smallest id."""
    if sampling.is_greedy:
        return jnp.arange(logits.size) == jnp.argmax(logits)
    order = jnp.argsort(logits, descending=True, stable=True)
    scaled = (logits - logits.max())[order] / sampling.temperature
    kept = jnp.arange(logits.size) < (sampling.top_k or logits.size)
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf))
        before = jnp.cumsum(probabilities) - probabilities
        # The first token is always kept: the probability before it is 0.
        kept &= before < sampling.top_p
    return jnp.zeros(logits.size, bool).at[order].set(kept)


def choose_token(
    logits: Float32[Array, " vocab"], sampling: Sampling, key: Key[Array, ""]
) -> Int32[Array, ""]:
    """One token; at temperature 0 the likeliest, or the smallest id of several likeliest ones."""
    if sampling.is_greedy:
        return jnp.argmax(logits).astype(jnp.int32)
    scaled = (logits - logits.max()) / sampling.temperature
    if sampling.top_k is not None or sampling.top_p < 1:
        scaled = jnp.where(kept_tokens(logits, sampling), scaled, -jnp.inf)
    return jax.random.categorical(key, scaled).astype(jnp.int32)

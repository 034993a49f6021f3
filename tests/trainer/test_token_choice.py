"""The choice of a token: which are kept, and how often each is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusals import refused
from startrail_jax.errors import InputError
from trainer.gpt.token_choice import Sampling, choose_token, kept_tokens


def kept_by_numpy(logits, sampling):
    """The tokens that the definition keeps, in float64."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: sampling.top_k]
    weights = np.exp(np.array([logits[i] - max(logits) for i in order]) / sampling.temperature)
    sums = np.cumsum(weights / weights.sum())
    count = 1 + int((sums < sampling.top_p).sum())
    return set(order[:count])


@pytest.mark.parametrize("top_k", [None, 1, 4, 11, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 1e-6])
def test_kept_tokens_are_those_of_the_definition(top_k, top_p):
    logits = np.random.default_rng(0).normal(size=11).astype(np.float32)
    logits[[2, 7, 9]] = logits[4]  # A tie.
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p)
    kept = set(np.flatnonzero(kept_tokens(jnp.asarray(logits), sampling)).tolist())
    assert kept == kept_by_numpy(logits.astype(np.float64), sampling)


def test_tied_tokens_are_kept_by_their_ids():
    tied = jnp.zeros(6)
    assert kept_tokens(tied, Sampling(top_k=2)).tolist() == [True] * 2 + [False] * 4
    assert kept_tokens(tied, Sampling(top_p=0.4)).tolist() == [True] * 3 + [False] * 3
    # Each of the two tokens that top_k keeps has one half of the probability.
    both = Sampling(top_k=2, top_p=0.5)
    assert kept_tokens(tied, both).tolist() == [True] + [False] * 5


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=3),
        Sampling(top_p=0.7),
        Sampling(temperature=1.5, top_k=4, top_p=0.8),
    ],
    ids=str,
)
def test_draws_have_the_probabilities_that_are_asked_for(sampling):
    logits = np.array([0.3, -1.0, 1.2, 0.1, 0.8, -0.2], np.float32)
    kept = kept_by_numpy(logits.astype(np.float64), sampling)
    expected = np.where(
        [i in kept for i in range(6)], np.exp(logits.astype(np.float64) / sampling.temperature), 0
    )
    expected /= expected.sum()
    count = 20_000
    keys = jax.random.split(jax.random.key(0), count)
    drawn = jax.jit(jax.vmap(lambda key: choose_token(jnp.asarray(logits), sampling, key)))(keys)
    found = np.bincount(drawn, minlength=6) / count
    assert not found[expected == 0].any()
    deviation = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(found - expected) <= 4.5 * deviation).all()


def test_temperature_near_zero_takes_the_likeliest():
    logits = jnp.asarray([1.0, 3.0, 2.0, 3.0])
    assert choose_token(logits, Sampling(temperature=0.0), jax.random.key(0)) == 1
    for temperature in (1e-30, 1e-31, 1e-38, 1e-46):
        cold = Sampling(temperature=temperature, top_p=0.5)
        assert choose_token(logits, cold, jax.random.key(0)) == 1
        assert kept_tokens(logits, cold).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k must be at least 1; got top_k=0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1; got top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"seed": -1}, "seed must be at least 0 and below 2**32; got seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),
    ],
)
def test_sampling_out_of_range_raises(options, named):
    with refused(InputError, named):
        Sampling(**options)

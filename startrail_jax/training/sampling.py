"""Continues a text with a model whose tokens are sharded and out of order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, Key

from startrail_jax.training.corpus import Corpus
from startrail_jax.training.step import Program

# (tokens [B T], positions [B T]) -> logits [B T vocab]
Forward = Callable[[Array, Array], Array]


def continue_tokens(
    forward: Forward,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    *,
    start: int,
    temperature: float,
    key: Key[Array, ""],
) -> Int32[Array, "B T"]:
    """Replaces the tokens at positions `start`, `start` + 1, ... by samples of the model.

    A whole forward pass for every token: there is no cache. Where a token lies is told by
    `positions` alone, so every layout and sharding will do.

    Args:
        forward: the model, which must be causal in `positions`.
        tokens: the prompt at positions below `start`; what is above does not matter.
        positions: position of each token, a permutation of 0 .. T - 1 in every row.
        start: number of tokens in the prompt, at least 1.
        temperature: divides the logits; at 0 the likeliest token is taken.
        key: source of randomness.

    Returns:
        Prompt and samples, in the order of `tokens`.
    """

    def extend(position: Int32[Array, ""], tokens: Array) -> Array:
        last = (positions == position - 1)[:, :, None]
        logits = jnp.sum(jnp.where(last, forward(tokens, positions), 0.0), axis=1)
        sample = choose_token(logits, temperature, jax.random.fold_in(key, position))
        return jnp.where(positions == position, sample[:, None], tokens)

    return lax.fori_loop(start, tokens.shape[1], extend, tokens)


def choose_token(
    logits: Float32[Array, "B vocab"], temperature: float, key: Key[Array, ""]
) -> Int32[Array, " B"]:
    """One token a row from softmax(logits / temperature), or the likeliest at temperature 0."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)


def continue_text(program: Program, weights: Any, corpus: Corpus) -> tuple[str, str]:
    """The start of the held-out part, and how the model goes on with it.

    Returns:
        Prompt and continuation, of `config.sample_length` tokens each if the sequence allows it; as
        text, or as token ids where the text of a token is not known.
    """
    config, layout = program.config, program.attention.layout
    length = layout.padded_length(min(2 * config.sample_length, config.seq_len))
    start = min(length - config.sample_length, len(corpus.held_out[0]))
    rows = program.attention.degrees.data
    tokens = np.zeros((rows, length), np.int32)
    tokens[:, :start] = corpus.held_out[0].read(0, start)
    positions = np.tile(layout.positions(length), (rows, 1)).astype(np.int32)

    @jax.jit
    def sample(weights: Any, tokens: Array, positions: Array) -> Array:
        return continue_tokens(
            lambda tokens, positions: program.logits(weights, tokens, positions),
            tokens,
            positions,
            start=start,
            temperature=config.temperature,
            key=jax.random.key(config.seed),
        )

    placed = jax.device_put((layout.permute(tokens), positions), program.batch_sharding)
    result = layout.unpermute(jax.device_get(sample(weights, *placed)))[0]
    show = corpus.decode or (lambda tokens: " ".join(map(str, tokens)))
    return show(result[:start]), show(result[start:])

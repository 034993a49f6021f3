"""The online-softmax merge of partial attentions (out, lse), in float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float32, Shaped

from startrail_jax.blocks.shapes import EMPTY

# Attentions (out, lse) or (out, lse, low) of the same queries to disjoint sets of keys. Each out is
# normalised over its own keys. A row that sees none of them has out 0, lse EMPTY and low 0. `low`
# is the rounding error of lse: the log-sum-exp is lse + low. At 1e4, neighbouring float32 numbers
# are 1e-3 apart, and so weights exp(lse) would be off by 5e-4. Kernels that know no `low` leave it
# out.
Partials = tuple[tuple[Array, ...], ...]


def rows(x: Shaped[Array, "b n t"]) -> Shaped[Array, "b t n 1"]:
    """One number for each query and head, laid out to scale an output of shape [b, t, n, v]."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def cap_logits(
    logits: Float32[Array, "..."], softcap: float | None
) -> tuple[Float32[Array, "..."], Float32[Array, "..."] | None]:
    """Scaled, unmasked logits below a soft cap c: s' = c tanh(s / c); and the slope of the cap
    there, for their gradient: ds' / ds = 1 - (s' / c)^2."""
    if softcap is None:
        return logits, None
    below = jnp.tanh(logits / softcap)
    return softcap * below, 1.0 - below * below


def highest_with(
    sinks: Float32[Array, " n"], highest: Float32[Array, "b n t"]
) -> tuple[Float32[Array, "b n t"], Float32[Array, "b n t"]]:
    """The greatest logit of rows that have a sink beside their keys, and what the sink adds to the
    sum of exp(logit - greatest). Rows that see no key, where `highest` is EMPTY, have no sink."""
    logits, empty = sinks[None, :, None], highest <= EMPTY
    top = jnp.where(empty, highest, jnp.maximum(highest, logits))
    return top, jnp.where(empty, 0.0, jnp.exp(logits - top))


def join_sinks(
    out: Float32[Array, "b t n v"],
    lse: Float32[Array, "b n t"],
    *low: Float32[Array, "b n t"],
    sinks: Float32[Array, " n"],
) -> tuple[Float32[Array, "b t n v"], Float32[Array, "b n t"], Float32[Array, "b n t"]]:
    """Adds one logit for each head to the denominators of attentions over all their keys.

        lse' = log(exp(lse) + exp(sink)),    out' = out exp(lse - lse')

    out, lse and low are those of `Partials`. Rows that see no key stay as they are.
    """
    top, of_sink = highest_with(sinks, lse)
    weight = jnp.exp(sum(low, lse - top))
    total = weight + of_sink
    return out.astype(jnp.float32) * rows(weight / total), *log_sum(top, total)


def sink_gradient(
    sinks: Float32[Array, " n"], lse: Float32[Array, "b n t"], delta: Float32[Array, "b n t"]
) -> Float32[Array, " n"]:
    """Gradient of the sinks: of a key of value 0, whose ds = exp(sink - lse) (0 - delta). lse
    counts the sinks; it is EMPTY in rows that see no key."""
    share = jnp.where(lse <= EMPTY, 0.0, jnp.exp(sinks[None, :, None] - lse))
    return -(share * delta).sum((0, 2))


def merge_partials(
    partials: Sequence[tuple[Array, ...]],
) -> tuple[Float32[Array, "b t n v"], Float32[Array, "b n t"]]:
    """What `merge_precisely` gives, without `low`: the end of all merging."""
    return merge_precisely(partials)[:2]


def merge_precisely(
    partials: Sequence[tuple[Array, ...]],
) -> tuple[Float32[Array, "b t n v"], Float32[Array, "b n t"], Float32[Array, "b n t"]]:
    """Merges attentions (`Partials`) of the same queries to disjoint sets of keys, at least one.

        L = log sum_p exp(lse_p + low_p),    out = sum_p exp(lse_p + low_p - L) out_p

    lse + low = L. A row that sees no key in any of the partials has out 0, lse EMPTY and low 0. See
    FlashAttention, https://arxiv.org/abs/2205.14135, section 3.1; StarTrail,
    https://arxiv.org/abs/2407.00611, algorithm 3.
    """
    if len(partials) == 1:
        out, lse, *low = partials[0]
        return out.astype(jnp.float32), lse, low[0] if low else jnp.zeros_like(lse)
    highest = functools.reduce(jnp.maximum, (lse for _, lse, *_ in partials))
    # In a row that is EMPTY everywhere the weights are 1, and the outputs that they scale are 0.
    weights = [jnp.exp(sum(low, lse - highest)) for _, lse, *low in partials]
    total = functools.reduce(jnp.add, weights)
    # The weights are normalised first: a sum of outputs near the greatest float32 would overflow.
    terms = [
        x.astype(jnp.float32) * rows(w / total)
        for (x, *_), w in zip(partials, weights, strict=True)
    ]
    return functools.reduce(jnp.add, terms), *log_sum(highest, total)


def log_sum(
    highest: Float32[Array, "..."], total: Float32[Array, "..."]
) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    """The log-sum-exp of rows from their greatest logit and the sum of exp(logit - highest).

    lse = highest + log(total), rounded, and its rounding error; EMPTY and 0 in rows that see no
    key, where `highest` is EMPTY.
    """
    log = jnp.log(total)
    lse, empty = highest + log, highest <= EMPTY
    return jnp.where(empty, EMPTY, lse), jnp.where(empty, 0.0, log - (lse - highest))

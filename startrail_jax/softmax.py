"""The online-softmax merge of partial attentions (out, lse), in float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from startrail_jax.shapes import EMPTY, LseShard, OutShard

# Attentions (out, lse) of the same queries to disjoint sets of keys. Each out is normalised over
# its own keys. A row that sees none of them has out 0 and lse EMPTY.
Partials = tuple[tuple[OutShard, LseShard], ...]


def rows(x: Float32[Array, "b n t"]) -> Float32[Array, "b t n 1"]:
    """One number for each query and head, laid out to scale an output of shape [b, t, n, v]."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def merge_partials(
    partials: Sequence[tuple[Float[Array, "b t n v"], Float32[Array, "b n t"]]],
) -> tuple[Float32[Array, "b t n v"], Float32[Array, "b n t"]]:
    """Merges attentions of the same queries to disjoint sets of keys.

        L = log sum_p exp(lse_p),    out = sum_p exp(lse_p - L) out_p

    Args:
        partials: one or more (out, lse); lse is a natural logarithm.

    Returns:
        out and lse in float32. A row that sees no key in any of them has out 0 and lse EMPTY.

    References:
        FlashAttention, https://arxiv.org/abs/2205.14135, section 3.1; StarTrail,
        https://arxiv.org/abs/2407.00611, algorithm 3.
    """
    if len(partials) == 1:
        out, lse = partials[0]
        return out.astype(jnp.float32), lse
    highest = functools.reduce(jnp.maximum, (lse for _, lse in partials))
    # In a row that is EMPTY everywhere the weights are 1, and the outputs that they scale are 0.
    weights = [jnp.exp(lse - highest) for _, lse in partials]
    total = functools.reduce(jnp.add, weights)
    terms = [x.astype(jnp.float32) * rows(w) for (x, _), w in zip(partials, weights, strict=True)]
    lse = jnp.where(highest <= EMPTY, EMPTY, highest + jnp.log(total))
    return functools.reduce(jnp.add, terms) / rows(total), lse

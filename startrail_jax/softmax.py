"""The one online-softmax merge of partial attention (out, lse), in float32."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from startrail_jax.shapes import EMPTY


def rows(x: Float32[Array, "b n t"]) -> Float32[Array, "b t n 1"]:
    """A quantity of each row, laid out to scale an output of shape [b, t, n, v]."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def merge_partials(
    outs: Iterable[Float[Array, "b t n v"]], lses: Iterable[Float32[Array, "b n t"]]
) -> tuple[Float32[Array, "b t n v"], Float32[Array, "b n t"]]:
    """Merges attentions of the same queries to disjoint sets of keys.

        L = log sum_p exp(lse_p),    out = sum_p exp(lse_p - L) out_p

    Args:
        outs: partial outputs, each normalised over its own keys; 0 in rows that saw no key.
        lses: their natural-log sums of exponentials; EMPTY in such rows.

    Returns:
        out and lse in float32; rows that saw no key anywhere get 0 and EMPTY.

    References:
        FlashAttention, https://arxiv.org/abs/2205.14135, section 3.1; StarTrail,
        https://arxiv.org/abs/2407.00611, algorithm 3.
    """
    outs, lses = list(outs), list(lses)
    highest = functools.reduce(jnp.maximum, lses)
    # In a row that is EMPTY everywhere the weights are 1: its outputs are 0 all the same.
    weights = [jnp.exp(lse - highest) for lse in lses]
    total = functools.reduce(jnp.add, weights)
    terms = [x.astype(jnp.float32) * rows(w) for x, w in zip(outs, weights, strict=True)]
    lse = jnp.where(highest <= EMPTY, EMPTY, highest + jnp.log(total))
    return functools.reduce(jnp.add, terms) / rows(total), lse

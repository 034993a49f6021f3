"""Residuals of the forward pass, and the row terms that the backward pass derives from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from startrail_jax.blocks.shapes import EMPTY
from startrail_jax.blocks.softmax import rows

CHECKPOINT_NAMES = ("attention_partial", "attention_lse", "attention_out", "attention_units")
"""Names for `jax.checkpoint_policies.save_only_these_names`, under which `jax.checkpoint` does not
recompute attention: the output of step 4, its log-sum-exp, the output of step 5 (which differs from
that of step 4 only where the head degree is above 1), and what was gathered or received, which
exists only with `keep_gathered`."""

EXCHANGED_OUT = CHECKPOINT_NAMES[2]
"""The output of step 5, which one `all_to_all` makes again from that of step 4."""


def named(out: Array, *stats: Array | None) -> tuple[Any, ...]:
    """An output and its log-sum-exp (`softmax.Partials`) under their names."""
    return (
        checkpoint_name(out, CHECKPOINT_NAMES[0]),
        *(x if x is None else checkpoint_name(x, CHECKPOINT_NAMES[1]) for x in stats),
    )


class Rows(NamedTuple):
    """What attention gave for the queries of a device, and the gradients of that."""

    dout: Float[Array, "b t n v"]
    dlse: Float32[Array, "b n t"]
    out: Float[Array, "b t n v"]
    lse: Float32[Array, "b n t"]
    low: Float32[Array, "b n t"] | None
    """What rounding took from lse; None for 16-bit outputs."""


def row_gradients(found: Rows) -> tuple[Float[Array, "b t n v"], Float32[Array, "b n t"]]:
    """The gradient of the output, and delta = rowsum(dout * out) - dlse.

    Rows that see no key take no part: a NaN times a weight of 0 would spoil dk and dv. What
    rounding took from lse need not travel: p = exp(s - lse) exp(-low), and gradients are linear in
    (dout, dlse).
    """
    dout, dlse, out, lse, low = found
    empty = lse <= EMPTY
    dout, dlse = jnp.where(rows(empty), 0, dout), jnp.where(empty, 0, dlse)
    if low is not None:
        # dout before delta, so that dp and delta round alike.
        weight = jnp.exp(-low)
        dout, dlse = dout * rows(weight), dlse * weight
    return dout, (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2) - dlse

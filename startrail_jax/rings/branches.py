"""Rows of trees on the devices: where a token stands in its own branch."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from startrail_jax.devices.degrees import Axis
from startrail_jax.rings import collectives
from startrail_jax.tokens.layout import Layout


def places_in_branches(
    ends: Int32[Array, "b t"], layout: Layout, ranks: Axis
) -> Int32[Array, "b t"]:
    """How many tokens each token of this device continues: its place in the text of its branch.

    These are the tokens before it in the row but those whose stretch has ended, and padding. The
    numbers of all devices are gathered, 4 bytes a token.

    Args:
        ends: `visible_until` of the tokens of this device, in the order of the layout.
        layout: that of the row.
        ranks: all devices of the sequence as one axis.
    """
    length = ends.shape[1] * layout.degree
    own = layout.unit_positions(length, collectives.index(ranks), 1).vector()
    # Padding at place p ends there, and of all places -1 - p is negative.
    sent = jnp.where(ends >= 0, ends, -1 - own[None])
    whole = collectives.gather(sent, ranks, 1)
    rows = jnp.arange(len(ends), dtype=jnp.int32)[:, None]
    # Ends beyond the row, which only traced numbers may have, count as its end.
    counts = jnp.zeros((len(ends), length + 1), jnp.int32)
    counts = counts.at[rows, jnp.minimum(jnp.abs(whole), length)].add(1)
    return own[None] - jnp.cumsum(counts, 1, dtype=jnp.int32)[:, own]

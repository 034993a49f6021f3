"""Rows of trees on the devices: where a token stands in its own branch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
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


def hidden_between(
    ends: Int32[Array, "b s"], positions: Int32[Array, "b t"], layout: Layout, ranks: Axis
) -> Int32[Array, "b t s"]:
    """How many slots that a new token does not see lie between it and each slot that it does see.

    These are slots of other branches, and of padding. Each device counts those in its runs of
    slots, and gathers the counts of the others: 4 bytes for each run and new token.

    Args:
        ends: `visible_until` of the slots of this device, in the order of the layout.
        positions: the places of the new tokens.
        layout: that of the cache.
        ranks: all devices of the sequence as one axis.
    """
    length = ends.shape[1] * layout.degree
    own = layout.unit_positions(length, collectives.index(ranks), 1)
    new = positions[:, :, None]
    hidden = (own.vector()[None, None, :] < new) & (ends[:, None, :] <= new)
    by_run = hidden.reshape(*positions.shape, len(own.starts), own.length)
    within = jnp.cumsum(by_run[..., ::-1], -1, dtype=jnp.int32)[..., ::-1]
    counts = collectives.gather(within[..., 0], ranks, 2)
    all_runs = layout.unit_positions(length, np.arange(layout.degree), 1)
    starts = np.stack(all_runs.starts, -1).ravel()
    is_later = starts[None, :] > jnp.asarray(own.starts)[:, None]
    later = (counts[:, :, None, :] * is_later[None, None]).sum(-1, dtype=jnp.int32)
    return (within + later[..., None]).reshape(hidden.shape)

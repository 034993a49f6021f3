"""Tokens in contiguous order, attended in zigzag order so that all devices work alike.

Under a causal mask the last shard of a contiguous sequence sees all keys and the first one only its
own. Zigzag order shares the work evenly, but neighbouring tokens are apart, and code that shifts
tokens or builds positions would be wrong in silence. So callers keep the contiguous order, and
attention exchanges queries, keys and values on the way in, and outputs on the way out.

Of 2P slices, rank r holds slices 2r and 2r + 1 in contiguous order, and slices r and 2P - 1 - r in
zigzag order. The even slices go to P different ranks, and so do the odd ones: two permutes of half
a share take all of them to their places, and two take them back.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from startrail_jax.devices.degrees import Axis
from startrail_jax.rings import collectives
from startrail_jax.rings.schedule import Schedule
from startrail_jax.tokens.layout import Layout, slice_pairs


def why_not_balanced(schedule: Schedule, query_tokens: int, key_tokens: int) -> str | None:
    """Why tokens cannot or need not be exchanged; None if they can."""
    ranks, kind = schedule.layout.degree, schedule.layout.kind
    if kind != "contiguous":
        return f"the tokens are in {kind} order"
    if ranks == 1:
        return "one device has all tokens"
    if not schedule.mask.within(query_tokens).grows or query_tokens != key_tokens:
        return f"all queries see about as many keys under mask {schedule.mask}"
    if schedule.exchange == "sparse":
        return "each device is sent the keys of its own queries alone"
    if "bias" in schedule.scores:
        return "the rows and columns of a bias lie in the order of the layout"
    if query_tokens % (2 * ranks):
        return f"{2 * ranks} slices do not divide {query_tokens} tokens"
    return None


def in_zigzag(schedule: Schedule) -> Schedule:
    """The schedule of the exchanged tokens."""
    layout = Layout("zigzag", schedule.layout.degree)
    return dataclasses.replace(schedule, layout=layout, balance="layout")


def to_zigzag(ranks: Axis, x: Array, dim: int = 1) -> Array:
    """This device's share of an array in zigzag order, from its share in contiguous order."""
    even, odd = _sent(ranks, jnp.split(x, 2, dim), back=False)
    return _swapped(ranks, even, odd, dim)


def from_zigzag(ranks: Axis, x: Array, dim: int = 1) -> Array:
    """The inverse of `to_zigzag`."""
    early, late = jnp.split(x, 2, dim)
    even, odd = jnp.split(_swapped(ranks, early, late, dim), 2, dim)
    return jnp.concatenate(_sent(ranks, [even, odd], back=True), dim)


def _sent(ranks: Axis, halves: list[Array], *, back: bool) -> list[Array]:
    """Even and odd slices, sent to their places or back."""
    moves = []
    for half, pairs in zip(halves, slice_pairs(ranks.degree), strict=True):
        pairs = [(b, a) if back else (a, b) for a, b in pairs]
        still = all(a == b for a, b in pairs)
        moves.append(half if still else collectives.permute(half, ranks, pairs))
    return moves


def _swapped(ranks: Axis, first: Array, second: Array, dim: int) -> Array:
    """Two slices one after the other, swapped on ranks whose early slice is odd: on rank r it is
    slice r, and the late one is 2P - 1 - r."""
    swap = collectives.index(ranks) % 2 == 1
    pair = jnp.where(swap, second, first), jnp.where(swap, first, second)
    return jnp.concatenate(pair, dim)

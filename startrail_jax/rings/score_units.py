"""What a call gives for the scores, brought to the units of queries and keys that a device visits.

A bias has a row for each query and a column for each key, in layout order; a device is given the
rows of its own queries. With G, R and A the degrees of group, ring and team, device (p, g, a)
visits only the key units (p', a) for all p'. So the members of a team trade columns for rows, and
each keeps its share of the bias; one of a single head is gathered over the axis of heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax import lax
from jaxtyping import Array, Float

from startrail_jax.blocks.scores import PLAIN, Scores
from startrail_jax.blocks.shapes import QueryShard
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.devices.degrees import Axis
from startrail_jax.rings import collectives
from startrail_jax.rings.latents import Expansion
from startrail_jax.rings.schedule import Schedule
from startrail_jax.xla.varying import alike


class ScoreInputs(NamedTuple):
    """What a call gives beside query, key, value and segment ids; None where it gives none."""

    scores: Scores | None = None
    prefix: Any = None
    """The length of the prefix of each row, int32 [b]."""
    sinks: Any = None
    """The logit of each head that counts in its denominator, float32 [n]."""
    expansion: Expansion | None = None
    """The matrices that make keys and values, if the keys of the call are latents."""

    def of_heads(self, first: int, heads: int) -> ScoreInputs:
        """The same for `heads` of the query heads, from number `first` on."""
        scores, prefix, sinks, expansion = self
        if scores is not None:
            scores = scores.of_heads(first, heads)
        if sinks is not None:
            sinks = sinks[first : first + heads]
        return ScoreInputs(scores, prefix, sinks, expansion)


NO_SCORES = ScoreInputs()


def of_device(
    schedule: Schedule, given: ScoreInputs, q: QueryShard, axes: Mapping[str, Axis]
) -> tuple[Schedule, ScoreInputs]:
    """What a call gives, for this device's rows and the heads of its tensor rank.

    Given are slopes and sinks of all heads, or of those of q; the rows of the bias of this device's
    queries; a dropout that does not know its rows and heads yet; and this device's prefixes. The
    schedule comes back knowing what is given.
    """
    scores, prefix, sinks, expansion = given
    if scores is None and sinks is None:
        return schedule, given
    row, head = (
        collectives.index(axes[role]) * size
        for role, size in (("data", q.shape[0]), ("tensor", q.shape[2]))
    )
    if sinks is not None:
        sinks = _part(sinks, head, q.shape[2])
    if scores is None:
        return schedule, ScoreInputs(scores, prefix, sinks, expansion)
    slopes, dropout = scores.slopes, scores.dropout
    if slopes is not None:
        slopes = _part(slopes, head, q.shape[2])
    if dropout is not None:
        dropout = dataclasses.replace(dropout, first_row=row, first_head=head)
    scores = dataclasses.replace(scores, slopes=slopes, dropout=dropout)
    given = ScoreInputs(scores, prefix, sinks, expansion)
    return dataclasses.replace(schedule, scores=scores.given), given


def of_units(schedule: Schedule, given: ScoreInputs, q: QueryShard) -> ScoreInputs:
    """What is given, for the query unit of this device and all key units that it visits.

    Slopes and sinks are of the heads of q. The bias has the rows of the query unit, and columns of
    one key unit after another, both in order of position. With H and A the degrees of head and
    team, a device receives (H - 1) / H of its share of the bias, or H - 1 shares if all heads have
    one, and then (A - 1) / A. Gradients go back, summed where a bias serves several rows or heads.
    """
    scores, prefix, sinks, expansion = given
    if scores is None and sinks is None and expansion is None:
        return given
    first = collectives.index(schedule.head) * q.shape[2]
    if expansion is not None:
        marked = Expansion(*alike(*expansion, q)[:2])
        expansion = Expansion(*(_part(x, first, q.shape[2], 1) for x in marked))
    if sinks is not None:
        sinks = _part(alike(sinks, q)[0], first, q.shape[2])
    if scores is None:
        return ScoreInputs(scores, prefix, sinks, expansion)
    slopes, bias, dropout = scores.slopes, scores.bias, scores.dropout
    if slopes is not None:
        slopes = _part(alike(slopes, q)[0], first, q.shape[2])
    if bias is not None:
        bias = _place_bias(schedule, alike(bias, q)[0])
    if dropout is not None:
        dropout = dataclasses.replace(dropout, first_head=dropout.first_head + first)
    scores = dataclasses.replace(scores, slopes=slopes, bias=bias, dropout=dropout)
    return ScoreInputs(scores, prefix, sinks, expansion)


def _place_bias(schedule: Schedule, x: Float[Array, "b n t c"]) -> Float[Array, "b _ _ _"]:
    head, team, ring, group = schedule.head, schedule.team, schedule.ring, schedule.group
    if x.shape[1] == 1:
        x = collectives.gather(x, head, 2)
    else:
        x = collectives.exchange(x, head, split=1, concat=2)
    # Which member of the team visits a column: one index of its rank says it.
    x = x.reshape(*x.shape[:3], ring.degree, group.degree, team.degree, -1)
    x = collectives.exchange(x, team, split=4 if schedule.published else 5, concat=2)
    x = x.reshape(*x.shape[:3], ring.degree, -1)
    x = schedule.sort(schedule.sort(x, schedule.query_ranks, 2), schedule.key_ranks, 4)
    return x.reshape(*x.shape[:3], -1)


def _part(x: Array, first: Any, size: int, dim: int = 0) -> Array:
    """`size` numbers of an array, from number `first` on."""
    return x if size == x.shape[dim] else lax.dynamic_slice_in_dim(x, first, size, dim)


def visibility_and_scores(
    schedule: Schedule,
    seq_len: int,
    device: tuple[Any, Any, Any],
    units: tuple[Any, Any, Any, Any],
    given: ScoreInputs,
    **distance: Any,
) -> tuple[Visibility, Scores]:
    """What a query unit sees of a key unit, and the scores there. `distance` is how far one of the
    units has come, as in `Schedule.visibility`."""
    _, k, *ids = units
    key_len = k.shape[1]
    kv_seq_len = key_len * schedule.num_shards // schedule.group.degree
    visibility = schedule.visibility(seq_len, device, *ids, kv_seq_len=kv_seq_len, **distance)
    scores, prefix, *_ = given
    if prefix is not None:
        mask = visibility.mask.given(prefix[:, None, None])
        visibility = dataclasses.replace(visibility, mask=mask)
    scores = dataclasses.replace(scores or PLAIN, softcap=schedule.softcap)
    if scores.bias is not None:
        owner = schedule.along_ring(device[0], distance.get("keys_behind", 0), -1)
        scores = dataclasses.replace(scores, column=owner * key_len)
    return visibility, scores

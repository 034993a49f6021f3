"""A call on the devices of a mesh: from whole arrays to those of a device and the rings."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from startrail_jax.calls.explain import warn_of_balance
from startrail_jax.calls.key_masks import empty_padding, without_padding
from startrail_jax.calls.sharding import Sharded
from startrail_jax.devices.axes import flat_axis
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.rings import collectives, score_units, vjp
from startrail_jax.rings.balance import from_zigzag, in_zigzag, to_zigzag
from startrail_jax.rings.branches import places_in_branches
from startrail_jax.rings.choices import choose
from startrail_jax.rings.schedule import Schedule
from startrail_jax.rings.score_units import ScoreInputs
from startrail_jax.rings.sizes import Sizes
from startrail_jax.rings.work import advice_on_balance


# Jitted, because outside a jit shard_map runs its body one operation at a time.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def attend_whole(
    attention: Sharded,
    schedule: Schedule,
    specs: tuple[Any, ...],
    given_specs: ScoreInputs,
    given: ScoreInputs,
    *inputs: Any,
) -> tuple[Array, Array]:
    """The attention of whole arrays, after all checks: out and lse."""

    def on_device(given: ScoreInputs, *shards: Any) -> tuple[Array, Array]:
        ids: Any = (shards[3], shards[-1]) if shards[3:] else (None, None)
        return attend(attention, schedule, given, *shards[:3], *ids, kv_heads=inputs[1].shape[2])

    return jax.shard_map(
        on_device,
        mesh=attention.mesh,
        in_specs=(given_specs, *specs),
        out_specs=(specs[0], attention.lse_spec),
    )(given, *inputs)


def attend(
    attention: Sharded,
    schedule: Schedule,
    given: ScoreInputs,
    query: Array,
    key: Array,
    value: Array | None,
    query_ids: Array | None,
    key_ids: Array | None,
    *,
    kv_heads: int,
) -> tuple[Array, Array]:
    """Attention on one device, where `kv_heads` may all lie on every device along `tensor`."""
    axes, degrees = attention.axes, attention.degrees
    if query_ids is not None:
        query = without_padding(query, query_ids)
    if key_ids is not None:
        hide = functools.partial(without_padding, ids=key_ids)
        key, value = jax.tree.map(hide, (key, value))
    padded = query_ids
    schedule, given = score_units.of_device(schedule, given, query, axes)
    here = Sizes.of(
        query,
        key,
        value,
        packed=query_ids is not None,
        id_arrays=schedule.id_arrays,
        expansion=given.expansion,
    )
    schedule = _exchanging(attention, schedule, here, kv_heads)
    ranks = flat_axis(axes, SEQUENCE_ROLES)
    if schedule.near is not None:
        assert query_ids is not None
        assert key_ids is not None
        shared = query_ids is key_ids
        places = places_in_branches(query_ids, schedule.layout, ranks)
        query_ids = jnp.stack([query_ids, places], -1)
        # A mask of the call has hidden some keys.
        key_ids = query_ids if shared else jnp.stack([key_ids, places], -1)
    balances, shared = schedule.balance == "exchange", query_ids is key_ids
    if balances:
        schedule = in_zigzag(schedule)
        query, key, value = jax.tree.map(lambda x: to_zigzag(ranks, x), (query, key, value))
        if query_ids is not None and key_ids is not None:
            query_ids = to_zigzag(ranks, query_ids)
            key_ids = query_ids if shared else to_zigzag(ranks, key_ids)
    if kv_heads % degrees.tensor and key.shape[2] == kv_heads:
        tensor = axes["tensor"]
        parts = 1 if schedule.exchange == "sparse" else degrees.head
        needed = collectives.needed_heads(kv_heads, parts, tensor)
        copied = lambda x: collectives.copy_heads(x, needed, tensor)  # noqa: E731
        key, value = jax.tree.map(copied, (key, value))
    out, lse = vjp.sharded_attention(schedule, query, key, value, query_ids, key_ids, given)
    if balances:
        out, lse = from_zigzag(ranks, out), from_zigzag(ranks, lse, 2)
    if padded is not None:  # For their gradients: what comes from padding goes nowhere.
        out, lse = without_padding(out, padded), empty_padding(lse, padded)
    return out, lse


def _exchanging(attention: Sharded, schedule: Schedule, here: Sizes, kv_heads: int) -> Schedule:
    """The schedule whose `exchange` and `balance` are chosen, for the sizes of one device."""
    degrees, asked = attention.degrees, schedule.balance
    sizes = dataclasses.replace(
        here,
        batch=degrees.data,  # Both choices are the same for every batch, also a symbolic one.
        query_tokens=here.query_tokens * degrees.sequence,
        key_tokens=here.key_tokens * degrees.sequence,
        heads=here.heads * degrees.tensor,
        kv_heads=kv_heads,
    )
    schedule, *_ = choose(schedule, degrees, sizes)
    if asked == "auto" and (schedule.balance, schedule.exchange) == ("layout", "rings"):
        advice = advice_on_balance(schedule, sizes.query_tokens, sizes.key_tokens)
        # Functions of jax are between this line and that of the caller.
        warn_of_balance(advice, stacklevel=1)
    return schedule

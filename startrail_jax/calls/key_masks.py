"""Masks of keys, and keys of any length: segment id -1 marks a key that no query sees."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array

from startrail_jax.blocks.shapes import EMPTY
from startrail_jax.calls.sharding import Sharded, int32_ids
from startrail_jax.errors import UnsupportedError
from startrail_jax.masks.algebra import shown


def valid_keys(mask: Any, query: Array, key: Array, *, causal: bool) -> Any:
    """Which keys a call's mask shows to all queries: bools [batch, kv_seq]; None for every key."""
    if mask is None:
        return None
    if isinstance(mask, (list, tuple)):
        mask = np.asarray(mask)
    shape, rows, keys = np.shape(mask), query.shape[0], key.shape[1]
    fits = shape in ((rows, 1, 1, keys), (1, 1, 1, keys))
    if not isinstance(mask, Tracer) and getattr(mask, "is_fully_addressable", True):
        values = np.asarray(mask)
        if (values == 1).all():
            return None
        # An additive mask has other values.
        fits &= bool(np.isin(values, (0, 1)).all())
    if not fits:
        already = "This attention is causal already: leave a causal mask out. "
        raise UnsupportedError(
            "Sequence-parallel attention serves a mask of keys, bools (or 0 and 1) "
            f"[batch, 1, 1, kv_seq] = {[rows, 1, 1, keys]}, and no dense mask; got mask="
            f"{shown(mask)}. {already if causal else ''}Windows and the like are "
            "mask=startrail_jax.masks... of the attention. Documents are segment_ids=, which "
            "functools.partial(attention, segment_ids=ids) brings through a module."
        )
    # Of a traced mask no value is known. An additive one, with 0 for what is seen, hides all keys.
    valid = mask[:, 0, 0] > 0
    return jnp.broadcast_to(valid, (rows, keys)) if shape[0] < rows else valid


def hide_keys(attention: Sharded, valid: Any, segment_ids: Any) -> tuple[Any, Any]:
    """The segment ids of queries and keys, with -1 for keys that are not valid."""
    ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    of_queries, of_keys = ids
    rows, keys = valid.shape
    if rows % attention.degrees.data == 0 == keys % attention.layout.multiple:
        valid = attention.placed(jnp.asarray(valid), attention.sequence_spec)
    return of_queries, jnp.where(valid, 0 if of_keys is None else int32_ids(of_keys), -1)


def without_padding(x: Array, ids: Array) -> Array:
    """Zeros at padding, which may hold anything: a weight of 0 times NaN is NaN."""
    return jnp.where(ids[..., None, None] >= 0, x, 0)


def empty_padding(lse: Array, ids: Array) -> Array:
    """The lse of rows that see no key, at padding: gradients from there go nowhere."""
    return jnp.where(ids[:, None] >= 0, lse, EMPTY)


def pad_keys(
    attention: Sharded, inputs: tuple[Array, ...], segment_ids: Any
) -> tuple[tuple[Array, ...], Any]:
    """Query, key, value and segment ids, with the keys and values of cross-attention filled up to a
    length that the layout divides: text of 77 tokens, say, which few meshes divide.

    No query sees what is added. Ids are None, or a pair of which each is an array or None; one
    array is for keys of the length of the queries, which are not filled up.
    """
    query, key, value = inputs
    missing = -key.shape[1] % attention.layout.multiple
    own = isinstance(segment_ids, tuple) or segment_ids is None
    if not missing or not own or 0 in key.shape or query.shape[1] == key.shape[1]:
        return inputs, segment_ids
    of_queries, of_keys = segment_ids or (None, None)
    of_keys = np.zeros(key.shape[:2], np.int32) if of_keys is None else int32_ids(of_keys)
    spec = attention.key_spec(key.shape[2])
    key, value = (_filled(attention, x, missing, 0, spec) for x in (key, value))
    of_keys = _filled(attention, jnp.asarray(of_keys), missing, -1, attention.sequence_spec)
    return (query, key, value), (of_queries, of_keys)


def _filled(attention: Sharded, x: Array, missing: int, fill: int, spec: PartitionSpec) -> Array:
    widths = [(0, missing) if dim == 1 else (0, 0) for dim in range(x.ndim)]
    return attention.placed(jnp.pad(x, widths, constant_values=fill), spec)

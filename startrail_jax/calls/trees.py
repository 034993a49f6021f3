"""Rows of trees: what a call, and `decode`, require of `visible_until`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int32

from startrail_jax.calls.sharding import Sharded
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.masks import Mask
from startrail_jax.rings.schedule import check_mask_of_trees
from startrail_jax.tokens.trees import check_ends

BOTH_IDS = (
    "visible_until takes the place of segment_ids, as the end of a document is a number of it; got "
    "both. Leave segment_ids out, and mark padding by negative numbers."
)


def check_trees(mask: Mask, *, segment_ids: Any, slopes: Any) -> None:
    """Raises unless an attention with this mask serves rows of trees."""
    if segment_ids is not None:
        raise InputError(BOTH_IDS)
    check_mask_of_trees(mask)
    if slopes is not None:
        raise UnsupportedError(
            "visible_until does not go with slopes, whose distances count the tokens of other "
            "branches; got both. Leave one of them out."
        )


def int32_ends(
    attention: Sharded,
    visible_until: Any,
    shape: tuple[int, ...],
    check: Callable[[np.ndarray], Any] = check_ends,
) -> Any:
    """`visible_until` of a call as int32, after a check of its values, in natural order, where they
    are known."""
    way_out = "Give each token the place after the last one that continues it."
    ends = _integers(visible_until, shape, "[batch, seq]", way_out)
    if not isinstance(ends, Tracer) and getattr(ends, "is_fully_addressable", True):
        check(attention.layout.unpermute(np.asarray(ends), 1))
    return ends.astype(np.int32)


def ends_of_slots(visible_until: Any, shape: tuple[int, ...]) -> Int32[Array, "b s"]:
    """`visible_until` of `decode` as int32. Its values are not checked, as rows may have grown in
    any order; those beyond int32 count as the largest."""
    way_out = (
        "Give each slot a number beyond the new tokens, or one that is not if they do not see it."
    )
    ends = _integers(visible_until, shape, "[batch, slots]", way_out)
    given, kept = jnp.iinfo(ends.dtype), jnp.iinfo(jnp.int32)
    if given.min < kept.min or given.max > kept.max:
        ends = ends.clip(max(given.min, -1), min(given.max, kept.max))
    return jnp.asarray(ends, jnp.int32)


def _integers(values: Any, shape: tuple[int, ...], dimensions: str, way_out: str) -> Any:
    """An array on the host or of JAX, after the checks of its shape and dtype."""
    ends = values if isinstance(values, jax.Array) else np.asarray(values)
    if ends.shape != shape or not np.issubdtype(ends.dtype, np.integer):
        raise InputError(
            f"visible_until must be integers {dimensions} = {list(shape)}; got {ends.dtype} "
            f"{list(ends.shape)}. {way_out}"
        )
    return ends

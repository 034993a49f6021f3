"""Warnings of tokens that are, or may be, in another order or dimension than an attention expects.

Attention to tokens in a wrong order gives losses that look healthy, so what can be noticed is said.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from startrail_jax.errors import OrderWarning
from startrail_jax.tokens.layout import Layout

CURE = (
    "Bring tokens, targets, positions and segment ids to the devices with attention.shard, or "
    "build the attention with layout='contiguous'."
)


def warn_of_order(layout: Layout, segment_ids: Any) -> None:
    """Warns of tokens that are called with, and that cannot be, or do not look, in layout order.

    Args:
        layout: the layout of a causal attention.
        segment_ids: None, or a tree of arrays of segment ids; traced ones are not looked at.
    """
    if layout.in_natural_order:
        return
    if not layout.used:
        _warn_of_order(
            f"This attention expects tokens in {layout.kind} order over {layout.degree} devices, "
            "and nothing in this process was brought into that order. Tokens in natural order give "
            "plausible but wrong results."
        )
    elif any(_runs(x) < _runs(layout.unpermute(x)) for x in _known(segment_ids)):
        _warn_of_order(
            "The segment ids are in natural order, where each document is one run of tokens; this "
            f"attention expects {layout.kind} order over {layout.degree} devices."
        )


def warn_of_dimensions(query: Any, key: Any) -> None:
    """Warns of queries and keys whose heads are probably where their tokens belong.

    Sequences that are worth splitting have more tokens than a model has heads. So arrays [batch,
    heads, seq, head_dim] seem to have more heads than tokens, on both sides; short queries of long
    keys have so on one.

    Args:
        query, key: arrays of four dimensions.
    """
    if all(x.shape[2] > x.shape[1] for x in (query, key)):
        _warn(
            "query and key must be [batch, seq, heads, head_dim]; got query "
            f"{list(query.shape)} and key {list(key.shape)}, which have more heads than tokens. If "
            "they are [batch, heads, seq, head_dim], swap the dimensions: query.swapaxes(1, 2).",
        )


def warn_of_positions(layout: Layout, positions: Any) -> None:
    """Warns of positions [batch, seq] that rise from token to token where the layout's do not.

    Args:
        layout: the layout of an attention.
        positions: the positions of the tokens in their sequence or document; traced ones are not
            looked at.
    """
    if layout.in_natural_order:
        return
    for x in _known(positions):
        if x.shape[-1] > 2 and (np.diff(x) == 1).all():
            _warn_of_order(
                "The positions are in natural order, 0, 1, 2, ...; this attention expects "
                f"{layout.kind} order over {layout.degree} devices. Use "
                "attention.layout.positions(seq_len)."
            )


def _known(arrays: Any) -> list[np.ndarray]:
    """The arrays of a tree whose values are known here and now."""
    return [
        np.asarray(x)
        for x in jax.tree.leaves(arrays)
        if not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)
    ]


def _runs(ids: np.ndarray) -> int:
    """Number of places where neighbours along the last dimension differ."""
    return int((ids[..., 1:] != ids[..., :-1]).sum())


def _warn_of_order(message: str) -> None:
    _warn(f"{message} {CURE}", 1)


def _warn(message: str, inner: int = 0) -> None:
    # To the line that called the attention: above this function and `inner` others, the one that
    # calls them, the visit of the inputs and the method itself.
    warnings.warn(message, OrderWarning, stacklevel=5 + inner)

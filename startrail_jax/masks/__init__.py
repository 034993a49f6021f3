"""Which keys a query sees, as values: causal masks, windows, chunks, and what they combine to.

    from startrail_jax import masks

    masks.Causal() & (masks.Window(1023, 0) | masks.Sinks(4))

A mask speaks of natural positions: those that the tokens of a row have before any layout moves
them, counted from the start of the row, whatever documents the row is packed of. For two spans of
positions it says whether some pair is visible and whether every pair is; tiles, ring rounds, byte
counts and `Attention.explain` all ask that.
"""

from startrail_jax.masks.algebra import Both, Causal, Either, Full, Mask, Window
from startrail_jax.masks.kinds import BlockCausal, Chunked, Prefix, Rule, Sinks, resolve

__all__ = [
    "BlockCausal",
    "Both",
    "Causal",
    "Chunked",
    "Either",
    "Full",
    "Mask",
    "Prefix",
    "Rule",
    "Sinks",
    "Window",
    "resolve",
]

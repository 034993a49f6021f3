"""The contract of a block backend: attention of one query unit to one key unit.

A block knows no mesh axis. A backend that cannot serve a request raises `NotImplementedError`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float32

from startrail_jax.mask import Mask
from startrail_jax.shapes import KeyShard, LseShard, OutShard, QueryShard, ValueShard


@runtime_checkable
class Block(Protocol):
    """A block backend: a module with these two functions."""

    def forward(
        self,
        q: QueryShard,
        k: KeyShard,
        v: ValueShard,
        mask: Mask,
        scale: float,
        into: tuple[Float32[Array, "b t n v"], LseShard] | None = None,
    ) -> tuple[Float32[Array, "b t n v"], LseShard]:
        """out = softmax(scale q k^T) v over the visible keys.

        Args:
            into: (out, lse) of the same queries over other keys, to merge with.

        Returns:
            out in float32, 0 in rows that see no key; lse in float32, the natural log of the sum of
            exponentials of the scaled logits, EMPTY in such rows.
        """
        ...

    def backward(
        self,
        q: QueryShard,
        k: KeyShard,
        v: ValueShard,
        lse: LseShard,
        delta: LseShard,
        dout: OutShard,
        mask: Mask,
        scale: float,
        into: tuple[Array | None, Array | None, Array | None] = (None, None, None),
    ) -> tuple[Float32[Array, "b t n h"], Float32[Array, "b s k h"], Float32[Array, "b s k v"]]:
        """This block's share of dq, dk, dv, in float32.

            p = exp(scale q k^T - lse),  ds = p * (dout v^T - delta)
            dq = scale ds k,  dk = scale ds^T q,  dv = p^T dout

        Args:
            lse: over *all* keys of each row, not only this block's.
            delta: rowsum(dout * out) - dlse, likewise global.
            into: sums of dq, dk and dv to add to, in float32, where there are any.
        """
        ...

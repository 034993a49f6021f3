"""The contract of a block backend: attention of one query unit to one key unit.

A block knows no mesh axis. What a backend cannot serve, its `refusal` says, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float

from startrail_jax.mask import Mask
from startrail_jax.shapes import KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.softmax import Partials


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a block, as far as it is known while tracing."""

    platform: str | None
    """"cpu", "cuda", ..., or None if the devices are not known."""
    capability: tuple[int, int] | None
    """Least CUDA compute capability of the devices; None if it is not known, or not CUDA."""
    dtype: str
    head_dim: int
    value_head_dim: int
    causal: bool
    window: int | None
    packed: bool
    """Whether there are segment ids."""
    num_cases: int
    """Sets of `Pieces` that a causal mask may be made of; 0 if it does not fall into such."""


@runtime_checkable
class Block(Protocol):
    """A block backend: a module with these functions."""

    def refusal(self, request: Request) -> str | None:
        """Why the backend does not serve a request, with the values; None if it does."""
        ...

    def forward(
        self,
        q: QueryShard,
        k: KeyShard,
        v: ValueShard,
        mask: Mask,
        scale: float,
        into: Partials = (),
    ) -> Partials:
        """out = softmax(scale q k^T) v over the visible keys.

        Args:
            into: attentions of the same queries to other keys.

        Returns:
            `into` and this block's, merged as far as suits the backend: (out, lse) pairs, out in
            the dtype of q or in float32, 0 in rows that see no key; lse in float32, the natural log
            of the sum of exponentials of the scaled logits, EMPTY in such rows.
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
    ) -> tuple[Float[Array, "b t n h"], Float[Array, "b s k h"], Float[Array, "b s k v"]]:
        """This block's share of dq, dk, dv: added to `into` in float32, or as the kernel has it.

            p = exp(scale q k^T - lse),  ds = p * (dout v^T - delta)
            dq = scale ds k,  dk = scale ds^T q,  dv = p^T dout

        Args:
            lse: over *all* keys of each row, not only this block's.
            delta: rowsum(dout * out) - dlse, likewise global.
            into: sums of dq, dk and dv to add to, in float32, where there are any.
        """
        ...

"""The contract of a block backend: attention of one query unit to one key unit, on one device.

A block knows no mesh axis. Its `refusal` says which requests it cannot serve, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Array

from startrail_jax.blocks.scores import PLAIN, Scores
from startrail_jax.blocks.softmax import Partials
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.masks import Pattern
from startrail_jax.shapes import KeyShard, LseShard, OutShard, QueryShard, ValueShard


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a block, as far as it is known while tracing."""

    platform: str | None
    """Platform of the devices, one of `mesh.PLATFORMS`; None if it is not known."""
    capability: tuple[int, int] | None
    """Least CUDA compute capability of the devices; None if it is not known, or not CUDA."""
    dtype: str
    """Name of the dtype of q, k and v."""
    head_dim: int
    """Channels of a query or key head."""
    value_head_dim: int
    """Channels of a value head."""
    mask: Pattern
    """Which position sees which; the simplest mask for the length of the sequence."""
    packed: bool
    """Whether there are segment ids."""
    num_cases: int
    """Number of sets of `Pieces` that the mask may be; 0 if it does not fall into pieces."""
    softcap: float | None = None
    """Cap of the logits; None for none."""
    scores: tuple[str, ...] = ()
    """What else the call gives for the scores, of `scores.NAMES`."""


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
        visibility: Visibility,
        scale: float,
        into: Partials = (),
        scores: Scores = PLAIN,
    ) -> Partials:
        """Attends queries to the keys that they see: out = softmax(scale q k^T) v.

        Args:
            q, k, v: the query unit and the key unit, in order of position.
            visibility: which keys each query sees.
            scale: factor of the logits.
            into: attentions of the same queries to other keys.
            scores: caps, biases and dropout of the pair.

        Returns:
            The attentions of `into` and of this block, merged as far as suits the backend, as
            (out, lse) or (out, lse, low). out is in the dtype of q or in float32, and 0 in rows
            that see no key. lse is in float32: the natural logarithm of the sum of the exponentials
            of the scaled logits, and EMPTY in rows that see no key. low is what rounding took from
            it (see `softmax.Partials`).
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
        visibility: Visibility,
        scale: float,
        into: tuple[Array | None, ...] = (None, None, None),
        scores: Scores = PLAIN,
    ) -> tuple[Array, ...]:
        """What the visible pairs of this block contribute to the gradients dq, dk and dv.

            p = exp(scale q k^T - lse),  ds = p * (dout v^T - delta)
            dq = scale ds k,  dk = scale ds^T q,  dv = p^T dout

        Args:
            q, k, v: the query unit and the key unit, in order of position.
            lse: log-sum-exp of each row over *all* its keys, not only those of this block.
            delta: rowsum(dout * out) - dlse, over all keys too.
            dout: gradient of the output.
            visibility: which keys each query sees.
            scale: factor of the logits.
            into: float32 sums of what is returned, to add to; None where there is none yet. It
                may leave out those of `scores`.
            scores: caps, biases and dropout of the pair, with which ds is as `scores` says.

        Returns:
            dq [b, t, n, h], dk [b, s, k, h] and dv [b, s, k, v], then the gradients of
            `scores.learnt`. They are float32 where something was added, else in the dtype in which
            the backend computes them.

        References:
            FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.1.2.
        """
        ...

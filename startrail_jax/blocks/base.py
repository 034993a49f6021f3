"""The contract of a block backend: attention of one query unit to one key unit, on one device.

A block does not depend on the mesh. Its `refusal` says which requests it does not support, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array

from startrail_jax.blocks.scores import PLAIN, Scores
from startrail_jax.blocks.shapes import KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.blocks.softmax import Partials
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.masks import Mask


@dataclass(frozen=True, kw_only=True)
class Request:
    """The static properties of a call of a block, which are known while tracing."""

    platform: str
    """Platform of the devices, one of `startrail_jax.devices.degrees.PLATFORMS`."""
    capability: tuple[int, int] | None
    """Least CUDA compute capability of the devices; None if it is not known, or not CUDA."""
    dtype: str
    """Name of the dtype of q, k and v."""
    head_dim: int
    """Channels of a query or key head."""
    value_head_dim: int
    """Channels of a value head."""
    mask: Mask
    """The simplest mask for the length of the sequence."""
    packed: bool
    """True if there are segment ids."""
    num_cases: int
    """Number of sets of `Pieces` that the mask may be; 0 if it does not fall into pieces."""
    softcap: float | None = None
    """Cap of the logits; None for none."""
    scores: tuple[str, ...] = ()
    """Other score inputs of the call, among `scores.NAMES`."""
    trees: bool = False
    """True if ids are the ends of stretches: see `Visibility.trees`. A block of your own serves
    them if it says so by an attribute `trees = True`."""
    near: int | None = None
    """In trees, a window, in tokens of a branch: see `Visibility.near`."""


class Pair(NamedTuple):
    """A query unit and a key unit, both in order of position, and the computation on them."""

    q: QueryShard
    """Queries [b, t, n, h]."""
    k: KeyShard
    """Keys [b, s, k, h]; neighbouring query heads share a key head."""
    v: ValueShard
    """Values [b, s, k, v]."""
    visibility: Visibility
    """The keys that each query sees."""
    scale: float
    """Factor of the logits."""
    scores: Scores = PLAIN
    """Caps, biases and dropout, which change ds as `startrail_jax.blocks.scores` says."""


@runtime_checkable
class Block(Protocol):
    """A block backend: a module with these functions."""

    def refusal(self, request: Request) -> str | None:
        """The reason why the backend does not support a request, with the values; None if it
        does."""
        ...

    def forward(self, pair: Pair, into: Partials = ()) -> Partials:
        """Computes the attention of queries to their visible keys: out = softmax(scale q k^T) v.

        Args:
            pair: the units.
            into: attentions of the same queries to other keys.

        Returns:
            The attentions of `into` and of this block, merged as far as suits the backend, as
            (out, lse) or (out, lse, low). out is in the dtype of q or in float32, and 0 in rows
            that see no key. lse is in float32: the natural logarithm of the sum of the exponentials
            of the scaled logits, and EMPTY in rows that see no key. low is the rounding error of
            lse (see `softmax.Partials`).
        """
        ...

    def backward(
        self,
        pair: Pair,
        lse: LseShard,
        delta: LseShard,
        dout: OutShard,
        into: tuple[Array | None, ...] = (None, None, None),
    ) -> tuple[Array, ...]:
        """Computes the contributions of this block's visible pairs to the gradients dq, dk and dv.

            p = exp(scale q k^T - lse),  ds = p * (dout v^T - delta)
            dq = scale ds k,  dk = scale ds^T q,  dv = p^T dout

        Args:
            pair: the units.
            lse: log-sum-exp of each row over *all* its keys, not only those of this block.
            delta: rowsum(dout * out) - dlse, over all keys too.
            dout: gradient of the output.
            into: float32 sums, to which the results are added; None where there is none yet. The
                sums for scores may be missing.

        Returns:
            dq [b, t, n, h], dk [b, s, k, h] and dv [b, s, k, v], then the gradients of
            `scores.learnt`. They are float32 where something was added, else in the dtype in which
            the backend computes them.

        References:
            FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.1.2.
        """
        ...

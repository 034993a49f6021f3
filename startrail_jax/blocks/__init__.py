"""Block backends: attention of one query unit to one key unit, on one device.

`base` states the contract, `xla`, `cudnn` and `tiled` are the backends. This module chooses between
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from startrail_jax.blocks import cudnn, tiled, xla
from startrail_jax.blocks.base import Block, Request
from startrail_jax.blocks.scores import PLAIN, Scores
from startrail_jax.blocks.softmax import Partials, merge_precisely
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.errors import UnsupportedError
from startrail_jax.shapes import KeyShard, LseShard, OutShard, QueryShard, ValueShard

BACKENDS: dict[str, Block] = {"xla": xla, "cudnn": cudnn, "tiled": tiled}

# The order in which "auto" tries them.
PREFERENCE = ("cudnn", "tiled", "xla")


@dataclass(frozen=True)
class Choice:
    """Which backend serves a request, and why better ones do not."""

    backend: str
    """Name of the backend."""
    refusals: dict[str, str]
    """Name of each better backend -> why it does not serve the request."""


def choose(backend: str, request: Request) -> Choice:
    """Chooses the backend for a request; if the platform is not known, the one for CUDA.

    Args:
        backend: name of a backend, or "auto" for the first of `PREFERENCE` that serves the request.
        request: what is asked of the block.

    Raises:
        NotImplementedError: if the backend is not "auto" and does not serve the request.
    """
    if backend != "auto":
        refusal = BACKENDS[backend].refusal(request)
        if refusal:
            raise UnsupportedError(
                f"backend={backend!r} does not serve this: {refusal}. "
                "Use backend='auto', which takes the best one that does."
            )
        return Choice(backend, {})
    refusals = {name: BACKENDS[name].refusal(request) for name in PREFERENCE}
    best = next(name for name, refusal in refusals.items() if refusal is None)
    better = PREFERENCE[: PREFERENCE.index(best)]
    return Choice(best, {name: refusals[name] or "" for name in better})


def select(backend: str, request: Request) -> Block:
    """The block that serves a request.

    Under "auto", if the platform is not known yet, it is a block that chooses while it is lowered.

    Args:
        backend: name of a backend, or "auto".
        request: what is asked of the block.

    Raises:
        NotImplementedError: if the backend is not "auto" and does not serve the request.
    """
    block = BACKENDS[choose(backend, request).backend]
    if backend == "auto" and request.platform is None:
        return _ByPlatform(block, xla)
    return block


@dataclass(frozen=True)
class _ByPlatform:
    """A block that is one backend on CUDA and another elsewhere; `into` is merged at once."""

    cuda: Block
    default: Block

    def refusal(self, request: Request) -> None:
        """Returns None: the default serves everything."""

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
        """See `base.Block.forward`."""

        def attend(block: Block) -> Callable[..., Partials]:
            return lambda q, k, v, into: (
                merge_precisely(block.forward(q, k, v, visibility, scale, into, scores)),
            )

        return lax.platform_dependent(
            q, k, v, into, cuda=attend(self.cuda), default=attend(self.default)
        )

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
        """See `base.Block.backward`."""

        def differentiate(block: Block) -> Callable[..., tuple[Array, ...]]:
            def gradients(q, k, v, lse, delta, dout, into):
                grads = block.backward(q, k, v, lse, delta, dout, visibility, scale, into, scores)
                return tuple(x.astype(jnp.float32) for x in grads)

            return gradients

        return lax.platform_dependent(
            *(q, k, v, lse, delta, dout, into),
            cuda=differentiate(self.cuda),
            default=differentiate(self.default),
        )

"""Block backends: attention of one query unit to one key unit, on one device.

`base` states the contract, `xla`, `cudnn` and `tiled` are the backends. This module chooses between
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from startrail_jax.blocks import cudnn, fa4, tiled, xla
from startrail_jax.blocks.base import Block, Pair, Request
from startrail_jax.blocks.flash import Flash
from startrail_jax.blocks.shapes import LseShard, OutShard
from startrail_jax.blocks.softmax import Partials
from startrail_jax.errors import InputError, UnsupportedError

# To add a backend, name it here, and in the order in which "auto" tries them.
BACKENDS: dict[str, Block] = {
    "xla": xla, "cudnn": Flash(cudnn), "tiled": tiled, "fa4": Flash(fa4)
}  # fmt: skip
PREFERENCE = ("cudnn", "tiled", "xla")


Backend = str | Block | tuple[str | Block, ...]
"""A backend by its name, "auto", a block of your own, or several of these, the best first."""


@dataclass(frozen=True)
class Choice:
    """Which backend serves a request, and why better ones do not."""

    block: Block
    refusals: dict[str, str]
    """Name of each better backend -> why it does not serve the request."""

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return name_of(self.block)


def check_backend(backend: Any) -> Backend:
    """A backend as a hashable value; raises a ValueError if it is none."""
    several = isinstance(backend, (tuple, list))
    for one in backend if several else (backend,):
        if not (one in ("auto", *BACKENDS) if isinstance(one, str) else _is_block(one)):
            raise InputError(
                f"backend must be one of {('auto', *BACKENDS)}, a hashable object with the methods "
                "of startrail_jax.blocks.Block, such as an instance of a frozen dataclass, or a "
                f"sequence of them; got backend={one!r}. Leave it out for 'auto'."
            )
    if several and not backend:
        raise InputError("backend must name a backend; got none. Leave it out for 'auto'.")
    return tuple(backend) if several else backend


def _is_block(backend: Any) -> bool:
    if isinstance(backend, type) or not isinstance(backend, Block):
        return False
    try:
        hash(backend)
    except TypeError:
        return False
    return True


def name_of(block: Block) -> str:
    """The name of a backend: its own, or that of the class or module of yours."""
    named = (name for name, known in BACKENDS.items() if known is block)
    return next(named, getattr(block, "__name__", type(block).__name__))


def choose(backend: Backend, request: Request) -> Choice:
    """The first of several backends that serves the request; "auto" stands for `PREFERENCE`. Raises
    a NotImplementedError if none does."""
    refusals = {}
    for one in _several(backend):
        block = BACKENDS[one] if isinstance(one, str) else one
        refusal = block.refusal(request)
        if refusal is None and request.trees and not _knows_trees(block):
            refusal = "it has no attribute trees = True, so it may not know Visibility.trees"
        if refusal is None:
            return Choice(block, refusals)
        refusals[name_of(block)] = refusal
    why = "; ".join(map(str, refusals.values()))
    if len(refusals) > 1:
        why = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    raise UnsupportedError(
        f"backend={backend!r} does not serve this: {why}. "
        "Use backend='auto', which takes the best one that does, or end a sequence with 'auto'."
    )


def _several(backend: Backend) -> Iterator[str | Block]:
    for one in backend if isinstance(backend, tuple) else (backend,):
        yield from PREFERENCE if one == "auto" else (one,)


def _knows_trees(block: Block) -> bool:
    return block in BACKENDS.values() or getattr(block, "trees", False)


def select(backend: Backend, request: Request) -> Block:
    """The block that serves a request; raises a NotImplementedError if none does."""
    block = choose(backend, request).block
    return block if block in BACKENDS.values() else Checked(block)


@dataclass(frozen=True)
class Checked:
    """A block of the user's, which is held to the shapes and dtypes of its contract."""

    block: Block

    def refusal(self, request: Request) -> str | None:
        """See `base.Block.refusal`."""
        return self.block.refusal(request)

    def forward(self, pair: Pair, into: Partials = ()) -> Partials:
        """See `base.Block.forward`."""
        parts, q = self.block.forward(pair, into), pair.q
        batch, tokens, heads, _ = q.shape
        out = (batch, tokens, heads, pair.v.shape[3]), (q.dtype, "float32")
        lse = (batch, heads, tokens), ("float32",)
        valid = isinstance(parts, tuple) and 1 <= len(parts) <= len(into) + 1
        valid = valid and all(
            isinstance(part, tuple)
            and len(part) in (2, 3)
            and all(_fits(x, *wanted) for x, wanted in zip(part, (out, lse, lse), strict=False))
            for part in parts
        )
        if not valid:
            raise self._error("forward", f"a tuple of ({_said(*out)}, {_said(*lse)})", parts)
        return parts

    def backward(
        self,
        pair: Pair,
        lse: LseShard,
        delta: LseShard,
        dout: OutShard,
        into: tuple[Array | None, ...] = (None, None, None),
    ) -> tuple[Array, ...]:
        """See `base.Block.backward`."""
        grads = self.block.backward(pair, lse, delta, dout, into)
        likes = pair.q, pair.k, pair.v, *pair.scores.learnt
        valid = isinstance(grads, tuple) and len(grads) == len(likes)
        if not valid or not all(
            _fits(x, like.shape, ("float32",) if total is not None else (like.dtype, "float32"))
            for x, like, total in zip_longest(grads, likes, into[: len(likes)])
        ):
            said = ", ".join(_said(like.shape, ("float32",)) for like in likes)
            raise self._error("backward", f"the gradients ({said})", grads)
        return grads

    def _error(self, method: str, wanted: str, given: Any) -> InputError:
        shown = jax.tree.map(lambda x: _said(jnp.shape(x), (jnp.asarray(x).dtype,)), given)
        return InputError(
            f"{method} of the backend {name_of(self.block)} must give {wanted}; got {shown}. See "
            f"startrail_jax.blocks.Block.{method}."
        )


def _fits(x: Any, shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> bool:
    return isinstance(x, jax.Array) and x.shape == shape and x.dtype in map(jnp.dtype, dtypes)


def _said(shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> str:
    return f"{dtypes[-1]}{list(shape)}"

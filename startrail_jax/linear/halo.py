"""The slices of a device, each with the tokens before it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

from startrail_jax.devices.degrees import Axis
from startrail_jax.rings import collectives


def with_tokens_before(
    x: Shaped[Array, "b t *m"],
    first: Shaped[Array, "b e *m"],
    axis: Axis,
    *,
    zigzag: bool,
    dtype: Any = None,
) -> Shaped[Array, "b s et *m"]:
    """The slices of a device, p and 2P - 1 - p in zigzag order, behind the e tokens before them.

    Other devices send these, in one message, or two under zigzag. A slice has at least e tokens;
    `first` stands before the first token of all. With a `dtype`, the result has it, and gradients
    are summed in it; messages have that of x.
    """
    n, p, extra = axis.degree, collectives.index(axis), first.shape[1]
    up, down = (pairs_along(n, 1, way) for way in (True, False))
    slices = x.reshape(x.shape[0], 2 if zigzag else 1, -1, *x.shape[2:]).astype(dtype or x.dtype)
    tails = slices[:, :, slices.shape[2] - extra :].astype(x.dtype)
    early = collectives.permute(tails[:, 0], axis, up) if n > 1 else first
    before = [jnp.where(p == 0, first, early)]
    if zigzag:  # The late slice of the last device comes right after its early one.
        late = collectives.permute(tails[:, 1], axis, down) if n > 1 else tails[:, 0]
        before.append(jnp.where(p == n - 1, tails[:, 0], late))
    return jnp.concatenate([jnp.stack(before, 1).astype(slices.dtype), slices], 2)


def pairs_along(n: int, distance: int, up: bool) -> list[tuple[int, int]]:
    """(sender, receiver) of all messages that go some distance up a line of n devices, or down."""
    pairs = [(p, p + distance) for p in range(n - distance)]
    return pairs if up else [(target, source) for source, target in pairs]


def kept(mask: Bool[Array, "*m"], x: Array) -> Array:
    """An array where a mask of its first dimensions holds, and zeros elsewhere.

    Without the barrier, XLA would compute the mask of all channels before a loop over layers, since
    it is the same for all of them, and hold it throughout.
    """
    mask, _ = lax.optimization_barrier((mask, lax.stop_gradient(x.ravel()[:1])))
    return jnp.where(wide(mask, x), x, 0)


def wide(mask: Bool[Array, "*m"], x: Array) -> Bool[Array, "*n"]:
    """A mask of the first dimensions of an array, with as many dimensions as it has."""
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))


def begins(ids: Int32[Array, "*m t"]) -> Bool[Array, "*m t-1"]:
    """Where a document begins, from the second token on: padding begins none."""
    return (ids[..., 1:] != ids[..., :-1]) & (ids[..., 1:] >= 0)

"""The slices of a device, each with the tokens before it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

from startrail_jax.devices.degrees import Axis
from startrail_jax.rings import collectives


def slices_and_before(
    x: Shaped[Array, "b t *m"],
    first: Shaped[Array, "b e *m"],
    axis: Axis,
    *,
    zigzag: bool,
    dtype: Any = None,
) -> tuple[Shaped[Array, "b s _ *m"], Shaped[Array, "b s e *m"]]:
    """The slices of a device, p and 2P - 1 - p in zigzag order, and the e tokens before each.

    Other devices send these, in one message, or two under zigzag. A slice has at least e tokens;
    `first` stands before the first token of all. With a `dtype`, the results have it, and gradients
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
    return slices, jnp.stack(before, 1).astype(slices.dtype)


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


def begins(ids: Int32[Array, "*m t"], before: Int32[Array, "*m"]) -> Bool[Array, "*m t"]:
    """Where a document begins: at tokens whose id is not that of the last token in front of them
    that is no padding. `before` is this of the first one, negative if there is none: then nothing
    begins."""
    earlier = _last_up_to(jnp.concatenate([before[..., None], ids], -1))[..., :-1]
    return (ids >= 0) & (earlier >= 0) & (ids != earlier)


def ids_before(ids: Int32[Array, "b t"], axis: Axis, *, zigzag: bool) -> Int32[Array, "b s"]:
    """The id of the last token before each slice of a device that is no padding, and -1 if there is
    none. Padding may fill whole slices, so all devices send each other one id of each slice."""
    slices = ids.reshape(ids.shape[0], 2 if zigzag else 1, -1)
    line = of_all_slices(_last_up_to(slices)[..., -1], axis)
    line = _last_up_to(jnp.pad(line, [(1, 0), (0, 0)], constant_values=-1).swapaxes(0, 1))
    return jnp.take(line, numbers_of_slices(axis, slices.shape[1]), axis=1)


def of_all_slices(x: Shaped[Array, "b s *m"], axis: Axis) -> Shaped[Array, "n b *m"]:
    """What the slices of all devices have, gathered, in natural order."""
    every = collectives.gather(x[None], axis, 0)
    if x.shape[1] == 1:
        return every[:, :, 0]
    return jnp.concatenate([every[:, :, 0], every[::-1, :, 1]])


def numbers_of_slices(axis: Axis, count: int) -> Int32[Array, " s"]:
    """The numbers of the one or two slices of this device, among those of all."""
    p = jnp.asarray(collectives.index(axis), jnp.int32)
    return jnp.stack([p, 2 * axis.degree - 1 - p][:count])


def _last_up_to(ids: Int32[Array, "*m t"]) -> Int32[Array, "*m t"]:
    """The id of the last token up to each one that is no padding; negative if there is none."""
    return lax.associative_scan(lambda x, y: jnp.where(y < 0, x, y), ids, axis=-1)

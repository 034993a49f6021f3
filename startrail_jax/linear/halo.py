"""The tokens before each slice of a device."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from startrail_jax.devices.degrees import Axis
from startrail_jax.rings import collectives


def tokens_before(
    x: Shaped[Array, "b t *m"], axis: Axis, width: int, *, zigzag: bool
) -> Shaped[Array, "b s w *m"]:
    """The last `width` tokens before each slice of a device; zeros before the first of all.

    They arrive in one message, and in two under zigzag. A slice has at least `width` tokens.
    """
    n, p = axis.degree, collectives.index(axis)
    up = [(i, i + 1) for i in range(n - 1)]
    slices = x.reshape(x.shape[0], 2 if zigzag else 1, -1, *x.shape[2:])
    tails = slices[:, :, slices.shape[2] - width :]
    if n == 1:
        came = jnp.zeros_like(tails[:, 0])
        return jnp.stack([came, tails[:, 0]] if zigzag else [came], 1)
    early = collectives.permute(tails[:, 0], axis, up)
    if not zigzag:
        return early[:, None]
    # The late slice of the last device comes right after its early one.
    late = collectives.permute(tails[:, 1], axis, [(j, i) for i, j in up])
    return jnp.stack([early, jnp.where(p == n - 1, tails[:, 0], late)], 1)

"""Attention for some heads at a time, so that a device holds the units of few heads at once.

The device runs the six steps of `vjp.py` for one chunk of its heads after the other, as heads do
not meet in attention. All chunks together send the same bytes, in more messages. UPipe,
https://arxiv.org/abs/2602.21196, does so for the head exchange; here any scheme does.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from startrail_jax.errors import InputError
from startrail_jax.xla.ordering import in_turn

AT_ONCE = 2
"""Chunks at a time: one whose messages are under way, beneath the kernels of another."""


def check_head_chunks(head_chunks: int, kv_heads: int) -> None:
    """Raises a ValueError unless as many chunks divide the key heads that a device attends."""
    if kv_heads % head_chunks:
        divisors = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        raise InputError(
            "head_chunks must divide the key heads of a device, which are kv_heads / (head * "
            f"tensor), since chunks that share a key head would send it more than once; got "
            f"head_chunks={head_chunks}, key heads of a device={kv_heads}. Use one of {divisors}."
        )


def in_chunks(
    attend: Callable[[int, Array, Array, Array | None], tuple[Array, Array]],
    head_chunks: int,
    q: Array,
    k: Array,
    v: Array | None,
) -> tuple[Array, Array]:
    """Attention of all heads, chunk by chunk: out [b, t, n, v] and lse [b, n, t].

    A chunk begins when the last but one is done, in both passes, so that `AT_ONCE` of them take
    memory at a time. `attend` gets the number of a chunk's first query head, and its q
    [b, t, n, h], k [b, s, k, h] and v [b, s, k, v]; it gives out and lse. Neighbouring heads share
    a key head. Latents are one key head without v, and so one chunk.
    """
    if head_chunks == 1 or v is None:
        return attend(0, q, k, v)
    found: list[tuple[Array, Array]] = []
    for chunk in zip(*(jnp.split(x, head_chunks, 2) for x in (q, k, v)), strict=True):
        if len(found) >= AT_ONCE:
            found[-AT_ONCE], chunk = in_turn(found[-AT_ONCE], chunk)
        found.append(attend(len(found) * chunk[0].shape[2], *chunk))
    outs, lses = zip(*found, strict=True)
    return jnp.concatenate(outs, 2), jnp.concatenate(lses, 1)

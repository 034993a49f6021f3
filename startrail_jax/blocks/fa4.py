"""FlashAttention-4's kernels as functions of arrays on one device, and what they serve.

They come with the package `fa4-jax`, which compiles them for the GPU at hand. On an H200 they take
0.84 to 0.89 of the time of cuDNN's kernels, forward and backward, and less than half of it for
packed documents. They sum the gradients of queries in any order, so that the last bits of two runs
may differ.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from startrail_jax.blocks.base import Request
from startrail_jax.blocks.cudnn import DTYPES, Segments, refusal_of_scores
from startrail_jax.blocks.shapes import KeyShard, LseShard, OutShard, QueryShard, ValueShard
from startrail_jax.masks.algebra import causal_window
from startrail_jax.xla.varying import alike

# See `packed.Kernels`.
by_segment = False
leading = False

WIDEST = 128
"""Greatest head_dim of keys and of values."""


def refusal(request: Request) -> str | None:
    """Why the kernels do not serve a request, whatever its mask; None if they may."""
    head_dims = request.head_dim, request.value_head_dim
    if request.platform != "cuda":
        return f"it needs NVIDIA GPUs; got platform {request.platform!r}"
    if request.capability is not None and request.capability < (9, 0):
        return (
            "it has been tried from compute capability 9.0 on; got "
            f"{'.'.join(map(str, request.capability))}"
        )
    if request.dtype not in DTYPES:
        return f"its dtypes are {' and '.join(DTYPES)}; got {request.dtype}"
    if any(head_dim % 8 or head_dim > WIDEST for head_dim in head_dims):
        return (
            f"head_dim must be a multiple of 8 of at most {WIDEST}; got "
            f"{' and '.join(map(str, dict.fromkeys(head_dims)))}"
        )
    if causal_window(request.mask):
        return f"its windows have run on no GPU yet; got mask={request.mask}"
    if importlib.util.find_spec("fa4_jax") is None:
        return "it needs the package fa4-jax: pip install '.[fa4]', on Python 3.12 or later"
    return refusal_of_scores(request)


def attend(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    scale: float,
    causal: bool,
    window: int = 0,
    segments: Segments | None = None,
    edge: bool = False,
) -> tuple[OutShard, LseShard]:
    """Calls the forward kernel. See `cudnn.attend`; lse is always [b, n, t]."""
    b, t, n, _ = q.shape
    library, config = _kernel(scale, causal, window, segments is not None, edge)
    arrays, told = _flat(segments, edge, q, k, v)
    out, lse = library.fwd_lse(config, *arrays, (), told)
    if segments is not None:
        out, lse = out.reshape(b, t, n, -1), lse.reshape(n, b, t).swapaxes(0, 1)
    out, lse, *_ = alike(out, lse, *arrays)
    return out, lse


def gradients(
    q: QueryShard,
    k: KeyShard,
    v: ValueShard,
    lse: LseShard,
    out: OutShard,
    dout: OutShard,
    scale: float,
    causal: bool,
    window: int = 0,
    segments: Segments | None = None,
    edge: bool = False,
) -> tuple[QueryShard, KeyShard, ValueShard]:
    """Calls the backward kernel. See `cudnn.gradients`; lse is always [b, n, t]."""
    library, config = _kernel(scale, causal, window, segments is not None, edge)
    (rows, keys, values, out, dout), told = _flat(segments, edge, q, k, v, out, dout)
    if segments is not None:
        lse = lse.swapaxes(0, 1).reshape(lse.shape[1], -1)
    grads = library.vjp(config, rows, keys, values, out, lse, dout, None, (), told)
    dq, dk, dv = (dx.reshape(x.shape) for dx, x in zip(grads, (q, k, v), strict=True))
    dq, dk, dv, *_ = alike(dq, dk, dv, rows, keys, lse, dout)
    return dq, dk, dv


def _kernel(
    scale: float, causal: bool, window: int, segmented: bool, edge: bool
) -> tuple[Any, Any]:
    """The functions of the package, and the kind of kernel that they call."""
    from fa4_jax.attention import (  # pyright: ignore[reportMissingImports]
        AttnConfig,
        get_backend,
    )

    # How many keys before a query it sees, and how many after it; None for all. The last query of a
    # segment is at the last key. A causal mask without a window is told in another way.
    sides = (window - 1, 0) if window else (0, None) if edge else (None, None)
    local = sides != (None, None)
    config = AttnConfig(
        causal=causal and not local,
        local=local,
        window=sides,
        scale=scale,
        mask=None,
        backend="cute",
        varlen=segmented,
    )
    return get_backend("cute"), config


def _flat(segments: Segments | None, edge: bool, *arrays: Array) -> tuple[Any, Any]:
    """Arrays [b, t, n, h] as the kernels get them, and what tells them their segments: where each
    begins, over all rows, and its length; of queries, and of keys."""
    if segments is None:
        return alike(*arrays), None
    (b, t), s = arrays[0].shape[:2], arrays[1].shape[1]
    queries, keys, of_queries, of_keys, _ = segments
    if of_queries is None or of_keys is None:
        rows = jnp.arange(b, dtype=jnp.int32)
        of_queries, of_keys = rows * t, (rows + 1) * s - keys
        # Of an edge, all queries count, so that the last one is at the last key.
        queries = jnp.full_like(queries, t) if edge else queries
    # The first segment begins at the first token and is empty.
    starts = (
        jnp.concatenate([jnp.zeros(1, jnp.int32), x, jnp.full(1, b * n, jnp.int32)])
        for x, n in ((of_queries, t), (of_keys, s))
    )
    lengths = (jnp.append(jnp.zeros(1, jnp.int32), x) for x in (queries, keys))
    flat = (x.reshape(-1, *x.shape[2:]) for x in arrays)
    *flat, of_queries, of_keys, queries, keys = alike(*flat, *starts, *lengths)
    return flat, (of_queries, of_keys, queries, keys)

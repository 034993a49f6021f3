"""cuDNN's attention kernels in plain JAX, by the contract of `startrail_jax.blocks.cudnn`."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from startrail_jax.blocks import cudnn, packed

_dot = functools.partial(
    jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
)


def attend(q, k, v, scale, causal, window=0, segments=None):
    """Returns out [b, t, n, v] in the dtype of q and lse in float32, NaN outside of segments."""
    assert q.shape[3] == v.shape[3] or not _joins_rows(segments)
    seen, inside = _visible(q, k, causal, window, segments)
    rows, keys, values = (_joined(x, segments) for x in (q, k, v))
    logits = _logits(rows, keys, scale, seen)
    lse = jax.nn.logsumexp(logits, axis=-1)
    p = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    out = _dot("bkgts,bskv->btkgv", _rounded(p, q.dtype), values)
    out = rearrange(_rounded(out, q.dtype), "b t k g v -> b t (k g) v")
    lse = rearrange(lse, "b k g t -> b (k g) t")
    out = _outside(out, inside[0]).reshape(*q.shape[:3], -1)
    if _joins_rows(segments):
        index, there = _queries_of(segments, q)
        lse = rearrange(lse[0][:, index], "n s t -> s n t")
        lse = jnp.where(there[:, None], lse, jnp.nan)
    elif segments is not None:
        lse = jnp.where(inside[0][:, None], lse, jnp.nan)
    return out, lse


def gradients(q, k, v, lse, out, dout, scale, causal, window=0, segments=None):
    """Returns dq, dk, dv in the dtype of q, NaN outside of segments."""
    assert q.dtype == out.dtype == dout.dtype
    seen, inside = _visible(q, k, causal, window, segments)
    if _joins_rows(segments):
        index, there = _queries_of(segments, q)
        tokens = q.shape[0] * q.shape[1]
        flat = jnp.zeros((lse.shape[1], tokens), lse.dtype)
        index = jnp.where(there, index, tokens)
        lse = flat.at[:, index].set(rearrange(lse, "s n t -> n s t"), mode="drop")[None]
    shapes = [x.shape for x in (q, k, v)]
    q, k, v, out, dout = (_joined(x, segments) for x in (q, k, v, out, dout))
    delta = _dot("btnv,btnv->bnt", out, dout)
    lse, delta = (rearrange(x, "b (k g) t -> b k g t 1", k=k.shape[2]) for x in (lse, delta))
    rows, dout = _grouped(q, k), _grouped(dout, k)
    p = jnp.exp(_logits(q, k, scale, seen) - lse)
    ds = p * (_dot("btkgv,bskv->bkgts", dout, v) - delta) * scale
    p, ds = _rounded(p, q.dtype), _rounded(ds, q.dtype)
    dq = rearrange(_dot("bkgts,bskh->btkgh", ds, k), "b t k g h -> b t (k g) h")
    dk, dv = _dot("bkgts,btkgh->bskh", ds, rows), _dot("bkgts,btkgv->bskv", p, dout)
    inside = inside[0], inside[1], inside[1]
    return tuple(
        _outside(_rounded(x, q.dtype), there).reshape(shape)
        for x, there, shape in zip((dq, dk, dv), inside, shapes, strict=True)
    )


def install(monkeypatch, calls=None):
    """Replaces the kernels, and lists their calls: (name, (queries, keys, causal or window))."""
    real = cudnn.refusal
    usual = dict(
        platform="cuda", capability=(9, 0), dtype="bfloat16", head_dim=64, value_head_dim=64
    )
    monkeypatch.setattr(
        cudnn, "refusal", lambda request: real(dataclasses.replace(request, **usual))
    )
    for kernel in (attend, gradients):
        monkeypatch.setattr(cudnn, f"_{kernel.__name__}", _recorded(kernel, calls))


def short_levels(monkeypatch):
    """Lets documents of a few tokens have several levels; clear jax's caches at the end."""
    for name, tokens in (("STEP", 2), ("LEAST", 4), ("SHORTEST", 1)):
        monkeypatch.setattr(packed, name, tokens)
    jax.clear_caches()


def _recorded(kernel, calls):
    if calls is None:
        return kernel

    @functools.wraps(kernel)
    def recorded(q, k, *operands, **named):
        given = inspect.signature(kernel).bind(q, k, *operands, **named).arguments
        mask = given.get("window") or given["causal"]
        call = kernel.__name__, (q.shape[1], k.shape[1], mask)
        jax.debug.callback(lambda: calls.append(call))
        return kernel(q, k, *operands, **named)

    return recorded


def _rounded(x, dtype):
    """x in `dtype`. Of a plain cast XLA drops the rounding, if float32 is wanted again."""
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def _grouped(x, k):
    return rearrange(x, "b t (k g) h -> b t k g h", k=k.shape[2])


def _logits(q, k, scale, seen):
    """[b, k, g, t, s], -inf where a key is hidden."""
    logits = _dot("btkgh,bskh->bkgts", _grouped(q, k), k) * scale
    return jnp.where(seen[:, None, None], logits, -jnp.inf)


def _visible(q, k, causal, window, segments):
    """Whether each query sees each key, [1 or b, t, s]; and which tokens lie in segments."""
    assert not window or (causal and q.shape[1] == k.shape[1])
    if segments is None:
        i, j = (np.arange(x.shape[1])[None] for x in (q, k))
        inside = i >= 0, j >= 0
        numbers = jnp.zeros_like(i), jnp.zeros_like(j)
    elif segments.query_starts is None:
        i, j = (jnp.broadcast_to(np.arange(x.shape[1]), x.shape[:2]) for x in (q, k))
        lengths = segments.query_lengths, segments.key_lengths
        inside = tuple(x < length[:, None] for x, length in zip((i, j), lengths, strict=True))
        numbers = jnp.zeros_like(i), jnp.zeros_like(j)
    else:
        of_queries = _places(q, segments.query_starts, segments.query_lengths)
        of_keys = _places(k, segments.key_starts, segments.key_lengths)
        numbers, places, inside = zip(of_queries, of_keys, strict=True)
        i, j = places
    i, j = i[:, :, None], j[:, None, :]
    seen = (j <= i) | (not causal)
    if window:
        seen &= j > i - window
    same = numbers[0][:, :, None] == numbers[1][:, None, :]
    return seen & same & inside[0][:, :, None] & inside[1][:, None, :], inside


def _places(x, starts, lengths):
    """Of all tokens in one row: the number of the segment, the place in it, and whether it has."""
    index = np.arange(x.shape[0] * x.shape[1])[None, :]
    place = index - starts[:, None]
    there = (place >= 0) & (place < lengths[:, None])
    number = there.argmax(0)
    return number[None], place[number, index[0]][None], there.any(0)[None]


def _joined(x, segments):
    """All rows as one, where segments count tokens over all of them."""
    return x.reshape(1, -1, *x.shape[2:]) if _joins_rows(segments) else x


def _joins_rows(segments):
    return segments is not None and segments.query_starts is not None


def _queries_of(segments, q):
    """Index of each query of each segment over all rows, and whether the segment has so many."""
    place = np.arange(q.shape[1])[None]
    return segments.query_starts[:, None] + place, place < segments.query_lengths[:, None]


def _outside(x, inside):
    return jnp.where(inside[..., None, None], x, jnp.nan)

"""cuDNN's attention kernels in plain JAX: what the backends built on them make of them, anywhere.

The same contract as the real calls, in `startrail_jax.blocks.cudnn`: masks full or causal from the
top left, the latter with a window if there are as many keys as queries; logits and softmax in
float32; probabilities (and their gradients) rounded for the products that follow; results rounded
to the dtype of q; and a backward pass that takes any lse and computes delta from out and dout.
Unlike them it serves float32 and any head_dim, so that errors of float32 size prove what is around
the kernels.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
from einops import rearrange

from startrail_jax.blocks import cudnn

_dot = functools.partial(
    jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
)


def attend(q, k, v, scale, causal, window=0):
    """Returns out [b, t, n, v] in the dtype of q and lse [b, n, t] in float32."""
    logits = _logits(q, k, scale, causal, window)
    lse = jax.nn.logsumexp(logits, axis=-1)
    p = jnp.exp(logits - lse[..., None])
    out = rearrange(_dot("bkgts,bskv->btkgv", _rounded(p, q.dtype), v), "b t k g v -> b t (k g) v")
    return _rounded(out, q.dtype), rearrange(lse, "b k g t -> b (k g) t")


def gradients(q, k, v, lse, out, dout, scale, causal, window=0):
    """Returns dq, dk, dv in the dtype of q."""
    assert q.dtype == out.dtype == dout.dtype
    delta = _dot("btnv,btnv->bnt", out, dout)
    lse, delta = (rearrange(x, "b (k g) t -> b k g t 1", k=k.shape[2]) for x in (lse, delta))
    rows, dout = _grouped(q, k), _grouped(dout, k)
    p = jnp.exp(_logits(q, k, scale, causal, window) - lse)
    ds = p * (_dot("btkgv,bskv->bkgts", dout, v) - delta) * scale
    p, ds = _rounded(p, q.dtype), _rounded(ds, q.dtype)
    dq = rearrange(_dot("bkgts,bskh->btkgh", ds, k), "b t k g h -> b t (k g) h")
    dk, dv = _dot("bkgts,btkgh->bskh", ds, rows), _dot("bkgts,btkgv->bskv", p, dout)
    return tuple(_rounded(x, q.dtype) for x in (dq, dk, dv))


def install(monkeypatch, calls=None):
    """Puts the emulation in the place of the kernels, and lifts their limits but for masks.

    Args:
        calls: a list, for (name of the kernel, (queries, keys, mask)) of every call that runs; the
            mask is whether it is causal, or the number of keys in its window.
    """
    real = cudnn.refusal
    usual = dict(
        platform="cuda", capability=(9, 0), dtype="bfloat16", head_dim=64, value_head_dim=64
    )
    monkeypatch.setattr(
        cudnn, "refusal", lambda request: real(dataclasses.replace(request, **usual))
    )
    for kernel in (attend, gradients):
        monkeypatch.setattr(cudnn, kernel.__name__, _recorded(kernel, calls))


def _recorded(kernel, calls):
    if calls is None:
        return kernel

    @functools.wraps(kernel)
    def recorded(q, k, *operands):
        given = inspect.signature(kernel).bind(q, k, *operands).arguments
        mask = given.get("window") or given["causal"]
        call = kernel.__name__, (q.shape[1], k.shape[1], mask)
        jax.debug.callback(lambda: calls.append(call))
        return kernel(q, k, *operands)

    return recorded


def _rounded(x, dtype):
    """x in `dtype`. Of a plain cast XLA drops the rounding, if float32 is wanted again."""
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def _grouped(x, k):
    return rearrange(x, "b t (k g) h -> b t k g h", k=k.shape[2])


def _logits(q, k, scale, causal, window):
    """[b, k, g, t, s], -inf where the mask hides the key."""
    assert not window or (causal and q.shape[1] == k.shape[1])
    logits = _dot("btkgh,bskh->bkgts", _grouped(q, k), k) * scale
    if not causal:
        return logits
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    if window:
        seen &= ~jnp.tril(seen, -window)
    return jnp.where(seen[None, None, None], logits, -jnp.inf)

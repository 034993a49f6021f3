"""The functions of fa4-jax that `startrail_jax.blocks.fa4` calls, in plain JAX."""

import dataclasses
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from fake_cudnn import _dot, _grouped, _rounded
from startrail_jax.blocks import fa4
from startrail_jax.masks import Full


@dataclasses.dataclass(frozen=True)
class AttnConfig:
    causal: bool
    local: bool
    window: tuple[int | None, int | None]
    scale: float
    mask: None
    backend: str
    varlen: bool = False


def fwd_lse(config, q, k, v, aux, segments=None):
    seen, inside = _visible(config, q, k, segments)
    q, k, v = (_batched(x) for x in (q, k, v))
    logits = jnp.where(seen, _dot("btkgh,bskh->bkgts", _grouped(q, k), k) * config.scale, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    p = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    out = rearrange(_dot("bkgts,bskv->btkgv", _rounded(p, q.dtype), v), "b t k g v -> b t (k g) v")
    out = jnp.where(inside[0][:, None, None], _rounded(out, q.dtype), jnp.nan)
    lse = jnp.where(inside[0], rearrange(lse, "b k g t -> b (k g) t"), jnp.nan)
    return (out[0], lse[0]) if config.varlen else (out, lse)


def vjp(config, q, k, v, out, lse, dout, dlse, aux, segments=None):
    assert dlse is None
    assert q.dtype == out.dtype == dout.dtype
    seen, inside = _visible(config, q, k, segments)
    q, k, v, out, dout = (_batched(x) for x in (q, k, v, out, dout))
    lse = lse[None] if config.varlen else lse
    delta = _dot("btnv,btnv->bnt", out, dout)
    lse, delta = (rearrange(x, "b (k g) t -> b k g t 1", k=k.shape[2]) for x in (lse, delta))
    rows, dout = _grouped(q, k), _grouped(dout, k)
    logits = jnp.where(seen, _dot("btkgh,bskh->bkgts", rows, k) * config.scale, -jnp.inf)
    p = jnp.where(seen, jnp.exp(logits - lse), 0.0)
    ds = p * (_dot("btkgv,bskv->bkgts", dout, v) - delta) * config.scale
    p, ds = _rounded(p, q.dtype), _rounded(jnp.where(seen, ds, 0.0), q.dtype)
    dq = rearrange(_dot("bkgts,bskh->btkgh", ds, k), "b t k g h -> b t (k g) h")
    # What lies outside of the segments is not read.
    rows, dout = (jnp.where(inside[0][:, None, None, None], x, 0) for x in (rows, dout))
    dk, dv = _dot("bkgts,btkgh->bskh", ds, rows), _dot("bkgts,btkgv->bskv", p, dout)
    grads = tuple(
        jnp.where(there[:, None, None], _rounded(x, q.dtype), jnp.nan)
        for x, there in zip((dq, dk, dv), (inside[0], inside[1], inside[1]), strict=True)
    )
    return tuple(x[0] for x in grads) if config.varlen else grads


def install(monkeypatch):
    """Puts the emulation in the place of the package, and lifts the limits of dtypes and sizes."""
    package, attention = ModuleType("fa4_jax"), ModuleType("fa4_jax.attention")
    package.__spec__ = ModuleSpec("fa4_jax", None)
    library: Any = attention
    library.AttnConfig = AttnConfig
    library.get_backend = {"cute": sys.modules[__name__]}.__getitem__
    monkeypatch.setitem(sys.modules, "fa4_jax", package)
    monkeypatch.setitem(sys.modules, "fa4_jax.attention", attention)
    usual = dict(platform="cuda", capability=(9, 0), dtype="bfloat16")
    usual |= dict(head_dim=64, value_head_dim=64, mask=Full())
    real = fa4.refusal
    monkeypatch.setattr(fa4, "refusal", lambda x: real(dataclasses.replace(x, **usual)))


def _batched(x):
    return x[None] if x.ndim == 3 else x


def _visible(config, q, k, segments):
    """Whether each query sees each key, [t, s], and which queries and keys lie in segments."""
    assert config.causal + config.local <= 1
    assert config.local == (config.window != (None, None))
    assert config.varlen == (segments is not None)
    t, s = q.shape[-3], k.shape[-3]
    if segments is None:
        number = np.zeros(t, int), np.zeros(s, int)
        place = np.arange(t) - t, np.arange(s) - s
        inside = np.ones(t, bool), np.ones(s, bool)
    else:
        *starts, query_lengths, key_lengths = segments
        number, place, inside = [], [], []
        for tokens, start, length in zip((t, s), starts, (query_lengths, key_lengths), strict=True):
            index = np.arange(tokens)[None]
            local = index - start[:-1, None]
            there = (local >= 0) & (local < length[:, None]) & (index < start[1:, None])
            number.append(there.argmax(0))
            inside.append(there.any(0))
            # Counted from behind.
            at = jnp.take_along_axis(local, number[-1][None], 0)[0]
            place.append(at - length[number[-1]])
    left, right = (None, 0) if config.causal else config.window
    apart = place[0][:, None] - place[1][None]
    seen = (number[0][:, None] == number[1][None]) & inside[0][:, None] & inside[1][None]
    if left is not None:
        seen &= apart <= left
    if right is not None:
        seen &= apart >= -right
    return seen, inside

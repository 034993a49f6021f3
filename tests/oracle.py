"""Dense attention in float64 NumPy, global view, natural token order: the reference of the tests.

It imports nothing of the package and nothing of JAX, and shares no formula with them but the
definition. Its own gradients are derived by hand and checked by finite differences.

    s = scale q k^T,  p = exp(s - lse),  out = p v,  lse = log sum exp s    (over visible keys)
    dv = p^T dout,  ds = p * (dout v^T - rowsum(dout * out) + dlse)
    dq = scale ds k,  dk = scale ds^T q

A soft cap c makes the logits c tanh(s / c). A sink is one more key, of a given logit and value 0.

Shapes: query [B, T, N, H], key [B, S, K, H], value [B, S, K, V], lse [B, N, T].
"""

from typing import NamedTuple

import numpy as np

# lse of a row that sees no key.
EMPTY = -1e30


class Gradients(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def visible(query_len, key_len, *, causal=False, window=None, rule=None, segment_ids=None):
    """Which key each query sees: bool [B or 1, T, S].

    Args:
        causal: query i sees keys j <= i.
        window: query i sees keys j > i - window.
        rule: a function of i and j that says whether query i sees key j.
        segment_ids: [B, T], or a pair [B, T], [B, S]: equal ids see each other, and a negative
            id sees nothing and is not seen.
    """
    query, key = np.arange(query_len)[:, None], np.arange(key_len)[None, :]
    seen = np.ones((1, query_len, key_len), bool)
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= key > query - window
    if rule is not None:
        seen = seen & rule(query, key)
    if segment_ids is not None:
        ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        query_ids, key_ids = np.asarray(ids[0])[:, :, None], np.asarray(ids[1])[:, None, :]
        seen = seen & (query_ids == key_ids) & (query_ids >= 0)
    return seen


def attention(query, key, value, *, scale=None, softcap=None, sinks=None, **mask):
    """Returns out [B, T, N, V] and lse [B, N, T]; rows that see no key get 0 and EMPTY."""
    q, k, v = _grouped(query, key, value)
    probabilities, lse, _ = _probabilities(q, k, scale, softcap, sinks, mask)
    out = np.einsum("bkgts,bskv->btkgv", probabilities, v)
    return _ungrouped(out), lse.reshape(lse.shape[0], -1, lse.shape[-1])


def gradients(query, key, value, dout, dlse=None, *, scale=None, softcap=None, sinks=None, **mask):
    """Gradients of sum(out * dout) + sum(lse * dlse)."""
    q, k, v = _grouped(query, key, value)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    p, _, _ = _probabilities(q, k, scale, softcap, sinks, mask)
    batch, query_len, kv_heads, group, _ = q.shape
    dout = np.asarray(dout, np.float64).reshape(batch, query_len, kv_heads, group, -1)
    dp = np.einsum("btkgv,bskv->bkgts", dout, v)
    row = (p * dp).sum(-1)
    if dlse is not None:
        row -= np.asarray(dlse, np.float64).reshape(row.shape)
    ds = p * (dp - row[..., None]) * scale
    if softcap is not None:
        raw = scale * np.einsum("btkgh,bskh->bkgts", q, k)
        ds = ds / np.cosh(raw / softcap) ** 2
    return Gradients(
        query=_ungrouped(np.einsum("bkgts,bskh->btkgh", ds, k)),
        key=np.einsum("bkgts,btkgh->bskh", ds, q),
        value=np.einsum("bkgts,btkgv->bskv", p, dout),
    )


def sink_gradient(query, key, value, dout, dlse, *, sinks, scale=None, softcap=None, **mask):
    """Gradient [N] of the sinks, of the same sum as that of `gradients`."""
    q, k, v = _grouped(query, key, value)
    p, _, of_sink = _probabilities(q, k, scale, softcap, sinks, mask)
    dout = np.asarray(dout, np.float64).reshape(*q.shape[:4], -1)
    row = (p * np.einsum("btkgv,bskv->bkgts", dout, v)).sum(-1)
    row = row - np.asarray(dlse, np.float64).reshape(row.shape)
    return -(of_sink * row).sum((0, 3)).reshape(-1)


def _grouped(query, key, value):
    """float64, with the query heads split into (key heads, queries per key head)."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]), k, v


def _ungrouped(x):
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _probabilities(q, k, scale, softcap, sinks, mask):
    """p [B, K, G, T, S], 0 where not visible, and lse and the p of the sink [B, K, G, T]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seen = visible(q.shape[1], k.shape[1], **mask)[:, None, None]
    logits = scale * np.einsum("btkgh,bskh->bkgts", q, k)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    logits = np.where(seen, logits, -np.inf)
    highest = np.where(seen.any(-1), logits.max(-1), 0.0)
    weights = np.exp(logits - highest[..., None])
    total = weights.sum(-1)
    empty = total == 0
    sink = np.zeros_like(total)
    if sinks is not None:
        per_head = np.asarray(sinks, np.float64).reshape(1, q.shape[2], -1, 1)
        sink = np.where(empty, 0.0, np.exp(per_head - highest))
    total = np.where(empty, 1.0, total + sink)
    lse = np.where(empty, EMPTY, highest + np.log(total))
    return weights / total[..., None], lse, sink / total

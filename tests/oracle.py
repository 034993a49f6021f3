"""Dense attention in float64 NumPy, in natural token order: the reference of the tests."""

from typing import NamedTuple

import numpy as np

# Shapes: query [B, T, N, H], key [B, S, K, H], value [B, S, K, V], lse [B, N, T].
# lse of a row that sees no key.
EMPTY = -1e30


class Gradients(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def visible(query_len, key_len, *, causal=False, window=None, rule=None, segment_ids=None):
    """Which keys j each query i sees, [B or 1, T, S]; `rule` is a function of i and j."""
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


def attention(query, key, value, *, factors=None, **options):
    """Returns out [B, T, N, V] and lse [B, N, T]; rows that see no key get 0 and EMPTY."""
    q, k, v = _grouped(query, key, value)
    probabilities, lse, _ = _probabilities(q, k, **options)
    out = np.einsum("bkgts,bskv->btkgv", probabilities * _heads(factors, q), v)
    return _ungrouped(out), lse.reshape(lse.shape[0], -1, lse.shape[-1])


def gradients(query, key, value, dout, dlse=None, *, scale=None, softcap=None, **options):
    """Gradients of sum(out * dout) + sum(lse * dlse)."""
    q, k, v = _grouped(query, key, value)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options |= dict(scale=scale, softcap=softcap)
    ds, dropped = _logit_gradients(q, k, v, dout, dlse, **options)
    dout = np.asarray(dout, np.float64).reshape(*q.shape[:4], -1)
    ds = ds * scale
    if softcap is not None:
        raw = scale * np.einsum("btkgh,bskh->bkgts", q, k)
        ds = ds / np.cosh(raw / softcap) ** 2
    return Gradients(
        query=_ungrouped(np.einsum("bkgts,bskh->btkgh", ds, k)),
        key=np.einsum("bkgts,btkgh->bskh", ds, q),
        value=np.einsum("bkgts,btkgv->bskv", dropped, dout),
    )


def bias_gradient(query, key, value, dout, dlse, **options):
    """Gradient [B, N, T, S] of a bias of that shape, of the same sum as that of `gradients`."""
    ds, _ = _logit_gradients(*_grouped(query, key, value), dout, dlse, **options)
    return ds.reshape(ds.shape[0], -1, *ds.shape[3:])


def slope_gradient(*args, **options):
    """Gradient [N] of the slopes, likewise."""
    ds = bias_gradient(*args, **options)
    return -(ds * _distance(*ds.shape[2:])).sum((0, 2, 3))


def _logit_gradients(q, k, v, dout, dlse, *, factors=None, **options):
    """ds [B, K, G, T, S], of the logits that the softmax gets; and p times the factors."""
    p, _, _ = _probabilities(q, k, **options)
    dout = np.asarray(dout, np.float64).reshape(*q.shape[:4], -1)
    dp = np.einsum("btkgv,bskv->bkgts", dout, v) * _heads(factors, q)
    row = (p * dp).sum(-1)
    if dlse is not None:
        row -= np.asarray(dlse, np.float64).reshape(row.shape)
    return p * (dp - row[..., None]), p * _heads(factors, q)


def sink_gradient(query, key, value, dout, dlse, *, factors=None, **options):
    """Gradient [N] of the sinks, of the same sum as that of `gradients`."""
    q, k, v = _grouped(query, key, value)
    p, _, of_sink = _probabilities(q, k, **options)
    dout = np.asarray(dout, np.float64).reshape(*q.shape[:4], -1)
    row = (p * _heads(factors, q) * np.einsum("btkgv,bskv->bkgts", dout, v)).sum(-1)
    row = row - np.asarray(dlse, np.float64).reshape(row.shape)
    return -(of_sink * row).sum((0, 3)).reshape(-1)


def _grouped(query, key, value):
    """float64, with the query heads split into (key heads, queries per key head)."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]), k, v


def _ungrouped(x):
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _heads(x, q):
    """[1 or B, 1 or N, T, S] as what broadcasts to [B, K, G, T, S]; None is 1."""
    if x is None:
        return 1.0
    x = np.asarray(x, np.float64)
    heads = (1, 1) if x.shape[1] == 1 else q.shape[2:4]
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def _distance(query_len, key_len):
    return np.abs(np.arange(query_len)[:, None] - np.arange(key_len)).astype(float)


def _probabilities(q, k, *, scale=None, softcap=None, sinks=None, slopes=None, bias=None, **mask):
    """p [B, K, G, T, S], 0 where not visible, and lse and the p of the sink [B, K, G, T]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seen = visible(q.shape[1], k.shape[1], **mask)[:, None, None]
    logits = scale * np.einsum("btkgh,bskh->bkgts", q, k)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    if slopes is not None:
        per_head = np.asarray(slopes, np.float64).reshape(1, q.shape[2], -1, 1, 1)
        logits = logits - per_head * _distance(*logits.shape[3:])
    if bias is not None:
        logits = logits + _heads(bias, q)
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

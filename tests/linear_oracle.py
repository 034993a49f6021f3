"""Linear attention in float64 NumPy, token by token: the reference of the tests.

It imports nothing of the package and nothing of JAX. Its gradients are derived by hand.

    A_t = D_t S_{t-1},   e_t = v_t - A_t^T k_t  (v_t without delta),   S_t = A_t + b_t k_t e_t^T,
    out_t = scale S_t^T q_t

Shapes: query, key [B, T, N, K], value [B, T, N, V], decay [B, T, N] or [B, T, N, K] (logarithms),
beta [B, T, N], states [B, N, K, V]; heads are repeated where an array has fewer.
"""

from typing import NamedTuple

import numpy as np


class Gradients(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    decay: np.ndarray
    beta: np.ndarray
    state: np.ndarray


def linear_attention(query, key, value, decay, beta, *, delta, scale, ids=None, state=None):
    """Returns out [B, T, N, V] and the states [T + 1, B, N, K, V], the initial one first."""
    q, k, v, d, b = _repeated(query, key, value, decay, beta)
    shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    states = [np.zeros(shape) if state is None else np.asarray(state, np.float64)]
    out = np.zeros((*q.shape[:3], v.shape[3]))
    begins, real = _documents(ids, q.shape[:2])
    for t in range(q.shape[1]):
        _, after = _step(states[-1], k[:, t], v[:, t], d[:, t], b[:, t], begins[:, t], delta)
        states.append(np.where(real[:, t, None, None, None], after, states[-1]))
        out[:, t] = scale * np.einsum("bnkv,bnk->bnv", states[-1], q[:, t])
    return np.where(real[:, :, None, None], out, 0), np.stack(states)


def gradients(
    query, key, value, decay, beta, dout, dstate=None, *, delta, scale, ids=None, state=None
):
    """Gradients of sum(out * dout) + sum(last state * dstate)."""
    arrays = query, key, value, decay, beta
    q, k, v, d, b = _repeated(*arrays)
    _, states = linear_attention(*arrays, delta=delta, scale=scale, ids=ids, state=state)
    begins, real = _documents(ids, q.shape[:2])
    dq, dk, dv, dd, db = (np.zeros(x.shape) for x in (q, k, v, d, b))
    ds = np.zeros(states[0].shape) if dstate is None else np.asarray(dstate, np.float64)
    for t in reversed(range(q.shape[1])):
        here = real[:, t]
        do = np.where(here[:, None, None], dout[:, t], 0)
        dq[:, t] = scale * np.einsum("bnkv,bnv->bnk", states[t + 1], do)
        total = ds + scale * np.einsum("bnk,bnv->bnkv", q[:, t], do)
        token = k[:, t], v[:, t], d[:, t], b[:, t], begins[:, t]
        *of_token, dstate = _step_back(total, states[t], *token, delta)
        ds = np.where(here[:, None, None, None], dstate, ds)
        for x, y in zip((dk, dv, dd, db), of_token, strict=True):
            x[:, t] = np.where(here.reshape(-1, *[1] * (x.ndim - 2)), y, 0)
    found = zip((dq, dk, dv, dd, db), arrays, strict=True)
    return Gradients(*[_summed(x, np.shape(like)) for x, like in found], ds)


def _step(state, k, v, d, b, begins, delta):
    """The decayed state, and the state after a token."""
    decayed = np.where(begins[:, None, None, None], 0, _factor(d) * state)
    e = v - (np.einsum("bnkv,bnk->bnv", decayed, k) if delta else 0)
    return decayed, decayed + np.einsum("bn,bnk,bnv->bnkv", b, k, e)


def _step_back(total, state, k, v, d, b, begins, delta):
    """From the gradient of the state after a token, those of its key, value, decay and beta, and of
    the state before it."""
    decayed, _ = _step(state, k, v, d, b, begins, delta)
    e = v - (np.einsum("bnkv,bnk->bnv", decayed, k) if delta else 0)
    de = b[:, :, None] * np.einsum("bnkv,bnk->bnv", total, k)
    db = np.einsum("bnk,bnkv,bnv->bn", k, total, e)
    dk, dstate = b[:, :, None] * np.einsum("bnkv,bnv->bnk", total, e), total
    if delta:
        dstate = total - np.einsum("bnk,bnv->bnkv", k, de)
        dk -= np.einsum("bnkv,bnv->bnk", decayed, de)
    of_channel = (dstate * decayed).sum(-1)
    dd = of_channel if d.ndim == 3 else of_channel.sum(-1)
    return dk, de, dd, db, np.where(begins[:, None, None, None], 0, _factor(d) * dstate)


def _factor(d):
    return np.exp(d).reshape(*d.shape, *[1] * (4 - d.ndim))


def _documents(ids, shape):
    """Which tokens begin a document that is not the first of its row, and which are no padding."""
    ids = np.zeros(shape, int) if ids is None else np.asarray(ids)
    begins = np.zeros(shape, bool)
    for row in range(shape[0]):
        (real,) = np.nonzero(ids[row] >= 0)
        begins[row, real[1:]] = ids[row, real[1:]] != ids[row, real[:-1]]
    return begins, ids >= 0


def _repeated(*arrays):
    heads = max(x.shape[2] for x in arrays)
    return [np.repeat(np.asarray(x, np.float64), heads // x.shape[2], axis=2) for x in arrays]


def _summed(x, shape):
    return x.reshape(*shape[:3], -1, *x.shape[3:]).sum(3) if x.shape != shape else x


def causal_conv(x, kernel, *, ids=None, first=None):
    """Returns out, with the shape of x, and the last w - 1 inputs of each row."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    extra = len(kernel) - 1
    begins, real = _documents(ids, x.shape[:2])
    out, last = np.zeros(x.shape), np.zeros((x.shape[0], extra, *x.shape[2:]))
    for row in range(len(x)):
        seen = list(np.zeros_like(last[row]) if first is None else first[row])
        for t in range(x.shape[1]):
            if begins[row, t]:
                seen = [np.zeros_like(y) for y in seen]
            seen.append(x[row, t] if real[row, t] else np.zeros_like(x[row, t]))
            if real[row, t]:
                out[row, t] = sum(w * y for w, y in zip(kernel, seen[-extra - 1 :], strict=True))
                last[row] = seen[len(seen) - extra :]
    return out, last


def tree_attention(query, key, value, decay, beta, *, delta, scale, parents):
    """The same over trees: `parents` [B, T] is the token that each one continues, -1 if there is
    none, and -2 for padding. Returns out, and the state after each token."""
    q, k, v, d, b = _repeated(query, key, value, decay, beta)
    states = np.zeros((q.shape[1] + 1, q.shape[0], q.shape[2], q.shape[3], v.shape[3]))
    rows = np.arange(len(q))
    for t in range(q.shape[1]):
        before = states[parents[:, t], rows]  # The last one has zeros until the end.
        before[parents[:, t] < 0] = 0
        _, after = _step(before, k[:, t], v[:, t], d[:, t], b[:, t], parents[:, t] < 0, delta)
        states[t] = np.where((parents[:, t] < -1)[:, None, None, None], 0, after)
    return scale * np.einsum("tbnkv,btnk->btnv", states[:-1], q), states


def tree_gradients(query, key, value, decay, beta, dout, *, delta, scale, parents):
    """Gradients of sum(out * dout) over trees: of query, key, value, decay and beta."""
    arrays = query, key, value, decay, beta
    q, k, v, d, b = _repeated(*arrays)
    _, states = tree_attention(*arrays, delta=delta, scale=scale, parents=parents)
    real = (parents >= -1)[:, :, None, None]
    dout = np.where(real, dout, 0)
    rows, dstates = np.arange(len(q)), scale * np.einsum("btnk,btnv->tbnkv", q, dout)
    dq = scale * np.einsum("tbnkv,btnv->btnk", states[:-1], dout)
    dk, dv, dd, db = (np.zeros(x.shape) for x in (k, v, d, b))
    for t in reversed(range(q.shape[1])):
        begins, total = parents[:, t] < 0, dstates[t]
        before = np.where(begins[:, None, None, None], 0, states[parents[:, t], rows])
        token = k[:, t], v[:, t], d[:, t], b[:, t], begins
        *of_token, back = _step_back(total, before, *token, delta)
        for x, y in zip((dk, dv, dd, db), of_token, strict=True):
            x[:, t] = y
        for row in np.flatnonzero(~begins):
            dstates[parents[row, t], row] += back[row]
    found = [np.where(real.reshape(*real.shape[: x.ndim]), x, 0) for x in (dq, dk, dv, dd, db)]
    return [_summed(x, np.shape(like)) for x, like in zip(found, arrays, strict=True)]


def tree_conv(x, kernel, *, parents):
    """The convolution over trees: of the tokens that each one continues."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    out = np.zeros(x.shape)
    for row, t in np.argwhere(parents > -2):
        token = t
        for weight in kernel[::-1]:
            if token >= 0:
                out[row, t] += weight * x[row, token]
                token = parents[row, token]
    return out

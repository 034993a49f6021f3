"""What happens to logits and probabilities beside the scale and the mask.

    s = cap(scale q k^T) - slope |query - key| + bias,    p = exp(s - lse)
    out = (p * kept / (1 - rate)) v

Caps come before biases, as in FlashAttention. Dropout follows the softmax: lse is that of all
visible keys, so attentions to different keys are merged as they are without dropout, and the
backward pass needs no more than delta = rowsum(dout * out) - dlse, as it does without:

    dp = (dout v^T) * kept / (1 - rate),  ds = p * (dp - delta),  dbias = ds

A tile computes its scores from the positions of its tokens; only a bias is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from startrail_jax.blocks.softmax import cap_logits
from startrail_jax.blocks.tiles import Tiling
from startrail_jax.blocks.visibility import Visibility

NAMES = ("slopes", "bias", "dropout")
"""What a call may give, of which the kernels of cuDNN serve nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Which probabilities are dropped: a hash of a seed, the row, the head and both positions.

    So a seed drops the same entries on any mesh, in any layout, in any tile and in both passes, and
    nothing is stored.
    """

    words: Any
    """The seed: uint32 [2]."""
    first_row: Any = None
    """Number, in the whole batch, of the first row of the arrays that it is used with."""
    first_head: Any = None
    """Number, over all devices, of their first query head."""
    rate: float = field(metadata=dict(static=True))
    """Share of the probabilities to drop, at least 0 and below 1."""
    shared: bool = field(metadata=dict(static=True))
    """Whether all rows and heads drop the same pairs of positions."""

    def keeps(
        self, rows: int, heads: int, query: Int32[Array, " t"], key: Int32[Array, " s"]
    ) -> Bool[Array, "#b #n t s"]:
        """Which probabilities stay, at natural positions `query` and `key` of so many rows and
        query heads."""
        state = self.words[0], self.words[1]
        if not self.shared:
            row, head = jnp.arange(rows) + self.first_row, jnp.arange(heads) + self.first_head
            state = _absorb(_absorb(state, row[:, None, None]), head[None, :, None])
        first, second = _absorb(state, query[None, None, :])
        first, second = (jnp.broadcast_to(x, (*x.shape[:-1], len(query))) for x in (first, second))
        word = key[None, None, None, :].astype(jnp.uint32) * jnp.uint32(_GOLDEN)
        bits = _mix(_mix(word ^ first[..., None]) + second[..., None])
        return bits >= jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))


# 2^32 over the golden ratio, and an odd number of MurmurHash3.
_GOLDEN, _ODD = 0x9E3779B9, 0xCC9E2D51


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The finaliser of MurmurHash3, a permutation of the 32-bit words (Austin Appleby,
    https://github.com/aappleby/smhasher/wiki/MurmurHash3, public domain)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))


def _absorb(state: tuple[Array, Array], number: Int32[Array, "..."]) -> tuple[Array, Array]:
    """Two words of state that also depend on a number."""
    word = number.astype(jnp.uint32)
    first, second = (
        x if x.ndim == word.ndim else x.reshape(*[1] * (word.ndim - x.ndim), *x.shape)
        for x in state
    )
    return (
        _mix(first + word * jnp.uint32(_GOLDEN)),
        _mix(second ^ (word * jnp.uint32(_ODD) + jnp.uint32(_GOLDEN))),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Scores:
    """All that is done to the scores of a query unit and a key unit; nothing by default."""

    softcap: float | None = field(default=None, metadata=dict(static=True))
    """Cap of the logits, see `softmax.cap_logits`; None for none."""
    slopes: Any = None
    """ALiBi slopes, float32 [n]; None for none."""
    bias: Any = None
    """[1 or b, 1 or n, t, columns] of any float dtype, for the logits of the unit's queries."""
    column: Any = None
    """Where in the columns of the bias the keys of the unit begin; None for 0."""
    dropout: Dropout | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The names of those that are there, as in `NAMES`."""
        return tuple(name for name in NAMES if getattr(self, name) is not None)

    @property
    def plain(self) -> bool:
        """Whether nothing is done."""
        return self.softcap is None and not self.given

    @property
    def learnt(self) -> tuple[Array, ...]:
        """The arrays that have gradients: slopes and bias, as far as they are there."""
        return tuple(x for x in (self.slopes, self.bias) if x is not None)

    def of_heads(self, first: int, heads: int) -> Scores:
        """The same for `heads` query heads from number `first` on; what all heads share stays."""
        slopes, bias, dropout = self.slopes, self.bias, self.dropout
        if slopes is not None:
            slopes = slopes[first : first + heads]
        if bias is not None and bias.shape[1] > 1:
            bias = bias[:, first : first + heads]
        if dropout is not None:
            dropout = replace(dropout, first_head=dropout.first_head + first)
        return replace(self, slopes=slopes, bias=bias, dropout=dropout)

    def with_gradients(self, sums: Sequence[Array]) -> Scores:
        """Gradients of `learnt`, in their dtypes, in the places of what they belong to."""
        given = iter(sums)
        found = (
            None if x is None else next(given).astype(x.dtype) for x in (self.slopes, self.bias)
        )
        slopes, bias = found
        return Scores(softcap=self.softcap, slopes=slopes, bias=bias)

    def sums(
        self, into: tuple[Array | None, ...], never: Bool[Array, ""]
    ) -> tuple[Float32[Array, "..."], ...]:
        """The sums of gradients of `learnt` so far, zeros where `into` has none; `never` as in
        `ordering.zeros_after`."""
        into = into or (None,) * len(self.learnt)
        return tuple(
            jnp.where(never, x.astype(jnp.float32), 0.0) if dx is None else dx
            for x, dx in zip(self.learnt, into, strict=True)
        )


@dataclass(frozen=True)
class ScoreTile:
    """The scores of a query tile and a key tile.

    Logits and probabilities are [b, k, g * t, s] or [b * k, g * t, s] for k key heads, each of
    which g query heads share, t queries and s keys; the last two are swapped if `keys_first`.
    """

    scores: Scores
    visibility: Visibility
    query: Tiling
    key: Tiling
    i: Array
    j: Array
    heads: int
    """Number of key heads."""
    group: int
    """Number of query heads that share a key head."""
    keys_first: bool = False

    def logits(
        self, raw: Float32[Array, "..."]
    ) -> tuple[Float32[Array, "..."], Float32[Array, "..."] | None]:
        """Capped and biased logits, from scaled products; and the slope of the cap, if any."""
        logits, slope = cap_logits(raw, self.scores.softcap)
        if self.scores.slopes is not None:
            far = self.scores.slopes[None, :, None, None] * self._distance()
            split = self._split(logits)
            logits = (split - self._spread(far)).reshape(raw.shape)
        if self.scores.bias is not None:
            there = self._cut(self.scores.bias).astype(jnp.float32)
            logits = (self._split(logits) + self._spread(there)).reshape(raw.shape)
        return logits, slope

    def drop(self, x: Float32[Array, "..."]) -> Float32[Array, "..."]:
        """The entries that stay, scaled up by 1 / (1 - rate), and 0 for those that do not."""
        dropout = self.scores.dropout
        if dropout is None:
            return x
        split = self._split(x)
        kept = dropout.keeps(split.shape[0], self.heads * self.group, *self._positions())
        stay = split / (1.0 - dropout.rate)
        return jnp.where(self._spread(kept), stay, 0.0).reshape(x.shape)

    def add_gradients(
        self, ds: Float32[Array, "..."], sums: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """The sums of the gradients of `Scores.learnt`, in its order, with those of this tile
        added. ds = p * (dp - delta), 0 where nothing is visible."""
        if not sums:
            return sums
        order = "b k s g t -> b (k g) t s" if self.keys_first else "b k g t s -> b (k g) t s"
        ds, added = rearrange(self._split(ds), order), list(sums)
        if self.scores.slopes is not None:
            added[0] = sums[0] - (ds * self._distance()).sum((0, 2, 3))
        if self.scores.bias is not None:
            shared = tuple(dim for dim in (0, 1) if self.scores.bias.shape[dim] == 1)
            tile = self._cut(sums[-1]) + ds.sum(shared, keepdims=True)
            added[-1] = lax.dynamic_update_slice(sums[-1], tile, self._corner())
        return tuple(added)

    def _positions(self) -> tuple[Int32[Array, " t"], Int32[Array, " s"]]:
        query = self.query.cut(self.visibility.query_positions, self.i, 0)
        return query, self.key.cut(self.visibility.key_positions, self.j, 0)

    def _distance(self) -> Float32[Array, "1 1 t s"]:
        query, key = self._positions()
        return jnp.abs(query[:, None] - key[None]).astype(jnp.float32)[None, None]

    def _split(self, x: Float32[Array, "..."]) -> Float32[Array, "b k _ _ _"]:
        size = self.query.size
        if self.keys_first:
            return x.reshape(-1, self.heads, self.key.size, self.group, size)
        return x.reshape(-1, self.heads, self.group, size, self.key.size)

    def _spread(self, x: Array) -> Array:
        """[1 or b, 1 or n, t, s] as what broadcasts to logits that are split."""
        x = x.reshape(x.shape[0], min(self.heads, x.shape[1]), -1, *x.shape[2:])
        return rearrange(x, "b k g t s -> b k s g t") if self.keys_first else x

    def _corner(self) -> tuple[Any, ...]:
        column = 0 if self.scores.column is None else self.scores.column
        starts = jnp.asarray(self.query.starts)[self.i], jnp.asarray(self.key.starts)[self.j]
        return 0, 0, starts[0], starts[1] + column

    def _cut(self, x: Float[Array, "#b #n t c"]) -> Float[Array, "#b #n _ _"]:
        return lax.dynamic_slice(x, self._corner(), (*x.shape[:2], self.query.size, self.key.size))


PLAIN = Scores()
"""No scores but the scaled products."""

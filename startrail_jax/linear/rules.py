"""What linear attention computes: rules, each with its maps of states.

A state S [key_dim, value_dim] of a head takes one token after another, and a query reads it:

    gated_delta    S <- exp(g) S;        S <- S + b k (v - S^T k)^T        out = scale S^T q
    kda            S <- diag(exp(g)) S;  S <- S + b k (v - S^T k)^T        out = scale S^T q
    ssd            S <- exp(g) S;        S <- S + b k v^T                  out = scale S^T q

So a chunk of tokens maps a state affinely, S -> M S + N, and maps compose. Within a chunk, all
tokens are computed at once, with the triangular system of the WY form for the delta rule. No sum of
decays is subtracted from another one, which would cost digits: pairs of tokens meet at the border
of the smallest power of two that holds both.

References:
    Gated DeltaNet, https://arxiv.org/abs/2412.06464 (equation 10, and the WY form of section 3.3);
    Kimi Linear, https://arxiv.org/abs/2510.26692; Mamba-2, https://arxiv.org/abs/2405.21060.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

LEAST = -1e4
"""Smaller logarithms of a decay count as this one, whose exponential is 0."""


class Chunk(NamedTuple):
    """Inputs of chunks: m is any number of dimensions, c tokens of a chunk."""

    query: Float32[Array, "*m c k"]
    key: Float32[Array, "*m c k"]
    value: Float32[Array, "*m c v"]
    decay: Float32[Array, "*m c g"]
    """Logarithms: of each channel of a key, or one for all of them."""
    beta: Float32[Array, "*m c"]
    document: Int32[Array, "*m c"]
    """How many documents have begun in the chunk, up to each token; `forks.Forks.of_tokens` in
    trees."""
    dtype: Any
    """The type of matrix products: that of the inputs."""


class ChunkTerms(NamedTuple):
    """What a chunk does to a state, and what it reads from it."""

    end: Float32[Array, "*m g 1"]
    """Decay of the state over the chunk; 0 if a document begins in it."""
    written: Float[Array, "*m c k"]
    """Keys, as they count at the end of the chunk."""
    new: Float32[Array, "*m c v"]
    """Values to write to an empty state."""
    known: Float[Array, "*m c k"] | None
    """What finds, in the state before the chunk, what its tokens do not write anew."""
    read: Float[Array, "*m c k"]
    """Queries, as they read the state before the chunk."""
    scores: Float[Array, "*m c c"]
    """How much each query reads of each value of the chunk."""


Map = tuple[Any, Array]
"""M and N of S -> M S + N: N [..., key_dim, value_dim] and M [..., key_dim, key_dim], or what
multiplies the rows of S, [..., key_dim or 1, 1]; float32. For trees see `forks.Forked`."""


def dot(spec: str, x: Array, y: Array) -> Float32[Array, "..."]:
    """`einsum` in the dtype of x, with float32 sums; float32 is computed in full."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = y.astype(x.dtype)
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class StateRule:
    """One rule of linear attention."""

    name: ClassVar[str]
    by_channel: ClassVar[bool] = False
    """Whether each channel of a key has its own decay."""
    delta: ClassVar[bool] = True
    """Whether a token writes the difference to what the state holds. Then the default scale is
    key_dim ** -0.5; without, it is 1."""

    def token(self, state: Array, key: Array, value: Array, decay: Array, beta: Array) -> Array:
        """The state [..., k, v] after one token, with a decay [..., k or 1]: the definition."""
        state = jnp.exp(decay)[..., None] * state
        if self.delta:
            value = value - jnp.einsum("...kv,...k->...v", state, key, precision="highest")
        return state + (beta[..., None] * key)[..., None] * value[..., None, :]

    def terms(self, chunk: Chunk) -> ChunkTerms:
        """What chunks do."""
        raise NotImplementedError

    def step(self, terms: ChunkTerms, state: Float32[Array, "*m k v"]) -> Float32[Array, "*m k v"]:
        """The state after a chunk."""
        return terms.end * state + dot("...ck,...cv->...kv", terms.written, _values(terms, state))

    def out(self, terms: ChunkTerms, state: Float32[Array, "*m k v"]) -> Float32[Array, "*m c v"]:
        """What the queries of a chunk read, from the state before the chunk and from the chunk."""
        of_state = dot("...ck,...kv->...cv", terms.read, state)
        return of_state + dot("...cd,...dv->...cv", terms.scores, _values(terms, state))

    # Maps ----------------------------------------------------------------------------------------

    def factor_elements(self, key_dim: int) -> int:
        """Numbers in M."""
        raise NotImplementedError

    def unit(self, like: Float32[Array, "*m k v"]) -> Any:
        """The map that changes nothing, in the form that `extend` takes."""
        raise NotImplementedError

    def extend(self, map_: Any, terms: ChunkTerms) -> Any:
        """A map, and then the chunk."""
        raise NotImplementedError

    def parts(self, map_: Any) -> Map:
        """A map in the form of the other methods."""
        return map_

    def then(self, first: Map, second: Map) -> Map:
        """Two maps, one after the other."""
        raise NotImplementedError

    def apply(self, map_: Map, state: Float32[Array, "*m k v"]) -> Float32[Array, "*m k v"]:
        """A state, mapped."""
        raise NotImplementedError

    def transposed(self, factor: Any) -> Any:
        """M^T, which takes gradients of states back."""
        raise NotImplementedError

    @property
    def adjoint(self) -> StateRule:
        """The rule by which maps of M^T, which take gradients of states back, compose."""
        return self


class _Delta(StateRule):
    """Rules that write the difference to what the state holds: M is a matrix."""

    def terms(self, chunk: Chunk) -> ChunkTerms:
        sums, same = _sums(chunk.decay), _same_document(chunk)
        before, after = _borders(chunk, sums)
        (query, key, value), dtype, beta = chunk[:3], chunk.dtype, chunk.beta[..., None]
        of_keys = _products(key * beta, key, sums, dtype)
        scores = _products(query, key, sums, dtype)
        system = jnp.where(same, jnp.tril(of_keys, -1), 0)
        given = jnp.concatenate([value * beta, key * beta * before], -1)
        # In 16 bits, a GPU computes this in TF32.
        full = lax.Precision.HIGHEST if dtype == jnp.float32 else None
        solved = jnp.einsum("...cd,...de->...ce", inverse(system), given, precision=full)
        new, known = jnp.split(solved, [value.shape[-1]], -1)
        return ChunkTerms(
            end=before[..., -1, :, None],
            written=(key * after).astype(dtype),
            new=new,
            known=known.astype(dtype),
            read=(query * before).astype(dtype),
            scores=jnp.where(same, jnp.tril(scores), 0).astype(dtype),
        )

    def factor_elements(self, key_dim: int) -> int:
        return key_dim**2

    def unit(self, like: Array) -> Array:
        one = jnp.eye(like.shape[-2], dtype=jnp.float32)
        return jnp.concatenate([jnp.broadcast_to(one, (*like.shape[:-2], *one.shape)), like], -1)

    def extend(self, map_: Array, terms: ChunkTerms) -> Array:
        # Both at once: what M maps is a state to which nothing is written.
        k = terms.new.shape[-1] - map_.shape[-1]
        new = jnp.pad(terms.new, [(0, 0)] * (terms.new.ndim - 1) + [(-k, 0)])
        return self.step(terms._replace(new=new), map_)

    def parts(self, map_: Array) -> Map:
        k = map_.shape[-2]
        return map_[..., :k], map_[..., k:]

    def then(self, first: Map, second: Map) -> Map:
        k = first[0].shape[-1]
        both = dot("...ij,...jk->...ik", second[0], jnp.concatenate(first, -1))
        return both[..., :k], both[..., k:] + second[1]

    def apply(self, map_: Map, state: Array) -> Array:
        return dot("...ij,...jk->...ik", map_[0], state) + map_[1]

    def transposed(self, factor: Array) -> Array:
        return factor.swapaxes(-1, -2)


class GatedDelta(_Delta):
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, Olmo Hybrid): one decay of a head."""

    name = "gated_delta"


class KDA(_Delta):
    """Kimi Delta Attention (Kimi Linear): each channel of a key has its decay."""

    name = "kda"
    by_channel = True


class SSD(StateRule):
    """State-space duality (Mamba-2; lightning attention with a fixed decay): M is one number.
    Query, key, value, beta and decay are C, B, x, the step size and A times it in Mamba-2."""

    name = "ssd"
    delta = False

    def terms(self, chunk: Chunk) -> ChunkTerms:
        sums, same = _sums(chunk.decay), _same_document(chunk)
        before, after = _borders(chunk, sums)
        (query, key, value), dtype = chunk[:3], chunk.dtype
        scores = _products(query, key, sums, dtype)
        return ChunkTerms(
            end=before[..., -1, :, None],
            written=(key * after).astype(dtype),
            new=value * chunk.beta[..., None],
            known=None,
            read=(query * before).astype(dtype),
            scores=jnp.where(same, jnp.tril(scores), 0).astype(dtype),
        )

    def factor_elements(self, key_dim: int) -> int:
        return 1

    def unit(self, like: Array) -> Map:
        return jnp.ones((*like.shape[:-2], 1, 1), jnp.float32), like

    def extend(self, map_: Map, terms: ChunkTerms) -> Map:
        return map_[0] * terms.end, self.step(terms, map_[1])

    def then(self, first: Map, second: Map) -> Map:
        return second[0] * first[0], second[0] * first[1] + second[1]

    def apply(self, map_: Map, state: Array) -> Array:
        return map_[0] * state + map_[1]

    def transposed(self, factor: Array) -> Array:
        return factor


RULES: dict[str, StateRule] = {rule.name: rule() for rule in (GatedDelta, KDA, SSD)}


@jax.custom_vjp
def inverse(lower: Float32[Array, "*m c c"]) -> Float32[Array, "*m c c"]:
    """(I + L)^-1 of strictly lower triangular matrices, whose size is a power of two.

    Two blocks A and D on the diagonal, with B below, have the inverse of A^-1, D^-1, and
    -D^-1 B A^-1 below. `lax.linalg.triangular_solve` would do, but on the CPU it goes on in threads
    of which there may be fewer than devices, and then waits for ever for the messages of others.
    """
    lead, c = lower.shape[:-2], lower.shape[-1]
    found, size = jnp.ones_like(lower[..., :1, None]), 1
    while size < c:
        pairs = lower.reshape(*lead, c // size // 2, 2, size, c // size // 2, 2, size)
        below = jnp.diagonal(pairs[..., 1, :, :, 0, :], axis1=-4, axis2=-2)
        below = jnp.moveaxis(below, -1, -3)
        pairs = found.reshape(*lead, -1, 2, size, size)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        low = -dot("...ij,...jk->...ik", second, dot("...ij,...jk->...ik", below, first))
        found = _joined(first, low, second)
        size *= 2
    return found.reshape(lower.shape)


def _inverse_backward(found: Array, dfound: Array) -> tuple[Array]:
    back = found.swapaxes(-1, -2)
    product = dot("...ij,...jk->...ik", back, dot("...ij,...jk->...ik", dfound, back))
    return (-jnp.tril(product, -1),)


inverse.defvjp(lambda lower: (inverse(lower),) * 2, _inverse_backward)


def _joined(first: Array, low: Array, second: Array) -> Array:
    """Lower triangular matrices, from their blocks."""
    top = jnp.concatenate([first, jnp.zeros_like(low)], -1)
    return jnp.concatenate([top, jnp.concatenate([low, second], -1)], -2)


def _values(terms: ChunkTerms, state: Array) -> Array:
    """What the tokens of a chunk write."""
    if terms.known is None:
        return terms.new
    return terms.new - dot("...ck,...kv->...cv", terms.known, state)


def _same_document(chunk: Chunk) -> Array:
    return chunk.document[..., :, None] == chunk.document[..., None, :]


class _Sums(NamedTuple):
    """Sums of decays in blocks of one size: up to each token of a block, and after it."""

    up_to: Float32[Array, "*m c g"]
    after: Float32[Array, "*m c g"]


def _sums(decay: Float32[Array, "*m c g"]) -> list[_Sums]:
    """Sums in blocks of 1, 2, 4, ... tokens, up to a whole chunk."""
    sums = [_Sums(decay, jnp.zeros_like(decay))]
    size, c = 1, decay.shape[-2]
    while size < c:
        (up0, up1), (after0, after1) = (_halves(x, size) for x in sums[-1])
        up = jnp.concatenate([up0, up1 + up0[..., -1:, :]], -2)
        after = jnp.concatenate([after0 + up1[..., -1:, :], after1], -2)
        sums.append(_Sums(up.reshape(decay.shape), after.reshape(decay.shape)))
        size *= 2
    return sums


def _halves(x: Array, size: int) -> tuple[Array, Array]:
    """The blocks of `size` tokens at even places, and those at odd ones: [..., blocks, size, _]."""
    pairs = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _borders(chunk: Chunk, sums: list[_Sums]) -> tuple[Array, Array]:
    """Decay from the beginning of the chunk to each token, and from it to the end: 0 where another
    document lies between."""
    document = chunk.document[..., None]
    before = jnp.where(document == 0, jnp.exp(sums[-1].up_to), 0)
    return before, jnp.where(document == document[..., -1:, :], jnp.exp(sums[-1].after), 0)


def _products(
    x: Float32[Array, "*m c k"], y: Float32[Array, "*m c k"], sums: list[_Sums], dtype: Any
) -> Float32[Array, "*m c c"]:
    """Products of rows i >= j with the decay between them; others are of no use."""
    c = x.shape[-2]
    if sums[0].up_to.shape[-1] == 1:
        return dot("...ck,...dk->...cd", x.astype(dtype), y) * jnp.exp(_between(sums))
    found = (x * y).sum(-1)[..., None, None]
    for level, (up, after) in enumerate(sums[:-1]):
        size = 2**level
        (_, x1), (y0, _) = _halves(x * jnp.exp(up), size), _halves(y * jnp.exp(after), size)
        low = dot("...ck,...dk->...cd", x1.astype(dtype), y0)
        pairs = found.reshape(*found.shape[:-3], -1, 2, size, size)
        found = _joined(pairs[..., 0, :, :], low, pairs[..., 1, :, :])
    return found.reshape(*x.shape[:-2], c, c)


def _between(sums: list[_Sums]) -> Float32[Array, "*m c c"]:
    """Sum of the decays after token j, up to token i > j; 0 elsewhere."""
    c = sums[0].up_to.shape[-2]
    found = jnp.zeros((*sums[0].up_to.shape[:-1], c), jnp.float32)
    i, j = np.arange(c)[:, None], np.arange(c)
    for level, (up, after) in enumerate(sums[:-1]):
        meets = ((i >> level) - (j >> level) == 1) & (i >> (level + 1) == j >> (level + 1))
        found = jnp.where(jnp.broadcast_to(meets, found.shape), up + after.swapaxes(-1, -2), found)
    return found

"""Latents in place of keys and values: they travel, and a device expands them as they arrive.

    key of head n = [latent Wk_n, rotated],    value of head n = latent Wv_n

A key unit is the latents of its tokens, with the rotated part of the key that all heads share, as
one key head. On every visit the keys and values of some heads at a time are made, attended and
forgotten, in the backward pass again. Their gradients come back as those of latents; those of the
matrices stay with the device, as sums over all that it visits.

References:
    DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1; StarTrail,
    https://arxiv.org/abs/2407.00611, for what travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from startrail_jax.blocks.base import Block, Pair
from startrail_jax.blocks.shapes import LatentShard, LseShard, OutShard
from startrail_jax.blocks.softmax import Partials
from startrail_jax.rings.sizes import heads_at_once

SCOPE = "expand_latents"
"""What the names of operations contain that make keys and values, or take back their gradients."""


class Expansion(NamedTuple):
    """The matrices that make keys and values of latents, float32."""

    keys: Float32[Array, "r n d"]
    """From a latent of r channels to the part of a key that is not rotated."""
    values: Float32[Array, "r n v"]

    @classmethod
    def of(cls, key_kernel: Array, value_kernel: Array) -> Expansion:
        """The matrices of a call."""
        return cls(key_kernel.astype(jnp.float32), value_kernel.astype(jnp.float32))

    @jax.named_scope(SCOPE)
    def keys_and_values(
        self, latents: LatentShard
    ) -> tuple[Float[Array, "b s n h"], Float[Array, "b s n v"]]:
        """Keys and values of all heads, in the dtype of the latents."""
        rank, heads, _ = self.keys.shape
        latent, rotated = latents[:, :, 0, :rank], latents[..., rank:]
        keys, values = (_product("bsr,rnd->bsnd", latent, x).astype(latents.dtype) for x in self)
        rotated = jnp.broadcast_to(rotated, (*keys.shape[:2], heads, rotated.shape[-1]))
        return jnp.concatenate([keys, rotated], -1), values

    @jax.named_scope(SCOPE)
    def gradients(
        self, latents: LatentShard, dk: Float[Array, "b s n h"], dv: Float[Array, "b s n v"]
    ) -> tuple[Float32[Array, "b s 1 c"], Expansion]:
        """Gradients of the latents and of the matrices."""
        rank, _, channels = self.keys.shape
        of_keys, of_rotated = dk[..., :channels], dk[..., channels:].astype(jnp.float32)
        both = [x.astype(latents.dtype) for x in (of_keys, dv)]
        pairs = [*zip(self, both, strict=True)]
        dlatent = sum(_product("rnd,bsnd->bsr", x, dx) for x, dx in pairs)
        latent = latents[:, :, 0, :rank]
        matrices = (_product("bsr,bsnd->rnd", latent, dx) for dx in both)
        dlatents = jnp.concatenate([dlatent, of_rotated.sum(2)], -1)[:, :, None]
        return dlatents, Expansion(*matrices)


@dataclass(frozen=True)
class Expanding:
    """A block that attends to latents: it makes keys and values, and another block attends."""

    block: Block
    expansion: Expansion

    def forward(self, pair: Pair, into: Partials = ()) -> Partials:
        """See `base.Block.forward`; the keys are latents, and there are no values."""
        found: list[Partials] = []
        for heads, here, _ in self._parts(pair, found):
            so_far = tuple((out[:, :, heads], *(x[:, heads] for x in rest)) for out, *rest in into)
            found.append(self.block.forward(here, so_far))
        joined = (zip(*parts, strict=True) for parts in zip(*found, strict=True))
        return tuple(
            (jnp.concatenate(outs, 2), *(jnp.concatenate(x, 1) for x in stats))
            for outs, *stats in joined
        )

    def backward(
        self,
        pair: Pair,
        lse: LseShard,
        delta: LseShard,
        dout: OutShard,
        into: tuple[Any, ...] = (None, None, None),
    ) -> tuple[Any, ...]:
        """See `base.Block.backward`: gradients of queries, latents and values, which are None, and
        then of the matrices."""
        dq, dlatents, _, *sums = into
        found: list[Array] = []
        of_matrices: list[Expansion] = []
        for heads, here, expansion in self._parts(pair, found):
            so_far = None if dq is None else dq[:, :, heads]
            rows = lse[:, heads], delta[:, heads], dout[:, :, heads]
            dq_here, dk, dv = self.block.backward(here, *rows, (so_far, None, None))
            new, of_these = expansion.gradients(pair.k, dk, dv)
            dlatents = new if dlatents is None else dlatents + new
            found.append(dq_here)
            of_matrices.append(of_these)
        matrices = [jnp.concatenate(x, 1) for x in zip(*of_matrices, strict=True)]
        if sums:
            matrices = [x + y for x, y in zip(matrices, sums, strict=True)]
        return jnp.concatenate(found, 2), dlatents, None, *matrices

    def _parts(self, pair: Pair, found: list[Any]) -> Iterator[tuple[slice, Pair, Expansion]]:
        """The heads that are expanded at a time, each when the last ones are `found`."""
        q, latents, _, visibility, scale, scores = pair
        batch, tokens, *_ = latents.shape
        head_dims, width = q.shape[3] + self.expansion.values.shape[2], q.dtype.itemsize
        size = heads_at_once(q.shape[2], batch * tokens, head_dims, width)
        for first in range(0, q.shape[2], size):
            expansion = Expansion(*(x[:, first : first + size] for x in self.expansion))
            expansion = Expansion(*(x.astype(q.dtype) for x in expansion))
            if found:
                latents, _ = lax.optimization_barrier((latents, found[-1]))
            keys, values = expansion.keys_and_values(latents)
            heads = slice(first, first + size)
            units = q[:, :, heads], keys, values
            here = Pair(*units, visibility, scale, scores.of_heads(first, size))
            yield heads, here, expansion


def _product(formula: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.einsum(formula, x, y, precision="highest", preferred_element_type=jnp.float32)

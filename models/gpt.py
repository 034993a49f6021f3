"""A decoder-only transformer: pre-norm, RMSNorm, rotary positions, grouped queries, SwiGLU.

The model knows no mesh. Tokens may come in any order, since the only things that depend on it are
`positions`, which are data, and the attention callable, which knows its own layout.

References:
    RMSNorm: https://arxiv.org/abs/1910.07467
    RoPE: https://arxiv.org/abs/2104.09864
    SwiGLU: https://arxiv.org/abs/2002.05202
    Grouped queries: https://arxiv.org/abs/2305.13245
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

# (query [B T N H], key [B T K H], value [B T K H], segment_ids=[B T] or None) -> [B T N H]
AttentionFn = Callable[..., Float[Array, "B T N H"]]


class GPT(nnx.Module):
    """A causal language model over integer tokens."""

    def __init__(
        self,
        *,
        vocab_size: int,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        mlp_width: int,
        attention_fn: AttentionFn,
        rope_base: float = 10_000.0,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Builds the model with float32 weights.

        Args:
            vocab_size: number of token ids.
            width: channels of the residual stream.
            layers: number of blocks.
            heads: query heads.
            kv_heads: key and value heads, a divisor of `heads`.
            head_dim: channels of a head, even; heads * head_dim need not be `width`.
            mlp_width: hidden channels of the MLP.
            attention_fn: causal attention; called with `segment_ids` by keyword.
            rope_base: wavelengths of the rotary embedding go from 2 pi to about 2 pi * rope_base.
            dtype: type of activations and matrix products; logits are float32 in any case.
            rngs: source of the initial weights.
        """
        self.rope_base = rope_base
        self.head_dim = head_dim
        self.embedding = nnx.Embed(
            vocab_size,
            width,
            embedding_init=nnx.initializers.normal(width**-0.5),
            dtype=dtype,
            rngs=rngs,
        )
        # Each block adds to the stream twice: with this its variance does not grow with depth.
        out_gain = (2 * layers) ** -0.5
        self.blocks = nnx.List(
            Block(
                attention=Attention(
                    width=width,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    attention_fn=attention_fn,
                    out_gain=out_gain,
                    dtype=dtype,
                    rngs=rngs,
                ),
                mlp=MLP(width=width, hidden=mlp_width, out_gain=out_gain, dtype=dtype, rngs=rngs),
                width=width,
                dtype=dtype,
                rngs=rngs,
            )
            for _ in range(layers)
        )
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.head = _linear(width, vocab_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        segment_ids: Int32[Array, "B T"] | None = None,
    ) -> Float32[Array, "B T vocab"]:
        """Logits of the token that follows each token.

        Args:
            tokens: token ids, in the order that `attention_fn` expects.
            positions: position of each token in its sequence.
            segment_ids: documents; a token sees only its own. None is one document a row.

        Returns:
            Unnormalised log-probabilities, in the order of `tokens`.
        """
        rotation = rotary_angles(positions, self.head_dim, self.rope_base)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation, segment_ids)
        return self.head(self.norm(x)).astype(jnp.float32)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, *, attention: Attention, mlp: MLP, width: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Float32[Array, "B T half"],
        segment_ids: Int32[Array, "B T"] | None,
    ) -> Float[Array, "B T width"]:
        x = x + self.attention(self.attention_norm(x), rotation, segment_ids)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nnx.Module):
    """Projections and rotary positions round an attention callable."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        attention_fn: AttentionFn,
        out_gain: float,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.attention_fn = attention_fn
        self.query = _linear(width, (heads, head_dim), dtype=dtype, rngs=rngs)
        self.key = _linear(width, (kv_heads, head_dim), dtype=dtype, rngs=rngs)
        self.value = _linear(width, (kv_heads, head_dim), dtype=dtype, rngs=rngs)
        self.out = _linear((heads, head_dim), width, gain=out_gain, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Float32[Array, "B T half"],
        segment_ids: Int32[Array, "B T"] | None,
    ) -> Float[Array, "B T width"]:
        query = rotate(self.query(x), rotation)
        query, x = _first(query, x)
        key = rotate(self.key(x), rotation)
        return self.out(self.attention_fn(query, key, self.value(x), segment_ids=segment_ids))


@jax.custom_vjp
def _first(y: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both, unchanged; what is made of x waits for y, in the forward pass.

    So messages of the attention that carry y can be on their way meanwhile: queries are gathered
    beneath the projections of keys and values (https://arxiv.org/abs/2407.00611).
    """
    y, x = jax.lax.optimization_barrier((y, x))
    return y, x


_first.defvjp(lambda y, x: (_first(y, x), None), lambda _, cotangents: cotangents)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(
        self, *, width: int, hidden: int, out_gain: float, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.gate = _linear(width, hidden, dtype=dtype, rngs=rngs)
        self.up = _linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = _linear(hidden, width, gain=out_gain, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def rotary_angles(
    positions: Int32[Array, "B T"], head_dim: int, base: float
) -> Float32[Array, "B T half"]:
    """Angles position * base^(-i / half) for the channel pairs i < half = head_dim / 2.

    Raises:
        ValueError: if `head_dim` is odd.
    """
    if head_dim % 2:
        raise ValueError(
            f"head_dim must be even for rotary positions; got head_dim={head_dim}. "
            f"Use {head_dim + 1}."
        )
    half = head_dim // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]


def rotate(
    x: Float[Array, "B T heads H"], rotation: Float32[Array, "B T half"]
) -> Float[Array, "B T heads H"]:
    """Turns the channel pairs (i, i + half) of every head by `rotation`, in float32."""
    cos, sin = jnp.cos(rotation)[:, :, None, :], jnp.sin(rotation)[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _linear(
    inputs: int | tuple[int, ...],
    outputs: int | tuple[int, ...],
    *,
    gain: float = 1.0,
    dtype: Any,
    rngs: nnx.Rngs,
) -> nnx.LinearGeneral:
    """A bias-free projection from the last dimensions, `inputs`, to `outputs`.

    Turns inputs of variance 1 into outputs of variance gain^2, whatever the sizes.
    """
    axis = tuple(range(-len(inputs), 0)) if isinstance(inputs, tuple) else -1
    return nnx.LinearGeneral(
        inputs,
        outputs,
        axis=axis,
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(gain**2, "fan_in", "normal"),
        dtype=dtype,
        rngs=rngs,
    )

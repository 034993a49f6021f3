"""A decoder-only transformer: pre-norm, RMSNorm, rotary positions, grouped queries, SwiGLU or GELU.

The model knows no mesh. Tokens may come in any order, since the only things that depend on it are
`positions`, which are data, and the attention callable, which knows its own layout.

References:
    RMSNorm: https://arxiv.org/abs/1910.07467
    SwiGLU: https://arxiv.org/abs/2002.05202
    Grouped queries: https://arxiv.org/abs/2305.13245
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from models.hooks import Hooks
from models.linear import linear, project
from models.rope import Rope, rotate
from startrail_jax.ordering import compute_first

# (query [B T N H], key [B T K H], value [B T K H], segment_ids=[B T] or None) -> [B T N H]
AttentionFn = Callable[..., Float[Array, "B T N H"]]
# (query, key, value) -> (out [B T N H], what it remembers)
RememberingFn = Callable[..., tuple[Float[Array, "B T N H"], Any]]


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
        mlp: Literal["swiglu", "gelu"] = "swiglu",
        tied_head: bool = False,
        rope: Rope | None = None,
        dtype: Any = jnp.float32,
        hooks: Hooks | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Builds the model with float32 weights; those of all layers are stacked, [layers, ...].

        Args:
            vocab_size: number of token ids.
            width: channels of the residual stream.
            layers: number of blocks.
            heads: query heads.
            kv_heads: key and value heads, a divisor of `heads`.
            head_dim: channels of a head, even; heads * head_dim need not be `width`.
            mlp_width: hidden channels of the MLP.
            attention_fn: causal attention; called with `segment_ids` by keyword.
            mlp: "swiglu" (three matrices) or "gelu" (two).
            tied_head: whether the embedding is the output projection too.
            rope: rotary positions of `head_dim` channels; None for the usual ones.
            dtype: type of activations and matrix products; logits are float32 in any case.
            hooks: how the model runs, where it is not as written.
            rngs: source of the initial weights.
        """
        self.dtype = jnp.dtype(dtype)
        self.rope = Rope(head_dim=head_dim) if rope is None else rope
        self.hooks = Hooks() if hooks is None else hooks
        self.embedding = nnx.Embed(
            vocab_size,
            width,
            embedding_init=nnx.initializers.normal(width**-0.5),
            rngs=rngs,
        )

        # Each block adds to the stream twice: with this its variance does not grow with depth.
        out_gain = (2 * layers) ** -0.5

        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(
                attention=Attention(
                    width=width,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    attention_fn=attention_fn,
                    out_gain=out_gain,
                    dtype=dtype,
                    hooks=self.hooks,
                    rngs=rngs,
                ),
                mlp=MLP(
                    mlp, width=width, hidden=mlp_width, out_gain=out_gain, dtype=dtype, rngs=rngs
                ),
                width=width,
                dtype=dtype,
                hooks=self.hooks,
                rngs=rngs,
            )

        self.blocks = make_blocks(rngs.split(layers))
        self.norm = nnx.RMSNorm(width, dtype=jnp.float32, rngs=rngs)
        self.head = (
            None
            if tied_head
            else linear(width, vocab_size, dtype=dtype, out_dtype=jnp.float32, rngs=rngs)
        )

    def __call__(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        segment_ids: Int32[Array, "B T"] | None = None,
    ) -> Float32[Array, "B T vocab"]:
        """Logits of the token that follows each token.

        Args:
            tokens: token ids, in the order that `attention_fn` expects.
            positions: position of each token in its sequence, or in its document.
            segment_ids: documents; a token sees only its own. None is one document a row.

        Returns:
            Unnormalised log-probabilities, in the order of `tokens`.
        """
        return self.logits(self.hidden(tokens, positions, segment_ids))

    def hidden(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        segment_ids: Int32[Array, "B T"] | None = None,
    ) -> Float[Array, "B T width"]:
        """What `logits` takes: the last layer's output, normalised. Arguments as of a call."""
        graph, weights = nnx.split(self.blocks)

        def run_block(weights: Any, x: Array, *context: Any) -> Array:
            return nnx.merge(graph, weights)(x, *context)

        layer = self.hooks.layer(run_block)
        context = self.rope.rotation(positions), segment_ids
        x = self._embed(tokens)
        x, _ = lax.scan(lambda x, weights: (layer(weights, x, *context), None), x, weights)
        return self.norm(x).astype(self.dtype)

    def cached(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        cache: Any,
        attend: RememberingFn,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """`hidden`, with attention that keeps keys and values from one call to the next.

        Args:
            tokens: token ids.
            positions: position of each token in its sequence.
            cache: arrays of all layers, which the loop over layers carries: what `attend` writes
                of one layer is written in place.
            attend: in the place of `attention_fn`, (cache, layer, query, key, value) -> (out,
                cache), with the number of the layer.

        Returns:
            What `logits` takes, and the cache.
        """
        graph, weights = nnx.split(self.blocks)

        def run_block(weights: Any, x: Array, rotation: Array, layer: Array, cache: Any) -> Any:
            attend_layer = functools.partial(attend, cache, layer)
            return nnx.merge(graph, weights).remembering(x, rotation, attend_layer)

        run = self.hooks.layer(run_block)
        rotation = self.rope.rotation(positions)

        def step(carry: tuple[Array, Any], layer: tuple[Any, Array]) -> tuple[Any, None]:
            (x, cache), (weights, number) = carry, layer
            return run(weights, x, rotation, number, cache), None

        numbers = jnp.arange(len(jax.tree.leaves(weights)[0]))
        (x, cache), _ = lax.scan(step, (self._embed(tokens), cache), (weights, numbers))
        return self.norm(x).astype(self.dtype), cache

    def _embed(self, tokens: Int32[Array, "B T"]) -> Float[Array, "B T width"]:
        # Looked up in float32 and rounded then: the gradient of a common token is a long sum.
        return jnp.asarray(self.embedding(tokens), self.dtype)

    def logits(self, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T vocab"]:
        """Unnormalised log-probabilities of the token that follows each token."""
        if self.head is None:
            return project(hidden, self.embedding.embedding[...].T, 1, jnp.float32)
        return self.head(hidden)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        *,
        attention: Attention,
        mlp: MLP,
        width: int,
        dtype: Any,
        hooks: Hooks,
        rngs: nnx.Rngs,
    ) -> None:
        self.hooks = hooks
        self.attention = attention
        self.mlp = mlp
        self.dtype = jnp.dtype(dtype)
        # In float32, and rounded after: else their scales, near 1, would be rounded themselves.
        self.attention_norm = nnx.RMSNorm(width, dtype=jnp.float32, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, dtype=jnp.float32, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Float32[Array, "2 B T half"],
        segment_ids: Int32[Array, "B T"] | None,
    ) -> Float[Array, "B T width"]:
        return self.remembering(x, rotation, self.attention.forgetful(segment_ids))[0]

    def remembering(
        self,
        x: Float[Array, "B T width"],
        rotation: Float32[Array, "2 B T half"],
        attend: RememberingFn,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """The block with another attention; returns what that remembers, too."""
        spread, join, tokens = self.hooks.spread, self.hooks.join, self.hooks.tokens

        def feed_forward(x: Array) -> Array:
            return join(self.mlp(spread(self.mlp_norm(x).astype(self.dtype))))

        normalised = spread(self.attention_norm(x).astype(self.dtype))
        out, memory = self.attention.remembering(normalised, rotation, attend)
        x = x + join(out)
        return x + tokens(feed_forward)(x), memory


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
        hooks: Hooks,
        rngs: nnx.Rngs,
    ) -> None:
        self.attention_fn = attention_fn
        self.query = linear(width, (heads, head_dim), dtype=dtype, rngs=rngs)
        self.key = linear(width, (kv_heads, head_dim), dtype=dtype, rngs=rngs)
        self.value = linear(width, (kv_heads, head_dim), dtype=dtype, rngs=rngs)
        self.out = linear((heads, head_dim), width, gain=out_gain, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Float32[Array, "2 B T half"],
        segment_ids: Int32[Array, "B T"] | None,
    ) -> Float[Array, "B T width"]:
        return self.remembering(x, rotation, self.forgetful(segment_ids))[0]

    def remembering(
        self,
        x: Float[Array, "B T width"],
        rotation: Float32[Array, "2 B T half"],
        attend: RememberingFn,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """The same round another callable; returns what that remembers, too."""
        query = rotate(self.query(x), rotation)
        query, x = compute_first(query, x)
        key = rotate(self.key(x), rotation)
        out, memory = attend(query, key, self.value(x))
        return self.out(out), memory

    def forgetful(self, segment_ids: Int32[Array, "B T"] | None) -> RememberingFn:
        """The attention callable of the model, which remembers nothing."""
        return lambda *arrays: (self.attention_fn(*arrays, segment_ids=segment_ids), None)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(
        self,
        kind: Literal["swiglu", "gelu"],
        *,
        width: int,
        hidden: int,
        out_gain: float,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        gated = kind == "swiglu"
        self.gate = linear(width, hidden, dtype=dtype, rngs=rngs) if gated else None
        self.up = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = linear(hidden, width, gain=out_gain, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x)))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))

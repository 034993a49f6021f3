"""A decoder-only transformer: pre-norm, RMSNorm, rotary positions, grouped queries, SwiGLU or GELU.

The model knows no mesh. Its tokens may come in any order: only two things depend on the order,
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
from jaxtyping import Array, Bool, Float, Float32, Int32

from models.hooks import Hooks
from models.layers import MLP, AttentionFn
from models.linear import linear, project
from models.rope import Rope, rotate
from startrail_jax.ordering import compute_first

CachedAttentionFn = Callable[..., tuple[Float[Array, "B T N H"], Any]]
"""(query, key, value) -> (out [B T N H], kv_cache)"""


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
        qkv_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rope: Rope | None = None,
        no_rope_every: int | None = None,
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
            qkv_bias: whether the projections to queries, keys and values have a bias.
            qk_norm: whether each head of queries and keys is normalised before it is rotated.
            norm_eps: what is added to the mean square in a norm.
            rope: rotary positions of `head_dim` channels; None for unscaled ones.
            no_rope_every: the last of every so many layers rotates nothing; None for no such layer.
            dtype: type of activations and matrix products; logits are float32 in any case.
            hooks: how the model runs; None runs it as it is written.
            rngs: source of the initial weights.
        """
        self.dtype = jnp.dtype(dtype)
        self.rope = Rope(head_dim=head_dim) if rope is None else rope
        self.no_rope_every = no_rope_every
        self.hooks = Hooks() if hooks is None else hooks
        # A sequence-parallel attention knows the order of its tokens, and warns of another one.
        self.check_positions = getattr(attention_fn, "check_positions", lambda positions: None)
        self.embedding = nnx.Embed(
            vocab_size,
            width,
            embedding_init=nnx.initializers.normal(width**-0.5),
            rngs=rngs,
        )

        # Each block adds to the residual stream twice: with this gain the variance of the stream
        # does not grow with depth.
        out_gain = (2 * layers) ** -0.5

        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> GPTBlock:
            return GPTBlock(
                attention=GPTAttention(
                    width=width,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    attention_fn=attention_fn,
                    out_gain=out_gain,
                    bias=qkv_bias,
                    norm_eps=norm_eps if qk_norm else None,
                    dtype=dtype,
                    rngs=rngs,
                ),
                mlp=MLP(
                    mlp, width=width, hidden=mlp_width, out_gain=out_gain, dtype=dtype, rngs=rngs
                ),
                width=width,
                norm_eps=norm_eps,
                dtype=dtype,
                hooks=self.hooks,
                rngs=rngs,
            )

        self.blocks = make_blocks(rngs.split(layers))
        self.norm = nnx.RMSNorm(width, epsilon=norm_eps, dtype=jnp.float32, rngs=rngs)
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
            segment_ids: number of the document of each token, which sees only its own document.
                None means that each row is one document.

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
        """What `logits` takes: the last layer's output, normalised. Arguments as in `__call__`."""
        graph, weights = nnx.split(self.blocks)

        def run_block(
            weights: Any,
            x: Array,
            rotates: Array | None,
            rotation: Array,
            segment_ids: Array | None,
        ) -> Array:
            block = nnx.merge(graph, weights)
            rotation = _rotation_of(rotates, rotation)
            return block(x, rotation, block.attention.uncached(segment_ids))[0]

        layer = self.hooks.wrap_layer(run_block)
        self.check_positions(positions)
        context = self.rope.rotation(positions), segment_ids
        x = self._embed(tokens)

        def step(x: Array, inputs: tuple[Any, Array | None]) -> tuple[Array, None]:
            weights, rotates = inputs
            return layer(weights, x, rotates, *context), None

        x, _ = lax.scan(step, x, (weights, self._rotates(weights)))
        return self.norm(x).astype(self.dtype)

    def hidden_with_cache(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        kv_cache: Any,
        attend: CachedAttentionFn,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """`hidden` for prefill and decode: attention keeps keys and values in a cache.

        Args:
            tokens: token ids.
            positions: position of each token in its sequence.
            kv_cache: arrays with the keys and values of all layers. The loop over layers carries
                them, so that what `attend` writes for one layer is written in place.
            attend: called instead of `attention_fn` as (kv_cache, layer, query, key, value) ->
                (out, kv_cache), where `layer` is the number of the layer.

        Returns:
            What `logits` takes, and the cache.
        """
        graph, weights = nnx.split(self.blocks)

        def run_block(
            weights: Any,
            x: Array,
            rotates: Array | None,
            rotation: Array,
            layer: Array,
            kv_cache: Any,
        ) -> tuple[Array, Any]:
            rotation = _rotation_of(rotates, rotation)
            return nnx.merge(graph, weights)(
                x, rotation, functools.partial(attend, kv_cache, layer)
            )

        run = self.hooks.wrap_layer(run_block)
        rotation = self.rope.rotation(positions)

        def step(
            carry: tuple[Array, Any], layer: tuple[Any, Array | None, Array]
        ) -> tuple[Any, None]:
            (x, kv_cache), (weights, rotates, number) = carry, layer
            return run(weights, x, rotates, rotation, number, kv_cache), None

        layers = weights, self._rotates(weights), _numbers(weights)
        (x, kv_cache), _ = lax.scan(step, (self._embed(tokens), kv_cache), layers)
        return self.norm(x).astype(self.dtype), kv_cache

    def _rotates(self, weights: Any) -> Bool[Array, " layers"] | None:
        """Which layers rotate queries and keys; None if all do."""
        if self.no_rope_every is None:
            return None
        return (_numbers(weights) + 1) % self.no_rope_every != 0

    def _embed(self, tokens: Int32[Array, "B T"]) -> Float[Array, "B T width"]:
        # The lookup is in float32 and rounded afterwards, so that the gradient of a frequent token,
        # which is a long sum, is float32 too.
        return jnp.asarray(self.embedding(tokens), self.dtype)

    def logits(self, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T vocab"]:
        """Unnormalised log-probabilities of the token that follows each token."""
        if self.head is None:
            return project(hidden, self.embedding.embedding[...].T, 1, jnp.float32)
        return self.head(hidden)


def _numbers(weights: Any) -> Int32[Array, " layers"]:
    """The numbers of the layers whose stacked weights these are."""
    return jnp.arange(len(jax.tree.leaves(weights)[0]))


def _rotation_of(
    rotates: Bool[Array, ""] | None, rotation: Float32[Array, "2 B T half"]
) -> Float32[Array, "2 B T half"]:
    """The rotation of a layer: if it does not rotate, that by an angle of 0.

    It is chosen inside the layer, so that remat does not save one for each.
    """
    if rotates is None:
        return rotation
    still = jnp.array([1.0, 0.0])[:, None, None, None]
    return jnp.where(rotates, rotation, still)


class GPTBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        *,
        attention: GPTAttention,
        mlp: MLP,
        width: int,
        norm_eps: float,
        dtype: Any,
        hooks: Hooks,
        rngs: nnx.Rngs,
    ) -> None:
        self.hooks = hooks
        self.attention = attention
        self.mlp = mlp
        self.dtype = jnp.dtype(dtype)
        # Norms are computed in float32 and rounded afterwards: in 16 bits their scales, which are
        # near 1, would be rounded themselves.
        norm = functools.partial(nnx.RMSNorm, width, epsilon=norm_eps, dtype=jnp.float32, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Float32[Array, "2 B T half"],
        attend: CachedAttentionFn,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """Runs the block; returns its output and the cache that `attend` returned."""
        copy, reduce = self.hooks.copy_to_tensor, self.hooks.reduce_from_tensor

        def feed_forward(x: Array) -> Array:
            return reduce(self.mlp(copy(self.mlp_norm(x).astype(self.dtype))))

        normalised = copy(self.attention_norm(x).astype(self.dtype))
        out, kv_cache = self.attention(normalised, rotation, attend)
        x = x + reduce(out)
        return x + self.hooks.tiled(feed_forward)(x), kv_cache


class GPTAttention(nnx.Module):
    """Projections, norms of heads and rotary positions around an attention callable."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        attention_fn: AttentionFn,
        out_gain: float,
        bias: bool,
        norm_eps: float | None,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.attention_fn = attention_fn
        self.query = linear(width, (heads, head_dim), dtype=dtype, rngs=rngs)
        self.key = linear(width, (kv_heads, head_dim), dtype=dtype, rngs=rngs)
        self.value = linear(width, (kv_heads, head_dim), dtype=dtype, rngs=rngs)
        self.out = linear((heads, head_dim), width, gain=out_gain, dtype=dtype, rngs=rngs)

        # No biases of `nnx.LinearGeneral`, which would look for all heads on a device that has
        # some of them.
        def make_bias(heads: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros((heads, head_dim))) if bias else None

        self.query_bias, self.key_bias = make_bias(heads), make_bias(kv_heads)
        self.value_bias = make_bias(kv_heads)

        def make_norm() -> nnx.RMSNorm | None:
            if norm_eps is None:
                return None
            return nnx.RMSNorm(head_dim, epsilon=norm_eps, dtype=jnp.float32, rngs=rngs)

        self.query_norm, self.key_norm = make_norm(), make_norm()

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Float32[Array, "2 B T half"],
        attend: CachedAttentionFn,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """Attention with projections; returns its output and the cache that `attend` returned."""
        query = _biased(self.query(x), self.query_bias)
        query = _normalised_and_rotated(query, self.query_norm, rotation)
        query, x = compute_first(query, x)
        key = _biased(self.key(x), self.key_bias)
        key = _normalised_and_rotated(key, self.key_norm, rotation)
        out, kv_cache = attend(query, key, _biased(self.value(x), self.value_bias))
        return self.out(out), kv_cache

    def uncached(self, segment_ids: Int32[Array, "B T"] | None) -> CachedAttentionFn:
        """The model's attention callable, with None in the place of a cache."""
        return lambda *arrays: (self.attention_fn(*arrays, segment_ids=segment_ids), None)


def _biased(x: Float[Array, "B T heads H"], bias: nnx.Param | None) -> Float[Array, "B T heads H"]:
    """x + bias. The sum is in float32, so that the gradient of the bias, a long sum, is too."""
    if bias is None:
        return x
    return (x.astype(jnp.float32) + bias[...][None, None]).astype(x.dtype)


def _normalised_and_rotated(
    x: Float[Array, "B T heads H"],
    norm: nnx.RMSNorm | None,
    rotation: Float32[Array, "2 B T half"],
) -> Float[Array, "B T heads H"]:
    """Queries or keys with their positions. Nothing is rounded between norm and rotation."""
    return rotate(x if norm is None else norm(x), rotation).astype(x.dtype)

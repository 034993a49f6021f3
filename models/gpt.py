"""A decoder-only transformer: RMSNorm, rotary positions, grouped queries, a gated MLP or GELU.

The model knows no mesh. Its tokens may come in any order: only two things depend on the order,
`positions`, which are data, and the attention callable, which knows its own layout.

References:
    RMSNorm: https://arxiv.org/abs/1910.07467
    SwiGLU: https://arxiv.org/abs/2002.05202
    Grouped queries: https://arxiv.org/abs/2305.13245
    Local and global layers, soft caps, norms after a block: https://arxiv.org/abs/2408.00118 (Gemma
    2) and https://arxiv.org/abs/2503.19786 (Gemma 3)
    Sinks: gpt-oss, https://arxiv.org/abs/2508.10925
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from models.hooks import Hooks
from models.layers import MLP, AttentionFn, MakeNorm, make_norm, projected
from models.linear import linear, project_to_rows
from models.periods import Kind, Stretch, kinds_of_layers, stretches
from models.rope import Rope, rotate
from startrail_jax.xla.ordering import compute_first

CachedAttentionFn = Callable[..., tuple[Float[Array, "B T N H"], Any]]
"""(query, key, value, local_window_size=, sinks=) -> (out [B T N H], kv_cache)"""
Rotation = Float32[Array, "2 B T half"] | None
"""Cosines and sines of a layer; None for a layer without rotary positions."""


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
        mlp: Literal["swiglu", "geglu", "gelu"] = "swiglu",
        tied_head: bool = False,
        scaled_embedding: bool = False,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        sinks: bool = False,
        post_norms: bool = False,
        norm_offset: bool = False,
        norm_eps: float = 1e-6,
        windows: Sequence[int | None] = (None,),
        ropes: Sequence[Rope | None] | None = None,
        output_softcap: float | None = None,
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
            attention_fn: causal attention; called with `segment_ids` by keyword, and with
                `local_window_size` and `sinks` where a layer has them.
            mlp: "swiglu", "geglu" (three matrices) or "gelu" (two).
            tied_head: whether the embedding is the output projection too.
            scaled_embedding: whether embeddings are multiplied by the square root of `width`.
            qkv_bias: whether the projections to queries, keys and values have a bias.
            qk_norm: whether each head of queries and keys is normalised before it is rotated.
            sinks: whether each head has a logit of its own in the denominator of its softmax.
            post_norms: whether what attention and MLP add to the stream is normalised.
            norm_offset: whether a norm multiplies by 1 + its scale.
            norm_eps: what is added to the mean square in a norm.
            windows: the number of keys that a query sees in each layer, its own included; None for
                those that `attention_fn` shows. Layer i has entry i modulo their number.
            ropes: rotary positions of `head_dim` channels in each layer, likewise; None for a layer
                without. None in place of all for unscaled ones.
            output_softcap: cap c of the logits, c * tanh(logits / c); None for none.
            dtype: type of activations and matrix products; logits are float32 in any case.
            hooks: how the model runs; None runs it as it is written.
            rngs: source of the initial weights.
        """
        self.dtype = jnp.dtype(dtype)
        ropes = (Rope(head_dim=head_dim),) if ropes is None else ropes
        self.stretches = stretches(kinds_of_layers(windows, ropes, layers))
        self.embedding_scale = width**0.5 if scaled_embedding else None
        self.output_softcap = output_softcap
        self.hooks = Hooks() if hooks is None else hooks
        self.embedding = nnx.Embed(
            vocab_size,
            width,
            embedding_init=nnx.initializers.normal(width**-0.5),
            rngs=rngs,
        )

        # Each block adds to the residual stream twice: with this gain the variance of the stream
        # does not grow with depth.
        out_gain = (2 * layers) ** -0.5
        norm = functools.partial(make_norm, epsilon=norm_eps, offset=norm_offset)

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
                    make_norm=norm if qk_norm else None,
                    sinks=sinks,
                    dtype=dtype,
                    rngs=rngs,
                ),
                mlp=MLP(
                    mlp, width=width, hidden=mlp_width, out_gain=out_gain, dtype=dtype, rngs=rngs
                ),
                width=width,
                make_norm=norm,
                post_norms=post_norms,
                dtype=dtype,
                hooks=self.hooks,
                rngs=rngs,
            )

        self.blocks = make_blocks(rngs.split(layers))
        self.norm = norm(width, rngs=rngs)
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
            kind: Kind, weights: Any, x: Array, rotation: Rotation, segment_ids: Array | None
        ) -> Array:
            block = nnx.merge(graph, weights)
            return block(x, rotation, kind.window, block.attention.uncached(segment_ids))[0]

        layers = self._wrapped(run_block)
        rotations = self._rotations(positions)
        x = self._embed(tokens)
        for stretch in self.stretches:

            def step(x: Array, weights: Any, stretch: Stretch = stretch) -> tuple[Array, None]:
                for kind, own in stretch.each(weights):
                    x = layers[kind](own, x, rotations[kind.rope], segment_ids)
                return x, None

            x, _ = lax.scan(step, x, stretch.grouped(weights))
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
            kind: Kind, weights: Any, x: Array, rotation: Rotation, number: Array, kv_cache: Any
        ) -> tuple[Array, Any]:
            block = nnx.merge(graph, weights)
            return block(x, rotation, kind.window, functools.partial(attend, kv_cache, number))

        layers = self._wrapped(run_block)
        rotations = self._rotations(positions)
        carry = self._embed(tokens), kv_cache
        numbers = jnp.arange(len(jax.tree.leaves(weights)[0]))
        for stretch in self.stretches:

            def step(carry: Any, inputs: Any, stretch: Stretch = stretch) -> tuple[Any, None]:
                x, kv_cache = carry
                for kind, (own, number) in stretch.each(inputs):
                    x, kv_cache = layers[kind](own, x, rotations[kind.rope], number, kv_cache)
                return (x, kv_cache), None

            carry, _ = lax.scan(step, carry, stretch.grouped((weights, numbers)))
        x, kv_cache = carry
        return self.norm(x).astype(self.dtype), kv_cache

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        """The kinds of layers, in the order of the layers: all processes trace the same program."""
        return tuple(dict.fromkeys(kind for stretch in self.stretches for kind in stretch.kinds))

    def _wrapped(self, run_block: Callable[..., Any]) -> dict[Kind, Callable[..., Any]]:
        """The function of a layer of each kind."""
        wrap = self.hooks.wrap_layer
        return {kind: wrap(functools.partial(run_block, kind)) for kind in self._kinds}

    def _rotations(self, positions: Int32[Array, "B T"]) -> dict[Rope | None, Rotation]:
        """The rotation of each kind of layer, which is computed once for all layers."""
        ropes = dict.fromkeys(kind.rope for kind in self._kinds)
        return {rope: None if rope is None else rope.rotation(positions) for rope in ropes}

    def _embed(self, tokens: Int32[Array, "B T"]) -> Float[Array, "B T width"]:
        # The lookup is in float32 and rounded afterwards, so that the gradient of a frequent token,
        # which is a long sum, is float32 too.
        x = self.embedding(tokens)
        if self.embedding_scale is not None:
            # As in Gemma, the factor has the type of the activations: 55.5 for 55.43 in bfloat16.
            x *= jnp.asarray(self.embedding_scale, self.dtype).astype(jnp.float32)
        return jnp.asarray(x, self.dtype)

    def logits(self, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T vocab"]:
        """Unnormalised log-probabilities of the token that follows each token."""
        logits: Any = (
            project_to_rows(hidden, self.embedding.embedding[...], jnp.float32)
            if self.head is None
            else self.head(hidden)
        )
        cap = self.output_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class GPTBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); what is added may be normalised too."""

    def __init__(
        self,
        *,
        attention: GPTAttention,
        mlp: MLP,
        width: int,
        make_norm: MakeNorm,
        post_norms: bool,
        dtype: Any,
        hooks: Hooks,
        rngs: nnx.Rngs,
    ) -> None:
        self.hooks = hooks
        self.attention = attention
        self.mlp = mlp
        self.dtype = jnp.dtype(dtype)
        self.attention_norm, self.mlp_norm = (make_norm(width, rngs=rngs) for _ in range(2))
        self.attention_out_norm, self.mlp_out_norm = (
            make_norm(width, rngs=rngs) if post_norms else None for _ in range(2)
        )

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Rotation,
        window: int | None,
        attend: CachedAttentionFn,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """Runs the block; returns its output and the cache that `attend` returned."""
        copy, reduce = self.hooks.copy_to_tensor, self.hooks.reduce_from_tensor

        def feed_forward(x: Array) -> Array:
            out = reduce(self.mlp(copy(self.mlp_norm(x).astype(self.dtype))))
            return out if self.mlp_out_norm is None else self.mlp_out_norm(out).astype(self.dtype)

        normalised = copy(self.attention_norm(x).astype(self.dtype))
        out, kv_cache = self.attention(normalised, rotation, window, attend)
        out = projected(reduce(out))
        if self.attention_out_norm is not None:
            out = self.attention_out_norm(out).astype(self.dtype)
        x = x + out
        return x + self.hooks.tiled(feed_forward)(x), kv_cache


class GPTAttention(nnx.Module):
    """Projections, norms of heads, rotary positions and sinks around an attention callable."""

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
        make_norm: MakeNorm | None,
        sinks: bool,
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

        self.query_norm, self.key_norm = (
            None if make_norm is None else make_norm(head_dim, rngs=rngs) for _ in range(2)
        )
        self.sinks = nnx.Param(jnp.zeros(heads)) if sinks else None

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Rotation,
        window: int | None,
        attend: CachedAttentionFn,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """Attention with projections; returns its output and the cache that `attend` returned."""
        query = _biased(projected(self.query(x)), self.query_bias)
        query = _normalised_and_rotated(query, self.query_norm, rotation)
        query, x = compute_first(query, x)
        key = _biased(projected(self.key(x)), self.key_bias)
        key = _normalised_and_rotated(key, self.key_norm, rotation)
        # In the words of `jax.nn.dot_product_attention`; only what a layer has is asked for.
        options: dict[str, Any] = {} if window is None else {"local_window_size": (window - 1, 0)}
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        out, kv_cache = attend(
            query, key, _biased(projected(self.value(x)), self.value_bias), **options
        )
        return self.out(out), kv_cache

    def uncached(self, segment_ids: Int32[Array, "B T"] | None) -> CachedAttentionFn:
        """The model's attention callable, with None in the place of a cache."""
        attention_fn = functools.partial(self.attention_fn, segment_ids=segment_ids)
        return lambda *arrays, **options: (attention_fn(*arrays, **options), None)


def _biased(x: Float[Array, "B T heads H"], bias: nnx.Param | None) -> Float[Array, "B T heads H"]:
    """x + bias. The sum is in float32, so that the gradient of the bias, a long sum, is too."""
    if bias is None:
        return x
    return (x.astype(jnp.float32) + bias[...][None, None]).astype(x.dtype)


def _normalised_and_rotated(
    x: Float[Array, "B T heads H"],
    norm: nnx.RMSNorm | None,
    rotation: Rotation,
) -> Float[Array, "B T heads H"]:
    """Queries or keys with their positions. Nothing is rounded between norm and rotation."""
    out = x if norm is None else norm(x)
    return (out if rotation is None else rotate(out, rotation)).astype(x.dtype)

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
    Norms after a block alone, and over all heads: OLMo 2, https://arxiv.org/abs/2501.00656
    Layers of linear attention among those of attention: Qwen3-Next and Qwen3.5, and Olmo Hybrid
    Experts: see `models.experts`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Integer

from models.attention import Rotation
from models.config import GPTConfig
from models.experts import Balance, Experts, Route
from models.hooks import Hooks
from models.layers import (
    MLP,
    AttentionFn,
    Documents,
    MakeNorm,
    biased,
    projected,
)
from models.linear import linear, project_to_rows
from models.parts.experts import ExpertsConfig
from models.parts.gpt import MIXERS, stack_pairs
from models.periods import Kind, Stretch, kinds_of_layers, layer_of, layers_of, stretches
from models.rope import Rope, ropes_of
from models.weights import Norms
from startrail_jax.errors import InputError
from startrail_jax.xla.varying import vary, varying_axes


class Added(NamedTuple):
    """Auxiliary losses of the layers of experts, and their balance."""

    auxiliary: Float32[Array, "B T"]
    """The sum of the auxiliary losses of all layers, for each token."""
    balance: Balance
    """The mean over layers of `Route.balance`."""
    busiest: Float32[Array, ""]
    """The mean over layers of `Route.busiest`."""

    @classmethod
    def none(cls, x: Float[Array, "B T width"], experts: int) -> Added:
        """Zeros, to which the losses of each layer are added."""
        axes = varying_axes(x)
        auxiliary, probability = (vary(jnp.zeros(y), *axes) for y in (x.shape[:2], experts))
        return cls(auxiliary, Balance(jnp.zeros(experts), probability), jnp.zeros(()))

    def of_layers(self, count: int, config: ExpertsConfig) -> Added:
        """Means over this many layers, from sums. Adds the balancing loss of the whole model if
        there is one: Switch's loss, equation (4), of the means, as in transformers. All tokens of a
        device get the same number, from the mean probabilities of the device."""
        load, probability = self.balance.load / count, self.balance.probability / count
        auxiliary = self.auxiliary
        if config.balance_over == "model":
            auxiliary += config.balance_loss * config.count * jnp.dot(load, probability)
        return Added(auxiliary, Balance(load, probability), self.busiest / count)


class GPT(nnx.Module):
    """A causal language model over integer tokens."""

    def __init__(
        self,
        config: GPTConfig,
        *,
        attention_fn: AttentionFn,
        windows: Sequence[int | None] | None = None,
        hooks: Hooks | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Builds the model with float32 weights, which `models.parts.gpt` declares. Layers with the
        same mixer and feed-forward have stacked weights, [layers, ...], in `blocks` or a stack of
        their own.

        Args:
            config: sizes and options. `attention_fn` must apply the soft cap, the scale, and the
                window if all layers have the same.
            attention_fn: causal attention; called with `segment_ids` by keyword, or with
                `visible_until` if the model is, and with `local_window_size` and `sinks` where a
                layer has them.
            windows: the number of keys that a query sees in each layer, its own included, in place
                of the windows of the config: the list repeats. None for the config's, unless
                `attention_fn` has the only one.
            hooks: how the model runs; None runs it as it is written.
            rngs: source of the initial weights.
        """
        self.config, self.dtype = config, jnp.dtype(config.dtype)
        width, dtype = config.width, self.dtype
        if windows is None:
            windows = (None,) if config.has_one_window else config.layer_windows
        mixers, feeds = config.layer_mixers, config.layer_feed_forwards
        kinds = kinds_of_layers(mixers, feeds, windows, ropes_of(config), config.layers)
        self.stretches = stretches(kinds)
        self.hooks = Hooks() if hooks is None else hooks
        self.embedding = nnx.Embed(
            config.vocab_size,
            width,
            embedding_init=nnx.initializers.normal(width**-0.5),
            rngs=rngs,
        )

        # With this gain the variance of the residual stream does not grow with depth.
        out_gain = sum(part != "none" for part in (*mixers, *feeds)) ** -0.5
        make_norm = MakeNorm(config.norm_eps, config.norm_offset)

        def make_block(mixer: str, feed_forward: str, rngs: nnx.Rngs) -> GPTBlock:
            mixer_options: dict[str, Any] = dict(attention_fn=attention_fn, hooks=self.hooks)
            mixer_options |= dict(out_gain=out_gain, rngs=rngs)
            common: dict[str, Any] = dict(width=width, out_gain=out_gain, dtype=dtype, rngs=rngs)
            module, mlp = MIXERS[mixer].module, None
            if feed_forward == "experts":
                mlp = Experts(config.experts.of_model(config), **common)
            elif feed_forward == "mlp":
                mlp = MLP(config.mlp, hidden=config.mlp_width, **common)
            return GPTBlock(
                attention=None if module is None else resolve_name(module)(config, **mixer_options),
                mlp=mlp,
                width=width,
                make_norm=make_norm,
                norms=MIXERS[mixer].norms(config),
                dtype=dtype,
                hooks=self.hooks,
                residual_scale=config.residual_scale,
                layer_scalar=config.layer_scalar,
                rngs=rngs,
            )

        for name, pair in stack_pairs(config).items():
            count = sum(layer_kind.stack == name for layer_kind in kinds)
            stack = nnx.vmap(functools.partial(make_block, *pair), in_axes=0, out_axes=0)
            setattr(self, name, stack(rngs.split(count)))
        self.norm = make_norm(width, rngs=rngs)
        make_head = functools.partial(linear, width, dtype=dtype, out_dtype=jnp.float32, rngs=rngs)
        if config.head == "score":
            self.score = make_head(1)
        elif config.head == "head":
            self.head = make_head(config.vocab_size)

    def __call__(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        segment_ids: Int32[Array, "B T"] | None = None,
        *,
        visible_until: Int32[Array, "B T"] | None = None,
    ) -> Float32[Array, "B T vocab"]:
        """Logits of the token that follows each token.

        Args:
            tokens: token ids, in the order that `attention_fn` expects.
            positions: position of each token in its sequence, or in its document.
            segment_ids: number of the document of each token, which sees only its own document.
                None means that each row is one document.
            visible_until: in place of segment ids, for rows of texts with shared beginnings: the
                place after the last token that continues each token, as `startrail_jax.Attention`
                takes it. Positions then are those of `startrail_jax.branch_positions`.

        Returns:
            Unnormalised log-probabilities, in the order of `tokens`.
        """
        return self.logits(self.hidden(tokens, positions, segment_ids, visible_until=visible_until))

    def hidden(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        segment_ids: Int32[Array, "B T"] | None = None,
        experts: Integer[Array, "B T layers k"] | None = None,
        *,
        visible_until: Int32[Array, "B T"] | None = None,
    ) -> Float[Array, "B T width"]:
        """The input of `logits`: the last layer's output, normalised. Arguments as
        `hidden_and_added`."""
        options = {"experts": experts, "visible_until": visible_until}
        return self.hidden_and_added(tokens, positions, segment_ids, **options)[0]

    def hidden_and_added(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        segment_ids: Int32[Array, "B T"] | None = None,
        token_weights: Float32[Array, "B T"] | None = None,
        experts: Integer[Array, "B T layers k"] | None = None,
        *,
        visible_until: Int32[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T width"], Added | None]:
        """`hidden`, and the losses of layers of experts; None without such layers.

        Args:
            tokens, positions, segment_ids, visible_until: as in `__call__`.
            token_weights: weight of the loss of each token; None for 1. Tokens of weight 0 are no
                part of the balance of experts.
            experts: the experts of each token in each layer that has experts, from the first such
                layer on, each once; None to leave the choice to the routers.
        """
        graphs, weights = self._split()

        def run_block(
            layer_kind: Kind,
            weights: Any,
            x: Array,
            rotation: Rotation,
            documents: Documents,
            token_weights: Array | None,
            experts: Any,
        ) -> tuple[Array, Added | None]:
            block = nnx.merge(graphs[layer_kind.stack], weights)
            attend, given = block.uncached(documents), layer_of(experts)
            x, _, route = block(x, rotation, layer_kind.window, attend, token_weights, given)
            return x, None if route is None else Added(
                route.auxiliary, route.balance, route.busiest
            )

        documents: Documents = {"segment_ids": segment_ids}
        if visible_until is not None:
            documents = {"visible_until": visible_until}
        layers = self._wrapped(run_block)
        rotations = self._rotations(positions)
        x, added = self._embed(tokens), None
        of_experts = self.config.layer_feed_forwards.count("experts")
        if of_experts:
            added = Added.none(x, self.config.experts.count)
        given = self._of_stacks(experts)
        for stretch in self.stretches:

            def step(carry: Any, inputs: Any, stretch: Stretch = stretch) -> tuple[Any, None]:
                x, added = carry
                of_layers = zip(*map(stretch.each, inputs), strict=True)
                for (layer_kind, layer_weights), (_, layer_experts) in of_layers:
                    rotation = rotations[layer_kind.rope]
                    x, new = layers[layer_kind](
                        layer_weights, x, rotation, documents, token_weights, layer_experts
                    )
                    added = added if new is None else jax.tree.map(jnp.add, added, new)
                return (x, added), None

            inputs = stretch.grouped(weights), stretch.grouped(given)
            (x, added), _ = lax.scan(step, (x, added), inputs)
        if added is not None:
            added = added.of_layers(of_experts, self.config.experts)
        return self.norm(x).astype(self.dtype), added

    def hidden_with_cache(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        caches: Mapping[str, Any],
        attend: Mapping[str, Callable[..., tuple[Array, Any]]],
    ) -> tuple[Float[Array, "B T width"], dict[str, Any]]:
        """`hidden` for prefill and decode: layers keep keys and values, or states, in caches.

        Args:
            tokens: token ids.
            positions: position of each token in its sequence.
            caches: for each stack of layers, such as `blocks`, the arrays that its layers keep. The
                loop over layers carries them, so that each layer writes in place.
            attend: for each stack, the function that its layers call: (cache, layer, *arrays) ->
                (out, cache), where `layer` is the number of the layer in its stack, and the arrays
                are the arguments of a `CachedAttentionFn` or a `CachedLinearFn`. Stacks of layers
                without a mixer have neither.

        Returns:
            The input of `logits`, and the caches.
        """
        graphs, weights = self._split()

        def run_block(
            layer_kind: Kind, weights: Any, x: Array, rotation: Rotation, number: Array, cache: Any
        ) -> tuple[Array, Any]:
            block = nnx.merge(graphs[layer_kind.stack], weights)
            function = attend.get(layer_kind.stack)
            attend_layer = None if function is None else functools.partial(function, cache, number)
            return block(x, rotation, layer_kind.window, attend_layer)[:2]

        layers = self._wrapped(run_block)
        rotations = self._rotations(positions)
        carry = self._embed(tokens), {stack: caches[stack] for stack in weights if stack in caches}
        numbered = {
            stack: (arrays, jnp.arange(len(jax.tree.leaves(arrays)[0])))
            for stack, arrays in weights.items()
        }
        for stretch in self.stretches:

            def step(carry: Any, inputs: Any, stretch: Stretch = stretch) -> tuple[Any, None]:
                x, caches = carry
                for layer_kind, entry in stretch.each(inputs):
                    (layer_weights, number), cache = layer_of(entry), caches.get(layer_kind.stack)
                    x, cache = layers[layer_kind](
                        layer_weights, x, rotations[layer_kind.rope], number, cache
                    )
                    kept = {} if cache is None else {layer_kind.stack: cache}
                    caches = {**caches, **kept}
                return (x, caches), None

            carry, _ = lax.scan(step, carry, stretch.grouped(numbered))
        x, written = carry
        return self.norm(x).astype(self.dtype), written

    def _split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The graphs of a layer of each stack, and the stacked weights."""
        stacks = {name: nnx.split(getattr(self, name)) for name in stack_pairs(self.config)}
        graphs, weights = ({name: x[i] for name, x in stacks.items()} for i in range(2))
        return graphs, weights

    def _of_stacks(
        self, experts: Integer[Array, "B T layers k"] | None
    ) -> dict[str, Integer[Array, "_ B T k"] | None]:
        """The given experts of the layers of each stack; None for a stack without."""
        config, found = self.config, dict.fromkeys(stack_pairs(self.config))
        if experts is None:
            return found
        mixers, feeds = config.layer_mixers, config.layer_feed_forwards
        order = [layer for layer, feed in enumerate(feeds) if feed == "experts"]
        if experts.shape[2:] != (len(order), config.experts.top_k):
            raise InputError(
                "experts must be [B, T, layers of experts, model.experts.top_k]; got "
                f"{experts.shape} for {len(order)} layers of top_k={config.experts.top_k}. Give "
                "those of all layers of experts."
            )
        by_layer = jnp.moveaxis(experts, 2, 0)
        for stack, (_, feed) in stack_pairs(config).items():
            if feed == "experts":
                numbers = [order.index(layer) for layer in layers_of(stack, mixers, feeds)]
                found[stack] = by_layer[np.array(numbers)]
        return found

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        """The kinds of layers, in the order of the layers: all processes trace the same program."""
        return tuple(
            dict.fromkeys(layer_kind for stretch in self.stretches for layer_kind in stretch.kinds)
        )

    def _wrapped(self, run_block: Callable[..., Any]) -> dict[Kind, Callable[..., Any]]:
        """The function of a layer of each kind."""
        wrap = self.hooks.wrap_layer
        return {
            layer_kind: wrap(functools.partial(run_block, layer_kind), layer_kind.stack)
            for layer_kind in self._kinds
        }

    def _rotations(self, positions: Int32[Array, "B T"]) -> dict[Rope | None, Rotation]:
        """The rotation of each kind of layer, which is computed once for all layers."""
        ropes = dict.fromkeys(layer_kind.rope for layer_kind in self._kinds)
        return {rope: None if rope is None else rope.rotation(positions) for rope in ropes}

    def _embed(self, tokens: Int32[Array, "B T"]) -> Float[Array, "B T width"]:
        # The lookup is in float32 and rounded afterwards, so that the gradient of a frequent token,
        # which is a long sum, is float32 too.
        x = self.embedding(tokens)
        if self.config.scaled_embedding:
            # As in Gemma, the factor has the type of the activations: 55.5 for 55.43 in bfloat16.
            x *= jnp.asarray(self.config.width**0.5, self.dtype).astype(jnp.float32)
        if self.config.embedding_scale != 1:
            x *= self.config.embedding_scale
        return jnp.asarray(x, self.dtype)

    def logits(self, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T vocab"]:
        """Unnormalised log-probabilities of the token that follows each token; for a model of
        scores, one score of each."""
        if self.config.scores:
            return self.score(hidden)
        logits: Any = (
            project_to_rows(hidden, self.embedding.embedding[...], jnp.float32)
            if self.config.tied_head
            else self.head(hidden)
        )
        if self.config.logit_divisor != 1:
            logits /= self.config.logit_divisor
        cap = self.config.output_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class GPTBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or one of them; their outputs may be
    normalised as well, or instead of their inputs, and multiplied by a fixed factor, and the sum
    multiplied by a number that no gradient reaches."""

    layer_scalar: nnx.Param | None = None

    def __init__(
        self,
        *,
        attention: Any,
        mlp: MLP | Experts | None,
        width: int,
        make_norm: MakeNorm,
        norms: Norms,
        dtype: Any,
        hooks: Hooks,
        residual_scale: float = 1.0,
        layer_scalar: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.hooks = hooks
        self.residual_scale = residual_scale
        if layer_scalar:
            self.layer_scalar = nnx.Param(jnp.ones(1))
        self.attention = attention
        self.mlp = mlp
        self.dtype = jnp.dtype(dtype)
        parts = attention, mlp
        self.attention_norm, self.mlp_norm = (
            None if norms == "after" or part is None else make_norm(width, rngs=rngs)
            for part in parts
        )
        self.attention_out_norm, self.mlp_out_norm = (
            None if norms == "before" or part is None else make_norm(width, rngs=rngs)
            for part in parts
        )

    def uncached(self, documents: Documents) -> Callable[..., tuple[Array, None]] | None:
        """What the mixer of a layer calls without a cache; None for a layer without one."""
        return None if self.attention is None else self.attention.uncached(documents)

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Rotation,
        window: int | None,
        attend: Callable[..., tuple[Array, Any]] | None,
        token_weights: Float32[Array, "B T"] | None = None,
        experts: Integer[Array, "B T k"] | None = None,
    ) -> tuple[Float[Array, "B T width"], Any, Route | None]:
        """Runs the block; returns its output, the cache that `attend` returned, and where a layer
        of experts has sent its tokens: to the given `experts`, if there are some."""
        kv_cache = route = None
        if self.attention is not None:
            normalised = self.hooks.copy_to_tensor(self._normalised(x, self.attention_norm))
            out, kv_cache = self.attention(normalised, rotation, window, attend)
            out = self.hooks.reduce_from_tensor(out)
            out = projected(biased(out, self.attention.out_bias))
            x = self._added(x, self._normalised(out, self.attention_out_norm))
        if self.mlp is not None:
            out, route = self._feed_forward(self.mlp, x, token_weights, experts)
            x = self._added(x, out)
        if self.layer_scalar is not None:
            (scalar,) = lax.stop_gradient(self.layer_scalar[...])
            x = (x.astype(jnp.float32) * scalar).astype(x.dtype)
        return x, kv_cache, route

    def _feed_forward(
        self,
        mlp: MLP | Experts,
        x: Float[Array, "B T width"],
        token_weights: Float32[Array, "B T"] | None,
        experts: Integer[Array, "B T k"] | None,
    ) -> tuple[Float[Array, "B T width"], Route | None]:
        hooks = self.hooks
        copy, reduce = hooks.copy_to_tensor, hooks.reduce_from_tensor
        if isinstance(mlp, MLP):

            def dense(x: Array) -> Array:
                out = reduce(mlp(copy(self._normalised(x, self.mlp_norm))))
                return self._normalised(out, self.mlp_out_norm)

            return hooks.tiled(dense)(x), None

        x = self._normalised(x, self.mlp_norm)
        route = mlp.route(x, token_weights, hooks.sum_over_tokens, experts)
        # Not in tiles of tokens, of which an expert would have few: it has tiles of its own.
        out = mlp(x, route.chosen, route.shares, copy, reduce, hooks.expert_axes)
        return self._normalised(out, self.mlp_out_norm), route

    def _added(self, x: Float[Array, "B T width"], out: Float[Array, "B T width"]) -> Array:
        """The residual stream with the output of a part; the product is in float32."""
        if self.residual_scale == 1:
            return x + out
        scaled = self.residual_scale * out.astype(jnp.float32)
        return (x.astype(jnp.float32) + scaled).astype(x.dtype)

    def _normalised(self, x: Float[Array, "B T width"], norm: nnx.RMSNorm | None) -> Array:
        return x if norm is None else norm(x).astype(self.dtype)

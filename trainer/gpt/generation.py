"""Tokens from a language model, one after another: a cache, sharded as the sequence, and a choice.

The prompt goes through the model as a sequence does in training, whose keys and values are the
first contents of the cache; then each new token attends to that cache (`Attention.decode`). Both
run inside one `shard_map` over the whole mesh, as a training step does, with the same weights where
they lie. What is drawn depends on seed, row and position alone, not on the mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer, Key

from models.gpt import GPT
from models.hooks import Hooks
from startrail_jax.attention import Attention
from startrail_jax.compiler import compiler_options
from startrail_jax.sizes import check_heads
from startrail_jax.varying import vary
from trainer.config import SHARDED_AXES
from trainer.gpt.config import GPTConfig
from trainer.gpt.objective import model_arguments
from trainer.parallel.partition import (
    STACKED,
    Partition,
)
from trainer.parallel.tiling import in_tiles

# Below it float32 may make 0 of a temperature, and NaN of the logits.
LEAST_TEMPERATURE = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    Tokens stand in the order of their probabilities softmax(logits / temperature), the smaller id
    first where they tie. `top_k` keeps the first k of them. `top_p` keeps, of what is left and has
    been given all the probability, the shortest start that has at least p of it. One of those is
    drawn, with probabilities in proportion.

    References:
        top_p: nucleus sampling, https://arxiv.org/abs/1904.09751

    Raises:
        ValueError: if a value is out of its range.
    """

    temperature: float = 1.0
    """Divides the logits; 0, or less than 1e-30, takes the likeliest token."""
    top_k: int | None = None
    """Number of tokens to choose from; None for all."""
    top_p: float = 1.0
    """Probability of the tokens to choose from; 1 for all."""
    seed: int = 0
    """Of the draws, below 2**32."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                "temperature must be at least 0 and finite; got "
                f"temperature={self.temperature}. Use 0 for the likeliest token, 1 for the "
                "probabilities of the model."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"top_k must be at least 1; got top_k={self.top_k}. Leave it out for all tokens."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be above 0 and at most 1; got top_p={self.top_p}. Leave it out for "
                "all tokens."
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(
                f"seed must be at least 0 and below 2**32; got seed={self.seed}. Use another."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether only the likeliest token is chosen from."""
        return self.temperature < LEAST_TEMPERATURE


def kept_tokens(logits: Float32[Array, " vocab"], sampling: Sampling) -> Bool[Array, " vocab"]:
    """Which tokens `sampling` chooses from; at temperature 0 the smallest of the likeliest."""
    if sampling.is_greedy:
        return jnp.arange(logits.size) == jnp.argmax(logits)
    order = jnp.argsort(logits, descending=True, stable=True)
    scaled = (logits - logits.max())[order] / sampling.temperature
    kept = jnp.arange(logits.size) < (sampling.top_k or logits.size)
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf))
        before = jnp.cumsum(probabilities) - probabilities
        # The first has nothing before it.
        kept &= before < sampling.top_p
    return jnp.zeros(logits.size, bool).at[order].set(kept)


def choose_token(
    logits: Float32[Array, " vocab"], sampling: Sampling, key: Key[Array, ""]
) -> Int32[Array, ""]:
    """One token; the smallest of the likeliest ones at temperature 0."""
    if sampling.is_greedy:
        return jnp.argmax(logits).astype(jnp.int32)
    scaled = (logits - logits.max()) / sampling.temperature
    if sampling.top_k is not None or sampling.top_p < 1:
        scaled = jnp.where(kept_tokens(logits, sampling), scaled, -jnp.inf)
    return jax.random.categorical(key, scaled).astype(jnp.int32)


class Generator:
    """The compiled functions that continue prompts, on one mesh."""

    def __init__(
        self,
        model: GPTConfig,
        attention: Attention,
        sampling: Sampling | None = None,
        *,
        zero: int = 0,
        zero_axes: tuple[str, ...] = SHARDED_AXES,
        tile: int | None = None,
    ) -> None:
        """Prepares the functions; each is compiled when it is called first.

        Args:
            model: sizes of the model.
            attention: causal, on a mesh with the axes of `startrail_jax.make_mesh`.
            sampling: how tokens are chosen.
            zero: ZeRO level of the weights that it is given. Those of level 3 stay split, and each
                layer collects its own for every token; those of 1 and 2 are collected once.
            zero_axes: mesh axes over which ZeRO has split them.
            tile: tokens of a prompt on a device that the MLP treats at a time; None for all.

        Raises:
            ValueError: if the mesh does not divide the model.
        """
        mesh: Any = attention.mesh
        check_heads(attention.degrees, model.heads, model.kv_heads)
        self.attention = attention
        self.sampling = sampling or Sampling()
        self._config = model
        self._tile = tile
        self._partition = Partition(mesh, 3 if zero == 3 else 0, zero_axes, model.dtype)
        hooks = Hooks(
            layer=self._layer,
            tokens=self._tokens,
            spread=self._partition.spread,
            join=self._partition.join,
        )
        made = nnx.eval_shape(
            lambda: GPT(
                **model_arguments(model),
                attention_fn=attention,
                hooks=hooks,
                rngs=nnx.Rngs(0),
            )
        )
        self._graph, shapes = nnx.split(made)
        self._splits = self._partition.splits(shapes)
        self._specs = self._partition.specs(shapes)
        shardings = self._partition.shardings(shapes)
        self.weight_shapes: Any = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            shardings,
        )
        """Shapes and shardings of the weights, to restore them with."""

        # What a training step would collect, without a copy in float32.
        narrow = functools.partial(jax.tree.map, self._narrow)
        collect = jax.jit(lambda weights: narrow(weights, self._splits), out_shardings=shardings)
        self._whole: Callable[[Any], Any] = collect if zero in (1, 2) else lambda weights: weights
        compiled = functools.partial(jax.jit, compiler_options=compiler_options(mesh))
        self.prefill: Callable[..., Any] = compiled(self._prefill)
        """(weights, tokens [B S], positions [B S], lengths [B]) -> tokens that follow [B], on every
        device, and the cache. Tokens and positions are in layout order."""
        self.step: Callable[..., Any] = compiled(self._step, donate_argnums=1)
        """(weights, cache, tokens [B], their positions [B]) -> as `prefill`; takes the cache's
        memory for the new one."""

    def __call__(
        self,
        weights: Any,
        prompts: Sequence[Integer[np.ndarray, " _"]],
        *,
        num_tokens: int,
        end_of_document: int | None = None,
    ) -> Iterator[tuple[int | None, ...]]:
        """Continues prompts, all at once.

        Args:
            weights: of the model; float32.
            prompts: token ids, at least one each; of any lengths.
            num_tokens: how many to add to each.
            end_of_document: the token after which a row ends; None if there is none such.

        Yields:
            `num_tokens` times, or until all rows have ended: the next token of each prompt; None
            for a row that has ended, the token that ended it included.

        Raises:
            ValueError: if a prompt is empty, or has a token that the model does not know.
        """
        for prompt in prompts:
            self.check_prompt(prompt)
        return self._generate(self._whole(weights), list(prompts), num_tokens, end_of_document)

    def _generate(
        self, weights: Any, prompts: list[Any], num_tokens: int, end_of_document: int | None
    ) -> Iterator[tuple[int | None, ...]]:
        if not num_tokens or not prompts:
            return
        layout, spec = self.attention.layout, self.attention.sequence_spec
        # Rows that only fill up the data axis.
        rows = -(-len(prompts) // self.attention.degrees.data) * self.attention.degrees.data
        filled = [*prompts, *[prompts[0][:1]] * (rows - len(prompts))]
        lengths = np.array([len(prompt) for prompt in filled], np.int32)
        slots = self._num_slots(rows, int(lengths.max()) + num_tokens - 1)
        tokens = np.zeros((rows, slots), np.int32)
        for row, prompt in zip(tokens, filled, strict=True):
            row[: len(prompt)] = prompt
        positions = np.broadcast_to(layout.positions(slots), tokens.shape)
        new, cache = self.prefill(
            weights,
            self._place(layout.permute(tokens), spec),
            self._place(positions, spec),
            self._place(lengths, PartitionSpec(spec[0])),
        )
        ended = np.zeros(len(prompts), bool)
        for i in range(num_tokens):
            # Read before more is begun: programs of simulated devices wait for each other.
            chosen = np.asarray(new)[: len(prompts)]
            ended |= chosen == (-1 if end_of_document is None else end_of_document)
            yield tuple(None if end else int(x) for x, end in zip(chosen, ended, strict=True))
            if i + 1 < num_tokens and not ended.all():
                at = self._place(lengths + i, PartitionSpec(spec[0]))
                new, cache = self.step(weights, cache, new, at)
            elif ended.all():
                return

    def _num_slots(self, rows: int, num_tokens: int) -> int:
        """Slots of a cache for so many tokens: as many as can be laid out, and cut into tiles."""
        layout, data = self.attention.layout, self.attention.degrees.data
        slots = layout.padded_length(num_tokens)
        if self._tile is None or rows // data * slots // layout.degree <= self._tile:
            return slots
        multiple = math.lcm(layout.multiple, layout.degree * self._tile)
        return -(-num_tokens // multiple) * multiple

    def check_prompt(self, prompt: Integer[np.ndarray, " length"]) -> None:
        if not len(prompt):
            raise ValueError(
                "A prompt must have at least one token; got an empty one. Give the model something "
                "to continue."
            )
        wrong = prompt[(prompt < 0) | (prompt >= self._config.vocab_size)]
        if len(wrong):
            raise ValueError(
                "Tokens of a prompt must be at least 0 and below model.vocab_size; got "
                f"id {wrong[0]} with vocab_size={self._config.vocab_size}. Use the tokenizer that "
                "the model was trained with."
            )

    def _place(self, x: np.ndarray, spec: PartitionSpec) -> Array:
        """Onto the devices, from processes that all have the whole array."""
        sharding = NamedSharding(self._partition.mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def _narrow(self, x: Array, split: Any) -> Array:
        return x if split.vector else x.astype(self._config.dtype)

    # On global arrays.

    def _prefill(self, weights: Any, tokens: Array, positions: Array, lengths: Array) -> Any:
        spec = self.attention.sequence_spec
        return self._sharded(
            self._local_prefill, (self._specs, spec, spec, PartitionSpec(spec[0]))
        )(weights, tokens, positions, lengths)

    def _step(self, weights: Any, cache: Any, tokens: Array, positions: Array) -> Any:
        rows = PartitionSpec(self.attention.sequence_spec[0])
        specs = (self._specs, self._cache_spec, rows, rows)
        return self._sharded(self._local_step, specs)(weights, cache, tokens, positions)

    def _sharded(self, function: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            function,
            mesh=self._partition.mesh,
            in_specs=in_specs,
            out_specs=(PartitionSpec(), self._cache_spec),
        )

    @property
    def _cache_spec(self) -> PartitionSpec:
        """Of keys and values of all layers: [layers, B, S, heads, head_dim].

        Where there are fewer key heads than `tensor` has devices, each has copies of its own, and
        they count as many heads.
        """
        return PartitionSpec(None, *self.attention.query_spec(self._config.heads))

    # What one device does.

    def _local_prefill(
        self,
        weights: Any,
        tokens: Int32[Array, "b s"],
        positions: Int32[Array, "b s"],
        lengths: Int32[Array, " b"],
    ) -> tuple[Int32[Array, " B"], Any]:
        copies = self.attention.key_copies(self._config.kv_heads)

        def attend(cache: Any, layer: Array, *arrays: Array) -> tuple[Array, Any]:
            new = (x[:, :, ::copies] for x in arrays[1:])
            cache = tuple(
                lax.dynamic_update_index_in_dim(slots, x, layer, 0)
                for slots, x in zip(cache, new, strict=True)
            )
            return self.attention.local(*arrays)[0], cache

        model = self._model(weights)
        hidden, cache = model.cached(tokens, positions, self._empty_cache(*tokens.shape), attend)
        # One device has the last token of a row; all get what it found.
        last = (positions == lengths[:, None] - 1)[:, :, None]
        found = jnp.sum(jnp.where(last, hidden, 0), axis=1, keepdims=True)
        if self._sequence_axes:
            found = lax.psum(found, self._sequence_axes)
        return self._choose(model, found, lengths), cache

    def _local_step(
        self, weights: Any, cache: Any, tokens: Int32[Array, " b"], positions: Int32[Array, " b"]
    ) -> tuple[Int32[Array, " B"], Any]:
        at = positions[:, None]
        copies = self.attention.key_copies(self._config.kv_heads)

        def attend(cache: Any, layer: Array, query: Array, *new: Array) -> tuple[Array, Any]:
            update = self.attention.update_cache_local
            cache = tuple(
                update(slots, x[:, :, ::copies], at, layer=layer)
                for slots, x in zip(cache, new, strict=True)
            )
            keys, values = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in cache)
            return self.attention.decode_local(query, keys, values, at), cache

        model = self._model(weights)
        hidden, cache = model.cached(tokens[:, None], at, cache, attend)
        return self._choose(model, hidden, positions + 1), cache

    def _choose(
        self, model: GPT, hidden: Float[Array, "b 1 width"], positions: Int32[Array, " b"]
    ) -> Int32[Array, " B"]:
        """The tokens of these positions; those of all rows, on all devices."""
        logits = model.logits(hidden)[:, 0]
        count = len(positions)
        data = self.attention.degrees.data
        first = lax.axis_index("data") * count if data > 1 else 0
        seed = jax.random.key(self.sampling.seed)

        def choose(logits: Array, row: Array, position: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(seed, row), position)
            return choose_token(logits, self.sampling, key)

        tokens = jax.vmap(choose)(logits, first + jnp.arange(count), positions)
        # That of one device counts: sums on others may round otherwise.
        whole = jnp.zeros(count * data, jnp.int32)
        whole = vary(whole, *self._partition.replicas)
        whole = lax.dynamic_update_slice_in_dim(whole, tokens, first, 0)
        if self._sequence_axes:
            whole = jnp.where(lax.axis_index(self._sequence_axes) == 0, whole, 0)
        replicas = self._partition.replicas
        return lax.psum(whole, replicas) if replicas else whole

    def _empty_cache(self, rows: int, slots: int) -> tuple[Array, Array]:
        """Keys and values of all layers, of this device's tokens, of the key heads it needs."""
        config, degrees = self._config, self.attention.degrees
        heads = config.kv_heads // degrees.tensor
        if config.kv_heads % degrees.tensor:
            heads = degrees.head // self.attention.key_copies(config.kv_heads)
        empty = jnp.zeros((config.layers, rows, slots, heads, config.head_dim), config.dtype)
        empty = vary(empty, *self._partition.replicas, *self._partition.tensor)
        return empty, empty

    def _model(self, weights: Any) -> GPT:
        """The model of one device; its layers collect their weights when they run."""
        used = {
            name: part if name == STACKED else self._use(part, self._splits[name])
            for name, part in weights.items()
        }
        return nnx.merge(self._graph, nnx.State(used))

    def _use(self, weights: Any, splits: Any) -> Any:
        # Gradients, of which there are none, would go to the sinks.
        return self._partition.use(weights, self._partition.sinks(weights, splits), splits)

    @property
    def _sequence_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self._partition.replicas if axis != "data")

    # What the model leaves open.

    def _layer(self, block: Callable[..., Any]) -> Callable[..., Any]:
        splits = self._partition.of_layer(self._splits[STACKED])
        return lambda weights, *context: block(self._use(weights, splits), *context)

    def _tokens(self, function: Callable[..., Array]) -> Callable[..., Array]:
        return in_tiles(function, self._tile)

"""Generation of text: prefill, then decode, with a KV cache that is sharded as the sequence.

Prefill runs the prompts as training runs sequences, and keeps keys, values and the states of linear
attention. Each decode step runs one new token of every prompt (`Attention.decode`). Both run as the
program of each device (`ShardedModel`), with the weights of training where they lie. The tokens
that are drawn depend on seed, row and position, and not on the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, Integer, UInt32

from models.gpt import GPT
from models.parts.attention import Keys, keys_of
from models.parts.gpt import gpt_weights, recurrences_of, stack_pairs
from models.parts.recurrence import Recurrence
from models.periods import layers_of
from startrail_jax.attention import Attention
from startrail_jax.calls.latents import joined
from startrail_jax.errors import InputError
from startrail_jax.rings.sizes import check_heads
from startrail_jax.xla.compiler import compiler_options
from startrail_jax.xla.varying import vary
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.objective import make_gpt
from trainer.gpt.token_choice import Sampling, choose_token
from trainer.parallel.partition import Partition
from trainer.parallel.sharded_model import ShardedModel


class Generator:
    """The compiled functions that continue prompts, on one mesh."""

    def __init__(
        self, config: GPTTrainConfig, attention: Attention, sampling: Sampling, *, zero: int
    ) -> None:
        """Takes causal attention, and the ZeRO level of the weights over `config.zero_axes`. At 3,
        each layer gathers its weights for every token; at 1 and 2, all are gathered once."""
        mesh: Any = attention.mesh
        model = config.model
        for keys in keys_of(model).values():
            check_heads(attention.degrees, model.heads, keys.heads)
        self.attention = attention
        self.sampling = sampling
        self._config, self._lora = model, config.lora
        self._tile = config.tile
        level = 3 if zero == 3 else 0
        self._partition = Partition(mesh, gpt_weights(model), level, config.zero_axes, model.dtype)
        self._model = ShardedModel(
            lambda attention_fn, hooks: make_gpt(
                model, config.lora, attention_fn, hooks, nnx.Rngs(0)
            ),
            attention,
            self._partition,
            tile=config.tile,
        )
        self.weight_shapes: Any = self._model.weight_shapes
        """Shapes and shardings of the weights, to restore them with."""

        shardings = self._partition.shardings(self.weight_shapes)
        gather = jax.jit(self._gathered, out_shardings=shardings)
        self._gather: Callable[[Any], Any] = gather if zero in (1, 2) else lambda weights: weights
        compiled = partial(jax.jit, compiler_options=compiler_options(mesh))
        spec, caches = attention.sequence_spec, self._cache_specs
        rows = PartitionSpec(spec[0])
        on_each = partial(self._model.on_each_device, out_specs=(PartitionSpec(), caches))
        seed = PartitionSpec()
        prefill = on_each(self._local_prefill, in_specs=(spec, spec, rows, seed))
        self.prefill: Callable[..., Any] = compiled(prefill)
        """(weights, tokens [B S], positions [B S], lengths [B], seed []) -> (next tokens [B], on
        every device, and caches). Tokens and positions are in layout order."""
        decode = on_each(self._local_decode, in_specs=(caches, rows, rows, seed))
        self.decode: Callable[..., Any] = compiled(decode, donate_argnums=1)
        """(weights, caches, tokens [B], their positions [B], seed []) -> (next tokens [B], caches),
        like `prefill`; the new caches take the memory of the old ones."""

    def __call__(
        self,
        weights: Any,
        prompts: Sequence[Integer[np.ndarray, " _"]],
        *,
        num_tokens: int,
        end_of_document: int | None = None,
        stops: Sequence[int] = (),
        seed: int | None = None,
    ) -> Iterator[tuple[int | None, ...]]:
        """Continues all prompts, which may differ in length: yields the next token of each, up to
        `num_tokens` times. A row that has ended yields None, beginning with the token that ended
        it. `seed` takes the place of that of `sampling`, and compiles nothing anew."""
        for prompt in prompts:
            self.check_prompt(prompt)
        ends = [*stops] if end_of_document is None else [end_of_document, *stops]
        seed = self.sampling.seed if seed is None else replace(self.sampling, seed=seed).seed
        return self._generate(self._gather(weights), list(prompts), num_tokens, ends, seed)

    def _generate(
        self, weights: Any, prompts: list[Any], num_tokens: int, ends: list[int], seed: int
    ) -> Iterator[tuple[int | None, ...]]:
        if not num_tokens or not prompts:
            return
        rows = PartitionSpec(self.attention.sequence_spec[0])
        tokens, positions, lengths = self._batch(prompts, num_tokens)
        placed = self._place(np.uint32(seed), PartitionSpec())
        new, caches = self.prefill(weights, tokens, positions, self._place(lengths, rows), placed)
        ended = np.zeros(len(prompts), bool)
        for i in range(num_tokens):
            # The tokens are read before the next step starts: programs of simulated devices that
            # run at the same time wait for each other.
            chosen = np.asarray(new)[: len(prompts)]
            ended |= np.isin(chosen, ends)
            yield tuple(None if end else int(x) for x, end in zip(chosen, ended, strict=True))
            if i + 1 == num_tokens or ended.all():
                return
            at = self._place(lengths + i, rows)
            new, caches = self.decode(weights, caches, new, at, placed)

    def _batch(
        self, prompts: list[Any], num_tokens: int
    ) -> tuple[Array, Array, Int32[np.ndarray, " B"]]:
        """Tokens and positions for `prefill`, with room for `num_tokens`; the prompts' lengths."""
        layout, spec = self.attention.layout, self.attention.sequence_spec
        # Rows that only fill up the data axis hold the first token.
        rows = -(-len(prompts) // self.attention.degrees.data) * self.attention.degrees.data
        filled = [*prompts, *[prompts[0][:1]] * (rows - len(prompts))]
        lengths = np.array([len(prompt) for prompt in filled], np.int32)
        slots = self._num_slots(rows, int(lengths.max()) + num_tokens - 1)
        tokens = np.zeros((rows, slots), np.int32)
        for row, prompt in zip(tokens, filled, strict=True):
            row[: len(prompt)] = prompt
        positions = np.broadcast_to(layout.positions(slots), tokens.shape)
        return self._place(layout.permute(tokens), spec), self._place(positions, spec), lengths

    def _num_slots(self, rows: int, num_tokens: int) -> int:
        """Slots of a cache for `num_tokens`: a number that the layout and the tiles divide."""
        layout, data = self.attention.layout, self.attention.degrees.data
        for recurrence in filter(None, self._recurrences.values()):
            # A slice must hold what the convolution of the next one sees.
            num_tokens = max(num_tokens, layout.multiple * (recurrence.conv - 1))
        slots = layout.padded_length(num_tokens)
        if self._tile is None or rows // data * slots // layout.degree <= self._tile:
            return slots
        multiple = math.lcm(layout.multiple, layout.degree * self._tile)
        return -(-num_tokens // multiple) * multiple

    def check_prompt(self, prompt: Integer[np.ndarray, " length"]) -> None:
        """Checks that the model can continue a prompt."""
        if not len(prompt):
            raise InputError(
                "A prompt must have at least one token; got an empty one. Give the model something "
                "to continue."
            )
        wrong = prompt[(prompt < 0) | (prompt >= self._config.vocab_size)]
        if len(wrong):
            raise InputError(
                "Tokens of a prompt must be at least 0 and below model.vocab_size; got "
                f"id {wrong[0]} with vocab_size={self._config.vocab_size}. Use the tokenizer that "
                "the model was trained with."
            )

    def _place(self, x: Any, spec: PartitionSpec) -> Array:
        """An array on the devices, from processes that each have the whole array."""
        sharding = NamedSharding(self.attention.mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def _gathered(self, weights: Any) -> Any:
        """The weights as a training step would gather them, in the type in which they are used."""

        def narrow(x: Array, split: Any) -> Array:
            return x if split.vector else x.astype(self._config.dtype)

        return jax.tree.map(narrow, weights, self._model.splits)

    @property
    def _cache_specs(self) -> dict[str, Any]:
        """PartitionSpecs of the caches of all layers: keys and values [layers, B, S, heads,
        head_dim], latents as one key head, states of a recurrence [layers, devices, B, heads,
        key_dim, value_dim], and inputs of its convolution before the next token [layers, devices,
        B, tokens, channels]. Each device along the sequence has a copy of the last two. With fewer
        key heads than devices along `tensor`, each device has the heads it needs, and these copies
        count as heads."""
        data, sequence = self.attention.sequence_spec
        tensor = self.attention.query_spec(self._config.heads)[2]
        of_keys = PartitionSpec(None, *self.attention.query_spec(self._config.heads))
        states = PartitionSpec(None, sequence, data, tensor)
        tails = PartitionSpec(None, sequence, data, None, tensor)
        of_stack: dict[str, Any] = dict.fromkeys(self._recurrences, (states, tails))
        for stack, keys in self._keys.items():
            of_stack[stack] = (of_keys,) if keys.latent_dim else (of_keys, of_keys)
        return of_stack

    @cached_property
    def _recurrences(self) -> dict[str, Recurrence | None]:
        """The recurrence of the layers of each stack that has a cache; None for layers with
        attention."""
        by_mixer, pairs = recurrences_of(self._config), stack_pairs(self._config)
        with_mixer = {stack: mixer for stack, (mixer, _) in pairs.items() if mixer != "none"}
        return {stack: by_mixer.get(mixer) for stack, mixer in with_mixer.items()}

    @cached_property
    def _keys(self) -> dict[str, Keys]:
        """The keys of the layers of each stack with attention."""
        by_mixer, pairs = keys_of(self._config), stack_pairs(self._config)
        return {stack: by_mixer[mixer] for stack, (mixer, _) in pairs.items() if mixer in by_mixer}

    # What one device does.

    def _local_prefill(
        self,
        weights: Any,
        tokens: Int32[Array, "b s"],
        positions: Int32[Array, "b s"],
        lengths: Int32[Array, " b"],
        seed: UInt32[Array, ""],
    ) -> tuple[Int32[Array, " B"], Any]:
        segment_ids = jnp.where(positions < lengths[:, None], 0, -1)

        def attend(
            copies: int, kv_cache: Any, layer: Array, *arrays: Array, **options: Any
        ) -> tuple[Array, Any]:
            new = (x[:, :, ::copies] for x in arrays[1:])
            return self._model.attend(*arrays, **options), _written(kv_cache, new, layer)

        def attend_latents(
            cache: Any, layer: Array, query: Array, latent: Array, rotated: Any, *kernels: Any
        ) -> tuple[Array, Any]:
            out = self._model.attend_latents(query, latent, rotated, *kernels)
            return out, _written(cache, [joined(latent, rotated)], layer)

        def mix(recurrence: Recurrence, *inputs: Any) -> tuple[Array, Array, Any]:
            cache, layer, x, kernel, heads_of, *gates = inputs
            linear = self._model.linear(recurrence.rule)
            options: dict[str, Any] = {"segment_ids": segment_ids}
            x, tail = linear.conv_local(x, kernel, return_last=True, **options)
            heads = heads_of(x)
            out, state = linear.local(*heads, *gates, return_state=True, **options)
            return out, heads[2], _written(cache, self._copied(state, tail), layer)

        model = self._model.local(weights)
        empty = self._empty_caches(*tokens.shape)
        attends = self._by_stack(attend, attend_latents, mix)
        hidden, caches = model.hidden_with_cache(tokens, positions, empty, attends)
        # The last token of a row is on one device, which sends its hidden state to the others.
        last = (positions == lengths[:, None] - 1)[:, :, None]
        last_hidden = jnp.sum(jnp.where(last, hidden, 0), axis=1, keepdims=True)
        if self._sequence_axes:
            last_hidden = lax.psum(last_hidden, self._sequence_axes)
        return self._choose(model, last_hidden, lengths, seed), caches

    def _local_decode(
        self,
        weights: Any,
        caches: Any,
        tokens: Int32[Array, " b"],
        positions: Int32[Array, " b"],
        seed: UInt32[Array, ""],
    ) -> tuple[Int32[Array, " B"], Any]:
        at = positions[:, None]

        def attend(
            copies: int,
            kv_cache: Any,
            layer: Array,
            query: Array,
            *new: Array,
            local_window_size: tuple[int, int] | None = None,
            sinks: Array | None = None,
        ) -> tuple[Array, Any]:
            update = self.attention.update_cache_local
            kv_cache = tuple(
                update(slots, x[:, :, ::copies], at, layer=layer)
                for slots, x in zip(kv_cache, new, strict=True)
            )
            keys, values = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in kv_cache)
            attention = self._model.windowed(local_window_size)
            return attention.decode_local(query, keys, values, at, sinks), kv_cache

        def attend_latents(
            cache: Any, layer: Array, query: Array, latent: Array, rotated: Any, *kernels: Any
        ) -> tuple[Array, Any]:
            (latents,) = cache
            new = joined(latent, rotated)
            latents = self.attention.update_cache_local(latents, new, at, layer=layer)
            own = lax.dynamic_index_in_dim(latents, layer, keepdims=False)
            return self.attention.latent_decode_local(query, own, at, *kernels), (latents,)

        def mix(recurrence: Recurrence, *inputs: Any) -> tuple[Array, Array, Any]:
            cache, layer, x, kernel, heads_of, *gates = inputs
            linear = self._model.linear(recurrence.rule)
            state, tail = (lax.dynamic_index_in_dim(x, layer, keepdims=False)[0] for x in cache)
            x, tail = linear.decode_conv(x, kernel, initial=tail)
            heads = heads_of(x)
            out, state = linear.decode_local(*heads, *gates, state=state)
            return out, heads[2], _written(cache, self._copied(state, tail), layer)

        model = self._model.local(weights)
        attends = self._by_stack(attend, attend_latents, mix)
        hidden, caches = model.hidden_with_cache(tokens[:, None], at, caches, attends)
        return self._choose(model, hidden, positions + 1, seed), caches

    def _choose(
        self,
        model: GPT,
        hidden: Float[Array, "b 1 width"],
        positions: Int32[Array, " b"],
        seed: UInt32[Array, ""],
    ) -> Int32[Array, " B"]:
        """Chooses the tokens at these positions; returns the tokens of all rows, on all devices."""
        logits = model.logits(hidden)[:, 0]
        count = len(positions)
        data = self.attention.degrees.data
        first = lax.axis_index("data") * count if data > 1 else 0
        base = jax.random.key(seed)

        def choose(logits: Array, row: Array, position: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(base, row), position)
            return choose_token(logits, self.sampling, key)

        tokens = jax.vmap(choose)(logits, first + jnp.arange(count), positions)
        # All devices take the choice of the first: with sums rounded differently, another device
        # could choose another token.
        replicas = self._partition.replicas
        all_tokens = vary(jnp.zeros(count * data, jnp.int32), *replicas)
        all_tokens = lax.dynamic_update_slice_in_dim(all_tokens, tokens, first, 0)
        if self._sequence_axes:
            all_tokens = jnp.where(lax.axis_index(self._sequence_axes) == 0, all_tokens, 0)
        return lax.psum(all_tokens, replicas) if replicas else all_tokens

    def _empty_caches(self, rows: int, slots: int) -> dict[str, tuple[Array, ...]]:
        """The caches of a device: keys and values of its tokens and the key heads that it needs,
        and states of its heads."""
        config, degrees = self._config, self.attention.degrees

        def shapes(stack: str, recurrence: Recurrence | None) -> tuple[Any, ...]:
            if recurrence is None:
                keys = self._keys[stack]
                if keys.latent_dim is not None:
                    latent_dim = keys.latent_dim + self._added_channels
                    return (((rows, slots, 1, latent_dim), config.dtype),)
                heads = keys.heads // degrees.tensor
                if keys.heads % degrees.tensor:
                    heads = degrees.head // self.attention.key_copies(keys.heads)
                array = (rows, slots, heads, keys.head_dim), config.dtype
                return array, array
            on_device = recurrence.on_device(degrees.tensor)
            states, tail = (1, *on_device.state_shape(rows)), (1, *on_device.tail_shape(rows))
            return (states, jnp.float32), (tail, config.dtype)

        def empty(stack: str, shape: tuple[int, ...], dtype: Any) -> Array:
            layers = layers_of(stack, config.layer_mixers, config.layer_feed_forwards)
            return self._varying(jnp.zeros((len(layers), *shape), dtype))

        return {
            stack: tuple(empty(stack, *x) for x in shapes(stack, recurrence))
            for stack, recurrence in self._recurrences.items()
        }

    @property
    def _added_channels(self) -> int:
        """Channels of a latent that adapters of its matrices add: see `models.latent`."""
        adapted = {"key", "value"} & {*self._lora.targets}
        return 0 if self._lora.rank is None else len(adapted) * self._lora.rank

    def _by_stack(self, attend: Any, attend_latents: Any, mix: Any) -> dict[str, Any]:
        """The function that the layers of each stack call: `attend` with the copies of their key
        heads, `attend_latents`, or `mix` with their recurrence."""

        def of_stack(stack: str, recurrence: Recurrence | None) -> Any:
            if recurrence is not None:
                return partial(mix, recurrence)
            if self._keys[stack].latent_dim is not None:
                return attend_latents
            return partial(attend, self.attention.key_copies(self._keys[stack].heads))

        return {stack: of_stack(stack, x) for stack, x in self._recurrences.items()}

    def _copied(self, *arrays: Array) -> list[Array]:
        """Arrays that all devices along the sequence have, as each one's own."""
        return [self._varying(x[None]) for x in arrays]

    def _varying(self, x: Array) -> Array:
        return vary(x, *self._partition.replicas, *self._partition.tensor)

    @property
    def _sequence_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self._partition.replicas if axis != "data")


def _written(cache: Sequence[Array], new: Iterable[Array], layer: Array) -> tuple[Array, ...]:
    """The arrays of all layers, with the new arrays of one layer written into them."""
    return tuple(
        lax.dynamic_update_index_in_dim(slots, x, layer, 0)
        for slots, x in zip(cache, new, strict=True)
    )

"""The problem and the reference of `startrail_jax.testing.assert_exact`, for linear attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array

from startrail_jax.linear.attention import LinearAttention
from startrail_jax.linear.halo import begins, wide
from startrail_jax.tokens.trees import branch_levels, branch_slots

STATES = ("state", "dstate")
"""The results that are states; all others are arrays of tokens."""
_NAMES = ("out", "state", "dquery", "dkey", "dvalue", "ddecay", "dbeta", "dstate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateProblem:
    """Arrays on the host, in natural order."""

    inputs: tuple[np.ndarray, ...]
    """Query, key, value, decay, beta and initial state."""
    cotangents: tuple[np.ndarray, np.ndarray]
    """Of the output and the last state."""
    ids: np.ndarray | None
    trees: bool = False
    """Whether ids are `visible_until`. Then there is no initial state, and no last one."""

    @classmethod
    def drawn(
        cls,
        attention: LinearAttention,
        rng: np.random.Generator,
        *,
        tokens: tuple[int, int],
        heads: tuple[int, int],
        dims: tuple[int, int],
        dtype: Any,
        ids: np.ndarray | None,
        trees: bool,
    ) -> StateProblem:
        """Random arrays of [batch, seq] tokens, with (states, key heads) and (key, value) dims."""
        rule, (count, key_heads), (k, v) = attention.rule, heads, dims

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        keys = [normal(*tokens, key_heads, k) for _ in range(2)]
        if rule.delta:
            keys = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in keys]
        narrow = [x.astype(jnp.dtype(dtype)) for x in (*keys, normal(*tokens, count, v))]
        decay = -np.exp(normal(*tokens, count, *([k] if rule.by_channel else [])) - 2)
        beta = 1 / (1 + np.exp(-normal(*tokens, count)))
        state, dlast = (normal(tokens[0], count, k, v) for _ in range(2))
        dout = normal(*tokens, count, v).astype(narrow[2].dtype)
        return cls(
            inputs=(*narrow, decay, beta, state), cotangents=(dout, dlast), ids=ids, trees=trees
        )

    def results(
        self,
        attention: LinearAttention,
        function: Callable[..., Any],
        compiler_options: dict[str, Any] | None = None,
    ) -> dict[str, Array]:
        """What a function computes on the mesh, and its gradients, by name."""
        *tokens, state = self.inputs
        *tokens, dout = (attention.shard(x) for x in (*tokens, self.cotangents[0]))
        state, dlast = (
            attention._put(x, attention.state_spec) for x in (state, self.cotangents[1])
        )
        ids = None if self.ids is None else attention.shard(self.ids)

        @functools.partial(jax.jit, compiler_options=compiler_options)
        def program(ids: Any, cotangents: Any, *inputs: Any) -> dict[str, Any]:
            if self.trees:
                options = dict(visible_until=ids, levels=branch_levels(self._ends))
                run = lambda *tokens: function(*tokens, **options)  # noqa: E731
                out, pull = jax.vjp(run, *inputs[:-1])
                return _named(out, None, *pull(cotangents[0]), None)

            def run(*inputs: Any) -> Any:
                *tokens, state = inputs
                return function(*tokens, segment_ids=ids, initial_state=state, return_state=True)

            (out, last), pull = jax.vjp(run, *inputs)
            return _named(out, last, *pull(cotangents))

        return program(ids, (dout, dlast), *tokens, state)

    def expected(self, attention: LinearAttention) -> dict[str, np.ndarray]:
        """The same by the recurrence, token by token, in float64 on the CPU."""
        with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
            arrays = [jnp.asarray(np.asarray(x, np.float64)) for x in self.inputs]
            cotangents = tuple(jnp.asarray(np.asarray(x, np.float64)) for x in self.cotangents)
            if self.trees:
                run = functools.partial(recurrence_of_trees, attention, self._ends)
                out, pull = jax.vjp(run, *arrays[:-1])
                found = _named(out, None, *pull(cotangents[0]), None)
            else:
                run = functools.partial(recurrence, attention, self.ids)
                (out, last), pull = jax.vjp(run, *arrays)
                found = _named(out, last, *pull(cotangents))
        return {name: np.asarray(x) for name, x in found.items()}

    @property
    def _ends(self) -> np.ndarray:
        assert self.ids is not None
        return np.asarray(self.ids)

    def of_one_device(self, attention: LinearAttention) -> dict[str, np.ndarray]:
        """The same by `LinearAttention` on one device."""
        devices: Any = attention.mesh.devices
        own = [x for x in devices.flat if x.process_index == jax.process_index()]
        mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=own[:1])
        alone = LinearAttention(
            mesh, rule=attention.rule, scale=attention.scale, padding_id=attention.padding_id
        )
        return in_natural_order(alone, self.results(alone, alone))


def in_natural_order(
    attention: LinearAttention, results: Mapping[str, Array]
) -> dict[str, np.ndarray]:
    """Results on the host, in natural order, in float64."""
    return {
        name: np.asarray(
            attention._on_host(x) if name in STATES else attention.unshard(x), np.float64
        )
        for name, x in results.items()
    }


def _named(*results: Array | None) -> dict[str, Array]:
    named = zip(_NAMES, results, strict=True)
    return {name: x for name, x in named if x is not None}


def recurrence(attention: LinearAttention, ids: Any, *arrays: Array) -> tuple[Array, Array]:
    """Output and last state, token by token, of query, key, value, decay, beta and a state."""
    *tokens, state = arrays
    ids = np.zeros(tokens[0].shape[:2], np.int32) if ids is None else ids
    ids = attention.mark_padding(ids)
    fresh = begins(jnp.asarray(ids), jnp.full(len(ids), -1, np.int32))

    def add(state: Array, x: Any) -> tuple[Array, Array]:
        token, fresh, real = x
        before = jnp.where(wide(fresh, state), 0, state)
        after, out = _one_token(attention, before, token)
        state = jnp.where(wide(real, state), after, state)
        return state, jnp.where(wide(real, out), out, 0)

    steps = _repeated(tokens, state.shape[1]), fresh, jnp.asarray(ids >= 0)
    last, out = lax.scan(add, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps))
    return jnp.moveaxis(out, 0, 1), last


def recurrence_of_trees(attention: LinearAttention, ends: np.ndarray, *tokens: Array) -> Array:
    """The same for trees, with one state for each slot: only the output."""
    slots, fresh = branch_slots(ends)
    # State 0 stays zero: from it, texts begin.
    places = slots + 1 - fresh, slots + 1
    return recurrence_at(attention, *places, ends >= 0, int(slots.max()) + 2, *tokens)


def recurrence_at(
    attention: LinearAttention, before: Any, after: Any, real: Any, count: int, *tokens: Array
) -> Array:
    """The output, token by token, with `count` states, which are 0 at first: each token begins with
    that of the number `before`, and replaces `after`, integers [batch, seq]. One that is not real
    replaces none, and its output is 0."""
    heads = max(x.shape[2] for x in tokens)
    rows, dims = jnp.arange(len(tokens[0])), (tokens[0].shape[3], tokens[2].shape[3])
    # The last one is for tokens that are not real.
    shape = (len(rows), count + 1, heads, *dims)
    empty = jnp.zeros(shape, jnp.promote_types(tokens[0].dtype, jnp.float32))

    def add(states: Array, x: Any) -> tuple[Array, Array]:
        token, start, end, real = x
        state, out = _one_token(attention, states[rows, start], token)
        return states.at[rows, end].set(state), jnp.where(wide(real, out), out, 0)

    steps = _repeated(tokens, heads), before, jnp.where(real, after, count), real
    steps = jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), 1, 0), steps)
    return jnp.moveaxis(lax.scan(add, empty, steps)[1], 0, 1)


def _one_token(attention: LinearAttention, state: Array, token: Any) -> tuple[Array, Array]:
    """The states [b h k v] after one token of each row, and its outputs."""
    query, key, value, decay, beta = token
    after = attention.rule.token(state, key, value, decay, beta)
    scale = attention._scale(query.shape[-1])
    return after, scale * jnp.einsum("bhkv,bhk->bhv", after, query, precision="highest")


def _repeated(tokens: Sequence[Array], heads: int) -> list[Array]:
    """Query, key, value, decay [batch, seq, heads, 1 or k] and beta, with the heads of states."""
    found = [jnp.repeat(x, heads // x.shape[2], axis=2) for x in tokens]
    found[3] = found[3] if found[3].ndim == 4 else found[3][..., None]
    return found

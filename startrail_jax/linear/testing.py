"""The problem and the reference of `startrail_jax.testing.assert_exact`, for linear attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array

from startrail_jax.linear.attention import LinearAttention
from startrail_jax.linear.halo import begins, wide

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
        return cls(inputs=(*narrow, decay, beta, state), cotangents=(dout, dlast), ids=ids)

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
            run = functools.partial(recurrence, attention, self.ids)
            (out, last), pull = jax.vjp(run, *arrays)
            found = _named(out, last, *pull(cotangents))
        return {name: np.asarray(x) for name, x in found.items()}

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


def _named(*results: Array) -> dict[str, Array]:
    return dict(zip(_NAMES, results, strict=True))


def recurrence(attention: LinearAttention, ids: Any, *arrays: Array) -> tuple[Array, Array]:
    """Output and last state, token by token, of query, key, value, decay, beta and a state."""
    *tokens, state = arrays
    heads = state.shape[1]
    query, key, value, decay, beta = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in tokens)
    decay = decay if decay.ndim == 4 else decay[..., None]
    ids = np.zeros(query.shape[:2], np.int32) if ids is None else ids
    ids = attention.mark_padding(ids)
    fresh = begins(jnp.asarray(ids), jnp.full(len(ids), -1, np.int32))
    scale = attention._scale(query.shape[3])

    def add(state: Array, x: Any) -> tuple[Array, Array]:
        query, key, value, decay, beta, fresh, real = x
        before = jnp.where(wide(fresh, state), 0, state)
        after = attention.rule.token(before, key, value, decay, beta)
        state = jnp.where(wide(real, state), after, state)
        out = scale * jnp.einsum("bhkv,bhk->bhv", state, query, precision="highest")
        return state, jnp.where(wide(real, out), out, 0)

    steps = (query, key, value, decay, beta, fresh, jnp.asarray(ids >= 0))
    last, out = lax.scan(add, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps))
    return jnp.moveaxis(out, 0, 1), last

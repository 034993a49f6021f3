"""The loss and gradients of a run in float64 on the host, without anything that divides work.

The model and the loss are the run's own, evaluated by `wide`. Attention is dense, states of linear
attention follow their recurrence token by token, and sums over tokens of a row are taken by their
ids. So everything that goes over several devices, and every derivative that is written by hand, is
compared with something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from models.hooks import Hooks
from startrail_jax.attention import Attention
from startrail_jax.linear.attention import LinearAttention
from startrail_jax.linear.halo import wide
from startrail_jax.linear.testing import recurrence, recurrence_at
from startrail_jax.masks.algebra import causal_window
from startrail_jax.testing import dense_attention
from startrail_jax.xla.compiler import quick_options
from trainer.objective import Objective
from trainer.parallel.partition import path_name, split_frozen
from trainer.verify.results import Results
from trainer.verify.wide import in_float64


def float64_results(
    objective: Objective, attention: Attention, frozen: tuple[str, ...], weights: Any, batch: Any
) -> Results:
    """Loss and gradients of the weights that are trained.

    Args:
        objective: that of a config whose activations are float32.
        attention: on one device, in natural order.
        frozen: `TrainConfig.frozen`.
        weights: all weights, on the host.
        batch: a prepared batch in natural order, on the host.
    """
    dense = _dense_of(attention)
    hooks = Hooks(
        linear_attention=lambda rule: _Recurrence(LinearAttention(attention.mesh, rule=rule)),
        latent_attention=functools.partial(_attend_latents, dense),
        attend_whole=_attend_whole,
    )

    def make() -> nnx.Module:
        return objective.make_model(dense, hooks, nnx.Rngs(0))

    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        graph, _ = nnx.split(nnx.eval_shape(make))
        flat, tree = jax.tree.flatten(weights)

        def loss_of(flat: list[Any]) -> Array:
            model = nnx.merge(graph, jax.tree.unflatten(tree, flat))
            return _loss(objective, model, jax.tree.map(jnp.asarray, batch))

        program = jax.make_jaxpr(loss_of)(flat)
        with jax.enable_x64(True):
            run = in_float64(program)
            of_weights = jax.value_and_grad(lambda flat: run(*flat)[0])
            wide_weights = [jnp.asarray(np.asarray(x), jnp.float64) for x in flat]
            run_once = jax.jit(of_weights, compiler_options=quick_options())
            loss, gradients = run_once(wide_weights)
            trained, _ = split_frozen(jax.tree.unflatten(tree, list(gradients)), frozen)
            leaves = jax.tree_util.tree_leaves_with_path(trained)
            named = {path_name(path): np.asarray(x) for path, x in leaves}
            return Results(float(loss), named)


def _loss(objective: Objective, model: Any, batch: Any) -> Array:
    """The loss of a batch, as `trainer.objective.Objective` defines it."""
    hidden, auxiliary, _ = objective.hidden_and_auxiliary(model, batch)
    if objective.of_rows:
        counted = batch.weights > 0
        numbers = jnp.where(counted[..., None], objective.numbers(model, hidden, batch), 0)

        def sums(x: Array, ids: Array) -> Array:
            same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
            same &= counted[:, None, :]
            return jnp.einsum("bts,bs->bt", same.astype(x.dtype), x)

        losses, _ = objective.loss(numbers, batch, sums)
        losses = jnp.where(counted, losses, 0)
    else:
        losses = objective.losses(model, hidden, batch.targets)
    if auxiliary is not None:
        losses = losses + auxiliary
    total = jnp.sum(batch.weights)
    return jnp.sum(losses * batch.weights) / jnp.where(total > 0, total, 1.0)


def _dense_of(attention: Attention) -> Callable[..., Array]:
    """An `AttentionFn` with the mask, scale and cap of an attention."""
    options: dict[str, Any] = {"scale": attention.scale, "softcap": attention.softcap}

    def attend(
        query: Array,
        key: Array,
        value: Array,
        *,
        segment_ids: Array | None = None,
        visible_until: Array | None = None,
        local_window_size: tuple[int, int] | None = None,
        sinks: Array | None = None,
    ) -> Array:
        place = np.arange(query.shape[1])
        apart = place[:, None] - place[None]
        mask, window = attention.resolved_mask, causal_window(attention.resolved_mask)
        if local_window_size is not None:
            window = min(local_window_size[0] + 1, len(place) if window is None else window)
        seen = np.asarray(mask.visible(place[:, None], place[None]))
        if window is not None:  # In trees, it counts tokens of a branch.
            seen = (apart >= 0) & ((apart < window) | (visible_until is not None))
        seen = jnp.asarray(np.broadcast_to(seen, (1, len(place), len(place))))
        if segment_ids is not None:
            seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
        if visible_until is not None:
            continued = _continued(visible_until)
            at, seen = continued.sum(-1), seen & continued
            if window is not None:
                seen = seen & (at[:, :, None] - at[:, None] < window)
        run = functools.partial(dense_attention, sinks=sinks, **options)
        return jax.checkpoint(run)(query, key, value, seen[:, None])[0]

    return attend


def _attend_latents(
    attend: Callable[..., Array],
    query: Array,
    latent: Array,
    rotated_key: Array | None,
    key_kernel: Array,
    value_kernel: Array,
    **documents: Any,
) -> Array:
    """Latent attention with the keys and values of all heads."""
    key, value = (jnp.einsum("bsr,rnd->bsnd", latent, x) for x in (key_kernel, value_kernel))
    if rotated_key is not None:
        shape = (*key.shape[:3], rotated_key.shape[2])
        key = jnp.concatenate([key, jnp.broadcast_to(rotated_key[:, :, None], shape)], -1)
    return attend(query, key, value, **documents)


def _attend_whole(query: Array, key: Array, value: Array, key_ids: Array | None = None) -> Array:
    seen: Any = np.ones((1, 1), bool) if key_ids is None else key_ids >= 0
    return dense_attention(query, key, value, seen[:, None, None])[0]


@dataclass(frozen=True)
class _Recurrence:
    """Linear attention token by token: a `LinearAttentionFn`."""

    attention: LinearAttention

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        decay: Array,
        beta: Array,
        *,
        segment_ids: Array | None = None,
        visible_until: Array | None = None,
    ) -> Array:
        heads, (rows, length) = decay.shape[2], query.shape[:2]
        tokens = query, key, value, decay, beta
        if visible_until is not None:  # A state after each token, and one before the first.
            own = jnp.broadcast_to(jnp.arange(length)[None], (rows, length))
            places = _parents(visible_until), own, visible_until >= 0
            return recurrence_at(self.attention, *places, length + 1, *tokens)
        state = jnp.zeros((rows, heads, query.shape[3], value.shape[3]), jnp.float32)
        return recurrence(self.attention, segment_ids, *tokens, state)[0]

    def causal_conv(
        self,
        x: Array,
        kernel: Array,
        *,
        segment_ids: Array | None = None,
        visible_until: Array | None = None,
    ) -> Array:
        rows, length = x.shape[:2]
        total, width = jnp.zeros_like(x), kernel.shape[0]
        if visible_until is not None:
            parents = _parents(visible_until)
            # One more token, of zeros, which follows itself.
            parents = jnp.pad(parents, ((0, 0), (0, 1)), constant_values=length)
            inputs = jnp.pad(x, ((0, 0), (0, 1), *((0, 0) for _ in x.shape[2:])))
            at = jnp.broadcast_to(jnp.arange(length)[None], (rows, length))
            at = jnp.where(visible_until < 0, length, at)
            for weight in kernel[::-1]:
                total = total + inputs[jnp.arange(rows)[:, None], at] * weight[None, None]
                at = jnp.take_along_axis(parents, at, 1)
            return total
        ids = jnp.zeros((rows, length), jnp.int32) if segment_ids is None else segment_ids
        for i in range(width):
            back = width - 1 - i
            shifted = jnp.pad(x, ((0, 0), (back, 0), *((0, 0) for _ in x.shape[2:])))[:, :length]
            same = jnp.pad(ids, ((0, 0), (back, 0)), constant_values=-9)[:, :length] == ids
            total = total + jnp.where(wide(same, x), shifted, 0) * kernel[i][None, None]
        return total


def _continued(visible_until: Array) -> Array:
    """Whether each token, [B T T], continues each other one or is it."""
    place = jnp.arange(visible_until.shape[1])[None]
    seen = (place[:, None] <= place[:, :, None]) & (place[:, :, None] < visible_until[:, None])
    return seen & (visible_until >= 0)[:, :, None]


def _parents(visible_until: Array) -> Array:
    """The token that each one continues; the number of tokens if there is none."""
    length = visible_until.shape[1]
    place = jnp.arange(length)[None, None]
    before = _continued(visible_until) & (place < jnp.arange(length)[None, :, None])
    parents = jnp.where(before, place, -1).max(-1)
    return jnp.where(parents < 0, length, parents)

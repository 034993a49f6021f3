"""Functions that a model calls where memory and parallelism are decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from models.periods import ATTENTION, layer_of
from startrail_jax.errors import InputError


def _unchanged(x: Any, parts: int = 1) -> Any:
    del parts
    return x


def _run_layer(layer: Callable[..., Any], stack: str = ATTENTION) -> Callable[..., Any]:
    return lambda weights, *arguments: layer(layer_of(weights), *arguments)


def _attend_whole(query: Array, key: Array, value: Array, key_ids: Array | None = None) -> Array:
    if key_ids is None:
        return jax.nn.dot_product_attention(query, key, value)
    seen = key_ids >= 0
    out = jax.nn.dot_product_attention(query, key, value, mask=seen[:, None, None])
    return jnp.where(seen.any(axis=1)[:, None, None, None], out, 0)


def _no_linear_attention(rule: str) -> Any:
    raise InputError(
        "A model with layers of linear attention needs hooks with linear_attention; got none. Use "
        "Hooks(linear_attention=lambda rule: LinearAttention(mesh, rule=rule))."
    )


def _no_latent_attention(*_: Any, **__: Any) -> Any:
    raise InputError(
        "A model with layers of latent attention needs hooks with latent_attention; got none. Use "
        "Hooks(latent_attention=attention.latent), of a startrail_jax.Attention."
    )


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions that a model calls; it knows neither devices nor memory.

    With the defaults the model runs as it is written: on one device, or on global arrays, for which
    the compiler divides the work.
    """

    wrap_layer: Callable[..., Callable[..., Any]] = _run_layer
    """Wraps the function of one layer, (weights, x, ...) -> x or -> (x, cache): it takes the
    weights by `layer_of`, gathers sharded ones, and rematerialises. Its second argument is the part
    of the model with the stacked weights of the layer; the default is `blocks`."""
    tiled: Callable[[Callable[..., Array]], Callable[..., Array]] = _unchanged
    """Wraps a function of arrays [B T ...] that treats each token by itself, so that it can run on
    a few tokens at a time."""
    copy_to_tensor: Callable[[Array], Array] = _unchanged
    """Applied to the inputs of projections whose outputs are split over tensor-parallel devices:
    the identity, whose gradient is summed over the devices (f of Megatron-LM,
    https://arxiv.org/abs/1909.08053)."""
    reduce_from_tensor: Callable[[Array], Array] = _unchanged
    """Applied to the outputs of projections whose inputs are split over tensor-parallel devices: a
    sum over the devices (g of Megatron-LM)."""
    mean_over_tensor: Callable[..., Array] = _unchanged
    """Applied to a mean over the heads of one device, as in a norm over all heads: the mean over
    the tensor-parallel devices, with its gradient. A second argument is a number of parts:
    neighbouring devices are one part, and the mean is taken within each part."""
    sum_over_tokens: Callable[[Array], Array] = _unchanged
    """The sum over the devices that have different tokens of a batch. It has no gradient."""
    expert_axes: tuple[str, ...] = ()
    """Mesh axes over whose devices the experts of a layer are divided, so that tokens are sent to
    them; with none, every device has the weights of all experts."""
    attend_whole: Callable[..., Array] = _attend_whole
    """Attention of tokens to others that are whole on every device, such as a text: (query
    [B T N H], key [B S N H], value [B S N H], key_ids [B S] or None) -> [B T N H]. Keys of negative
    ids only fill up; where a row has no other, the output is 0."""
    linear_attention: Callable[[str], Any] = _no_linear_attention
    """(rule) -> a `startrail_jax.LinearAttention` for the layers of linear attention."""
    latent_attention: Callable[..., Array] = _no_latent_attention
    """`startrail_jax.Attention.latent` for the layers of latent attention: (query, latent,
    rotated_key, key_kernel, value_kernel, **Documents) -> [B T N V]"""

"""What is kept for the backward pass, and how much is treated at a time.

References:
    DistFlashAttn's placement of what is saved, https://arxiv.org/abs/2310.03294; LoongTrain's
    Selective-Checkpoint++, https://arxiv.org/abs/2406.18485.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float32

from startrail_jax.rings import CHECKPOINT_NAMES
from startrail_jax.varying import vary

LAYER_INPUT = "layer_input"
"""`checkpoint_name` of what goes into a layer."""

Remat = Literal["none", "attention_saved", "full"]


def rematerialised(
    layer: Callable[..., Array], *, remat: Remat, offload: bool, collects_weights: bool
) -> Callable[..., Array]:
    """A layer that computes again in the backward pass what is not saved.

    Saved for every layer, in elements of a device's tokens x width: its input, and with
    "attention_saved" attention's output (heads * head_dim) and log-sum-exp too, so that attention
    is never computed again. Weights that the layer collects are collected again in any case.

    Args:
        layer: (weights, x, ...) -> x.
        remat: "none" saves all, "full" the input alone.
        offload: whether what is saved waits in the host's memory.
        collects_weights: whether the layer collects its weights (ZeRO 3).
    """
    if remat == "none":
        if not collects_weights:
            return layer
        return jax.checkpoint(layer, prevent_cse=False, policy=_all_but_weights)
    names = CHECKPOINT_NAMES if remat == "attention_saved" else ()
    policies = jax.checkpoint_policies
    if not offload:
        policy = policies.save_only_these_names(*names)
        return jax.checkpoint(layer, prevent_cse=False, policy=policy)
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT, *names],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def named(weights: Any, x: Array, *context: Any) -> Array:
        return layer(weights, checkpoint_name(x, LAYER_INPUT), *context)

    return jax.checkpoint(named, prevent_cse=False, policy=policy)


# What collecting a weight is made of. Inside a layer there is little else of it, and that is cheap.
_COLLECTING = {"all_gather", "convert_element_type", "pvary", "pcast"}


def _all_but_weights(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A policy: saves everything but the weights that a layer has collected."""
    if primitive.name == "custom_vjp_call":
        # Asked about as a whole, and `Partition.use` makes one of every weight.
        names = {equation.primitive.name for equation in parameters["call_jaxpr"].eqns}
        return not names <= _COLLECTING
    return primitive.name not in _COLLECTING


def in_tiles(function: Callable[..., Array], tile: int | None) -> Callable[..., Array]:
    """A function of tokens that treats `tile` of them at a time, forward and backward.

    Args:
        function: of arrays [B T ...], to an array [B T ...], every token by itself.
        tile: tokens at a time, or as many fewer as divide B * T; None for all at once.
    """

    def tiled(*arrays: Array) -> Array:
        batch, length = arrays[0].shape[:2]
        if tile is None or tile >= batch * length:
            return function(*arrays)
        size = largest_tile(tile, batch * length)
        tiles = tuple(x.reshape(-1, 1, size, *x.shape[2:]) for x in arrays)
        out = lax.map(jax.checkpoint(lambda xs: function(*xs), prevent_cse=False), tiles)
        return out.reshape(batch, length, *out.shape[3:])

    return tiled


def summed_in_tiles(
    function: Callable[..., Float32[Array, ""]], tile: int | None, dtype: Any
) -> Callable[..., Float32[Array, ""]]:
    """The sum of a function over tiles of tokens.

    Where it is differentiated, each tile gives value and gradients at once: what `function`
    computes is neither kept nor computed again, and a second pass over the tiles does not keep the
    weights.

    Args:
        function: (weights, x [B T ...], more [B T ...], ...) -> the sum over its tokens.
            Differentiable by weights, which are float32, and by x.
        tile: a divisor of B * T; None for all at once.
        dtype: what the values of the weights fit: as such they wait between tiles.
    """

    def tiles(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        batch, length = arrays[0].shape[:2]
        size = min(tile or batch * length, batch * length)
        return tuple(x.reshape(-1, 1, size, *x.shape[2:]) for x in arrays)

    def zeros(shape: Any) -> Array:
        return vary(jnp.zeros(shape.shape, shape.dtype), *shape.manual_axis_type.varying)

    def add_up(step: Callable[..., Any], weights: Any, cut: Any) -> Any:
        first = jax.eval_shape(lambda *xs: step(weights, *xs)[0], *(x[0] for x in cut))
        narrow = jax.tree.map(lambda w: w.astype(dtype), weights)

        def add(so_far: Any, xs: Any) -> tuple[Any, Any]:
            new, out = step(jax.tree.map(lambda w: w.astype(jnp.float32), narrow), *xs)
            return jax.tree.map(jnp.add, so_far, new), out

        return lax.scan(add, jax.tree.map(zeros, first), cut)

    @jax.custom_vjp
    def total(weights: Any, *arrays: Array) -> Array:
        return add_up(lambda *xs: (function(*xs), None), weights, tiles(arrays))[0]

    def forward(weights: Any, *arrays: Array) -> tuple[Array, Any]:
        def step(*xs: Any) -> tuple[Any, Array]:
            loss, (dweights, dx) = jax.value_and_grad(function, argnums=(0, 1))(*xs)
            return (loss, dweights), dx

        (loss, dweights), dx = add_up(step, weights, tiles(arrays))
        return loss, (dweights, dx.reshape(arrays[0].shape), len(arrays))

    def backward(residuals: Any, dloss: Array) -> tuple[Any, ...]:
        dweights, dx, count = residuals
        dweights = jax.tree.map(lambda dw: dw * dloss, dweights)
        return (dweights, dx * dloss.astype(dx.dtype), *[None] * (count - 1))

    total.defvjp(forward, backward)
    return total


@jax.custom_vjp
def returned_after(x: Any, y: Any) -> tuple[Any, Any]:
    """Both, unchanged; the backward pass goes on from x when the gradient of y is there."""
    return x, y


def _returned_after_backward(_: None, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    dx, dy = gradients
    return lax.optimization_barrier((dx, dy))[0], dy


returned_after.defvjp(lambda x, y: ((x, y), None), _returned_after_backward)


def describe_memory(memory: Any) -> str:
    """What a compiled program takes of a device, for the log.

    Args:
        memory: what `memory_analysis()` of it says.
    """
    state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    host = memory.host_temp_size_in_bytes
    line = f"{_size(state + temporary)} (state and batch {_size(state)}, the rest for a step)"
    return f"{line}, and {_size(host)} of the host's" if host else line


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


def largest_tile(tile: int, tokens: int) -> int:
    """The largest number up to `tile` that divides the tokens."""
    return next(n for n in range(min(tile, tokens), 0, -1) if tokens % n == 0)


def check_tile(tile: int | None, tokens: int) -> None:
    """Raises unless `tile` divides the tokens that a device treats.

    Raises:
        ValueError: if it does not.
    """
    if tile is not None and tile < tokens and tokens % tile:
        best = largest_tile(tile, tokens)
        raise ValueError(
            "tile must divide the tokens that a device treats at a time, those of a batch / "
            f"(accumulation * devices that share them); got tile={tile} for {tokens} tokens. "
            f"Use --tile {best}."
        )

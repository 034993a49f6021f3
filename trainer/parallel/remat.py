"""What is kept for the backward pass, and how much is treated at a time.

References:
    DistFlashAttn's placement of what is saved, https://arxiv.org/abs/2310.03294; LoongTrain's
    Selective-Checkpoint++, https://arxiv.org/abs/2406.18485.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from startrail_jax.rings import CHECKPOINT_NAMES

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

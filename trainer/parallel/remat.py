"""Rematerialisation: what a layer saves for its backward pass, and where.

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

from models.layers import HIDDEN, PROJECTION
from models.periods import LayerOfGroup
from startrail_jax.linear import vjp
from startrail_jax.rings.residuals import CHECKPOINT_NAMES, EXCHANGED_OUT

LAYER_INPUT = "layer_input"
"""`checkpoint_name` of the input of a layer."""

Remat = Literal["none", "products_saved", "projections_saved", "attention_saved", "full"]

_ATTENTION = (*CHECKPOINT_NAMES, *vjp.CHECKPOINT_NAMES)
_NAMES: dict[Remat, tuple[str, ...]] = {
    "products_saved": (*_ATTENTION, PROJECTION, HIDDEN),
    "projections_saved": (*_ATTENTION, PROJECTION),
    "attention_saved": _ATTENTION,
    "full": (),
}
"""The `checkpoint_name`s of what layers save beside their input."""


def rematerialised(
    layer: Callable[..., Any], *, remat: Remat, offload: bool, gathers_weights: bool
) -> Callable[..., Any]:
    """A layer that recomputes in its backward pass what it has not saved.

    With "full", a layer saves its input, [tokens, width]. With "attention_saved", it also saves the
    output of attention, [tokens, heads * head_dim], and its log-sum-exp, or the states of linear
    attention. "projections_saved" adds the projections before attention, and what attention adds to
    the stream; "products_saved" adds the hidden channels of the MLP, [tokens, mlp_width], so that
    no matrix product is recomputed. "none" saves everything but gathered weights (ZeRO 3): those
    are always gathered again.

    Where the head degree is above 1, the output of attention is saved before and after the exchange
    of heads. With `offload`, to the host's memory, only the one before is saved, half as much; the
    backward pass exchanges it again.
    """
    if remat == "none":
        if not gathers_weights:
            return layer
        return _checkpointed(layer, _save_all_but_weights)
    names = _NAMES[remat]
    policies = jax.checkpoint_policies
    if not offload:
        return _checkpointed(layer, policies.save_only_these_names(*names))
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT, *(x for x in names if x != EXCHANGED_OUT)],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def named(weights: Any, x: Array, *context: Any) -> Any:
        return layer(weights, checkpoint_name(x, LAYER_INPUT), *context)

    return _checkpointed(named, policy)


def _checkpointed(layer: Callable[..., Any], policy: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.checkpoint`, whose layers of a group begin to recompute when their gradients are there.
    Otherwise the compiler may recompute all layers of the group at once."""

    def run(weights: Any, *arguments: Any) -> Any:
        in_order = isinstance(weights, LayerOfGroup)
        return jax.checkpoint(layer, prevent_cse=in_order, policy=policy)(weights, *arguments)

    return run


# The operations of which gathering a weight consists. A layer has few others of these kinds, which
# are cheap to repeat.
_GATHERING = {"all_gather", "convert_element_type", "pvary", "pcast"}


def _save_all_but_weights(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A checkpoint policy that saves everything but the weights that a layer has gathered."""
    if primitive.name == "custom_vjp_call":
        # `Partition.gather` makes one of every weight, and jax asks about it as a whole.
        names = {equation.primitive.name for equation in parameters["call_jaxpr"].eqns}
        return not names <= _GATHERING
    return primitive.name not in _GATHERING

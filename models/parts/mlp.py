"""The MLP of all models: its weights and sizes. `models.layers.MLP` computes it.

It keeps nothing while it decodes; between the passes it keeps its hidden channels if `--remat` says
so. Its only message is the sum of its outputs over `tensor`.
"""

from __future__ import annotations

from models.weights import Model, Weight, bias, projection

UNGATED = ("gelu", "relu2")
"""Kinds of MLP without a gate."""


def weights(config: Model) -> dict[str, Weight]:
    """The weights, in the order in which they are drawn."""
    return weights_of("mlp", gated=config.mlp not in UNGATED)


def weights_of(hidden: str, *, gated: bool, biased: bool = False) -> dict[str, Weight]:
    """The weights of an MLP whose dimension of hidden channels has this name."""
    declared = {"gate/kernel": projection(f"width | {hidden}")} if gated else {}
    declared["up/kernel"] = projection(f"width | {hidden}")
    if biased:
        declared["up_bias"] = bias(hidden)
    return declared | {"down/kernel": projection(f"{hidden} | width", "out")}


def sizes(config: Model) -> dict[str, int]:
    """Sizes by name of dimension."""
    return {"mlp": config.mlp_width}

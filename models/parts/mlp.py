"""The MLP of all models: its weights and sizes. `models.layers.MLP` computes it.

It keeps nothing while it decodes; between the passes its hidden channels, if `--remat` says so. It
sends nothing but the sum of its outputs over `tensor`.
"""

from __future__ import annotations

from models.weights import Model, Weight, bias, projection


def weights(config: Model) -> dict[str, Weight]:
    """The weights, in the order in which they are drawn."""
    return weights_of("mlp", gated=config.mlp != "gelu")


def weights_of(hidden: str, *, gated: bool, biased: bool = False) -> dict[str, Weight]:
    """Those of an MLP whose hidden channels have this name."""
    declared = {"gate/kernel": projection(f"width | {hidden}")} if gated else {}
    declared["up/kernel"] = projection(f"width | {hidden}")
    if biased:
        declared["up_bias"] = bias(hidden)
    return declared | {"down/kernel": projection(f"{hidden} | width", "out")}


def sizes(config: Model) -> dict[str, int]:
    """The sizes of its dimensions."""
    return {"mlp": config.mlp_width}

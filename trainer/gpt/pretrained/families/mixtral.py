"""Mixtral: the names of the tensors of its experts. Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.gpt.pretrained.families.experts import COUNTS, LIKE_MLP, LOSSES, ExpertLayers
from trainer.gpt.pretrained.families.family import SILU, Family
from trainer.weights.places import TRANSPOSED, Groups

OF_MIXTRAL: Mapping[str, tuple[str, Groups]] = {
    "mlp/router": ("block_sparse_moe.gate.weight", TRANSPOSED),
    "mlp/expert_gate/kernel": ("block_sparse_moe.experts.{}.w1.weight", TRANSPOSED),
    "mlp/expert_up/kernel": ("block_sparse_moe.experts.{}.w3.weight", TRANSPOSED),
    "mlp/expert_down/kernel": ("block_sparse_moe.experts.{}.w2.weight", TRANSPOSED),
}
"""Weight of a layer of experts -> tensor."""

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    keys=("sliding_window", *COUNTS, *LIKE_MLP, *LOSSES),
    only=SILU | {"router_jitter_noise": (0.0,)},
    windows="all_or_none",
    experts=ExpertLayers(
        sizes=LIKE_MLP,
        count=COUNTS[1],
        tensors=OF_MIXTRAL,
    ),
)

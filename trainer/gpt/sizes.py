"""The sizes of a GPT, by which its FLOPs are counted and plans are made. Imports no jax."""

from __future__ import annotations

from startrail_jax.patterns import shortest
from trainer.gpt.config import GPTTrainConfig
from trainer.planner.models import LinearSizes, ModelSizes, MoESizes
from trainer.sizes import common_sizes


def sizes_of(config: GPTTrainConfig) -> ModelSizes:
    """The sizes of the model of a run."""
    model = config.model
    same = ("kv_heads", "head_dim", "qk_norm", "attention_gate", "tied_head")
    linear = {}
    if "linear" in model.layer_mixers:
        names = ("heads", "key_heads", "key_dim", "value_dim", "conv")
        sizes = LinearSizes(**{name: getattr(model.linear_sizes, name) for name in names})
        linear = {"mixers": model.mixers, "linear": sizes}
    experts = {}
    if "experts" in model.layer_feed_forwards:
        names = ("count", "top_k", "width", "shared_width", "shared_gate", "biases")
        sizes = {name: getattr(model.expert_sizes, name) for name in names}
        sizes["choice_bias"] = model.experts.balance_rate > 0
        experts = {"feed_forwards": model.feed_forwards, "experts": MoESizes(**sizes)}
        ways = {"auto": None, "gather": False, "dispatch": True}
        experts["dispatch"] = ways[config.experts]
    return ModelSizes(
        **common_sizes(config),
        **{name: getattr(model, name) for name in same},
        **linear,
        **experts,
        outputs=model.vocab_size,
        mlp_matrices=2 if model.mlp == "gelu" else 3,
        windows=shortest(config.layer_windows),
    )

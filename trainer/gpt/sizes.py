"""The sizes of a GPT, by which its FLOPs are counted and plans are made. Imports no jax."""

from __future__ import annotations

from models.parts.gpt import gpt_weights
from startrail_jax.errors import InputError
from trainer.frozen import frozen_names
from trainer.gpt.config import GPTTrainConfig
from trainer.planner.gpt import sizes_of_gpt
from trainer.planner.models import ModelSizes
from trainer.sizes import common_sizes


def sizes_of(config: GPTTrainConfig) -> ModelSizes:
    """The sizes of the model of a run."""
    _check_balance(config)
    ways = {"auto": None, "gather": False, "dispatch": True}
    return sizes_of_gpt(
        config.model,
        **common_sizes(config),
        windows=config.layer_windows,
        dispatch=ways[config.experts],
    )


def _check_balance(config: GPTTrainConfig) -> None:
    """Raises if weights are frozen that something else than the optimizer moves."""
    rate = config.model.experts.balance_rate
    if not rate or not config.frozen:
        return
    frozen = frozen_names(gpt_weights(config.model), config.frozen)
    if any(name.endswith("/choice_bias") for name in frozen):
        raise InputError(
            "model.experts.balance_rate moves the weights */choice_bias, which frozen must not "
            f"match; got balance_rate={rate}, frozen={' '.join(config.frozen)}. Use "
            "patterns that leave them out, or --model.experts.balance-loss."
        )

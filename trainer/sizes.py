"""What the sizes of a model of any kind have in common. Imports no jax: plans must be fast."""

from __future__ import annotations

from typing import Any

from trainer.config import LoraConfig, TrainConfig

ITEMSIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element."""


def common_sizes(config: TrainConfig) -> dict[str, Any]:
    """What the `ModelSizes` of a GPT and of a diffusion transformer have in common."""
    model, lora = config.model, getattr(config, "lora", LoraConfig())
    return {
        "name": f"that of {config.run_dir}",
        "batch": config.batch_size,
        "average": config.ema_decay is not None,
        "seq_len": config.num_tokens,
        "itemsize": ITEMSIZES[model.dtype],
        "lora_rank": lora.rank or 0,
        "lora_targets": lora.targets,
        "frozen_itemsize": ITEMSIZES[lora.base_dtype or model.dtype],
        "frozen_names": config.frozen,
    }

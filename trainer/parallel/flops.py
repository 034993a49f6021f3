"""What a model computes for a token, and what a GPU can: the two sides of MFU. Imports no jax."""

from __future__ import annotations

import re

from trainer.dit.config import DiTTrainConfig
from trainer.gpt.config import GPTConfig

# Dense bfloat16 tensor-core FLOP/s, from NVIDIA's data sheets (half of the figures with sparsity).
# What is more special comes first.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2.25e15,
    "GB200": 2.5e15,
}


def gpt_flops_per_token(config: GPTConfig, seq_len: int) -> float:
    """FLOPs that a token of the model needs for a training step.

    forward = 2 N + 4 L Q H T / 2, with N weights in matrix products, L layers, Q heads of H
    channels and T tokens. The backward pass has two products for each of the forward pass:
    3 * forward in all.

    As in PaLM, only matrix products count, and what remat computes again does not. Unlike there,
    attention counts half, since a causal mask hides half of the pairs (the paper has 12 L Q H T
    for all of them); and N leaves out the embedding, which is a look-up, and the norms. Boundaries
    between packed documents hide more pairs, which is not counted.

    Args:
        config: the model.
        seq_len: tokens in a sequence.

    Returns:
        FLOPs per token, of all devices together.

    References:
        PaLM, appendix B: https://arxiv.org/abs/2204.02311
    """
    projections = 2 * (config.heads + config.kv_heads) * config.head_dim * config.width
    mlp = {"swiglu": 3, "gelu": 2}[config.mlp] * config.width * config.mlp_width
    weights = config.layers * (projections + mlp) + config.width * config.vocab_size
    attention = config.layers * 2 * config.heads * config.head_dim * seq_len
    return 3.0 * (2 * weights + attention)


def dit_flops_per_token(config: DiTTrainConfig) -> float:
    """FLOPs of a training step for each token of an image: 3 * (2 N + 4 L W T).

    As of a GPT, but for attention to all T tokens of the image and of its caption, in L layers of
    width W. The work for text, which goes through layers of the same sizes, counts as that of the
    image beside it. What is computed once for an image, of its time and class, is left out.

    Args:
        config: model, and size of an image.

    Returns:
        FLOPs per token, of all devices together.
    """
    model = config.model
    layer = 4 * model.width**2 + 2 * model.width * model.mlp_width
    tokens = config.num_tokens + model.caption_length
    layers = model.layers * (2 * layer + 4 * model.width * tokens) * tokens / config.num_tokens
    return 3.0 * (layers + 4 * model.width * config.patch_elements)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU.

    Args:
        device_kind: as jax names it, such as "NVIDIA H100 80GB HBM3".

    Returns:
        FLOP/s of one device; None where it is not known, as for a part of a GPU (MIG).
    """
    if "MIG" in device_kind:
        return None
    for name, flops in PEAK_FLOPS.items():
        if re.search(rf"\b{name}\b", device_kind):
            return flops
    return None

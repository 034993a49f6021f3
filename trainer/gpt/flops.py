"""What a GPT computes for a token. Imports no jax."""

from __future__ import annotations

from trainer.gpt.config import GPTConfig


def gpt_flops_per_token(config: GPTConfig, seq_len: int) -> float:
    """FLOPs of a training step for each token.

    forward = 2 N + 4 L Q H T / 2, with N weights in matrix products, L layers, Q heads of H
    channels and T tokens. The backward pass has two matrix products for each one of the forward
    pass, so that a step takes 3 * forward.

    As in PaLM, only matrix products count, and what remat recomputes does not. PaLM counts
    12 L Q H T for attention to all pairs of tokens; here attention counts half, since a causal mask
    hides half of the pairs. N leaves out the norms and the embedding, which is a look-up. The pairs
    that boundaries between packed documents hide are counted nevertheless.

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

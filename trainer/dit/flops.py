"""What a diffusion transformer computes for a token. Imports no jax."""

from __future__ import annotations

from trainer.dit.config import DiTTrainConfig


def dit_flops_per_token(config: DiTTrainConfig) -> float:
    """FLOPs of a training step for each token of an image: 3 * (2 N + 4 L W T).

    N weights are in matrix products; attention is to all T tokens of the image and of its caption,
    in L layers of width W. Only matrix products count, and what remat recomputes does not. The work
    for a caption, whose tokens go through layers of the same sizes, is counted with the tokens of
    its image. What is computed once for an image, from its time and class, is left out.

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

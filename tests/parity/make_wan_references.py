"""Tiny random Wan models of the library diffusers, and what PyTorch computes with them.

pip install -e '.[parity]'
python tests/parity/make_wan_references.py      # writes tests/parity/wan, 0.3 MB
"""

from pathlib import Path

import numpy as np
import torch
from diffusers import WanTransformer3DModel

REFERENCES = Path(__file__).parent / "wan"
SIZES = dict(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=14,
    in_channels=3,
    out_channels=3,
    text_dim=5,
    freq_dim=8,
    ffn_dim=12,
    num_layers=2,
)
# Name -> options, frames and height and width of the latents, tokens of text and of an image, and
# whether each token has a time of its own. With an image, diffusers wants 512 tokens of text.
CASES = {
    "t2v": ({}, (3, 4, 10), 7, 0, False),
    "i2v": (dict(in_channels=10), (2, 2, 6), 1, 0, False),
    "i2v_2_1": (dict(in_channels=10, image_dim=6, added_kv_proj_dim=28), (1, 6, 2), 512, 9, False),
    "ti2v": (dict(cross_attn_norm=False), (3, 4, 4), 4, 0, True),
}


def make(name, seed):
    """Saves a model of a case; returns inputs, outputs and gradients, in float32."""
    options, size, texts, images, each = CASES[name]
    torch.manual_seed(seed)
    model = WanTransformer3DModel(**SIZES | options).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            scale = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3
            weight.copy_(noise * scale + ("norm" in path and "weight" in path))
    model.save_pretrained(REFERENCES / name)
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return rng.normal(size=(2, *shape)).astype("f4")

    tokens = size[0] * size[1] * size[2] // 4
    arrays = {
        "latents": drawn(*size, model.config.in_channels),
        "times": rng.random((2, tokens if each else 1)).astype("f4"),
        "text": drawn(texts, SIZES["text_dim"]),
        "cotangent": drawn(*size, SIZES["out_channels"]),
    }
    if images:
        arrays["image"] = drawn(images, 6)
    times = torch.tensor(1000 * arrays["times"])
    out = model(
        torch.tensor(arrays["latents"]).permute(0, 4, 1, 2, 3),
        times if each else times[:, 0],
        torch.tensor(arrays["text"]),
        torch.tensor(arrays["image"]) if images else None,
    ).sample.permute(0, 2, 3, 4, 1)
    (out * torch.tensor(arrays["cotangent"])).sum().backward()
    gradients = {f"gradient {path}": x.grad.numpy() for path, x in model.named_parameters()}
    return arrays | {"out": out.detach().numpy()} | gradients


if __name__ == "__main__":
    for seed, name in enumerate(CASES):
        np.savez_compressed(REFERENCES / name / "reference.npz", **make(name, seed))

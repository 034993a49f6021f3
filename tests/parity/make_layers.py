"""Single layers of the library transformers, and what PyTorch computes with them.

pip install -e '.[parity]'
python tests/parity/make_layers.py            # writes tests/parity/layers, 0.2 MB
python tests/parity/make_layers.py --check    # compares with layers that it makes anew
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

LAYERS = Path(__file__).parent / "layers"
SIZES = dict(
    **dict(hidden_size=16, mamba_num_heads=8, mamba_head_dim=6, ssm_state_size=5, conv_kernel=4),
    **dict(chunk_size=8, use_bias=False, layer_norm_epsilon=1e-5, time_step_min=0.001),
)
CASES = {
    "mamba2": dict(n_groups=2, use_conv_bias=True),
    # All devices along `tensor` share a group, and steps are cut off.
    "mamba2_one_group": dict(n_groups=1, use_conv_bias=False, time_step_min=0.5),
    "mamba2_eight_groups": dict(n_groups=8, use_conv_bias=True),
}
ROWS, LENGTH = 2, 64


def make(name):
    """Arrays by name: weights, `x`, `out`, `dout`, and gradients under `d` and the name."""
    config = NemotronHConfig(
        **SIZES | CASES[name], num_hidden_layers=1, layers_block_type=["mamba"]
    )
    torch.manual_seed(0)
    layer = NemotronHMamba2Mixer(config, layer_idx=0).float()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3 + (weight.ndim == 1) * 0.5)
    x, dout = (torch.randn(ROWS, LENGTH, config.hidden_size) for _ in range(2))
    x.requires_grad_()
    out = layer(x)
    out.backward(dout)
    arrays = {"x": x, "out": out, "dout": dout, "dx": x.grad}
    for key, weight in layer.named_parameters():
        arrays |= {key: weight, f"d{key}": weight.grad}
    return {key: value.detach().numpy() for key, value in arrays.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    LAYERS.mkdir(exist_ok=True)
    for name in CASES:
        arrays, path = make(name), LAYERS / f"{name}.npz"
        if not check:
            np.savez_compressed(path, **arrays)
            continue
        with np.load(path) as kept:
            assert kept.keys() == arrays.keys(), name
            for key, value in arrays.items():
                np.testing.assert_allclose(kept[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""FLOPs of a model, counted by hand; FLOP/s of GPUs by their names."""

from dataclasses import replace

import pytest

from configs.gpt import gpt_tiny
from models.config import GPTConfig
from trainer.gpt.config import TextSampleConfig
from trainer.gpt.objective import NextToken
from trainer.parallel.flops import peak_flops

pytestmark = pytest.mark.quick

CONFIG = GPTConfig(width=24, layers=3, heads=4, kv_heads=2, head_dim=10, mlp_width=40)


def flops_of(model, seq_len):
    config = replace(gpt_tiny(), model=model, seq_len=seq_len, sample=TextSampleConfig())
    return NextToken(config).flops_per_token


def test_flops_are_those_of_the_matrix_products():
    per_layer = 24 * 40 + 2 * 24 * 20 + 40 * 24 + 3 * 24 * 40
    weights = 3 * per_layer + 24 * 256
    # Scores and weighted values are 2 products, of 2 FLOPs for each of 4 * 10 channels and each key
    # that a token sees: 1 to 100 of them.
    attention = 3 * (2 * 2 * 40 * 50.5)
    assert flops_of(CONFIG, 100) == 6 * weights + 3 * attention
    without_gate = flops_of(replace(CONFIG, mlp="gelu"), 100)
    assert flops_of(CONFIG, 100) - without_gate == 6 * 3 * 24 * 40


def test_window_leaves_fewer_keys():
    windowed = flops_of(replace(CONFIG, windows=(4,)), 10)
    # Of the 10 + 9 + ... + 1 pairs, 6 + 5 + ... + 1 are hidden.
    hidden = 21 / 10
    assert flops_of(CONFIG, 10) - windowed == pytest.approx(3 * 3 * 4 * 40 * hidden)
    pattern = flops_of(replace(CONFIG, windows=(4, "none")), 10)
    assert flops_of(CONFIG, 10) - pattern == pytest.approx(3 * 2 * 4 * 40 * hidden)
    assert flops_of(replace(CONFIG, windows=(99,)), 10) == flops_of(CONFIG, 10)


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H20", None),
        ("cpu", None),
    ],
)
def test_peak_flops_of_a_device(kind, flops):
    assert peak_flops(kind) == flops

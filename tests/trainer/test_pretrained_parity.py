"""Logits, loss and gradients of pretrained models beside those that PyTorch computed once."""

import pytest

from pretrained import CASES, REFERENCES, SCHEMES, compare, compute, reference_of

ONE, *OTHERS = SCHEMES
SHARDED = {
    # Its index has several files, heads are normalised, and embedding and head are one.
    "StarTrail, C = 2": "qwen3",
    # Of two layers, one has a window with fewer tokens than there are devices; logits are capped.
    "2D-Attention": "gemma2",
    # Fewer key heads than devices along `tensor`, and biases.
    "Ring Attention and tensor parallelism": "qwen2",
}


# A first look sees the family whose layers are all alike and few things beside.
FAMILIES = [pytest.param(x, marks=[pytest.mark.quick] * (x == "mistral")) for x in CASES]


@pytest.mark.slow_except_every(10)
@pytest.mark.parametrize("name", FAMILIES)
def test_pretrained_model_computes_what_pytorch_does(name):
    reference = reference_of(name)
    compare(compute(REFERENCES / name, reference["tokens"], ONE), reference)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", OTHERS)
def test_pretrained_model_computes_over_eight_devices_what_pytorch_does(scheme):
    name = SHARDED[scheme]
    reference = reference_of(name)
    compare(compute(REFERENCES / name, reference["tokens"], scheme), reference)

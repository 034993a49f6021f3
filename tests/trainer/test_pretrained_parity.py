"""Logits, loss and gradients of pretrained models beside those that PyTorch computed once."""

import pytest

from pretrained import CASES, SCHEMES, compare, compute, reference_of

ONE, *OTHERS = SCHEMES


@pytest.mark.parametrize("name", CASES)
def test_pretrained_model_computes_what_pytorch_does(name):
    reference = reference_of(name)
    compare(compute(REFERENCE_OF(name), reference["tokens"], ONE), reference)

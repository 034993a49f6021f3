"""The FLOP/s of GPUs, of which a run reports the share that it reaches (MFU). Imports no jax."""

from __future__ import annotations

import re

# Dense bfloat16 tensor-core FLOP/s, from NVIDIA's data sheets (half of the figures with sparsity).
# The first name that is found counts, so that "H100 PCIe" comes before "H100".
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


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU, by jax's name of it; None where unknown, as with MIG."""
    if "MIG" in device_kind:
        return None
    found = (flops for x, flops in PEAK_FLOPS.items() if re.search(rf"\b{x}\b", device_kind))
    return next(found, None)

"""GPUs and clusters of them: peak FLOP/s, memory, rates of kernels, and links between GPUs.

Every number has its source beside it. `Gpu` and `Cluster` take other numbers too, such as measured
ones.

References:
    * [1] FlashAttention-3, https://arxiv.org/abs/2407.08608, figures 5 and 6: cuDNN on H100 SXM.
    * [2] FlashAttention-2, https://arxiv.org/abs/2307.08691, section 4: up to 73 % of the peak of
      an A100 forward, and 63 % backward.
    * [3] https://github.com/Dao-AILab/flash-attention/pull/2280: B200, head_dim 128, 8192 tokens.
    * [4] NVIDIA's data sheets: dense bfloat16 tensor cores, and bytes/s of the memory. The memory
      is what nvidia-smi shows.
    * [5] NCCL, src/graph/topo.h: 20.0, 20.6 and 40.1 GB/s for a link of NVLink 3, 4 and 5.
    * [6] NCCL, src/graph/tuning.cc: latencies of its ring algorithm with the protocol Simple.

Steps of minutes reach the rates of [1] too: those of TRL, which recompute attention, took 1.00 to
1.07 times as long as predicted (`benchmarks/published.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.errors import InputError

Curve = Mapping[int, tuple[float, float]]
"""Tokens of a kernel call -> share of the peak that it reaches forward, and backward."""

_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_H100 = 989e12
# [1]: full attention in 16 bits, 16K tokens in all, 2048 channels, TFLOP/s.
_CUDNN = {
    64: ((335, 373, 395, 408, 412, 413), (266, 348, 395, 417, 432, 433)),
    128: ((497, 574, 617, 609, 600, 595), (305, 408, 465, 499, 518, 516)),
}


def _curves(forward: float, backward: float) -> dict[int, Curve]:
    """The curves of [1], scaled to what long calls with head_dim 128 reach."""
    long = [column[-1] for column in _CUDNN[128]]
    return {
        head_dim: {
            tokens: (a / long[0] * forward, b / long[1] * backward)
            for tokens, a, b in zip(_TOKENS, *columns, strict=True)
        }
        for head_dim, columns in _CUDNN.items()
    }


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: str
    """Name that users give."""
    peak_flops: float
    """Dense 16-bit matrix FLOP/s: [4]."""
    memory_bytes: int
    """Bytes of its memory: [4]."""
    memory_rate: float
    """Bytes/s of its own memory: [4]."""
    inside_rate: float
    """Bytes/s that it sends to the other GPUs of its node, and receives at the same time: [5]."""
    host_rate: float
    """Bytes/s to the memory of the host, each way: 80 % of PCI Express, of generation 4 or 5."""
    attention: Mapping[int, Curve]
    """head_dim -> rates of attention kernels: [1], [2], [3]."""
    matrix_efficiency: float = 0.7
    """Share of the peak in the matrix products of projections and MLP, with the kernels between
    them. An assumption: large products alone reach 0.7 to 0.8; norms and activations take the
    rest."""
    single_speed: float = 0.5
    """FLOP/s in float32 over those in 16 bits: products in TF32."""

    def attention_efficiency(self, tokens: Any, head_dim: int, *, backward: bool) -> np.ndarray:
        """Share of the peak that attention kernels reach; between two measured lengths, a line.

        Args:
            tokens: queries and keys of a kernel call; the shorter side counts.
            head_dim: channels of a head; the nearest measured one counts.
            backward: which pass.
        """
        curve = self.attention[min(self.attention, key=lambda h: abs(math.log(h / head_dim)))]
        lengths = sorted(curve)
        shares = [curve[length][backward] for length in lengths]
        tokens = np.asarray(tokens, float)
        found = np.interp(np.log(np.maximum(tokens, 1.0)), np.log(lengths), shares)
        # A call of fewer tokens than were measured fills fewer of the GPU's processors.
        return np.asarray(found * np.minimum(tokens / lengths[0], 1.0))


def _gpu(
    name: str, peak: float, mib: int, rate: float, nvlink: float, pcie: int, **others: Any
) -> Gpu:
    return Gpu(
        name=name,
        peak_flops=peak,
        memory_bytes=mib << 20,
        memory_rate=rate,
        inside_rate=nvlink,
        host_rate=0.8 * pcie * 1e9,
        **others,
    )


_A100: dict[str, Any] = dict(nvlink=12 * 20.0e9, pcie=32, attention=_curves(0.73, 0.63))
_HOPPER: dict[str, Any] = dict(
    nvlink=18 * 20.6e9,
    pcie=64,
    attention=_curves(595e12 / _H100, 516e12 / _H100),
)
_B200 = _curves(1535e12 / 2.25e15, 1360e12 / 2.25e15)
_KNOWN = (
    _gpu("a100_40", 312e12, 40 * 1024, 1.555e12, **_A100),
    _gpu("a100_80", 312e12, 80 * 1024, 2.039e12, **_A100),
    _gpu("h100", _H100, 81_559, 3.35e12, **_HOPPER),
    _gpu("h200", _H100, 143_771, 4.8e12, **_HOPPER),
    _gpu("b200", 2.25e15, 183_359, 8e12, nvlink=18 * 40.1e9, pcie=64, attention=_B200),
)
GPUS = {gpu.name: gpu for gpu in _KNOWN}
"""The GPUs that have a name."""


_MOST_GPUS = 2**20


def find_gpu(name: str) -> Gpu:
    """The GPU of a name, in capital or small letters.

    Raises:
        ValueError: if there is none.
    """
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    raise InputError(
        f"--gpu must be one of {', '.join(GPUS)}; got {name!r}. For another one, give the nearest "
        "of these, and --peak-flops, --memory, --inside and --efficiency of yours."
    )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of GPUs, and the links between them."""

    nodes: int
    """Number of nodes."""
    gpus_per_node: int
    """GPUs of each node."""
    gpu: Gpu
    """Kind of the GPUs."""
    port_rate: float
    """Bytes/s through one port of a node, each way; both ways together if `half_duplex`."""
    ports: int
    """Ports of a node, which its GPUs share evenly: neighbours use the same one."""
    half_duplex: bool = False
    """True if sending and receiving share the rate of a port."""
    latency: float = 9.6e-6
    """Seconds of a step of an algorithm that goes through ports: [6]."""
    inside_latency: float = 3.4e-6
    """Seconds of a step inside of a node: [6]."""
    start_latency: float = 8.4e-6
    """Seconds of every collective on top: [6]."""
    algorithms: str = "nccl"
    """Library of the collectives: "nccl", or "gloo" for CPUs."""
    overlaps: bool = True
    """True if messages of a ring travel while kernels run, as on GPUs; false on CPUs."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "ports"):
            flag, number = "--" + name.replace("_", "-"), getattr(self, name)
            if number < 1:
                raise InputError(f"{flag} must be at least 1; got {number}. Use 1 or more.")
        if self.num_gpus > _MOST_GPUS:
            raise InputError(
                f"--nodes * --gpus-per-node must be at most {_MOST_GPUS}; got --nodes {self.nodes} "
                f"--gpus-per-node {self.gpus_per_node}. Use fewer."
            )
        if self.gpus_per_node % self.ports:
            near = [n for n in range(1, self.gpus_per_node + 1) if self.gpus_per_node % n == 0]
            raise InputError(
                "--ports must divide --gpus-per-node, since GPUs share ports evenly; got "
                f"--ports {self.ports} for --gpus-per-node {self.gpus_per_node}. Use one of {near}."
            )
        if not self.port_rate > 0:
            raise InputError(
                f"--port must be above 0; got {self.port_rate}. Give the bytes/s of a port, such "
                "as 50GB/s."
            )
        if self.algorithms not in ("nccl", "gloo"):
            raise InputError(
                f"algorithms must be 'nccl' or 'gloo'; got {self.algorithms!r}. Correct the name."
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

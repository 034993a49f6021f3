"""Options of XLA: messages that travel while attention kernels run, and arrays in host memory."""

from __future__ import annotations

import math

import jax
from jax.sharding import Mesh

from startrail_jax.devices.axes import device_kind

_LIMIT = 95
"""Percentage of the memory that arguments leave which XLA lets a program take by default."""


def compiler_options(mesh: Mesh | None = None) -> dict[str, bool | int]:
    """Options for `jax.jit(..., compiler_options=)` of a program that holds the attention.

    * `xla_gpu_enable_latency_hiding_scheduler` moves the start of a message before the kernels that
      do not need it, and its end after them. By default XLA does so for Hopper GPUs only.
    * `xla_gpu_collective_permute_combine_threshold_bytes` lets the arrays of a hop of the ring
      (keys and values, or queries with their gradients and statistics) go as one message of any
      size. By default XLA joins no more than 30 MiB.
    * `xla_gpu_experimental_parallel_collective_overlap_limit` says how many messages may be under
      way at a time, so that none waits for the gradients of weights. By default there is one.

    `benchmarks/compiled/run.py` in the repository shows their effect.

    Args:
        mesh: mesh of the devices to compile for; None for `jax.devices()`.

    Returns:
        Names and values of the options; empty for devices other than NVIDIA GPUs.
    """
    if mesh is None:
        mesh = Mesh(jax.devices(), ("device",))
    if device_kind(mesh)[0] != "cuda":
        return {}
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_collective_permute_combine_threshold_bytes": 2**40,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    }


def offload_options(*, device_bytes: int, host_bytes: int) -> dict[str, int]:
    """Further options of a program that takes `device_bytes` of device memory beside its arguments
    (an estimate is enough) and keeps `host_bytes` in the host's memory.

    XLA recomputes arrays, and overlaps fewer messages, if a program seems to take more than
    `xla_gpu_memory_limit_slop_factor` % of the memory that arguments leave. It counts arrays in the
    host's memory as if the device held them. For a program that fills the device, this option
    raises the limit by exactly these arrays; a smaller program gets a higher limit than it needs.
    """
    factor = math.ceil(_LIMIT * (1 + host_bytes / device_bytes))
    return {"xla_gpu_memory_limit_slop_factor": factor}


def quick_options() -> dict[str, bool | int]:
    """Options for a program on CPUs that runs once: its kernels need not be fast."""
    options: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
    if jax.__version_info__ < (0, 11):
        # Later releases have only the new emitters, which take twice as long to compile.
        options["xla_cpu_use_fusion_emitters"] = False
    return options

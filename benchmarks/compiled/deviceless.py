"""Compiles programs for GPUs on a machine that has none.

XLA needs a description of the GPU and a plugin, not a driver, and returns the optimised, scheduled
program. Two things need the device and are missing: autotuning (so matrix products are of a default
kind), and cuDNN's decision whether it serves a graph.

    pip install --no-deps jax-cuda13-pjrt==<version of jax>
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

TARGETS = Path(__file__).parent / "targets"
"""Descriptions of GPUs, as XLA prints them, one file each; what XLA does not use is left out."""

DEVICES_PER_HOST = 8

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def target_names() -> list[str]:
    """The GPUs that are described here."""
    return sorted(path.stem for path in TARGETS.glob("*.txtpb"))


def missing_plugin() -> str | None:
    """What to install before `gpu_topology` can work, or None."""
    for name in _PLUGINS:
        try:
            if importlib.util.find_spec(name):
                return None
        except ModuleNotFoundError:
            pass
    return (
        "needs jax-cuda13-pjrt, which compiles for GPUs without one: "
        f"pip install --no-deps jax-cuda13-pjrt=={jax.__version__}"
    )


def gpu_topology(target: str, num_devices: int) -> Any:
    """Devices to compile for, up to `DEVICES_PER_HOST` or a multiple of it: a mesh may be made of
    the `devices` of what this returns.

    From then on, this process writes nothing to the compilation cache of jax. Where there is no
    GPU, restrict jax to the CPU before anything else: by JAX_PLATFORMS=cpu, or by
    `jax.config.update("jax_platforms", "cpu")`.
    """
    if target not in target_names():
        raise ValueError(
            f"target must be one of {target_names()}; got {target!r}. Add its description to "
            f"{TARGETS}."
        )
    per_host = max(min(num_devices, DEVICES_PER_HOST), 1)
    if num_devices < 1 or num_devices % per_host:
        raise ValueError(
            f"num_devices must be at most {DEVICES_PER_HOST} or a multiple of it; got "
            f"num_devices={num_devices}. Use {max(per_host, num_devices // per_host * per_host)}."
        )
    if problem := missing_plugin():
        raise ModuleNotFoundError(f"Compiling for {target} {problem}")
    # jax could write such a program to its compilation cache, but not read it without the device.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=(TARGETS / f"{target}.txtpb").read_text(encoding="utf-8"),
        # Partitions of fast links, hosts, devices of a host.
        topology=f"1x{num_devices // per_host}x{per_host}",
    )

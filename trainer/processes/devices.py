"""The devices of a run: real ones, or simulated ones on a CPU."""

from __future__ import annotations

import os
from typing import Any

import jax

from startrail_jax.errors import InputError

# Enough for StarTrail with C = 2 and sub-rings of two.
SIMULATED_DEVICES = 8


def select_devices(count: int | None, *, processes: int | None = 1) -> list[Any]:
    """The first `count` devices, or all of them; to be called before jax is used.

    On a machine that has only a CPU, the CPU is made to look like `count` devices, 8 by default. A
    number of simulated devices that is already set, in jax's configuration or in XLA_FLAGS, is
    kept. Every process contributes the same number of devices, the first of its own.

    Args:
        count: number of devices of all processes together.
        processes: number of processes that share the simulated devices. None if that is not known
            before jax is used: each process then has the number already set, or one.

    Raises:
        ValueError: if there are fewer than `count` devices, or the processes cannot share them.
    """
    require_divisible(count, processes)
    flags = os.environ.get("XLA_FLAGS", "")
    given = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if given < 0 and "host_platform_device_count" not in flags and processes is not None:
        simulated = _share(count or SIMULATED_DEVICES, processes)
        jax.config.update("jax_num_cpu_devices", simulated)
    devices = jax.devices()
    by_process: dict[int, list[Any]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    counts = [len(by_process[process]) for process in sorted(by_process)]
    if len(set(counts)) > 1:
        raise InputError(
            "Every process must see the same number of devices; got "
            f"{' and '.join(map(str, counts))} in processes 0 to {len(counts) - 1}. Hide the "
            "superfluous ones with CUDA_VISIBLE_DEVICES; if they are simulated, give all processes "
            "the same --devices."
        )
    if count is not None and count > len(devices):
        raise InputError(
            f"devices must be at most the number of devices; got devices={count}, and there are "
            f"{len(devices)} ({devices[0].platform}). Use --devices {len(devices)}."
        )
    share = _share(len(devices) if count is None else count, len(by_process))
    return [device for process in sorted(by_process) for device in by_process[process][:share]]


def require_divisible(count: int | None, processes: int | None) -> None:
    """Raises the error of `select_devices` that is known before the processes meet.

    Raises:
        ValueError: if the processes cannot share `count` devices.
    """
    if count is not None and processes is not None:
        _share(count, processes)


def _share(count: int, processes: int) -> int:
    if count % processes:
        raise InputError(
            "devices must be divisible by the number of processes; got "
            f"devices={count}, processes={processes}. Use --devices "
            f"{-(-count // processes) * processes}."
        )
    return count // processes

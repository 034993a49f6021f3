"""Real devices, or simulated ones on a CPU."""

from __future__ import annotations

import os
from typing import Any

import jax

from startrail_jax.errors import InputError

# Enough for StarTrail with C = 2 and sub-rings of two.
SIMULATED_DEVICES = 8


def select_devices(count: int | None, *, processes: int | None = 1) -> list[Any]:
    """The first `count` devices, or all of them; call it before jax is used.

    Where there is only a CPU it is made to look like `count` devices, 8 by default. A number of
    simulated devices that was set before, in jax's configuration or in XLA_FLAGS, stands. Of
    several processes each has the same number of the devices, its first.

    Args:
        count: on all processes together.
        processes: how many share the simulated devices. None if that is not known before jax is
            used: then each has what was set before, or one.

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
            f"Every process must see as many devices; got {' and '.join(map(str, counts))} in "
            f"processes 0 to {len(counts) - 1}. Hide those that are too many, by "
            "CUDA_VISIBLE_DEVICES; where they are simulated, give all the same --devices."
        )
    if count is not None and count > len(devices):
        raise InputError(
            f"devices must be at most the number of devices; got devices={count}, and there are "
            f"{len(devices)} ({devices[0].platform}). Use --devices {len(devices)}."
        )
    share = _share(len(devices) if count is None else count, len(by_process))
    return [device for process in sorted(by_process) for device in by_process[process][:share]]


def require_divisible(count: int | None, processes: int | None) -> None:
    """Refuses what `select_devices` would, as far as that is known before processes meet.

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

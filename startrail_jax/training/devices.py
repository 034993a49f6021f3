"""Real devices, or simulated ones on a CPU."""

from __future__ import annotations

import os
from typing import Any

import jax

# Enough for StarTrail with C = 2 and sub-rings of two.
SIMULATED_DEVICES = 8


def select_devices(count: int | None) -> list[Any]:
    """The first `count` devices, or all of them; call it before jax is used.

    Where there is only a CPU it is made to look like `count` devices, 8 by default. A number of
    simulated devices that was set before, in jax's configuration or in XLA_FLAGS, stands.

    Raises:
        ValueError: if there are fewer than `count` devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    given = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if given < 0 and "host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", count or SIMULATED_DEVICES)
    devices = jax.devices()
    if count is not None and count > len(devices):
        raise ValueError(
            f"devices must be at most the number of devices; got devices={count}, and there are "
            f"{len(devices)} ({devices[0].platform}). Use --devices {len(devices)}."
        )
    return devices[:count]

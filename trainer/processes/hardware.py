"""GPUs that the machine has and jax does not use."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from trainer.run.commands import command

ROOT = Path("/")
DRIVER = "proc/driver/nvidia/version"
DEVICE = "dev/nvidia[0-9]*"
WINDOWS_DRIVER = "usr/lib/wsl/lib/libcuda.so.1"

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
"""Packages by which jax uses NVIDIA GPUs: the extras cuda13 and cuda12 install them."""
CUDA_13_DRIVER = 580
"""The first driver that runs CUDA 13."""
# By this variable too a user keeps jax away from the GPUs.
VISIBLE = "CUDA_VISIBLE_DEVICES"


def unused_gpus(
    platform: str,
    *,
    wanted: str | None = None,
    root: Path = ROOT,
    environment: Mapping[str, str] = os.environ,
    plugin: bool | None = None,
) -> str | None:
    """A line for the log if the machine has NVIDIA GPUs, but jax computes on the CPU.

    Args:
        platform: platform of the devices that jax has found.
        wanted: the platforms that jax may use, by its option `jax_platforms`; None for all.
        root: folder of /proc, /dev and /usr.
        environment: variables, of which one hides GPUs.
        plugin: whether a plugin of jax for NVIDIA GPUs is installed; None to look.

    Returns:
        What is there and which command installs what it needs; None if all is as intended.
    """
    if platform != "cpu" or wanted or environment.get(VISIBLE) in ("", "-1"):
        return None
    # A machine under WSL has no device file of its own for each GPU.
    gpus = len(list(root.glob(DEVICE)))
    if not gpus and not (root / WINDOWS_DRIVER).exists():
        return None
    driver = _driver(root)
    found = f"{gpus or 'an'} NVIDIA GPU{'s' if gpus > 1 else ''}"
    found += f" (driver {driver})" if driver else ""
    note = f"NOTE: this machine has {found}, but jax computes on the CPU. "
    if plugin is None:
        plugin = any(importlib.util.find_spec(name) for name in PLUGINS)
    if plugin:
        return note + (
            "jax's plugin for CUDA is installed and finds none: "
            "python -c 'import jax; jax.devices(\"cuda\")' says why."
        )
    cuda = "cuda12" if driver and int(driver.split(".")[0]) < CUDA_13_DRIVER else "cuda13"
    return note + f"Install jax for them: {command('pip', 'install', '-e', f'.[train,{cuda}]')}"


def _driver(root: Path) -> str | None:
    """Version of the NVIDIA driver, such as "535.104.05"; None if it does not say."""
    try:
        text = (root / DRIVER).read_text()
    except OSError:
        return None
    match = re.search(r"Module.*?\s(\d+\.[\d.]+)", text)
    return match and match[1]

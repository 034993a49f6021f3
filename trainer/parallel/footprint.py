"""The memory that a compiled training step takes, as XLA reports it.

`startrail_jax.planner.memory` estimates it without compiling.
"""

from __future__ import annotations

from typing import Any


def describe_memory(analysis: Any) -> str:
    """The memory that a compiled program takes of a device, as a line of the log.

    Args:
        analysis: what `memory_analysis()` of the program returns.
    """
    state, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    host = analysis.host_temp_size_in_bytes
    line = f"{_size(state + temporary)} (state and batch {_size(state)}, the rest for a step)"
    return f"{line}, and {_size(host)} of the host's" if host else line


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"

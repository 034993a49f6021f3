"""The memory that a compiled training step takes, as XLA reports it.

`startrail_jax.planner.memory` estimates it without compiling.
"""

from __future__ import annotations

import math
from typing import Any

import jax


def bytes_of_device(arrays: Any) -> int:
    """Bytes of one device's shards of a tree of arrays, or of their shapes and shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(arrays)
    )


def describe_state(state: Any) -> list[str]:
    """The parameters of a model, and the memory that their state takes, as lines of the log.

    Args:
        state: `trainer.parallel.state.TrainState`.
    """

    def millions(weights: Any) -> str:
        return f"{sum(x.size for x in jax.tree.leaves(weights)) / 1e6:,.2f} million"

    line = f"model: {millions(state.model)} parameters"
    if state.frozen is None:
        return [line]
    # Norms are few, and float32 whatever the others are.
    dtype = max(jax.tree.leaves(state.frozen), key=lambda x: x.size).dtype
    trained = bytes_of_device((state.weights, state.average))
    return [
        f"{line}, of which adapters are trained: {millions(state.weights)}",
        f"state of a device: adapters {_size(trained)}, optimizer "
        f"{_size(bytes_of_device(state.optimizer))}, frozen weights "
        f"{_size(bytes_of_device(state.frozen))} in {dtype}",
    ]


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

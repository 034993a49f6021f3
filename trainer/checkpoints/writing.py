"""How orbax writes a checkpoint, and how much memory it takes for that."""

from __future__ import annotations

import math
from pathlib import Path

import jax
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

LEAST_LIMIT = 16 << 20
"""Bytes that are compressed at a time even if the state is small."""
FRACTION = 16
"""A larger state is compressed in about so many parts."""


def new_checkpointer(folder: Path, prefix: str, limit: int | None) -> ocp.training.Checkpointer:
    """What writes checkpoints into the folders `<prefix>_<step>`.

    Without a limit, orbax compresses all arrays before it writes the first byte, in one transaction
    of its database. So random numbers in bfloat16 take their memory once more. With a limit there
    are as many transactions as arrays have parts. The files are then more, and read alike.

    Args:
        folder: the folder of all checkpoints.
        prefix: the beginning of their names.
        limit: how many bytes of arrays this process may compress at a time; None for all.
    """
    context = ocp.Context(memory_options=ocp.options.MemoryOptions(write_concurrent_bytes=limit))
    return ocp.training.Checkpointer(
        str(folder),
        step_name_format=ocp.path.step.standard_name_format(step_prefix=prefix),
        context=context,
    )


def write_limit(state: PyTree[jax.ShapeDtypeStruct]) -> int:
    """Bytes to compress at a time so that a save takes little memory beside the state.

    Args:
        state: shapes, types and shardings of all that will be saved.
    """
    parts = [
        (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize, x.sharding)
        for x in jax.tree.leaves(state)
    ]
    local = sum(size * len(sharding.addressable_devices) for size, sharding in parts)
    # orbax compresses the part of a device as a whole, and demands a limit above its size.
    largest = max((size for size, _ in parts), default=0)
    return max(LEAST_LIMIT, largest + 1, local // FRACTION)

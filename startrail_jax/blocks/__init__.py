"""Block backends: attention of one query unit to one key unit, on one device."""

from startrail_jax.blocks import xla
from startrail_jax.blocks.base import Block

# "auto" takes the first that serves the request.
BACKENDS: dict[str, Block] = {"xla": xla}


def select(backend: str) -> Block:
    """The block backend of that name, or the best one for "auto"."""
    return xla if backend == "auto" else BACKENDS[backend]

"""Block backends: attention of one query unit to one key unit, on one device."""

from startrail_jax.blocks import xla
from startrail_jax.blocks.base import Block

BACKENDS: dict[str, Block] = {"xla": xla}


def select(backend: str) -> Block:
    """The block backend of that name; "auto" is "xla", which serves everything."""
    return BACKENDS["xla" if backend == "auto" else backend]

"""Which training steps a mesh allows: one answer for train.py, sample.py and the estimates."""

from __future__ import annotations

from functools import partial

import jax

from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.rings.head_chunks import check_head_chunks
from startrail_jax.rings.sizes import check_heads
from startrail_jax.tokens.layout import Layout
from trainer.config import TrainConfig
from trainer.objective import Objective
from trainer.parallel.partition import Partition


def tokens_shape(objective: Objective, layout: Layout) -> tuple[int, int]:
    """(B, T) of a batch, with the tokens that fill a row up to a length that the layout holds."""
    prepare = partial(objective.prepare, training=True)
    return jax.eval_shape(prepare, objective.batch_shapes(layout)).weights.shape


def check_step(config: TrainConfig, degrees: Degrees, partition: Partition) -> None:
    """Raises what the first step would raise, with a way out. No devices are needed.

    Args:
        config: model, batch, accumulation and ZeRO.
        degrees: degrees of the mesh.
        partition: how the state is sharded.

    Raises:
        ValueError: if the degrees do not divide the batch or the heads, or ZeRO has nothing to
            split over.
    """
    parts = degrees.data * config.accumulation
    if config.batch_size % parts:
        raise InputError(
            "batch_size must be divisible by data * accumulation; got "
            f"batch_size={config.batch_size}, data={degrees.data}, "
            f"accumulation={config.accumulation}. Use --batch-size "
            f"{-(-config.batch_size // parts) * parts}."
        )
    check_heads(degrees, config.model.heads, config.model.kv_heads)
    kv_heads = config.model.kv_heads // (degrees.head * degrees.tensor)
    check_head_chunks(config.attention.head_chunks, max(kv_heads, 1))
    if config.zero and partition.replicas and not partition.zero:
        raise InputError(
            f"zero={config.zero} needs an axis of degree above 1 among zero_axes; got "
            f"zero_axes={config.zero_axes} on a mesh with {degrees}. "
            f"Use --zero-axes {' '.join(partition.replicas)}."
        )


def check_platform(config: TrainConfig, platform: str | None) -> None:
    """Raises if a step needs what the devices lack.

    Args:
        config: offload.
        platform: platform of the devices: see `startrail_jax.devices.degrees.device_kind`.

    Raises:
        NotImplementedError: if the devices cannot offload what is saved.
    """
    if config.offload and platform != "cuda":
        raise UnsupportedError(
            "offload needs GPUs, which have memory of their own; got devices of platform "
            f"{platform!r}. Leave --offload out."
        )

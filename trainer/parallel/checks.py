"""The attention of a run, and what a training step needs of its mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from models.config import GPTConfig
from models.parts.attention import Keys, keys_of
from models.parts.gpt import recurrences_of
from startrail_jax.attention import Attention
from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError
from startrail_jax.rings.head_chunks import check_head_chunks
from startrail_jax.rings.sizes import check_heads
from trainer.config import TrainConfig
from trainer.objective import Objective
from trainer.parallel.partition import Partition


def make_attention(
    mesh: Mesh | AbstractMesh, config: TrainConfig, objective: Objective
) -> Attention:
    """The attention of a run on a mesh."""
    causal: dict[str, Any] = {"causal": objective.causal}
    return Attention(mesh, **causal | config.attention_of_model | config.attention.options)


def make_partition(
    mesh: Mesh | AbstractMesh, config: TrainConfig, objective: Objective
) -> Partition:
    """How the state of a run is sharded on a mesh."""
    partition = Partition(
        mesh, objective.weights, config.zero, config.zero_axes, config.model.dtype
    )
    parts = parts_of_batch(config, mesh.shape["data"])
    tokens = config.batch_size * config.num_tokens // parts
    tokens //= partition.size(partition.replicas)
    devices, tensor = (partition.size(x) for x in (partition.zero, partition.tensor))
    sizes = objective.sizes
    dispatches = config.zero == 3 and bool(sizes.dispatches(tokens, devices, tensor))
    if sizes.experts and sizes.dispatch and not dispatches:
        raise InputError(
            "experts=dispatch needs devices of zero_axes whose number divides the experts; got "
            f"{devices} devices and {sizes.experts} experts. Use --experts gather."
        )
    return replace(partition, dispatches=dispatches)


def parts_of_batch(config: TrainConfig, data: int) -> int:
    """Parts of a batch that are computed one after another, on `data` shards of it."""
    if config.whole_documents:  # The most that there can be: each has a row of tokens.
        return max(config.batch_size // data, 1)
    return config.gradient_accumulation


def check_step(config: TrainConfig, degrees: Degrees, partition: Partition) -> None:
    """Raises what the first step would raise, with a way out. No devices are needed."""
    parts = degrees.data * config.gradient_accumulation
    if config.batch_size % parts:
        raise InputError(
            "batch_size must be divisible by data * gradient_accumulation; got "
            f"batch_size={config.batch_size}, data={degrees.data}, "
            f"gradient_accumulation={config.gradient_accumulation}. Use --batch-size "
            f"{-(-config.batch_size // parts) * parts}."
        )
    for heads in kv_heads_of(config.model):
        check_heads(degrees, config.model.heads, heads)
        kv_heads = heads // (degrees.head * degrees.tensor)
        check_head_chunks(config.attention.head_chunks, max(kv_heads, 1))
    check_linear(degrees.tensor, config)
    if config.zero and partition.replicas and not partition.zero:
        raise InputError(
            f"zero={config.zero} needs an axis of degree above 1 among zero_axes; got "
            f"zero_axes={config.zero_axes} on a mesh with {degrees}. "
            f"Use --zero-axes {' '.join(partition.replicas)}."
        )


def kinds_of_keys(model: Any) -> tuple[Keys, ...]:
    """The keys of each kind of layers of a model."""
    if not isinstance(model, GPTConfig):
        return (Keys(model.kv_heads, model.head_dim),)
    return tuple(keys_of(model).values())


def kv_heads_of(model: Any) -> tuple[int, ...]:
    """The numbers of key heads of the layers of a model."""
    return tuple({keys.heads: None for keys in kinds_of_keys(model)})


def check_linear(tensor: int, config: TrainConfig) -> None:
    """Raises a ValueError unless `tensor` divides the heads of linear attention. Fewer key heads
    than devices are fine: some share one."""
    recurrences = recurrences_of(config.model) if isinstance(config.model, GPTConfig) else {}
    if not recurrences:
        if config.attention.linear_backend == "xla":
            return
        raise InputError(
            "attention.linear_backend needs layers of linear attention; got linear_backend="
            f"{config.attention.linear_backend!r} and a model without any. Leave it out."
        )
    for x in recurrences.values():
        if x.heads % tensor or (x.key_heads % tensor and tensor % x.key_heads):
            raise InputError(
                "mesh.tensor must divide the heads of linear attention, and divide its key heads "
                f"or be a multiple of them; got tensor={tensor}, heads={x.heads}, "
                f"key_heads={x.key_heads}. Change one of them."
            )

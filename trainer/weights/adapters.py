"""The weights of a run for an export: read with low-rank adapters, which are merged into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, PyTree, Shaped

from models.hooks import Hooks
from models.layers import ADAPTERS
from startrail_jax.errors import InputError
from trainer.checkpoints.reading import restore_frozen, restore_weights
from trainer.config import LoraConfig, TrainConfig
from trainer.objective import Objective
from trainer.parallel.partition import counts_experts, join_frozen, split_frozen
from trainer.run.folder import FROZEN_FOLDER
from trainer.run.settings import CHECKPOINTS_FOLDER, model_flags
from trainer.weights.files import MODEL
from trainer.weights.places import Place
from trainer.weights.writing import write_tensors

KERNEL = "kernel"


def check_merge(config: TrainConfig, run_dir: Path, *, merge: bool) -> None:
    """Raises ValueError if adapters are to be merged, and there are none."""
    if merge and not config.freezes:
        raise InputError(
            f"merge adds adapters to weights; got merge=True for {str(run_dir)!r}, a run that has "
            "none, as it had no --lora.rank. Leave --merge out."
        )


def shapes_on_host(objective: Objective) -> Any:
    """Shapes of the weights of a model, on one device of the host."""
    model = nnx.eval_shape(
        lambda: objective.make_model(jax.nn.dot_product_attention, Hooks(), nnx.Rngs(0))
    )
    # A command of one process needs no accelerator.
    place = SingleDeviceSharding(jax.devices("cpu")[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        nnx.state(model),
    )


def restore_model(
    run_dir: Path,
    config: TrainConfig,
    shapes: Any,
    *,
    step: int | None = None,
    only_trained: bool = False,
    note: Callable[[str], object],
) -> tuple[PyTree[Shaped[Array, "..."]], int]:
    """Reads the weights of a run, also while it trains, and tells the step of their checkpoint.
    `shapes` has types and shardings of all weights; `step` None is the newest whole one. With
    `only_trained`, those that are frozen are left out."""
    trained, frozen = split_frozen(shapes)
    weights, found = restore_weights(
        run_dir / CHECKPOINTS_FOLDER, trained, model_flags(config), step=step, note=note
    )
    if only_trained:
        return weights, found
    base = restore_frozen(run_dir / FROZEN_FOLDER, frozen, note=note)
    return join_frozen(weights, base), found


def as_matrix(x: Float[np.ndarray, "..."], kind: str) -> Float[np.ndarray, "inputs outputs"]:
    """A matrix of an adapter of one layer, with a single dimension beside the rank."""
    return x.reshape(-1, x.shape[-1]) if kind == ADAPTERS[0] else x.reshape(x.shape[0], -1)


def merged(
    arrays: Mapping[str, Any], path: str, place: Place, number: int, lora: LoraConfig
) -> Float[np.ndarray, "..."]:
    """The kernel at `path` with its adapter, if it has one, in float32: W + scale * A B."""
    weight = place.weight_of(np.asarray(arrays[path]), number)
    part, _, kind = path.rpartition("/")
    names = [f"{part}/{kind}" for kind in ADAPTERS]
    if kind != KERNEL or names[0] not in arrays:
        return weight
    a, b = (place.weight_of(np.asarray(arrays[name]), number) for name in names)
    if not counts_experts(part.rpartition("/")[2]):
        a, b = (as_matrix(x, kind) for x, kind in zip((a, b), ADAPTERS, strict=True))
    added = np.matmul(a, b)
    assert weight.size == added.size, "they belong to the kernel"
    return weight.astype(np.float32) + lora.scale * added.reshape(weight.shape)


def write_merged(
    arrays: Mapping[str, Any],
    places: Callable[[Mapping[str, tuple[int, ...]]], Iterable[tuple[str, Place]]],
    lora: LoraConfig,
    folder: Path,
    dtype_of: Callable[[str], Any],
    *,
    shard_bytes: int,
    stem: str = MODEL,
) -> None:
    """Writes the files of a model, whose adapters are added to the weights."""
    shapes = {x: y.shape for x, y in arrays.items() if x.rpartition("/")[2] not in ADAPTERS}
    found = dict(places(shapes))

    def weight(path: str, number: int) -> Shaped[np.ndarray, "..."]:
        return merged(arrays, path, found[path], number, lora)

    write_tensors(found, weight, folder, dtype_of, shard_bytes=shard_bytes, stem=stem)

"""The weights of a run for an export: reads them, and merges low-rank adapters into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, PyTree, Shaped

from models.weights import ADAPTERS
from startrail_jax.errors import InputError, UserError
from trainer.checkpoints.reading import restore_frozen, restore_weights
from trainer.config import LoraConfig, TrainConfig
from trainer.objective import Objective, abstract_weights
from trainer.parallel.partition import join_frozen, split_frozen
from trainer.run.folder import FROZEN_FOLDER
from trainer.run.settings import CHECKPOINTS_FOLDER, model_flags
from trainer.weights.files import MODEL
from trainer.weights.initial import TensorWeights
from trainer.weights.places import Place
from trainer.weights.types import ExportTypes
from trainer.weights.writing import write_tensors

KERNEL = "kernel"
Places = Callable[[Mapping[str, tuple[int, ...]]], Iterable[tuple[str, Place]]]
"""Shapes of weights by path -> path and place of each weight."""


def check_merge(config: TrainConfig, run_dir: Path, *, merge: bool) -> None:
    """Raises ValueError if adapters are to be merged, and there are none."""
    if merge and not config.has_adapters:
        raise InputError(
            f"merge adds adapters to weights; got merge=True for {str(run_dir)!r}, a run that has "
            "none, as it had no --lora.rank. Leave --merge out."
        )


def shapes_on_host(objective: Objective) -> Any:
    """Shapes of the weights of a model, on one device of the host."""
    # A command of one process needs no accelerator.
    place = SingleDeviceSharding(jax.devices("cpu")[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        abstract_weights(objective),
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
    `only_trained`, frozen weights are left out."""
    trained, frozen = split_frozen(shapes, config.frozen)
    weights, restored_step = restore_weights(
        run_dir / CHECKPOINTS_FOLDER, trained, model_flags(config), step=step, note=note
    )
    if only_trained:
        return weights, restored_step
    base = restore_frozen(run_dir / FROZEN_FOLDER, frozen, note=note)
    return join_frozen(weights, base), restored_step


def as_matrix(x: Float[np.ndarray, "..."], adapter: str) -> Float[np.ndarray, "inputs outputs"]:
    """A matrix of an adapter of one layer, with a single dimension beside the rank."""
    return x.reshape(-1, x.shape[-1]) if adapter == ADAPTERS[0] else x.reshape(x.shape[0], -1)


class BaseWeights:
    """The weights to which a run's adapters are added: from its pretrained model, if the run keeps
    them in fewer bits."""

    def __init__(self, arrays: Mapping[str, Any], source: TensorWeights | None) -> None:
        self._arrays, self._source = arrays, source

    def read(self, path: str, place: Place, number: int) -> Shaped[np.ndarray, "..."]:
        """The weight at `path` of one of its tensors; raises unless it equals the rounded one in
        the run."""
        weight = place.weight_of(np.asarray(self._arrays[path]), number)
        if self._source is None or weight.dtype.itemsize > 2:
            return weight
        source_place, tensors = self._source.places[path], self._source.tensors
        name = source_place.tensors[number]
        ranges = [slice(0, size) for size in source_place.shape]
        original = source_place.read(tensors.slices[name], ranges)
        if not np.array_equal(original.astype(weight.dtype), weight):
            raise _other_weights(tensors.folder, f"other numbers in {name}", weight.dtype.name)
        return original


def _places_of(arrays: Mapping[str, Any], places: Places) -> dict[str, Place]:
    shapes = {x: y.shape for x, y in arrays.items() if x.rpartition("/")[2] not in ADAPTERS}
    return dict(places(shapes))


def _other_weights(folder: Path, what: str, dtype: str) -> InputError:
    return InputError(
        "Adapters are added to the weights with which the run began; got "
        f"{str(folder)!r} with {what}. Put the former files back, or move the folder away: --merge "
        f"then takes what the run has kept, rounded to {dtype}."
    )


@contextmanager
def base_weights(
    arrays: Mapping[str, Any],
    places: Places,
    config: Any,
    open_weights: Callable[[], AbstractContextManager[TensorWeights]],
    types: ExportTypes,
    *,
    note: Callable[[str], object],
) -> Iterator[BaseWeights]:
    """The weights of a run, for `write_merged`. The files of its pretrained model are opened if the
    run has rounded some weights, as to the type of activations; `note` gets a warning if they
    cannot be opened."""
    rounded = {
        arrays[path].dtype.name
        for path, place in _places_of(arrays, places).items()
        for name in place.tensors
        if arrays[path].dtype.itemsize == 2 and types.before(name) != arrays[path].dtype.name
    }
    with ExitStack() as stack:
        source = None
        if config.init_from is not None and rounded:
            (dtype,) = rounded
            try:
                source = stack.enter_context(open_weights())
            except UserError as error:
                note(
                    f"WARNING: the weights are those that the run has kept, rounded to {dtype}, "
                    f"since those of its pretrained model cannot be read: {error}"
                )
            else:
                file_types = source.tensors.types
                for name, before in types.noted.items():
                    if file_types.get(name, before) != before:
                        what = f"{name} in {file_types[name]}"
                        raise _other_weights(source.tensors.folder, what, dtype)
        yield BaseWeights(arrays, source)


def merged(
    arrays: Mapping[str, Any],
    path: str,
    place: Place,
    number: int,
    lora: LoraConfig,
    base: BaseWeights,
) -> Float[np.ndarray, "..."]:
    """The kernel at `path` with its adapter, if it has one, in float32: W + scale * A B."""
    weight = base.read(path, place, number)
    module, _, leaf = path.rpartition("/")
    names = [f"{module}/{adapter}" for adapter in ADAPTERS]
    if leaf != KERNEL or names[0] not in arrays:
        return weight
    a, b = (place.weight_of(np.asarray(arrays[name]), number) for name in names)
    # Matrices of experts lie one after another.
    if a.ndim + b.ndim == weight.ndim + 2:
        a, b = (as_matrix(x, adapter) for x, adapter in zip((a, b), ADAPTERS, strict=True))
    added = np.matmul(a, b)
    assert weight.size == added.size, "they belong to the kernel"
    return weight.astype(np.float32) + lora.scale * added.reshape(weight.shape)


def write_merged(
    arrays: Mapping[str, Any],
    places: Places,
    lora: LoraConfig,
    folder: Path,
    dtype_of: Callable[[str], Any],
    *,
    shard_bytes: int,
    stem: str = MODEL,
    base: BaseWeights | None = None,
) -> str:
    """Writes the files of a model, with adapters added to the weights of `base`, or of `arrays` by
    default. Returns the types of the tensors."""
    weights = base or BaseWeights(arrays, None)
    by_path = _places_of(arrays, places)

    def weight(path: str, number: int) -> Shaped[np.ndarray, "..."]:
        return merged(arrays, path, by_path[path], number, lora, weights)

    return write_tensors(by_path, weight, folder, dtype_of, shard_bytes=shard_bytes, stem=stem)

"""Folders of safetensors files, written as the libraries of PyTorch read them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError
from safetensors.numpy import save_file

from trainer.errors import NonFiniteError, StorageError
from trainer.weights.files import MODEL, index_of, one_file
from trainer.weights.places import Place, by_tensor


def write_tensors(
    places: Mapping[str, Place],
    weight: Callable[[str, int], Shaped[np.ndarray, "..."]],
    folder: Path,
    dtype_of: Callable[[str], Any],
    *,
    shard_bytes: int,
    stem: str = MODEL,
) -> str:
    """Writes the files of tensors, embeddings first, layers in their order and the rest last; and
    their index if there are several. `dtype_of` gives a tensor's type by its name; returns the
    types of all tensors, as a text. A file has at most `shard_bytes`, unless one tensor has
    more."""
    weights = by_tensor(places)
    weights = {name: weights[name] for name in sorted(weights, key=_layer_of)}
    dtypes = {name: np.dtype(dtype_of(name)) for name in weights}
    sizes = {
        name: math.prod(places[path].whole_shape) * dtypes[name].itemsize
        for name, ((path, _), *_) in weights.items()
    }
    shards: list[list[str]] = [[]]
    for name in weights:
        if shards[-1] and sum(sizes[x] for x in shards[-1]) + sizes[name] > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    files = {}
    for number, names in enumerate(shards, 1):
        file = one_file(f"{stem}-{number:05}-of-{len(shards):05}" if shards[1:] else stem)
        tensors = {}
        for name in names:
            parts = [_tensor(weight(x, n), x, places[x], dtypes[name]) for x, n in weights[name]]
            share = places[weights[name][0][0]].share
            tensors[name] = parts[0] if share is None else share.joined(parts)
        write_file(folder / file, tensors)
        files |= dict.fromkeys(names, file)
    if shards[1:]:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        (folder / index_of(stem)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return " and ".join(sorted({dtype.name for dtype in dtypes.values()}))


def _layer_of(name: str) -> float:
    """The number of the layer of a tensor; of one outside of the layers, where it is used."""
    number = re.search(r"\.(\d+)\.", name)
    if number is None:
        return -1.0 if "embed" in name else math.inf
    return float(number[1])


def _tensor(
    weight: Shaped[np.ndarray, "..."], path: str, place: Place, dtype: Any
) -> Shaped[np.ndarray, "..."]:
    with np.errstate(over="ignore"):
        tensor = place.to_tensor(weight).astype(dtype)
    if not np.isfinite(tensor).all():
        raise NonFiniteError(
            f"The weights must be finite in the type that is exported; got {path}, which is not in "
            f"{np.dtype(dtype).name}. Use --dtype float32, or another checkpoint."
        )
    return tensor


def write_file(path: Path, tensors: dict[str, Any]) -> None:
    """Writes one file."""
    try:
        # transformers asks for the format.
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # It hides what the operating system said.
        raise StorageError(
            f"Tensors must be written to a disk with space for them; got {str(path.parent)!r}: "
            f"{error}. Fix that, or give another OUT."
        ) from error

"""A pretrained Wan in the format of diffusers: its weights at the beginning of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from startrail_jax.errors import InputError
from trainer import durable
from trainer.data.opening import read_object
from trainer.dit.wan.config import WanConfig, WanTrainConfig
from trainer.dit.wan.config_json import CONFIG, find_folder, read_config
from trainer.dit.wan.tensors import places
from trainer.parallel.partition import path_name
from trainer.run.folder import KEPT_FOLDER
from trainer.sums import write_sums
from trainer.weights.files import DIFFUSERS, open_tensors
from trainer.weights.initial import TensorWeights
from trainer.weights.types import keep_types


@dataclass(frozen=True, kw_only=True)
class WanWeights(TensorWeights):
    """The weights in a folder of diffusers, which fit the model of a run."""

    def keep(self, run_dir: Path) -> None:
        """Copies config.json, and notes the types of the tensors, which an export takes again."""
        folder = run_dir / KEPT_FOLDER
        folder.mkdir(exist_ok=True)
        text = json.dumps(read_object(self.tensors.folder / CONFIG), indent=2)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
        keep_types(folder, self.tensors)
        write_sums(folder)
        durable.flush_files(folder, 0)
        durable.flush(folder.parent)


@contextmanager
def open_wan(config: WanTrainConfig, shapes: Any) -> Iterator[WanWeights]:
    """The weights in the folder `config.init_from`, which have been compared with the model."""
    assert config.init_from is not None, "the caller asks for it"
    folder = find_folder(config.init_from)
    check_same_model(read_config(folder), config.model, folder)
    with open_tensors(folder, stem=DIFFUSERS) as tensors:
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        found = dict(places({path_name(path): tuple(x.shape) for path, x in leaves}))
        wanted = {name: place.whole_shape for place in found.values() for name in place.tensors}
        tensors.check(wanted, tied={})
        size = sum(jnp.dtype(x.dtype).itemsize * x.size for _, x in leaves)
        dtype = jnp.dtype(max((x for _, x in leaves), key=lambda x: x.size).dtype)
        yield WanWeights(
            tensors=tensors,
            places=found,
            description=f"initial weights: {folder}, a Wan with {len(wanted)} tensors of "
            f"{tensors.kinds}, {size / 2**30:.2f} GiB in {dtype}",
        )


def check_same_model(there: WanConfig, model: WanConfig, folder: Path) -> None:
    """Raises if flags make another model of the weights of a folder. The type of the activations,
    the length of texts and a first frame of time 0 may differ."""
    free: dict[str, Any] = {"dtype": "float32", "text_tokens": 1}
    if {there.first_frame, model.first_frame} <= {"none", "time"}:
        free["first_frame"] = "none"
    one, other = (vars(replace(x, **free)) for x in (there, model))
    changed = [name for name in one if one[name] != other[name]]
    if changed:
        name = changed[0]
        raise InputError(
            f"The model must be that of its folder; got model.{name}={other[name]} and "
            f"{one[name]} in {str(folder)!r}. Leave flags --model.* out, or give the folder of the "
            "model that you want."
        )

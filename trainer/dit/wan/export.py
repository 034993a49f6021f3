"""Writes a run of a Wan as diffusers loads it: a model, or adapters for its LoRA loader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from models.weights import ADAPTERS
from trainer.data.cache import check_new, write_folder
from trainer.dit.wan.config import WanTrainConfig
from trainer.dit.wan.config_json import CONFIG, to_values
from trainer.dit.wan.objective import VideoFlow
from trainer.dit.wan.pretrained import open_wan
from trainer.dit.wan.tensors import places
from trainer.parallel.partition import path_name, split_adapters
from trainer.run.folder import KEPT_FOLDER
from trainer.weights.adapters import (
    KERNEL,
    as_matrix,
    base_weights,
    check_merge,
    restore_model,
    shapes_on_host,
    write_merged,
)
from trainer.weights.files import DIFFUSERS
from trainer.weights.types import ExportTypes
from trainer.weights.writing import write_file

LORA_FILE, PEFT_FILE = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
PREFIXES = {LORA_FILE: "transformer.", PEFT_FILE: "base_model.model."}
"""File -> what diffusers and PEFT put in front of the names of a model."""
PEFT_CONFIG = "adapter_config.json"
SHARD_BYTES = 10 * 10**9
"""Bytes of the tensors of one file, as diffusers writes them."""


def export_wan(
    run_dir: Path,
    config: WanTrainConfig,
    out: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    merge: bool = False,
    shard_bytes: int = SHARD_BYTES,
    note: Any = print,
) -> int:
    """Writes the weights of a checkpoint, by default the newest whole one, and returns its step;
    the folder appears only when it is whole. By default, each tensor has the type that it had in
    the pretrained model, or float32 without one; `dtype` is for all but those in float32 among
    others of 16 bits. Adapters are float32 by default, and exported by themselves unless `merge`
    adds them to the weights. A file has at most `shard_bytes` of tensors, unless one tensor has
    more. `note` is told what the user must know about the checkpoint."""
    check_new("OUT", out)
    check_merge(config, run_dir, merge=merge)
    if config.block_frames:
        note(
            "WARNING: pipelines of diffusers attend to all frames, and this model does not: "
            f"block_frames={config.block_frames}"
        )
    apart = config.has_adapters and not merge
    types = ExportTypes.of_run(run_dir / KEPT_FOLDER, dtype)
    shapes = shapes_on_host(VideoFlow(config))
    weights, found = restore_model(
        run_dir, config, shapes, step=step, only_trained=apart, note=note
    )
    arrays = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(weights)}

    def open_base() -> Any:
        return open_wan(config, split_adapters(shapes)[1])

    def write(part: Path) -> None:
        if apart:
            matrices = adapter_tensors(arrays, shapes, config, jnp.dtype(dtype or "float32"))
            for file, prefix in PREFIXES.items():
                write_file(part / file, {prefix + name: x for name, x in matrices.items()})
            (part / PEFT_CONFIG).write_text(
                json.dumps(peft_values(matrices, config), indent=2), encoding="utf-8"
            )
            return
        options: dict[str, Any] = dict(shard_bytes=shard_bytes, stem=DIFFUSERS)
        with base_weights(arrays, places, config, open_base, types, note=note) as base:
            write_merged(arrays, places, config.lora, part, types.of, base=base, **options)
        # Last: a kill leaves a hidden folder without it.
        (part / CONFIG).write_text(
            json.dumps(to_values(config.model), indent=2) + "\n", encoding="utf-8"
        )

    write_folder(out, write, option="OUT")
    return found


def adapter_tensors(
    arrays: Mapping[str, Any], shapes: Any, config: WanTrainConfig, dtype: Any
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The tensors of a LoRA file: lora_A [rank, inputs] and lora_B [outputs, rank]. The scale is
    part of B, as not all libraries read an alpha from such a file."""
    lora = config.lora
    named = {path_name(x): y.shape for x, y in jax.tree_util.tree_leaves_with_path(shapes)}
    found: dict[str, Any] = {}
    for path, place in places({x: y for x, y in named.items() if x.endswith(KERNEL)}):
        pair = [arrays.get(path.removesuffix(KERNEL) + kind) for kind in ADAPTERS]
        if pair[0] is None:
            continue
        for layer, name in enumerate(place.tensors):
            stem = name.removesuffix(".weight")
            for letter, kind, x, scale in zip("AB", ADAPTERS, pair, (1, lora.scale), strict=True):
                matrix = scale * as_matrix(np.asarray(x)[layer], kind).T
                found[f"{stem}.lora_{letter}.weight"] = np.ascontiguousarray(matrix.astype(dtype))
    return found


def peft_values(matrices: Mapping[str, Any], config: WanTrainConfig) -> dict[str, Any]:
    """The adapter_config.json of PEFT."""
    rank = config.lora.rank
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".lora_")[0] for name in matrices}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }

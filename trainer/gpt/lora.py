"""Low-rank adapters of a run in the format of PEFT, Hugging Face's library for adapters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from models.config import GPTConfig
from models.parts.gpt import gpt_dims, gpt_weights, recurrences_of, stack_pairs
from models.periods import layers_of
from models.weights import ADAPTERS
from startrail_jax.errors import InputError
from trainer.data.opening import read_object
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.pretrained.families.table import FAMILIES, MULTIMODAL, TEXT_ALONE
from trainer.gpt.pretrained.plain import without_losses
from trainer.gpt.pretrained.values import CONFIG
from trainer.run.settings import settings_of
from trainer.weights.adapters import KERNEL, as_matrix
from trainer.weights.places import Share

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of PEFT before the names of a model."""
TEXT, TEXT_OF_IMAGES = "model.", "model.language_model."
"""Prefix of the layers in a model of text, and in one of images and text."""


def peft_config(
    config: GPTTrainConfig, base: GPTConfig | None, family: str, *, note: Callable[[str], Any]
) -> dict[str, Any]:
    """The adapter_config.json of a run; `base` is the model of the folder it names, if known."""
    if config.init_from is None:
        raise InputError(
            "Adapters are exported for the pretrained model of a run; got a run without init_from,"
            " whose frozen weights are random. Use --merge to export the whole model."
        )
    if base is not None:
        _require_same(base, config.model, config.init_from)
    folder = config.init_from
    if folder.is_dir():
        # PEFT may load the adapters from another directory.
        folder = folder.resolve()
    else:
        note(
            f"the adapters name {str(folder)!r} as their model, which is no folder here: correct "
            f"base_model_name_or_path in {ADAPTER_CONFIG}, or use --merge"
        )
    lora = config.lora
    assert lora.rank is not None, "the caller has looked"
    text = text_prefix(config, family)
    if text != TEXT:
        note(
            f"the adapters are those of the model of images and text in {str(folder)!r}, which "
            "transformers.AutoModelForImageTextToText loads"
        )
    modules, parameters = _adapted(config.model, family, lora.targets, text)
    several = {name: len(rows) for name, rows in (modules | parameters).items() if len(rows) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder),
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": 0.0,
        "rank_pattern": {name: n * lora.rank for name, n in several.items()},
        "alpha_pattern": {name: n * lora.scale * lora.rank for name, n in several.items()},
        "target_modules": _target_modules(sorted(modules), text),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def text_prefix(config: GPTTrainConfig, family: str) -> str:
    """The prefix of layers in the model of `init_from`, as transformers has it in memory."""
    assert config.init_from is not None
    path = config.init_from / CONFIG
    if path.is_file():
        kind = read_object(path).get("model_type")
        return TEXT_OF_IMAGES if kind in MULTIMODAL and kind not in TEXT_ALONE else TEXT
    alone = family in {MULTIMODAL[kind] for kind in TEXT_ALONE}
    return TEXT_OF_IMAGES if config.init_text_only and not alone else TEXT


def _target_modules(names: list[str], text: str) -> list[str] | str:
    """The tower of images may have modules of the same names, which are not adapted."""
    if text == TEXT or not names:
        return names
    return rf"(.*\.)?{re.escape(text)}.*\.({'|'.join(names)})"


def _require_same(base: GPTConfig, model: GPTConfig, folder: Path) -> None:
    """Raises if flags have changed the outputs of a folder's model: PEFT would not know."""
    in_folder, in_run = (
        settings_of(replace(without_losses(x), dtype="float32")) for x in (base, model)
    )
    changed = [name for name in in_run if in_folder[name] != in_run[name]]
    if changed:
        lines = ", ".join(
            f"{name}={in_folder[name]} there and {in_run[name]} here" for name in changed
        )
        raise InputError(
            "Adapters that are exported by themselves must be those of a model that is in a "
            f"folder as it was trained; got {str(folder)!r} with {lines}. Use --merge to export "
            "the whole model."
        )


def _adapted(
    model: GPTConfig, family: str, targets: Collection[str], text: str
) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The adapted projections by their names in transformers: modules, such as "q_proj", and
    parameters. In a model with experts, PEFT takes modules gate_proj, up_proj and down_proj for
    experts, so that an MLP there is named by its parameters, in full beside a tower of images."""
    weights, modules = gpt_weights(model), dict[str, set[str]]()
    parameters: dict[str, set[str]] = {}
    for stack, table in FAMILIES[family].tables(model).items():
        for path, (name, _) in table.items():
            *_, target, leaf = ("", *path.split("/"))
            weight = weights.get(f"{stack}/{path}")
            if weight is None or leaf != KERNEL or target not in targets:
                continue
            if name in FAMILIES[family].never_adapted:
                raise InputError(
                    f"Adapters that are exported by themselves must be of matrices that PEFT "
                    f"adapts; got lora.targets with {target}, which is {name} in models of kind "
                    f"{family}. Use --merge to export the whole model."
                )
            if weight.of_experts:
                before, down = _names_of_experts(model, family)
                named = down if target == "expert_down" else before
                parameters.setdefault(named, set()).add(path)
            elif path.startswith("mlp/") and "experts" in model.layer_feed_forwards:
                name = FAMILIES[family].in_memory(name)
                named = [name.removeprefix("mlp.")]
                if text != TEXT:
                    layers = layers_of(stack, model.layer_mixers, model.layer_feed_forwards)
                    named = [f"{text}layers.{layer}.{name}" for layer in layers]
                for one in named:
                    parameters.setdefault(one, set()).add(path)
            else:
                modules.setdefault(name.split(".")[-2], set()).add(path)
    return modules, parameters


def peft_tensors(
    arrays: Mapping[str, Any], dtype: Any, model: GPTConfig, family: str, text: str
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The tensors of adapter_model.safetensors: lora_A [rank, inputs] and lora_B [outputs, rank].
    `text` is before the names of layers. Where several weights are rows of one tensor, they share
    one adapter, whose rank is the sum of their ranks. Adapters of experts are
    [experts * rank, inputs] and [outputs, rank * experts]."""
    tensors, weights, recurrences = {}, gpt_weights(model), recurrences_of(model)
    for stack, table in FAMILIES[family].tables(model).items():
        layers = layers_of(stack, model.layer_mixers, model.layer_feed_forwards)
        recurrence = recurrences.get(stack_pairs(model)[stack][0])
        sizes = gpt_dims(model) | (recurrence.sizes if recurrence else {})
        for place, layer in enumerate(layers):
            for name, matrix in _of_experts(arrays, stack, place, model, family).items():
                place_of_experts = f"{layer}.{FAMILIES[family].module_of_experts}"
                tensors[f"{PREFIX}{text}layers.{place_of_experts}.{name}"] = matrix.astype(dtype)
        names = dict.fromkeys(
            name
            for path, (name, _) in table.items()
            if path.endswith(KERNEL)
            and (weight := weights.get(f"{stack}/{path}"))
            and not weight.of_experts
        )
        for name in names:
            rows = [path.removesuffix(f"/{KERNEL}") for path, (x, _) in table.items() if x == name]
            pairs = [
                [arrays.get(f"{stack}/{path}/{adapter}") for adapter in ADAPTERS] for path in rows
            ]
            if all(a is None for a, _ in pairs):
                continue
            kernels = [weights[f"{stack}/{path}/{KERNEL}"] for path in rows]
            outputs = [math.prod(sizes[dim] for dim in kernel.outputs) for kernel in kernels]
            for place, layer in enumerate(layers):
                layer_pairs = [
                    None if a is None else [np.asarray(x)[place] for x in (a, b)] for a, b in pairs
                ]
                groups = FAMILIES[family].row_groups(name, model)
                both = _joined(layer_pairs, outputs, groups)
                for letter, matrix in zip("AB", both, strict=True):
                    loaded = FAMILIES[family].in_memory(name)
                    key = loaded.removesuffix("weight") + f"lora_{letter}.weight"
                    tensor = matrix.T.astype(dtype)
                    tensors[f"{PREFIX}{text}layers.{layer}.{key}"] = np.ascontiguousarray(tensor)
    return tensors


def _names_of_experts(model: GPTConfig, family: str) -> tuple[str, str]:
    """Names of the matrices of all experts, parameters [experts, ...] in transformers from version
    5 on: of gates and projections up, and of projections down."""
    module = FAMILIES[family].module_of_experts
    return f"{module}.{'gate_' * model.experts.is_gated}up_proj", f"{module}.down_proj"


def _of_experts(
    arrays: Mapping[str, Any], stack: str, place: int, model: GPTConfig, family: str
) -> dict[str, Shaped[np.ndarray, "rows columns"]]:
    """The adapters of all experts of one layer. PEFT wraps a parameter around the one before it."""

    def pair(name: str) -> list[Any] | None:
        matrices = [arrays.get(f"{stack}/mlp/expert_{name}/{adapter}") for adapter in ADAPTERS]
        return None if matrices[0] is None else [np.asarray(x)[place] for x in matrices]

    tensors, down = {}, pair("down")
    hidden = model.experts.of_model(model).width
    # In gpt-oss, gates and projections up take turns.
    turns = hidden if FAMILIES[family].takes_turns(_names_of_experts(model, family)[0]) else 1
    prefix = "" if down is None else "base_layer."
    first = [pair(name) for name in (("gate", "up") if model.experts.is_gated else ("up",))]
    for before, pairs, groups in ((prefix, first, turns), ("", [down], 1)):
        if any(pairs):
            joined = [
                _joined([pair and [x[i] for x in pair] for pair in pairs], [hidden] * 2, groups)
                for i in range(model.experts.count)
            ]
            a, b = (np.stack(x) for x in zip(*joined, strict=True))
            tensors[f"{before}lora_A.weight"] = a.swapaxes(1, 2).reshape(-1, a.shape[1])
            tensors[f"{before}lora_B.weight"] = b.transpose(2, 1, 0).reshape(b.shape[2], -1)
    return tensors


def _joined(
    pairs: Sequence[Any], outputs: Sequence[int], groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """The matrices [inputs, rank] and [rank, outputs] of one layer, joined from the adapters of
    several projections, whose weights are rows of one tensor. A projection without adapters is
    None, and adds 0."""
    adapted = [pair for pair in pairs if pair is not None]
    matrices = [
        [as_matrix(x, adapter) for x, adapter in zip(x, ADAPTERS, strict=True)] for x in adapted
    ]
    if len(pairs) == 1:
        ((a, b),) = matrices
        return a, b
    ranks = [b.shape[0] for _, b in matrices]
    block_diagonal = np.zeros((sum(ranks), sum(outputs)), matrices[0][1].dtype)
    first, blocks = 0, iter(matrices)
    for pair, start, size in zip(pairs, np.cumsum([0, *outputs]), outputs, strict=False):
        if pair is not None:
            b = next(blocks)[1]
            block_diagonal[first : first + len(b), start : start + size] = b
            first += len(b)
    share = Share(index=0, sizes=tuple(size // groups for size in outputs), groups=groups)
    rows = share.joined(np.split(block_diagonal.T, np.cumsum(outputs)[:-1]))
    return np.concatenate([a for a, _ in matrices], axis=1), rows.T

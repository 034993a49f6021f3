"""The command line of `train.py` for a plan, to be pasted."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from startrail_jax.devices.degrees import ROLES
from startrail_jax.planner.config_json import PRETRAINED, find_model
from startrail_jax.planner.grid import Call
from startrail_jax.planner.hardware import Cluster
from startrail_jax.planner.models import FRAME, MODELS, ModelSizes
from startrail_jax.planner.quantities import show_count
from startrail_jax.planner.search import Prediction

# The models that train.py has a recipe for, of the same name.
_RECIPES = ("gpt_3b", "gpt_7b", "dit_1b", "llama3_8b", "wan_1_3b", "wan_14b")
_DEFAULT_FRACTION = 0.75
"""Share of a GPU's memory that jax takes by default."""
_BYTES = 256
"""Tokens that text has without a tokenizer."""


def command_of(choice: Prediction, call: Call, cluster: Cluster, *, memory_fraction: float) -> str:
    """The command line of `train.py` for a choice, to be pasted.

    Args:
        choice: the setting.
        call: the model, its tokens and its batch.
        cluster: how many nodes there are, and how much memory a GPU has.
        memory_fraction: share of a GPU's memory that jax may take.
    """
    model, words = call.model, []
    if choice.memory_bytes > _DEFAULT_FRACTION * cluster.gpu.memory_bytes:
        words.append(f"XLA_PYTHON_CLIENT_MEM_FRACTION={memory_fraction}")
    base, base_model = _base_of(model)
    from_folder = base_model.pretrained is not None
    words += ["python", "train.py", *(["--init-from"] if from_folder else []), shlex.quote(base)]
    flags: dict[str, Any] = _data_flags(model, base_model)
    same = model == replace(base_model, name=model.name, lora_rank=model.lora_rank)
    flags |= {} if same else _model_flags(model, base_model)
    if model.lora_rank != base_model.lora_rank:
        flags["lora.rank"] = model.lora_rank or None
    if from_folder:
        # The file may name another type, or none, which is float32.
        flags["model.dtype"] = _dtype(model)
        flags |= {"init-text-only": True} if base_model.text_only else {}
    if model.kind == "gpt":
        flags["seq-len"] = call.seq_len
    elif model.kind == "dit" and not model.from_run and call.seq_len != MODELS["dit_1b"].seq_len:
        flags["size"] = f"{call.seq_len // FRAME} 256 256"
    flags |= {"batch-size": call.batch}
    flags |= {f"mesh.{role}": getattr(choice.degrees, role) for role in ROLES}
    if cluster.nodes > 1 or model.from_run:
        flags["mesh.order"] = " ".join(choice.order)
    flags["attention.inner"] = choice.inner
    flags["attention.gradient-dtype"] = choice.gradient_dtype
    flags |= {"zero": choice.savings.zero, "remat": choice.savings.remat, "tile": choice.tile}
    if model.from_run:
        # What the plan assumes, and the run may have set otherwise.
        flags |= {"gradient-accumulation": 1, "zero-axes": "data group ring team head"}
        flags |= {"devices": None, "mesh.c": None, "mesh.devices-per-node": None}
        flags["attention.keep-gathered"] = False
    flags["offload"] = choice.savings.offload
    flags["run-dir"] = shlex.quote(_new_folder(base, call))
    if cluster.nodes > 1:
        flags["distributed"] = True
    return " ".join([*words, *(_flag(*item) for item in flags.items())])


def _data_flags(model: ModelSizes, base: ModelSizes) -> dict[str, str]:
    """Placeholders for the data of a new run: no such files exist, so that the run ends at once."""
    if model.from_run:
        return {}
    if model.kind == "dit":
        return {"data.path": "YOUR_LATENTS.npz"}
    if model.kind == "wan":
        return {"data.path": "YOUR_ENCODED_VIDEOS"}
    flags = {"data.path": "YOUR_TEXT"}
    if base.pretrained is None and model.outputs > _BYTES:
        flags["data.tokenizer"] = "YOUR_TOKENIZER.json"
    return flags


def _flag(name: str, value: Any) -> str:
    """A flag of `train.py`, as its command line spells it."""
    section, dot, last = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{section}{dot}{'' if value else 'no-'}{last}"
    return f"--{section}{dot}{last} {value}"


def _base_of(model: ModelSizes) -> tuple[str, ModelSizes]:
    """The recipe or the config.json that a command starts from, and the model that it has."""
    if model.from_run:
        return model.name, find_model(model.name)
    if model.pretrained is not None:
        whole = find_model(model.pretrained)
        if model == replace(whole, name=model.name, lora_rank=model.lora_rank):
            return model.pretrained, whole
    if model.name in _RECIPES and MODELS[model.name] == replace(model, lora_rank=0):
        return model.name, MODELS[model.name]
    base = "dit_1b" if model.kind == "dit" else "gpt_7b"
    return base, MODELS[base]


def remarks(call: Call, cluster: Cluster) -> list[str]:
    """What a user who pastes the command must know: lines of text.

    Args:
        call: the model.
        cluster: how many nodes there are.
    """
    model, lines = call.model, []
    base, base_model = _base_of(model)
    if placeholders := _data_flags(model, base_model):
        lines.append(f"Replace {' and '.join(placeholders.values())}.")
    if base_model.pretrained is not None:
        wanted = ("*.safetensors", "tokenizer.json")
        missing = [name for name in wanted if not any(Path(base).glob(name))]
        if missing:
            lines.append(f"train.py also reads {' and '.join(missing)}, which {base} lacks.")
    elif model.hugging_face:
        lines.append(
            "The command trains a new model of these sizes, without biases and with rotary "
            "positions of base 10000:\ntrain.py --init-from reads a whole, unchanged config.json "
            f"of {', '.join(PRETRAINED)}."
        )
    if cluster.nodes > 1:
        lines.append(
            "Start it on every node, with a --run-dir that all nodes share: see docs/cluster.md."
        )
    return lines


def _dtype(model: ModelSizes) -> str:
    return "bfloat16" if model.itemsize == 2 else "float32"


def _model_flags(model: ModelSizes, base: ModelSizes) -> dict[str, Any]:
    """The flags of `train.py` that give a model its sizes, whatever its base has."""
    names = ["width", "layers", "heads", "mlp_width"]
    names += ["classes"] if model.kind == "dit" else ["kv_heads", "head_dim"]
    flags = {f"model.{name}": getattr(model, name) for name in names}
    flags["model.dtype"] = _dtype(model)
    if model.average != base.average:
        flags["ema-decay"] = 0.9999 if model.average else None
    if model.kind == "dit":
        return flags | {"model.channels": model.outputs // model.patch}
    flags["model.vocab-size"] = model.outputs
    if not (model.from_run and model.mlp_matrices == base.mlp_matrices):
        flags["model.mlp"] = "swiglu" if model.mlp_matrices == 3 else "gelu"
    flags["model.tied-head"] = model.tied_head
    if model.qk_norm != base.qk_norm:
        flags["model.qk-norm"] = model.qk_norm
    if model.attention_gate != base.attention_gate:
        flags["model.attention-gate"] = model.attention_gate
    if (model.mixers, model.linear) != (base.mixers, base.linear):
        flags["model.mixers"] = " ".join(model.mixers)
        sizes = {} if model.linear is None else vars(model.linear)
        flags |= {f"model.linear.{name}": size for name, size in sizes.items()}
    windows = ("none" if x is None else str(x) for x in model.windows)
    return flags | {"model.windows": " ".join(windows)}


def _new_folder(base: str, call: Call) -> str:
    """A folder for the run that does not exist: beside that of the run that is planned, if any."""
    path = Path(base)
    runs = path.parent.parent if path.suffix == ".json" else Path("runs")
    name = path.parent.name if path.suffix == ".json" else path.resolve().name
    name = f"{name or 'run'}-{show_count(call.seq_len)}"
    numbers = itertools.count(2)
    folder = runs / name
    while folder.exists():
        folder = runs / f"{name}-{next(numbers)}"
    return str(folder)

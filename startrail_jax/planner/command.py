"""The command line of `train.py` for a plan, to be completed and pasted."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from startrail_jax.devices.degrees import ROLES
from startrail_jax.planner.config_json import find_model
from startrail_jax.planner.grid import Call
from startrail_jax.planner.hardware import Cluster
from startrail_jax.planner.models import FRAME, LONG, MODELS, ModelSizes
from startrail_jax.planner.search import Prediction

_RECIPES = {
    **{model: name for name, (model, _) in LONG.items()},
    **{x: x for x in ("gpt_3b", "gpt_7b", "dit_1b", "llama3_8b", "wan_1_3b", "wan_14b", *LONG)},
}
"""Models of `MODELS` -> recipes of `train.py`."""
_LIKE = {"llama3_70b": "llama3_8b"}
"""Models without a recipe -> those that differ from them in sizes alone."""
_SIZES = {
    **{x: x for x in ("width", "layers", "heads", "kv_heads", "head_dim", "mlp_width")},
    **{"outputs": "vocab_size", "windows": "windows", "qk_norm": "qk_norm"},
}
"""Sizes that flags of the planner set -> settings of the model of a recipe."""
CHANGED = ", changed"
"""The end of the name of a model of `MODELS` with other sizes."""
_OWN = "YOUR_RECIPE"
_DEFAULT_FRACTION = 0.75
"""Share of a GPU's memory that jax takes by default."""
_BYTES = 256
"""Tokens that text has without a tokenizer."""


def command_of(choice: Prediction, call: Call, cluster: Cluster, *, memory_fraction: float) -> str:
    """The command line of `train.py` for a choice. Words in capitals stand for what a plan does not
    know; no such files exist, so that a command that still has them ends at once."""
    model, words = call.model, []
    if choice.memory_bytes > _DEFAULT_FRACTION * cluster.gpu.memory_bytes:
        words.append(f"XLA_PYTHON_CLIENT_MEM_FRACTION={memory_fraction}")
    base = _base_of(model)
    words += ["python", "train.py", *base]
    flags: dict[str, Any] = {"data.path": "YOUR_DATA"}
    if base[0] == "--init-from":
        # The file may name another type, or none, which is float32.
        flags["model.dtype"] = "bfloat16" if model.itemsize == 2 else "float32"
        flags |= {"init-text-only": True} if model.text_only else {}
    elif model.kind == "gpt" and model.outputs > _BYTES:
        flags["data.tokenizer"] = "YOUR_TOKENIZER.json"
    flags |= {"lora.rank": model.lora_rank} if model.lora_rank else {}
    if model.kind == "gpt":
        flags["seq-len"] = call.seq_len
    elif call.seq_len != MODELS[model.name].seq_len:
        flags["size"] = f"{call.seq_len // FRAME} 256 256"
    flags |= {"batch-size": call.batch}
    flags |= {f"mesh.{role}": getattr(choice.degrees, role) for role in ROLES}
    flags |= {"mesh.order": " ".join(choice.order)} if cluster.nodes > 1 else {}
    flags["attention.inner"] = choice.inner
    flags["attention.head-chunks"] = 1  # Recipes have more of them, which not all meshes can take.
    flags["attention.gradient-dtype"] = choice.gradient_dtype
    flags |= {"zero": choice.savings.zero, "remat": choice.savings.remat, "tile": choice.tile}
    flags["offload"] = choice.savings.offload
    flags["offload-optimizer"] = choice.savings.offload_optimizer
    flags |= {"distributed": True} if cluster.nodes > 1 else {}
    return " ".join([*words, *(_flag(*item) for item in flags.items())])


def _base_of(model: ModelSizes) -> list[str]:
    """What names the model to `train.py`."""
    same = replace(model, lora_rank=0)
    if model.pretrained is not None:
        whole = find_model(model.pretrained)
        if same == replace(whole, name=model.name):
            return ["--init-from", shlex.quote(model.pretrained)]
    name = model.name.removesuffix(CHANGED)
    like = _LIKE.get(name, name)
    if like not in _RECIPES:
        return [_OWN]
    sizes = {x: y for x in _SIZES if (y := getattr(same, x)) != getattr(MODELS[like], x)}
    if same != replace(MODELS[like], name=model.name, **sizes):
        return [_OWN]
    flags = [_flag(f"model.{_SIZES[x]}", y) for x, y in sizes.items()]
    # The folder of the recipe may hold a run of its own sizes.
    flags += [f"--run-dir runs/{model.name.replace(', ', '_')}"] if sizes else []
    return [_RECIPES[like], *flags]


def _flag(name: str, value: Any) -> str:
    """A flag of `train.py`, as its command line spells it."""
    section, dot, last = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{section}{dot}{'' if value else 'no-'}{last}"
    if isinstance(value, tuple):
        value = " ".join("none" if x is None else str(x) for x in value)
    return f"--{section}{dot}{last} {value}"


def remarks(call: Call, cluster: Cluster) -> list[str]:
    """What a user who pastes the command must know: lines of text."""
    lines = ["Replace the words that begin with YOUR_."]
    if _base_of(call.model) == [_OWN]:
        lines[0] += f" {_OWN} is a recipe or a config.json with the sizes of this model."
    if cluster.nodes > 1:
        lines.append(
            "Start it on every node, with a --run-dir that all nodes share: see docs/cluster.md."
        )
    return lines

"""The command line of `train.py` for a plan, to be completed and pasted."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from startrail_jax.devices.degrees import ROLES
from trainer.planner.grid import Call
from trainer.planner.hardware import Cluster
from trainer.planner.search import Prediction

OWN = "YOUR_RECIPE"
"""The word in place of a model that `train.py` does not take as it is."""
_DEFAULT_FRACTION = 0.75
"""Share of a GPU's memory that jax takes by default."""
_BYTES = 256
"""Tokens that text has without a tokenizer."""


def command_of(
    choice: Prediction, call: Call, cluster: Cluster, *, run: Sequence[str], memory_fraction: float
) -> str:
    """The command line of `train.py` for a choice. Words in capitals stand for what a plan does not
    know; no such files exist, so that a command that still has them ends at once.

    Args:
        choice: the choice.
        call: what was planned.
        cluster: the cluster.
        run: the words that name the model, and flags that it was planned with.
        memory_fraction: share of a GPU's memory that jax may take.
    """
    model, words = call.model, []
    if choice.memory_bytes > _DEFAULT_FRACTION * cluster.gpu.memory_bytes:
        words.append(f"XLA_PYTHON_CLIENT_MEM_FRACTION={memory_fraction}")
    flags: dict[str, Any] = {}
    if run[0] == "--init-from":
        # The file may name another type, or none, which is float32.
        flags["model.dtype"] = "bfloat16" if model.itemsize == 2 else "float32"
    if model.kind == "gpt":
        flags["seq-len"] = call.seq_len
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
    given = [shlex.quote(word) for word in without_flags(run, flags)]
    data: dict[str, Any] = {}
    if not _names(run, "data.path"):
        data["data.path"] = "YOUR_DATA"
    is_of_words = model.kind == "gpt" and model.outputs > _BYTES and run[0] != "--init-from"
    if is_of_words and not _names(run, "data.tokenizer"):
        data["data.tokenizer"] = "YOUR_TOKENIZER.json"
    others = [_flag(*item) for item in (data | flags).items()]
    return " ".join([*words, "python", "train.py", *given, *others])


def without_flags(words: Sequence[str], names: Iterable[str]) -> list[str]:
    """Words of a command line without some flags and their values."""
    kept, leaves_out = list[str](), False
    names = {_flag_name(name) for name in names}
    for word in words:
        if word.startswith("--"):
            leaves_out = _flag_name(word) in names
        if not leaves_out:
            kept.append(word)
    return kept


def _names(words: Sequence[str], name: str) -> bool:
    return any(_flag_name(word) == name for word in words if word.startswith("--"))


def _flag_name(word: str) -> str:
    """The name of a flag, of its negation too: data.path, mesh.c."""
    section, dot, last = word.lstrip("-").partition("=")[0].replace("_", "-").rpartition(".")
    return f"{section}{dot}{last.removeprefix('no-')}"


def _flag(name: str, value: Any) -> str:
    """A flag of `train.py`, as its command line spells it."""
    section, dot, last = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{section}{dot}{'' if value else 'no-'}{last}"
    if isinstance(value, tuple):
        value = " ".join("none" if x is None else str(x) for x in value)
    return f"--{section}{dot}{last} {value}"


def remarks(run: Sequence[str], cluster: Cluster) -> list[str]:
    """What a user who pastes the command must know: lines of text."""
    lines = ["Replace the words that begin with YOUR_."]
    if run[0] == OWN:
        lines[0] += f" {OWN} is a recipe or a config.json with the sizes of this model."
    if cluster.nodes > 1:
        lines.append(
            "Start it on every node, with a --run-dir that all nodes share: see docs/cluster.md."
        )
    return lines

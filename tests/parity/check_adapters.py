"""Adapters of models with experts in PEFT, beside the same model with the adapters added to it.

python tests/parity/check_adapters.py                    all families with experts
python tests/parity/check_adapters.py gpt_oss qwen3_moe  those that are named
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

import pretrained
from trainer.gpt.lora import ADAPTER_CONFIG, ADAPTER_FILE
from trainer.gpt.pretrained.families.table import MULTIMODAL

SHARED, EXPERTS = ("gate", "up", "down"), ("expert_gate", "expert_up", "expert_down")
TARGETS = (("query", "out", *EXPERTS), ("expert_up",), ("value", "expert_down"))
WITH_SHARED = (("key", *SHARED, *EXPERTS), SHARED, ("up", "query"))
FAMILIES = {
    **dict.fromkeys(("gpt_oss", "mixtral", "olmoe"), TARGETS),
    # Of Qwen3-MoE and GLM, the first layer has an MLP.
    # Of a Gemma 4, the keys of some layers are values too.
    **dict.fromkeys(("gemma4", "gemma4_values"), (("query", "value"), ("key", "out", *SHARED))),
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe"), TARGETS + WITH_SHARED),
    **dict.fromkeys(("gemma3_images", "qwen3_vl", "mistral3"), (("query", "value"), SHARED)),
    **dict.fromkeys(("gemma4_images", "glm4v"), (("query", "value"), ("out", *SHARED))),
    **dict.fromkeys(("glm4v_moe", "qwen3_vl_moe"), (*TARGETS, (*SHARED, "key"))),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "moonlight"),
        (("query", "out", *EXPERTS), ("key", "value", "latent", "rotated"), ("value", *SHARED)),
    ),
    **dict.fromkeys(
        ("kimi_linear", "kimi_linear_rank"),
        (
            ("query", "out", "beta", *EXPERTS),
            ("key", "decay_down", "decay", "rotated"),
            ("value", "out_gate_down", "out_gate", *SHARED),
        ),
    ),
    "nemotron3": (
        ("query", "expert_up", "expert_down"),
        ("expert_up",),
        ("expert_down", "value"),
        ("key", "up", "step", "out_gate", "latent_in"),
        ("down", "latent_in", "latent_out"),
    ),
    # Gates and projections up are rows of one tensor, in an MLP and in experts.
    "granite": (
        ("query", "out"),
        SHARED,
        ("up", "value", "step"),
        ("key", "out_gate", "down"),
    ),
    "granite_moe": (*TARGETS, *WITH_SHARED, ("step", "expert_gate", "gate")),
    "nemotron_h": (("up", "down"), ("query", "value", "out_gate", "step"), ("up", "step")),
}


def within_whole(path: Path) -> None:
    """Names tensors of a text model as in the model of images and text, with experts in one."""
    tensors, experts = {}, dict[str, dict[int, np.ndarray]]()
    for name, x in load_file(path).items():
        longer = name.replace("model.", "model.language_model.", 1)
        before, found, behind = longer.partition(".experts.")
        if found:
            index, which, _ = behind.split(".")
            experts.setdefault(f"{before}.experts.{which}", {})[int(index)] = x
        else:
            tensors[longer] = x
    for name, rows in experts.items():
        both = [np.stack([rows[i] for i in range(len(rows))])]
        if name.endswith("up_proj"):
            gates = experts[name.replace("up_proj", "gate_proj")]
            both.insert(0, np.stack([gates[i] for i in range(len(rows))]))
            name = name.replace("up_proj", "gate_up_proj")
        if not name.endswith("gate_proj"):
            tensors[name] = np.concatenate(both, axis=1)
    save_file(tensors, path, metadata={"format": "pt"})


def check(family: str, targets: tuple[str, ...], folder: Path) -> None:
    _, _, tensors, described = pretrained.with_adapters(family, targets, folder, size=0.3)
    models = {}
    kind, values = transformers.AutoModelForCausalLM, pretrained.REFERENCES / family / "config.json"
    of_images = json.loads(values.read_text())["model_type"] in MULTIMODAL
    if of_images:
        kind = transformers.AutoModelForImageTextToText
    for name in ("base", "merged"):
        shutil.copy(values, folder / name)
        if of_images:
            within_whole(folder / name / "model.safetensors")
        models[name] = kind.from_pretrained(
            folder / name,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described))
    save_file(tensors, folder / ADAPTER_FILE)
    adapted = peft.PeftModel.from_pretrained(models["base"], folder, autocast_adapter_dtype=False)
    if of_images:
        assert all("language_model" in x for x, _ in adapted.named_parameters() if "lora" in x)
    vocabulary = models["base"].config.get_text_config().vocab_size
    tokens = torch.tensor(np.random.default_rng(1).integers(vocabulary, size=(2, 16)))
    with torch.no_grad():
        expected, found = (
            models["merged"](input_ids=tokens).logits,
            adapted(input_ids=tokens).logits,
        )
        with adapted.disable_adapter():
            without = adapted(input_ids=tokens).logits
    error, size = (float((x - expected).abs().max()) for x in (found, without))
    print(f"{family} {' '.join(targets)}: {error:.1e} of {size:.1f}")
    # The files have float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


for family in sys.argv[1:] or FAMILIES:
    for targets in FAMILIES[family]:
        with tempfile.TemporaryDirectory() as folder:
            check(family, targets, Path(folder))

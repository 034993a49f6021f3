"""Adapters of models with experts in PEFT, beside the same model with the adapters added to it.

python tests/parity/check_adapters.py                    all families with experts
python tests/parity/check_adapters.py gpt_oss qwen3_moe  those that are named
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import save_file

import pretrained
import startrail_jax as st
from programs import make_program
from trainer.config import LoraConfig
from trainer.gpt.lora import ADAPTER_CONFIG, ADAPTER_FILE, peft_config, peft_tensors
from trainer.gpt.pretrained.config_json import read_description
from trainer.gpt.pretrained.tensors import places
from trainer.parallel.partition import path_name
from trainer.weights.adapters import write_merged

SHARED, EXPERTS = ("gate", "up", "down"), ("expert_gate", "expert_up", "expert_down")
TARGETS = (("query", "out", *EXPERTS), ("expert_up",), ("value", "expert_down"))
WITH_SHARED = (("key", *SHARED, *EXPERTS), SHARED, ("up", "query"))
FAMILIES = {
    **dict.fromkeys(("qwen3_moe", "gpt_oss", "mixtral", "olmoe"), TARGETS),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe"), TARGETS + WITH_SHARED),
}


def check(family: str, targets: tuple[str, ...], folder: Path) -> None:
    reference = pretrained.REFERENCES / family
    lora = LoraConfig(rank=2, alpha=3.0, targets=targets)
    config = pretrained.make_config(reference, lora=lora)
    kind = read_description(reference).family
    rng = np.random.default_rng(0)
    shapes = make_program(config, st.Degrees()).state_shapes.model
    arrays = {
        path_name(path): (0.3 * rng.normal(size=x.shape)).astype(np.float32)
        for path, x in jax.tree_util.tree_leaves_with_path(shapes)
    }
    models = {}
    for name, added in (("base", LoraConfig(rank=1, alpha=1e-30)), ("merged", lora)):
        part = folder / name
        part.mkdir()
        of_model = functools.partial(places, model=config.model, family=kind)
        write_merged(arrays, of_model, added, part, lambda _: np.float32, shard_bytes=10**9)
        (part / "config.json").write_text((reference / "config.json").read_text())
        models[name] = transformers.AutoModelForCausalLM.from_pretrained(
            part, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
    described = peft_config(config, None, kind, note=print)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described))
    save_file(peft_tensors(arrays, np.float32, config.model, kind), folder / ADAPTER_FILE)
    adapted = peft.PeftModel.from_pretrained(models["base"], folder, autocast_adapter_dtype=False)
    tokens = torch.tensor(rng.integers(config.model.vocab_size, size=(2, 16)))
    with torch.no_grad():
        expected, found = models["merged"](tokens).logits, adapted(tokens).logits
        with adapted.disable_adapter():
            without = adapted(tokens).logits
    error, size = (float((x - expected).abs().max()) for x in (found, without))
    print(f"{family} {' '.join(targets)}: {error:.1e} of {size:.1f}")
    # The files have float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


for family in sys.argv[1:] or FAMILIES:
    for targets in FAMILIES[family]:
        with tempfile.TemporaryDirectory() as folder:
            check(family, targets, Path(folder))

"""What a Hugging Face config.json says of a model, and back. Imports no jax.

A family is a `model_type` of the library transformers. All families here are one decoder with other
options: see `GPTConfig`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.planner.layers import WINDOWS
from trainer.data.opening import read_object
from trainer.gpt.config import GPTConfig
from trainer.gpt.pretrained.config_json import (
    bases_by_window,
    layer_values,
    local_rope_values,
    one_base,
    one_window,
    plain,
    read_local_rope,
    read_rope,
    read_skips,
    read_softcaps,
    read_windows,
    rope_length,
    rope_values,
    window_options,
)
from trainer.gpt.pretrained.keys import values_of

CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""What a model of the Hub is called."""
MOST_LAYERS = 10_000
"""No model is so deep, and no file of its weights is looked at before its depth is known."""
GELU = "gelu_pytorch_tanh"
GEMMA = {"mlp": "geglu", "scaled_embedding": True, "post_norms": True, "norm_offset": True}
"""Options of every Gemma."""
OTHERS = {
    **{"mlp": "swiglu", "scaled_embedding": False, "post_norms": False, "norm_offset": False},
    **{"softcap": None, "output_softcap": None, "scale_dim": None},
}
"""Options of all other families."""
OF_FAMILIES = ("sinks", "qkv_bias", "qk_norm", "window", "windows", "no_rope_every")
"""Options by which families differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between the models of one `model_type` and those of another."""

    architecture: str
    """The class of transformers."""
    qkv_bias: bool = False
    qk_norm: bool = False
    skips_rope: bool = False
    """Whether some layers have no rotary positions."""
    gemma: bool = False
    """Whether it has the norms, the embedding, the MLP and the soft caps of Gemma 2."""
    local_rope: bool = False
    """Whether layers with a window have rotary positions of their own."""


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(architecture="MistralForCausalLM"),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qk_norm=True),
    "smollm3": Family(architecture="SmolLM3ForCausalLM", skips_rope=True),
    "gemma2": Family(architecture="Gemma2ForCausalLM", gemma=True),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        qk_norm=True,
        gemma=True,
        local_rope=True,
    ),
}
"""The families by `model_type`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a config.json says."""

    family: str
    model: GPTConfig
    length: int
    """Tokens of the sequences that the model is made for."""


def read_description(folder: Path) -> Description:
    """What the config.json of a folder says.

    Raises:
        ValueError: if the file cannot be read, or lacks something.
        NotImplementedError: if the model has something that is not supported.
    """
    path = folder / CONFIG
    if not path.is_file():
        advice = "Give the folder into which the model was downloaded."
        what = "a folder without one" if folder.is_dir() else "no such folder"
        if folder.is_file():
            what, advice = "a file", f"Give its folder, {str(folder.parent)!r}."
        elif near := difflib.get_close_matches(folder.name, _names_beside(folder), n=1):
            advice = f"Did you mean {str(folder.parent / near[0])!r}?"
        elif not folder.exists() and _HUB_NAME.fullmatch(str(folder)):
            advice = (
                "A model of the Hugging Face Hub is downloaded first: "
                f"hf download {folder} --local-dir {folder.name}"
            )
        raise InputError(
            f"init_from must be a folder with a Hugging Face {CONFIG}; got {str(folder)!r}, {what}."
            f" {advice}"
        )
    return describe(read_object(path), str(path))


def _names_beside(folder: Path) -> list[str]:
    return os.listdir(folder.parent) if folder.parent.is_dir() and not folder.exists() else []


def describe(values: Mapping[str, Any], name: str) -> Description:
    """What the values of a config.json say.

    Args:
        values: the JSON object.
        name: of the file, for messages.

    Raises:
        ValueError, NotImplementedError: as `read_description`.
    """
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not isinstance(kind, str):
        raise UnsupportedError(
            f"The architecture must be one of {', '.join(FAMILIES)}; got {name!r} with "
            f"model_type={kind!r}, architectures={values.get('architectures')}. Use another model."
        )
    read = values_of(kind, values, name)
    if read.values["architectures"] not in (None, [family.architecture]):
        raise UnsupportedError(
            f"architectures must be {[family.architecture]} in {name!r}; got "
            f"{read.values['architectures']!r}, which is not supported. Use another model."
        )
    layers = read.number("num_hidden_layers", most=MOST_LAYERS)
    heads, width = read.number("num_attention_heads"), read.number("hidden_size")
    if kind == "llama" and width % heads:
        raise read.wrong("hidden_size", f"a multiple of num_attention_heads={heads}", width)
    head_dim = read.number("head_dim", default=width // heads)
    length = read.number("max_position_embeddings")
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    skips = read_skips(read, layers) if family.skips_rope else (False,) * layers
    windows = read_windows(read, WINDOWS[kind], layers, skips)
    is_local = family.local_rope
    rope = read_local_rope(read, length, windows) if is_local else read_rope(read, length)
    if any(skips):
        bases = tuple("none" if skipped else rope.base for skipped in skips)
        rope = dataclasses.replace(rope, bases=bases)
    options = GEMMA | read_softcaps(read, head_dim) if family.gemma else {}
    model = GPTConfig(
        vocab_size=read.number("vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=read.number("num_key_value_heads", default=heads),
        head_dim=head_dim,
        mlp_width=read.number("intermediate_size"),
        tied_head=read.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_eps=read.real("rms_norm_eps"),
        rope=rope,
        dtype="float32" if dtype in ("float32", "float64") else "bfloat16",
        **window_options(windows),
        **options,
    )
    simple = plain(model)
    # `plain` leaves out which layers a scaling stretches if there is none, but a flag may add one.
    kept = dataclasses.replace(simple.rope, stretches=rope.stretches)
    model = dataclasses.replace(simple, rope=kept)
    return Description(family=kind, model=model, length=length)


def family_of(model: GPTConfig) -> str:
    """The `model_type` of which a model is.

    Raises:
        NotImplementedError: if it is of none.
    """
    kind = None
    if model.sinks or not one_window(model):
        kind = None
    elif all(getattr(model, name) == value for name, value in GEMMA.items()):
        if model.qk_norm and not model.qkv_bias and bases_by_window(model):
            kind = "gemma3_text"
        elif not model.qk_norm and not model.qkv_bias and one_base(model):
            kind = "gemma2" if None not in model.layer_bases else None
    elif one_base(model) and all(getattr(model, x) == value for x, value in OTHERS.items()):
        skips, mixed = None in model.layer_bases, len(set(model.layer_windows)) > 1
        kind = {
            (False, False): "llama" if model.layer_windows[0] is None else "mistral",
            (True, False): "qwen2",
            (False, True): "qwen3",
        }.get((model.qkv_bias, model.qk_norm))
        if skips or (mixed and kind in ("llama", "mistral")):
            kind = "smollm3" if kind in ("llama", "mistral") else None
    if kind is None:
        given = {name: getattr(model, name) for name in (*OF_FAMILIES, *OTHERS)}
        raise UnsupportedError(
            f"A model that is exported must be one of {', '.join(FAMILIES)}; got "
            f"{', '.join(f'{name}={value!r}' for name, value in given.items())}, "
            f"rope.bases={model.rope.bases}, rope.scaling={model.rope.scaling!r}, "
            f"rope.stretches={model.rope.stretches!r}, which none of them has together. Train one "
            "of theirs."
        )
    return kind


def rotary_values(model: GPTConfig) -> dict[str, Any]:
    """The values of a config.json that say what the rotary positions of a model are."""
    return (local_rope_values if FAMILIES[family_of(model)].local_rope else rope_values)(model)


def to_values(model: GPTConfig, *, length: int, dtype: str) -> dict[str, Any]:
    """The values of a config.json: `describe` gives the model again.

    Args:
        model: the model.
        length: tokens of the sequences that it is made for.
        dtype: type of the weights.

    Raises:
        NotImplementedError: as `family_of`.
    """
    kind = family_of(model)
    family = FAMILIES[kind]
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.mlp_width,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "max_position_embeddings": rope_length(model.rope, length),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **rotary_values(model),
        **layer_values(model, WINDOWS[kind], skips_rope=family.skips_rope),
    }
    if not family.gemma:
        return values | {"hidden_act": "silu"}
    return values | {
        "hidden_activation": GELU,
        "query_pre_attn_scalar": model.scale_dim or model.head_dim,
        "attn_logit_softcapping": model.softcap,
        "final_logit_softcapping": model.output_softcap,
    }

"""What a Hugging Face config.json says of a model, and back. Imports no jax.

A family is a `model_type` of the library transformers. All families here are one decoder with other
options: see `GPTConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError, UnsupportedError
from trainer.data.opening import read_object
from trainer.gpt.config import GPTConfig
from trainer.gpt.pretrained.rope import read_rope, rope_length, rope_values
from trainer.gpt.pretrained.values import ConfigValues

CONFIG = "config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between the models of one `model_type` and those of another."""

    architecture: str
    """The class of transformers."""
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    """Whether the embedding is the head where config.json does not say."""
    base: float = 10_000.0
    """Base of the rotary positions where config.json does not say."""
    windows: str = "none"
    """Which layers have the sliding window where config.json does not name a type for each: "none",
    "all", or those from `max_window_layers` on if `use_sliding_window` ("upper")."""
    skips_rope: bool = False
    """Whether some layers have no rotary positions."""
    fixed_head_dim: int | None = None
    """Channels of a head where config.json does not say; None for width / heads."""
    mlp_bias: bool = False
    """Whether config.json may ask for biases of the MLP, which are not supported."""


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", mlp_bias=True),
    "mistral": Family(architecture="MistralForCausalLM", windows="all"),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True, windows="upper"),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", qk_norm=True, windows="upper", fixed_head_dim=128
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        tied_head=True,
        base=2_000_000.0,
        skips_rope=True,
        mlp_bias=True,
    ),
}
"""The families by `model_type`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a config.json says."""

    family: str
    model: GPTConfig
    length: int | None
    """Tokens of the sequences that the model is made for; None if the file does not say."""


def read_description(folder: Path) -> Description:
    """What the config.json of a folder says.

    Raises:
        ValueError: if the file cannot be read, or lacks something.
        NotImplementedError: if the model has something that is not supported.
    """
    path = folder / CONFIG
    if not path.is_file():
        what = "a folder without one" if folder.is_dir() else "no such folder"
        raise InputError(
            f"init_from must be a folder with a Hugging Face {CONFIG}; got {str(folder)!r}, {what}."
            " Give the folder into which the model was downloaded."
        )
    return describe(read_object(path), str(path))


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
    read = ConfigValues(values, name)
    read.require("architectures", [family.architecture], default=[family.architecture])
    read.require("hidden_act", "silu", default="silu")
    read.require("quantization_config", None)
    if not family.qkv_bias:  # Qwen2 has them whatever the file says.
        read.require("attention_bias", False, default=False)
    if family.skips_rope:
        read.require("use_sliding_window", False, default=False)
    if family.mlp_bias:
        read.require("mlp_bias", False, default=False)
    layers = read.number("num_hidden_layers")
    heads, width = read.number("num_attention_heads"), read.number("hidden_size")
    head_dim = read.number("head_dim", default=family.fixed_head_dim or width // heads)
    length = read.number("max_position_embeddings", default=0)
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    model = GPTConfig(
        vocab_size=read.number("vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=read.number("num_key_value_heads", default=heads),
        head_dim=head_dim,
        mlp_width=read.number("intermediate_size"),
        tied_head=read.flag("tie_word_embeddings", default=family.tied_head),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_eps=read.real("rms_norm_eps", default=1e-6),
        window=_window(read, family, layers),
        rope=read_rope(read, family.base, length),
        no_rope_every=_no_rope_every(read, layers) if family.skips_rope else None,
        dtype="float32" if dtype in ("float32", "float64") else "bfloat16",
    )
    return Description(family=kind, model=model, length=length or None)


def _window(read: ConfigValues, family: Family, layers: int) -> int | None:
    """The sliding window of all layers; None if no layer has one."""
    size, types = read.values.get("sliding_window"), read.values.get("layer_types")
    if family.windows == "upper" and not read.flag("use_sliding_window", default=False):
        size = None
    if types is None:
        first = (
            read.number("max_window_layers", default=28, least=0)
            if family.windows == "upper"
            else 0
        )
        sliding = [size is not None and family.windows != "none" and i >= first
                   for i in range(layers)]  # fmt: skip
    else:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(types, list) or len(types) != layers:
            raise read.wrong("layer_types", f"a list of {layers} names, one for each layer", types)
        if any(not isinstance(kind, str) or kind not in known for kind in types):
            raise UnsupportedError(
                f"layer_types must be full_attention or sliding_attention in {read.name!r}; got "
                f"{types!r}. Use another model."
            )
        sliding = [known[kind] for kind in types]
        if family.windows == "all" and not any(sliding):
            sliding = [size is not None] * layers
    if not any(sliding):
        return None
    if not all(sliding):
        raise UnsupportedError(
            f"All layers must have the same attention; got {read.name!r} with a sliding window in "
            f"{sum(sliding)} of {len(sliding)} layers, which is not supported. Use another model."
        )
    return read.number("sliding_window")


def _no_rope_every(read: ConfigValues, layers: int) -> int | None:
    """The period of the layers without rotary positions."""
    period = read.number("no_rope_layer_interval", default=4)
    flags = read.values.get("no_rope_layers")
    flags = [int((i + 1) % period != 0) for i in range(layers)] if flags is None else flags
    if (
        not isinstance(flags, list)
        or len(flags) != layers
        or any(type(flag) not in (int, bool) or flag not in (0, 1) for flag in flags)
    ):
        raise read.wrong("no_rope_layers", f"a list of {layers} numbers that are 0 or 1", flags)
    if all(flags):
        return None
    # The list wins over the period, as in transformers.
    period = flags.index(0) + 1
    if flags != [int((i + 1) % period != 0) for i in range(layers)]:
        raise UnsupportedError(
            "no_rope_layers must leave out rotary positions in every n-th layer; got "
            f"{flags} in {read.name!r}, which is not supported. Use another model."
        )
    return period


def family_of(model: GPTConfig) -> str:
    """The `model_type` of which a model is.

    Raises:
        NotImplementedError: if it is of none.
    """
    kind = {
        (False, False): "llama" if model.window is None else "mistral",
        (True, False): "qwen2",
        (False, True): "qwen3",
    }.get((model.qkv_bias, model.qk_norm))
    if model.no_rope_every is not None:
        kind = "smollm3" if kind == "llama" else None
    if kind is None or model.mlp != "swiglu":
        raise UnsupportedError(
            f"A model that is exported must be one of {', '.join(FAMILIES)}; got "
            f"mlp={model.mlp!r}, qkv_bias={model.qkv_bias}, qk_norm={model.qk_norm}, "
            f"window={model.window}, no_rope_every={model.no_rope_every}, which none of them has. "
            "Train one of theirs."
        )
    return kind


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
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "max_position_embeddings": rope_length(model.rope, length),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **rope_values(model),
    }
    if family.windows != "none":
        values["sliding_window"] = model.window
    if family.windows == "upper":
        values |= {"use_sliding_window": model.window is not None, "max_window_layers": 0}
        if model.window is None:
            values["max_window_layers"] = model.layers
    if family.skips_rope:
        period = model.no_rope_every or model.layers + 1
        values["no_rope_layers"] = [int((i + 1) % period != 0) for i in range(model.layers)]
    return values

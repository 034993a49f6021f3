"""What a Hugging Face config.json says of a model, and back. Imports no jax.

A family is a `model_type` of the library transformers. All families here are one decoder with other
options: see `GPTConfig`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError, UnsupportedError
from trainer.data.opening import read_whole, reading
from trainer.gpt.config import GPTConfig, RopeConfig

CONFIG = "config.json"
LARGEST_CONFIG = 1 << 24
"""Number of bytes that a file of JSON may have, apart from the tokenizer's."""


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

# `rope_type` of config.json -> `RopeConfig.scaling`.
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# Of a rope that is not understood, nothing may be left out silently.
ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a config.json says."""

    family: str
    model: GPTConfig
    length: int | None
    """Tokens of the sequences that the model is made for; None if the file does not say."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: if the file cannot be read or holds anything else.
    """
    with reading(path):
        content = read_whole(path, LARGEST_CONFIG)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{str(path)!r} must be JSON; got {type(error).__name__}: {error}. Download it again."
        ) from error
    if not isinstance(values, dict):
        raise InputError(
            f"{str(path)!r} must hold a JSON object; got {type(values).__name__}. Download it "
            "again."
        )
    return values


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
    return describe(read_json(path), str(path))


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
    read = _Values(values, name)
    read.require("architectures", [family.architecture], default=[family.architecture])
    read.require("hidden_act", "silu", default="silu")
    read.require("quantization_config", None)
    if not family.qkv_bias:  # Qwen2 has them whatever the file says.
        read.require("attention_bias", False, default=False)
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
        rope=_rope(read, family, length),
        no_rope_every=_no_rope_every(read, layers) if family.skips_rope else None,
        dtype="float32" if dtype in ("float32", "float64") else "bfloat16",
    )
    return Description(family=kind, model=model, length=length or None)


class _Values:
    """The values of a config.json, with errors that name them."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def number(self, key: str, *, default: int | None = None) -> int:
        """A whole number."""
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int:
            raise self._wrong(key, "a whole number", value)
        return value

    def real(self, key: str, *, default: float | None = None) -> float:
        """A finite number."""
        value: Any = self.values.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, "a finite number", value)
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self._wrong(key, "true or false", value)
        return value

    def require(self, key: str, supported: Any, *, default: Any = None) -> None:
        """Raises unless something has the only value that is supported."""
        value = self.values.get(key)
        value = default if value is None else value
        if value != supported:
            raise UnsupportedError(
                f"{key} must be {supported!r} in {self.name!r}; got {value!r}, which is not "
                "supported. Use another model."
            )

    def _wrong(self, key: str, wanted: str, value: Any) -> InputError:
        return InputError(
            f"{key} must be {wanted} in {self.name!r}; got {value!r}. Download the file again."
        )


def _window(read: _Values, family: Family, layers: int) -> int | None:
    """The sliding window of all layers; None if no layer has one."""
    size, types = read.values.get("sliding_window"), read.values.get("layer_types")
    if family.windows == "upper" and not read.flag("use_sliding_window", default=False):
        size = None
    if types is None:
        first = read.number("max_window_layers", default=28) if family.windows == "upper" else 0
        sliding = [size is not None and family.windows != "none" and i >= first
                   for i in range(layers)]  # fmt: skip
    else:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(types, list) or any(kind not in known for kind in types):
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


def _no_rope_every(read: _Values, layers: int) -> int | None:
    """The period of the layers without rotary positions."""
    period = read.number("no_rope_layer_interval", default=4)
    flags = read.values.get("no_rope_layers")
    flags = [int((i + 1) % period != 0) for i in range(layers)] if flags is None else flags
    if all(flags):
        return None
    # The list wins over the period, as in transformers.
    period = flags.index(0) + 1
    if len(flags) != layers or flags != [int((i + 1) % period != 0) for i in range(layers)]:
        raise UnsupportedError(
            "no_rope_layers must leave out rotary positions in every n-th layer; got "
            f"{flags} in {read.name!r}, which is not supported. Use another model."
        )
    return period


def _rope(read: _Values, family: Family, length: int) -> RopeConfig:
    """The rotary positions; `rope_parameters` is the name since transformers 5."""
    given = read.values.get("rope_parameters") or read.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise InputError(
            f"rope_parameters must be an object in {read.name!r}; got {given!r}. Download the file "
            "again."
        )
    name = given.get("rope_type") or given.get("type") or "default"
    unknown = sorted(given.keys() - ROPE_KEYS)
    if name not in SCALINGS or unknown:
        raise UnsupportedError(
            f"rope_type must be one of {', '.join(SCALINGS)} in {read.name!r}; got {name!r}"
            f"{f' with {unknown}' if unknown else ''}, which is not supported. Use another model, "
            "or rope_type default and --model.rope.scaling ntk."
        )
    rope = _Values(given, read.name)
    rope.require("truncate", True, default=True)
    for values in (rope, read):
        values.require("partial_rotary_factor", 1.0, default=1.0)
    base = rope.real("rope_theta", default=read.real("rope_theta", default=family.base))
    factor = rope.real("factor", default=1.0)
    scaling: Any = SCALINGS[name] if factor != 1 else "none"
    if scaling in ("none", "linear"):
        return RopeConfig(base=base, scaling=scaling, factor=factor)
    # Of the two places, transformers prefers the outer one.
    inner = rope.number("original_max_position_embeddings", default=length)
    original = read.number("original_max_position_embeddings", default=inner)
    if scaling == "llama3":
        turns = rope.real("high_freq_factor"), rope.real("low_freq_factor")
        standard, attention_factor = (4.0, 1.0), None
    else:
        turns = rope.real("beta_fast", default=32.0), rope.real("beta_slow", default=1.0)
        standard, attention_factor = (32.0, 1.0), _attention_factor(rope, factor)
    return RopeConfig(
        base=base,
        scaling=scaling,
        factor=factor,
        original_length=original,
        turns=None if turns == standard else turns,
        attention_factor=attention_factor,
    )


def _attention_factor(rope: _Values, factor: float) -> float | None:
    """YaRN's factor of queries and keys; None for that of the paper."""
    if rope.values.get("attention_factor") is not None:
        return rope.real("attention_factor")
    if not rope.values.get("mscale") or not rope.values.get("mscale_all_dim"):
        return None
    above, below = (
        0.1 * rope.real(key) * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim")
    )
    return above / below


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
        "max_position_embeddings": length,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **rope_values(model, length=length),
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


def rope_values(model: GPTConfig, *, length: int) -> dict[str, Any]:
    """The rotary positions, under the names that all versions of transformers read."""
    rope = model.rope
    base = rope.base
    if rope.scaling == "ntk":  # It is nothing but a larger base: see `models.rope`.
        half = model.head_dim // 2
        base *= rope.factor ** (half / max(half - 1, 1))
    if rope.scaling in ("none", "ntk"):
        return {"rope_theta": base, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.original_length is not None:
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.scaling == "llama3":
        most, least = rope.turns or (4.0, 1.0)
        scaling |= {"high_freq_factor": most, "low_freq_factor": least}
    if rope.scaling == "yarn":
        most, least = rope.turns or (32.0, 1.0)
        scaling |= {"beta_fast": most, "beta_slow": least}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
    return {"rope_theta": base, "rope_scaling": scaling}

"""The model of a plan, from a config.json of Hugging Face. Imports no jax."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config import GPTConfig
from startrail_jax.errors import InputError, UnsupportedError
from trainer.data.opening import read_object
from trainer.gpt.pretrained.config_json import WHOLE, describe, text_values
from trainer.gpt.pretrained.families.experts import COUNTS, DENSE, WITH_SHARED
from trainer.gpt.pretrained.families.family import CHOICE
from trainer.gpt.pretrained.families.hybrid import SIZES as OF_LINEAR
from trainer.gpt.pretrained.families.table import FAMILIES, MULTIMODAL, TEXT_PARTS
from trainer.gpt.pretrained.plain import pattern, plain
from trainer.gpt.pretrained.rope import FULL, SLIDING
from trainer.gpt.pretrained.values import CONFIG, ConfigValues, with_defaults
from trainer.planner.gpt import sizes_of_gpt
from trainer.planner.models import ModelSizes

TIES = "tie_word_embeddings"
FURTHER = (
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "glm"),
    *("gpt_neox", "granite", "helium", "hunyuan_v1_dense", "ministral", "ministral3", "nemotron"),
    *("olmo", "persimmon", "phi", "phi3", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl"),
    *("qwen2_5_vl_text", "qwen3_vl_text", "stablelm", "starcoder2"),
)
"""Types of model beside `FAMILIES` whose layers are attention and an MLP."""
WITHOUT_GATE = ("apertus", "arcee", "gpt_neox", "nemotron", "persimmon", "phi", "starcoder2")
"""Types in `FURTHER` whose MLP has two matrices, which no config.json says."""
NORMALISED = ("apertus", "exaone4", "hunyuan_v1_dense", "qwen3_vl_text")
"""Types in `FURTHER` that normalise the heads of queries and keys in all models."""
IF_NORMALISED = ("qk_layernorm", "use_qk_norm")
"""Keys by which models of other types say that they normalise heads."""
_NEEDED = ("hidden_size", "num_hidden_layers")
_NEEDED_OF_UNKNOWN = (*_NEEDED, "num_attention_heads", "intermediate_size", "vocab_size")
_NUMBERS = WHOLE[:7]
_READ = {*_NUMBERS, TIES, "sliding_window", "use_sliding_window"}
_SIZES = {
    *(*_READ, *CHOICE, "sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval"),
    *("full_attention_interval", *OF_LINEAR, *COUNTS, *WITH_SHARED, *DENSE, *IF_NORMALISED),
}
"""Keys that change the weights of a model, or the windows of its layers."""
_EXPERTS = (*COUNTS, "n_routed_experts")
_SHOWN = 8
"""Keys of a file that a message names."""
_IDLE = re.compile(
    r"^_|token|drop|eps|rope|rotary|position|init|act$|activation|dtype|bias|use_cache|loss|coef"
    r"|version|architectures|auto_map|model_type|label|quant|scal|multiplier|softcap|output_"
)
"""Keys of a config.json that change neither the number of weights nor the windows of layers."""


@dataclass(frozen=True, kw_only=True)
class FileModel:
    """The model of a config.json of Hugging Face."""

    sizes: ModelSizes
    run: tuple[str, ...]
    """Words that name the model to `train.py`; none for a model that it does not take."""


def is_file_model(name: str) -> bool:
    """True for a config.json, or a folder with one, that is not the config of a run."""
    path = _file_of(name)
    is_file = path.suffix == ".json" and path.is_file()
    return is_file and not isinstance(read_object(path).get("model"), dict)


def find_model(name: str, *, allow_unknown: bool = False) -> FileModel:
    """The model of a config.json of Hugging Face, or of its folder.

    Args:
        name: the path.
        allow_unknown: True to take a file of another architecture for a decoder with attention and
            a gated MLP in every layer.
    """
    path = _file_of(name)
    file, name = read_object(path), str(path)
    # Models of text and images have the decoder in a part of their own.
    inner = file.get("text_config") or file
    if not isinstance(inner, dict):
        raise ConfigValues(file, name).wrong("text_config", "the settings of a model", inner)
    outer_type = str(file.get("model_type"))
    of_images = MULTIMODAL.get(outer_type)
    # Only the whole model says whether its embedding is tied.
    outer = {TIES: file[TIES]} if TIES in file else {}
    text_type = {"model_type": TEXT_PARTS.get(outer_type, of_images)} if of_images else {}
    values: dict[str, Any] = {**outer, **text_type, **inner}
    model_type, refused = str(values.get("model_type")), None
    if of_images or model_type in FAMILIES:
        _check_experts(values, model_type, name)
        _check_needed(values, FAMILIES[of_images or model_type].sizes_needed, name)
        try:
            model = describe(file if of_images else values, name).model
        except (InputError, UnsupportedError) as error:
            refused = f"train.py does not take this file, whose sizes alone are planned: {error}"
        else:
            run = ["--init-from", str(path.parent), *(["--init-text-only"] if of_images else [])]
            is_taken = path.name == CONFIG and (of_images or inner is file)
            sizes = sizes_of_gpt(model, name=name)
            return FileModel(sizes=sizes, run=tuple(run) if is_taken else ())
    if of_images:
        values, model_type = {**text_values(file, name)}, of_images
    if model_type in FAMILIES:
        values = FAMILIES[model_type].usual(values)
        FAMILIES[model_type].check_types(values, name)
        model = plain(FAMILIES[model_type].model(_read_sizes(values, model_type, name)))
        return FileModel(sizes=sizes_of_gpt(model, name=name, assumed=refused), run=())
    values = {"architectures": file.get("architectures"), **values}
    if model_type not in FURTHER and not allow_unknown:
        raise _unknown(values, name)
    return FileModel(sizes=_of_others(values, model_type, name, refused), run=())


def _file_of(name: str) -> Path:
    path = Path(name)
    return path / CONFIG if path.is_dir() else path


def _of_others(
    values: Mapping[str, Any], model_type: str, name: str, assumed: str | None
) -> ModelSizes:
    """The sizes of a model of no family: in all layers, attention and an MLP."""
    is_known = model_type in FURTHER
    _check_experts(values, model_type, name)
    _check_needed(values, _NEEDED if is_known else _NEEDED_OF_UNKNOWN, name)
    sizes = _read_sizes(values, model_type, name)
    read, number = sizes.values, sizes.number
    layers, width = number("num_hidden_layers"), number("hidden_size")
    heads = number("num_attention_heads")
    settings: dict[str, Any] = {
        "vocab_size": number("vocab_size"),
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": number("num_key_value_heads", default=heads),
        "head_dim": number("head_dim", default=max(width // heads, 1)),
        "mlp_width": number("intermediate_size"),
        "mlp": "gelu" if model_type in WITHOUT_GATE else "swiglu",
        "tied_head": read.get(TIES, False),
        "qk_norm": model_type in NORMALISED or any(read.get(key) for key in IF_NORMALISED),
        "windows": pattern(_windows(sizes, is_known=is_known)),
    }
    try:
        model = GPTConfig(**settings)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if not is_known:
        assumed = (
            f"{_named(values)} is not known here: attention and a gated MLP are assumed in all "
            f"{layers} layers, with {heads} heads of {model.head_dim} "
            f"channels{_uncounted(values, ', and not counted are {}')}."
        )
    return sizes_of_gpt(model, name=name, assumed=assumed)


def _read_sizes(values: Mapping[str, Any], model_type: str, name: str) -> ConfigValues:
    """The sizes of a model, with defaults of transformers for sizes that the file leaves out."""
    # Null means the default, but for windows, where it means none, and for the heads of keys.
    keys = {*_SIZES, *(FAMILIES[model_type].keys if model_type in FAMILIES else ())}
    written = {
        key: value
        for key, value in values.items()
        if key in keys and (value is not None or key == "sliding_window")
    }
    if values.get("num_key_value_heads", 0) is None and "num_attention_heads" in written:
        written["num_key_value_heads"] = written["num_attention_heads"]
    sizes = ConfigValues(written, name)
    for key in _NUMBERS:
        if written.get(key) is not None:
            sizes.number(key)
    if model_type not in FAMILIES and model_type not in FURTHER:
        return sizes
    read = with_defaults(written, model_type, name).values
    read = FAMILIES[model_type].usual(read) if model_type in FAMILIES else read
    # Only the whole of a model of text and images has the key in transformers.
    return ConfigValues({**read, TIES: written.get(TIES, read.get(TIES, False))}, name)


def _windows(sizes: ConfigValues, *, is_known: bool) -> tuple[int | None, ...]:
    """The sliding window of each layer, where the file is taken at its word; None without one."""
    read, layers = sizes.values, sizes.values["num_hidden_layers"]
    is_used, types = read.get("use_sliding_window"), read.get("layer_types")
    if not isinstance(is_used, bool | None):
        raise sizes.wrong("use_sliding_window", "true or false", is_used)
    if read.get("sliding_window") is None or is_used is False:
        return (None,) * layers
    window = sizes.number("sliding_window")
    if types is None:
        period = sizes.number("sliding_window_pattern", default=layers + 1)
        types = [FULL if (i + 1) % period == 0 else SLIDING for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        needed = f"a list with an entry for each of {layers} layers"
        raise sizes.wrong("layer_types", needed, types)
    for x in types:
        if is_known and x not in (FULL, SLIDING):
            raise sizes.wrong("layer_types", f"{FULL} or {SLIDING} for each layer", x)
    return tuple(window if x == SLIDING else None for x in types)


def _check_experts(values: Mapping[str, Any], model_type: str, name: str) -> None:
    """Raises if a model has experts, and its type is no family with experts."""
    of_experts = [x for x, family in FAMILIES.items() if family.experts is not None]
    count = next((key for key in _EXPERTS if values.get(key)), None)
    if count is not None and model_type not in of_experts:
        raise UnsupportedError(
            f"{name}: experts are planned for models of {', '.join(of_experts)}; got "
            f"model_type={model_type} with {count}={values[count]}. Plan a recipe with such layers "
            "instead."
        )


def _check_needed(values: Mapping[str, Any], keys: tuple[str, ...], name: str) -> None:
    missing = [key for key in keys if values.get(key) is None]
    if missing:
        raise InputError(
            f"{name}: the file must describe a transformer; it has no {missing[0]!r}. Plan "
            "a recipe with its sizes instead: --model.width, --model.layers and so on."
        )


def _unknown(values: Mapping[str, Any], name: str) -> UnsupportedError:
    """The error of an unknown architecture, whose layers may differ from those that are counted."""
    return UnsupportedError(
        f"{name}: the architecture must be one whose layers the planner can count: see "
        f"docs/planner.md; got {_named(values)}{_uncounted(values, ', with {}')}. Plan a "
        "recipe with its sizes (--model.width, --model.layers and so on), or use --allow-unknown, "
        "which assumes attention and a gated MLP in every layer."
    )


def _named(values: Mapping[str, Any]) -> str:
    """The architecture of a file."""
    classes = values.get("architectures")
    first = f"{classes[0]} " if isinstance(classes, list) and classes else ""
    return f"{first}(model_type={values.get('model_type')!r})"


def _uncounted(values: Mapping[str, Any], text: str) -> str:
    """A text with the keys of a file that may change its layers, and are not counted."""
    read, types = set(_READ), values.get("layer_types")
    read |= {"layer_types"} if isinstance(types, list) and {*types} <= {FULL, SLIDING} else set()
    keys = [x for x, value in values.items() if value and x not in read and not _IDLE.search(x)]
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return text.format(f"{', '.join(keys[:_SHOWN])}{more}") if keys else ""

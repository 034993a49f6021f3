"""The model that a config.json of Hugging Face describes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config import ExpertsConfig, GPTConfig, LinearConfig
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.patterns import shortest
from trainer.planner.gpt import sizes_of_gpt
from trainer.planner.models import ModelSizes

# Size -> its name in a config.json of Hugging Face.
_HUGGING_FACE = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "tied_head": "tie_word_embeddings",
}

PRETRAINED: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128, "sliding_window": 4096},
    "smollm3": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    "qwen3_5_text": {"head_dim": 256},
    "olmo2": {},
    "olmo3": {"sliding_window": 4096},
    "olmo_hybrid": {},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **{"sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8},
        "moe_intermediate_size": 768,
    },
    "gpt_oss": {
        **{"head_dim": 64, "sliding_window": 128, "num_local_experts": 128},
        "num_experts_per_tok": 4,
    },
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "qwen3_5_moe_text": {
        **{"head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    },
    "qwen3_next": {
        **{"head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    },
}
"""Types of model that `train.py --init-from` takes, each with its defaults."""
_TIED, _OF_128 = {"tie_word_embeddings": True}, {"head_dim": 128}
_DENSE: Mapping[str, Mapping[str, Any]] = {
    **{"apertus": {}, "arcee": {}, "gpt_neox": {}, "granite": {}, "hunyuan_v1_dense": {}},
    **{"nemotron": {}, "olmo": {}, "persimmon": {}, "phi": {}, "phi3": {}, "stablelm": {}},
    **{"qwen2_vl": {}, "qwen2_vl_text": {}, "qwen2_5_vl": {}, "qwen2_5_vl_text": {}},
    **{"glm": _OF_128, "glm4": _OF_128, "helium": _OF_128, "ministral3": _OF_128},
    **{"qwen3_vl_text": _OF_128, "seed_oss": _OF_128, "ernie4_5": _TIED | _OF_128},
    **{"cohere": _TIED, "starcoder2": _TIED, "cohere2": _TIED | {"sliding_window": 4096}},
    **{x: {"sliding_window": 4096} for x in ("exaone4", "ministral")},
    "gemma": _TIED | {"head_dim": 256},
}
"""Further types of model whose layers are attention and an MLP, each with its defaults."""
_KNOWN = {**PRETRAINED, **_DENSE}
_PERIODS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4, "exaone4": 4, "olmo3": 4}
"""Type of model -> period of its layers, where the file gives none; the last one has no window."""
_LINEAR = {
    **{"heads": ("linear_num_value_heads", 32), "key_heads": ("linear_num_key_heads", 16)},
    **{"key_dim": ("linear_key_head_dim", 128), "value_dim": ("linear_value_head_dim", 128)},
    "conv": ("linear_conv_kernel_dim", 4),
}
"""Sizes of linear attention -> names in a config.json of Hugging Face, and their defaults."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_WITHOUT_GATE = ("apertus", "arcee", "gpt_neox", "nemotron", "persimmon", "phi", "starcoder2")
"""Types of model whose MLP has two matrices."""
_MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Types of model that `--init-text-only` takes, and those of their text models."""
_HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
_NORMALISED = (
    *("qwen3", "gemma3_text", "olmo2", "olmo3", "olmo_hybrid", "olmoe"),
    *("apertus", "exaone4", "hunyuan_v1_dense"),
)
"""How the types of model begin that normalise the heads of queries and keys."""
_FULL, _SLIDING, _LINEAR_TYPE = "full_attention", "sliding_attention", "linear_attention"
_SHOWN = 8
"""Keys of a file that a message names."""
_IDLE = re.compile(
    r"^_|token|drop|eps|rope|rotary|position|init|act$|activation|dtype|bias|use_cache|loss|coef"
    r"|version|architectures|auto_map|model_type|label|quant|scal|multiplier|softcap|output_"
)
"""Keys of a config.json that change neither the number of weights nor what layers attend to."""


@dataclass(frozen=True, kw_only=True)
class FileModel:
    """The model of a config.json of Hugging Face."""

    sizes: ModelSizes
    run: tuple[str, ...]
    """Words that name the model to `train.py`; none for a model that it does not take."""


def is_file_model(name: str) -> bool:
    """True for a config.json, or a folder with one, that is not the config of a run."""
    path = _file_of(name)
    return path.suffix == ".json" and path.is_file() and not _is_run(_settings_of(path))


def find_model(name: str, *, allow_unknown: bool = False) -> FileModel:
    """The model of a config.json of Hugging Face, or of its folder.

    Args:
        name: the path.
        allow_unknown: whether a file of another architecture is taken for a decoder with attention
            and a gated MLP in every layer.
    """
    path = _file_of(name)
    settings = _settings_of(path)
    # Models of text and images have the decoder in a part of their own.
    decoder = settings.get("text_config") or settings
    _require(isinstance(decoder, dict), name, "text_config", "the settings of a model", decoder)
    of_images = _type_of(settings) in _MULTIMODAL
    if of_images:
        decoder = {"model_type": _MULTIMODAL[_type_of(settings)], **decoder}
    # Only the whole model says whether its embedding is tied, and what its class is.
    outer = {x: settings[x] for x in ("tie_word_embeddings", "architectures") if x in settings}
    model = _of_hugging_face({**outer, **decoder}, str(path), allow_unknown=allow_unknown)
    is_read = decoder is settings or of_images
    if not (is_read and path.name == "config.json" and _type_of(decoder) in PRETRAINED):
        return FileModel(sizes=model, run=())
    run = ("--init-from", str(path.parent), *(["--init-text-only"] if of_images else []))
    return FileModel(sizes=model, run=run)


def _file_of(name: str) -> Path:
    path = Path(name)
    return path / "config.json" if path.is_dir() else path


def _settings_of(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} must hold JSON; got {error}. Give another file.") from None
    if not isinstance(settings, dict):
        raise InputError(
            f"{path} must hold an object; got {type(settings).__name__}. Give another."
        )
    return settings


def _is_run(settings: Mapping[str, Any]) -> bool:
    return isinstance(settings.get("model"), dict)


def _of_hugging_face(settings: Mapping[str, Any], name: str, *, allow_unknown: bool) -> ModelSizes:
    """The model of a config.json of Hugging Face."""
    is_known, read = _type_of(settings) in _KNOWN, settings
    if not is_known and not allow_unknown:
        raise _unknown(settings, name)
    known = _KNOWN.get(_type_of(settings), {})
    given_count = next((key for key in _EXPERTS if settings.get(key)), None)
    known = {x: y for x, y in known.items() if given_count is None or x not in _EXPERTS}
    # Null means the default, but for windows, where it means none.
    nulls = {x for x, value in settings.items() if value is None and x != "sliding_window"}
    settings = {**known, **{x: value for x, value in settings.items() if x not in nulls}}
    experts = next((key for key in _EXPERTS if settings.get(key)), None)
    if experts and "num_experts_per_tok" not in known:
        raise UnsupportedError(
            f"{name}: experts are planned for models of {', '.join(_of_experts())}; got "
            f"model_type={_type_of(settings)} with {experts}={settings[experts]}. Plan a recipe "
            "with such layers instead."
        )
    if "shared_expert_intermediate_size" in known and "moe_intermediate_size" in settings:
        settings.setdefault("intermediate_size", settings["moe_intermediate_size"])
    needed = [_HUGGING_FACE[x] for x in ("width", "layers", "heads", "mlp_width", "vocab_size")]
    missing = [key for key in needed if key not in settings]
    if missing:
        raise InputError(
            f"{name}: the file must describe a transformer; it has no {missing[0]!r}. Plan "
            "a recipe with its sizes instead: --model.width, --model.layers and so on."
        )
    _require_sizes(settings, needed, name)
    given = {ours: settings[theirs] for ours, theirs in _HUGGING_FACE.items() if theirs in settings}
    given.setdefault("kv_heads", given["heads"])
    if _type_of(settings) in _WITHOUT_GATE:
        given["mlp"] = "gelu"
    given["qk_norm"] = _type_of(settings).startswith(_NORMALISED)
    given.setdefault("head_dim", max(given["width"] // given["heads"], 1))
    _require_sizes(given, ("kv_heads", "head_dim"), name)
    if experts:
        given |= _experts_of(settings, name, experts, given)
    if _type_of(settings) in _HYBRIDS:
        return _sizes(name, given | _hybrid(settings, name))
    windows = shortest(_windows(settings, name, given["layers"]))
    given["windows"] = tuple("none" if x is None else x for x in windows)
    assumed = None
    if not is_known:
        assumed = (
            f"{_named(read)} is not known here: attention and a gated MLP are assumed in all "
            f"{given['layers']} layers, with {given['heads']} heads of {given['head_dim']} "
            f"channels{_uncounted(read, ', and not counted are {}')}."
        )
    return _sizes(name, given, assumed=assumed)


def _sizes(name: str, given: Mapping[str, Any], **others: Any) -> ModelSizes:
    """The sizes of a GPT with these settings."""
    try:
        model = GPTConfig(**given)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return sizes_of_gpt(model, name=name, **others)


def _of_experts() -> list[str]:
    return [kind for kind, values in PRETRAINED.items() if "num_experts_per_tok" in values]


def _unknown(settings: Mapping[str, Any], name: str) -> UnsupportedError:
    """The error of an architecture whose layers may be others than those that are counted."""
    return UnsupportedError(
        f"{name}: the architecture must be one whose layers the planner can count: see "
        f"docs/planner.md; got {_named(settings)}{_uncounted(settings, ', with {}')}. Plan a "
        "recipe with its sizes (--model.width, --model.layers and so on), or use --allow-unknown, "
        "which assumes attention and a gated MLP in every layer."
    )


def _named(settings: Mapping[str, Any]) -> str:
    """The architecture of a file."""
    classes = settings.get("architectures")
    first = f"{classes[0]} " if isinstance(classes, list) and classes else ""
    return f"{first}(model_type={settings.get('model_type')!r})"


def _uncounted(settings: Mapping[str, Any], text: str) -> str:
    """A text with the keys of a file that may change its layers in a way that is not counted."""
    read = {*_HUGGING_FACE.values(), "sliding_window", "use_sliding_window"}
    types = settings.get("layer_types")
    read |= {"layer_types"} if isinstance(types, list) and {*types} <= {_FULL, _SLIDING} else set()
    keys = [x for x, value in settings.items() if value and x not in read and not _IDLE.search(x)]
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return text.format(f"{', '.join(keys[:_SHOWN])}{more}") if keys else ""


def _experts_of(
    settings: Mapping[str, Any], name: str, count: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The layers of experts, and which these are."""
    kind = _type_of(settings)
    width, shared = "moe_intermediate_size", "shared_expert_intermediate_size"
    width = width if width in PRETRAINED[kind] else "intermediate_size"
    keys = [count, "num_experts_per_tok", width, *([shared] if shared in PRETRAINED[kind] else [])]
    _require_sizes(settings, keys, name)
    layers, dense = given["layers"], settings.get("mlp_only_layers") or ()
    step = settings.get("decoder_sparse_step", 1)
    _require_sizes({"decoder_sparse_step": step}, ["decoder_sparse_step"], name)
    feeds = ["mlp" if i in dense or (i + 1) % step else "experts" for i in range(layers)]
    sizes = ExpertsConfig(
        count=settings[count],
        top_k=settings["num_experts_per_tok"],
        width=settings[width],
        shared_width=settings[shared] if shared in keys else 0,
        shared_gate=shared in keys,
        biases=kind == "gpt_oss",
    )
    return {"experts": sizes, "feed_forwards": shortest(feeds)}


def _hybrid(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the layers of a hybrid mix tokens with, and the sizes of linear attention."""
    layers, types = settings["num_hidden_layers"], settings.get("layer_types")
    if types is None:
        every = settings.get("full_attention_interval", 4)
        _require_sizes({"full_attention_interval": every}, ["full_attention_interval"], name)
        types = [_LINEAR_TYPE if (i + 1) % every else _FULL for i in range(layers)]
    known = isinstance(types, list) and len(types) == layers
    _require(known, name, "layer_types", f"a list with an entry for each of {layers} layers", types)
    _check_types(types, (_FULL, _LINEAR_TYPE), name)
    sizes = {key: settings.get(theirs, default) for key, (theirs, default) in _LINEAR.items()}
    _require_sizes(sizes, sizes, name, "linear: ")
    mixers = ["linear" if x == _LINEAR_TYPE else "attention" for x in types]
    return {
        "mixers": shortest(mixers),
        "linear": LinearConfig(**sizes),
        "attention_gate": settings.get("attn_output_gate", _type_of(settings) != "olmo_hybrid"),
    }


def _type_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("model_type"))


def _windows(settings: Mapping[str, Any], name: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, as `train.py --init-from` reads it; None without one."""

    def number(key: str, default: int, least: int = 1) -> int:
        # In these files, null is as good as none.
        found = default if settings.get(key) is None else settings[key]
        wanted = f"a whole number of at least {least}"
        _require(type(found) is int and found >= least, name, key, wanted, found)
        return found

    def entries(key: str, default: Any) -> Any:
        found = default if settings.get(key) is None else settings[key]
        wanted = f"a list with an entry for each of {layers} layers"
        _require(isinstance(found, list) and len(found) == layers, name, key, wanted, found)
        return found

    kind, window, types = (settings.get(x) for x in ("model_type", "sliding_window", "layer_types"))
    kind, numbers = str(kind), range(layers)
    # Of a type that train.py does not read, the file is taken at its word.
    is_qwen = kind.startswith("qwen") and kind != "qwen3_moe"  # Of which all layers have one.
    is_other = kind not in PRETRAINED
    if is_qwen or is_other or kind in ("smollm3", "qwen3_moe"):
        used = settings.get("use_sliding_window")
        is_flag = isinstance(used, bool | None)
        _require(is_flag, name, "use_sliding_window", "true or false", used)
        if is_qwen or not is_other:
            window = window if used else None
            types = types if used or is_qwen else None
        elif window is None or used is False:
            return (None,) * layers
    if kind == "smollm3":
        # The entry is 0 for a layer without rotary positions.
        every = number("no_rope_layer_interval", 4)
        slides = [not x for x in entries("no_rope_layers", [(i + 1) % every for i in numbers])]
    elif is_qwen:
        slides = [i >= number("max_window_layers", 28, least=0) for i in numbers]
    elif types is None and (
        kind in _PERIODS or (is_other and settings.get("sliding_window_pattern") is not None)
    ):
        # Beside types of layers, the pattern may be a word, such as "LLLG".
        period = number("sliding_window_pattern", _PERIODS.get(kind, 1))
        slides = [(i + 1) % period != 0 for i in numbers]
    else:
        slides = [kind != "llama"] * layers
    slides = [window is not None and x for x in slides]
    if types is not None:
        types = entries("layer_types", types)
        if kind in _KNOWN:
            _check_types(types, (_FULL, _SLIDING), name)
        slides = [x == _SLIDING for x in types]
    if any(slides):
        _require_sizes({"sliding_window": window, **settings}, ["sliding_window"], name)
    return tuple(settings.get("sliding_window") if x else None for x in slides)


def _check_types(types: Iterable[Any], known: tuple[str, str], name: str) -> None:
    wanted = f"{known[0]} or {known[1]} for each layer"
    for x in types:
        _require(x in known, name, "layer_types", wanted, x)


def _require(holds: bool, name: str, key: str, wanted: str, got: Any) -> None:
    if not holds:
        raise InputError(f"{name}: {key} must be {wanted}; got {got!r}. Correct the file.")


def _require_sizes(
    settings: Mapping[str, Any], keys: Iterable[str], name: str, part: str = ""
) -> None:
    for key in keys:
        number = settings[key]
        _require(is_size(number), name, part + key, "a whole number of at least 1", number)


def is_size(number: Any) -> bool:
    """True if something is a whole number of at least 1."""
    return type(number) is int and number >= 1

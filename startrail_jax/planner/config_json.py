"""The model that a config.json describes, of a run or of Hugging Face."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.planner.layers import WINDOWS, shortest, sliding_layers
from startrail_jax.planner.models import DIT, MODELS, ModelSizes, is_size

# Size -> its name in a config.json of Hugging Face.
_HUGGING_FACE = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "outputs": "vocab_size",
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
}
"""Types of model that `train.py --init-from` takes, each with its defaults."""
_PERIODS = {"gemma2": 2, "gemma3_text": 6}
"""For windows of "pattern", the period where the file does not say it."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WITHOUT_GATE = ("gpt_neox", "opt", "bloom", "falcon", "gpt_bigcode", "starcoder2", "phi")
"""Types of model whose MLP has two matrices."""
_NORMALISED = ("qwen3", "gemma3")
"""How the types of model begin that normalise the heads of queries and keys."""


def find_model(name: str) -> ModelSizes:
    """The model of a name, or that of a config.json.

    Args:
        name: one of `MODELS`, or the path of a config.json, of a run or of Hugging Face.

    Raises:
        ValueError: if there is no such model, or the file describes none.
        NotImplementedError: if the file describes a mixture of experts.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" or not path.is_file():
        raise InputError(
            f"--model must be one of {', '.join(MODELS)}, or a config.json, of a run or of Hugging "
            f"Face; got {name!r}. Correct it, or leave it out and give the sizes: --width, "
            "--layers, --heads, --kv-heads, --head-dim, --mlp-width and --outputs."
        )
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"--model {name}: the file is no JSON: {error}. Give another.") from None
    if not isinstance(settings, dict):
        raise InputError(f"--model {name}: the file holds no settings. Give another.")
    if isinstance(settings.get("model"), dict):
        return model_of_run(settings, str(path))
    # Models of text and images have the decoder in a part of their own.
    decoder = settings.get("text_config") or settings
    if not isinstance(decoder, dict):
        raise InputError(
            f"--model {name}: text_config must hold the settings of a model; got {decoder!r}. "
            "Correct the file."
        )
    model = _of_hugging_face(decoder, str(path))
    if decoder is settings and path.name == "config.json" and _type_of(settings) in PRETRAINED:
        return replace(model, pretrained=str(path.parent))
    return model


def model_of_run(settings: Mapping[str, Any], name: str) -> ModelSizes:
    """The model of a run of train.py.

    Args:
        settings: what the config.json of the run holds.
        name: of the file.

    Raises:
        ValueError: if the settings describe no model, or one of a task that is not known here.
    """
    # A run of the time when there was one kind of model does not name it.
    kind = settings.get("kind", "gpt")
    if kind not in ("gpt", "dit"):
        raise InputError(
            f"--model {name}: kind must be gpt or dit; got {kind!r}. Use train.py {name} --plan "
            "show, or give the sizes by flags instead: --width, --layers, --heads and so on."
        )
    names = ("width", "layers", "heads", "mlp_width")
    model = _known(settings["model"], name, names)
    for key in names:
        _require_size(model[key], f"model.{key}", name)
    common: dict[str, Any] = {key: model[key] for key in names}
    common |= {"name": name, "from_run": True, "batch": settings.get("batch_size", 1)}
    common |= {"average": settings.get("ema_decay") is not None}
    common["itemsize"] = 4 if model.get("dtype", "float32") == "float32" else 2
    if kind == "gpt":
        _known(model, name, ("kv_heads", "head_dim"))
        return ModelSizes(
            **common,
            kv_heads=model["kv_heads"],
            head_dim=model["head_dim"],
            outputs=model.get("vocab_size", 256),
            mlp_matrices=2 if model.get("mlp") == "gelu" else 3,
            qk_norm=bool(model.get("qk_norm")),
            tied_head=model.get("tied_head", False),
            windows=_windows_of_run(model, name),
            adapters=_part(settings, "lora").get("rank") is not None,
            seq_len=settings.get("seq_len"),
        )
    _known(model, name, ("channels", "classes"))
    patches, size = model.get("patch", (1, 2, 2)), _known(settings, name, ("size",))["size"]
    for key, three in (("model.patch", patches), ("size", size)):
        if not isinstance(three, list | tuple) or len(three) != 3 or not all(map(is_size, three)):
            raise InputError(
                f"--model {name}: {key} must be three whole numbers of at least 1; got {three!r}. "
                "Correct the file."
            )
    _require_size(model["channels"], "model.channels", name)
    if model["classes"] != 0:
        _require_size(model["classes"], "model.classes", name)
    patch = math.prod(patches)
    return ModelSizes(
        **common,
        **DIT,
        kv_heads=model["heads"],
        head_dim=max(model["width"] // model["heads"], 1),
        mlp_matrices=2,
        outputs=patch * model["channels"],
        classes=model["classes"],
        patch=patch,
        seq_len=math.prod(size) // patch,
    )


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the settings; an empty one for a run of the time before it existed."""
    part = settings.get(name)
    return part if isinstance(part, dict) else {}


def _of_hugging_face(settings: Mapping[str, Any], name: str) -> ModelSizes:
    """The model of a config.json of Hugging Face: a gated decoder, as Llama, Qwen or Mistral."""
    settings = {**PRETRAINED.get(_type_of(settings), {}), **settings}
    experts = next((key for key in _EXPERTS if settings.get(key)), None)
    if experts:
        raise UnsupportedError(
            f"--model {name}: mixtures of experts are not planned; got {experts}="
            f"{settings[experts]}. Give the sizes of a dense model instead."
        )
    given = {ours: settings[theirs] for ours, theirs in _HUGGING_FACE.items() if theirs in settings}
    needed = ("width", "layers", "heads", "mlp_width", "outputs")
    _known(given, name, needed, shown=_HUGGING_FACE)
    for key in needed:
        _require_size(given[key], _HUGGING_FACE[key], name)
    given.setdefault("kv_heads", given["heads"])
    if _type_of(settings) in _WITHOUT_GATE:
        given["mlp_matrices"] = 2
    given["qk_norm"] = _type_of(settings).startswith(_NORMALISED)
    # Files may hold "head_dim": null.
    given["head_dim"] = given.get("head_dim") or max(given["width"] // given["heads"], 1)
    windows = shortest(_windows(settings, name, given["layers"]))
    return ModelSizes(name=name, hugging_face=True, windows=windows, **given)


def _type_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("model_type"))


def _windows_of_run(model: Mapping[str, Any], name: str) -> tuple[int | None, ...]:
    """The windows of the layers of a run; the list repeats."""
    windows = model.get("windows")
    if windows is None:
        windows = [model.get("window") or "none"]
    if not isinstance(windows, list | tuple) or not windows:
        raise InputError(
            f"--model {name}: model.windows must be a list of numbers and `none`; got {windows!r}. "
            "Correct the file."
        )
    for window in windows:
        if window != "none":
            _require_size(window, "model.windows", name)
    return tuple(window if isinstance(window, int) else None for window in windows)


def _windows(settings: Mapping[str, Any], name: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, as `train.py --init-from` reads it; None without one."""
    kind, window = _type_of(settings), settings.get("sliding_window")
    types = settings.get("layer_types")
    which = WINDOWS.get("qwen3" if kind.startswith("qwen") else kind)
    period = _number(settings, "sliding_window_pattern", name, default=_PERIODS.get(kind, 1))
    used = settings.get("use_sliding_window")
    if which in ("upper", "no_rope", None) and not isinstance(used, bool | None):
        raise InputError(
            f"--model {name}: use_sliding_window must be true or false; got {used!r}. Correct the "
            "file."
        )
    if which in ("upper", "no_rope") and not used:
        window = None
        types = None if which == "no_rope" else types
    if which is None:
        # A type that train.py does not read: whatever the file says.
        if window is None or used is False:
            return (None,) * layers
        which = "all" if settings.get("sliding_window_pattern") is None else "pattern"
    first, rotary = 0, ()
    if which == "no_rope":
        # The entry is 0 for a layer without rotary positions.
        every = _number(settings, "no_rope_layer_interval", name, default=4)
        rotary = settings.get("no_rope_layers")
        rotary = [int((i + 1) % every != 0) for i in range(layers)] if rotary is None else rotary
        _require_entries(rotary, "no_rope_layers", name, layers)
    elif which == "upper":
        first = _number(settings, "max_window_layers", name, default=28, least=0)
    chosen = sliding_layers(which, layers, first=first, rotary=rotary, period=period)
    sliding = [window is not None and x for x in chosen]
    if types is not None:
        _require_entries(types, "layer_types", name, layers)
        sliding = ["sliding" in str(x) for x in types]
    if any(sliding):
        _require_size(settings.get("sliding_window"), "sliding_window", name)
    return tuple(settings.get("sliding_window") if slides else None for slides in sliding)


def _number(
    settings: Mapping[str, Any], key: str, name: str, *, default: int, least: int = 1
) -> int:
    """A whole number from `least` on; null is as good as none."""
    number = settings.get(key)
    number = default if number is None else number
    if type(number) is not int or number < least:
        raise InputError(
            f"--model {name}: {key} must be a whole number of at least {least}; got {number!r}. "
            "Correct the file."
        )
    return number


def _require_entries(entries: Any, key: str, name: str, layers: int) -> None:
    if not isinstance(entries, list) or len(entries) != layers:
        raise InputError(
            f"--model {name}: {key} must be a list with an entry for each of {layers} layers; got "
            f"{entries!r}. Correct the file."
        )


def _require_size(number: Any, key: str, name: str) -> None:
    if not is_size(number):
        raise InputError(
            f"--model {name}: {key} must be a whole number of at least 1; got {number!r}. Correct "
            "the file."
        )


def _known(
    settings: Mapping[str, Any],
    name: str,
    keys: tuple[str, ...],
    shown: Mapping[str, str] | None = None,
) -> Mapping[str, Any]:
    missing = [(shown or {}).get(key, key) for key in keys if key not in settings]
    if missing:
        raise InputError(
            f"--model {name}: the file must describe a transformer; it has no {missing[0]!r}. Give "
            "the sizes by flags instead: --width, --layers, --heads and so on."
        )
    return settings

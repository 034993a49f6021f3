"""What a Hugging Face config.json says of a model. Imports no jax.

transformers reads it: a key that a file leaves out has the default of its class there. What is not
supported here is refused, and so is a key that is not known, as it might change the model.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.config import GPTConfig, RopeConfig
from startrail_jax.errors import InputError, UnsupportedError
from trainer.data.opening import read_object
from trainer.gpt.pretrained.families import (
    BALANCE,
    COUNTS,
    DENSE,
    FAMILIES,
    FULL,
    LINEAR,
    MULTIMODAL,
    NEGATIVE,
    NORMALISED_SHARES,
    OF_LINEAR,
    PARTS,
    SLIDING,
    Family,
    paper_factor,
    pattern,
    plain,
)
from trainer.places import way_to
from trainer.printable import shortened

CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""What a model of the Hub is called."""
MOST = {"num_hidden_layers": 10_000}
"""No model is so deep, and no file of its weights is looked at before its depth is known."""
TOO_LARGE = 1 << 31
"""No size of a model is so large."""
# Keys that change no logits, beside those of generation: names, ids, how to train and store.
IDLE = {
    *("transformers_version", "initializer_range", "attention_dropout", "pretraining_tp"),
    *("sep_token_id", "unk_token_id", "tokenizer_class", "prefix", "chunk_size_feed_forward"),
    *("return_dict", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
    *("pruned_heads", "task_specific_params", "torchscript", "use_bfloat16"),
    *("tie_encoder_decoder", "cross_attention_hidden_size", "unsloth_version", "unsloth_fixed"),
    *("generation_config", "auto_map", "attn_implementation", "gradient_checkpointing"),
    *("max_sequence_length", "model_max_length", "is_llama_config", "transformers.js_config"),
}
NAMES = ("model_type", "architectures", "dtype", "torch_dtype")
WHOLE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("no_rope_layer_interval", "sliding_window_pattern", "query_pre_attn_scalar"),
)
"""Keys whose values are whole numbers from 1 on."""
OUTER_LENGTH = "original_max_position_embeddings"
READ = {
    *(*NAMES, *WHOLE[:8], "rms_norm_eps", "tie_word_embeddings"),
    *("rope_parameters", "rope_scaling", "rope_theta", OUTER_LENGTH),
}
"""Keys of all families."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0, None),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
    # Some families have no such biases and read no such key; files have it all the same.
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
"""Keys of all families of which a few values are supported."""
# `rope_type` of config.json -> `RopeConfig.scaling`.
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# How the channels are shared by time, height and width, which are one number for text.
ROPE_KEYS_OF_IMAGES = {"mrope_section", "mrope_interleaved"}
ROPE = "rope_parameters"
ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", OUTER_LENGTH, "low_freq_factor"),
    *("high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale"),
    *("mscale_all_dim", "truncate", "partial_rotary_factor"),
}


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a config.json says."""

    family: str
    model: GPTConfig
    length: int
    """Tokens of the sequences that the model is made for."""


def read_description(folder: Path) -> Description:
    """What the config.json of a folder says."""
    path = folder / CONFIG
    if not path.is_file():
        advice = "Give the folder into which the model was downloaded."
        what = "a folder without one" if folder.is_dir() else "no such folder"
        if folder.is_file():
            what, advice = "a file", f"Give its folder, {str(folder.parent)!r}."
        elif not folder.exists():
            if _HUB_NAME.fullmatch(str(folder)):
                advice = (
                    "A model of the Hugging Face Hub is downloaded first: "
                    f"hf download {folder} --local-dir {folder.name}"
                )
            advice = way_to(folder, advice)
        raise InputError(
            f"init_from must be a folder with a Hugging Face {CONFIG}; got {str(folder)!r}, {what}."
            f" {advice}"
        )
    return describe(read_object(path), str(path))


def describe(values: Mapping[str, Any], name: str) -> Description:
    """What the values of a config.json say."""
    values = text_values(values, name)
    kind = values.get("model_type")
    if kind is None and isinstance(values.get("model"), dict):
        run = str(Path(name).parent)
        raise UnsupportedError(
            f"--init-from takes a model in the format of Hugging Face; got {name!r}, that of a run "
            "of train.py. Go on with the run, optimizer and all, by --run-dir "
            f"{run} --allow-changes with the flags to change; or begin a new one with its weights: "
            f"python -m trainer.gpt.export {run} exported, then --init-from exported."
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UnsupportedError(
            f"The architecture must be one of {', '.join(FAMILIES)}; got {name!r} with "
            f"model_type={kind!r}, architectures={values.get('architectures')}. Use another model."
        )
    family, transformers = FAMILIES[kind], _transformers(name)
    reader = transformers.CONFIG_MAPPING[kind]
    # A null says something only where the default is something else, as of a window.
    values = {
        key: value
        for key, value in values.items()
        if value is not None or getattr(reader, key, None) is not None
    }
    _check_keys(values, kind, {*transformers.GenerationConfig().to_dict(), *IDLE}, name)
    check_layer_types(values, kind, name)
    if kind == "llama":
        _check_no_window(values, name)
    _check_ropes(values, family, name)
    known = {*READ, *family.keys}.difference(NAMES)
    given = {key: value for key, value in values.items() if key in known}
    found = read_values(given, kind, name)
    model, read = model_of(found, kind), found.values
    if family.local_rope:
        rope = _local_rope(found, values, model.layer_windows)
    else:
        may_lack = family.without_rope == "all"
        rope = _read_rope(found, read["rope_parameters"], values, may_lack=may_lack)
    if family.without_rope == "some":
        skips = _skips(found)
        bases = tuple("none" if skipped else rope.bases[0] for skipped in skips)
        rope = replace(rope, bases=bases) if any(skips) else rope
    if family.turns_some:
        turning = ConfigValues(read["rope_parameters"], name)
        share = turning.real("partial_rotary_factor", default=1.0)
        rope = replace(rope, channels=int(model.head_dim * share))
    scaled: dict[str, Any] = {}
    if family.gemma:
        scale_dim = read["query_pre_attn_scalar"]
        scaled = {
            "softcap": read["attn_logit_softcapping"],
            "output_softcap": read["final_logit_softcapping"],
            "scale_dim": None if scale_dim == model.head_dim else scale_dim,
        }
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    model = replace(
        model,
        norm_eps=read["rms_norm_eps"],
        rope=rope,
        dtype="float32" if dtype in ("float32", "float64") else "bfloat16",
        **scaled,
    )
    simple = plain(model)
    # `plain` leaves out which layers a scaling stretches if there is none, but a flag may add one.
    kept = replace(simple.rope, stretches=rope.stretches)
    model = replace(simple, rope=kept)
    return Description(family=kind, model=model, length=read["max_position_embeddings"])


def _transformers(name: str) -> Any:
    from trainer.gpt.tokenizer import load_transformers  # Not above: `--help` must be fast.

    return load_transformers(f"The {CONFIG} of a pretrained model", name)


def read_values(given: Mapping[str, Any], kind: str, name: str) -> ConfigValues:
    """The values that transformers reads, with its defaults of this type of model."""
    reader = _transformers(name).CONFIG_MAPPING[kind]
    try:
        read: Any = reader(**copy.deepcopy(dict(given))).get_text_config()
    except Exception as error:  # Whatever the values make it raise.
        raise InputError(
            f"{name!r} must be a config.json that transformers reads; got "
            f"{type(error).__name__}: {error}. Download the file again."
        ) from error
    values = dict(vars(read))
    if values.get("head_dim") is None and "head_dim" not in given:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return ConfigValues(values, name)


def model_of(found: ConfigValues, kind: str) -> GPTConfig:
    """The model of a family: its weights, and what each layer attends to, without the rest."""
    family, read = FAMILIES[kind], found.values
    layers, heads, width = (
        read[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    head_dim = found.number("head_dim")
    if kind == "olmoe" and heads * head_dim != width:  # Of which it takes the norm of a query.
        raise found.wrong("head_dim", f"{width} / {heads}", head_dim)
    options, windows = dict(family.options), _windows(found, kind)
    if family.linear is not None:
        kinds = {FULL: "attention", LINEAR: "linear"}
        options["mixers"] = tuple(kinds[x] for x in _types_of(found))
        sizes: Any = {x: found.number(key) for key, x in OF_LINEAR.items()}
        if not read.get(NEGATIVE, True):
            sizes["largest_beta"] = 1.0
        options["linear"] = replace(family.linear, **sizes)
    mlp_width: Any = read.get("intermediate_size")
    if family.experts is not None:
        of_family = {key: read.get(key) for key in family.keys}
        options |= _experts(ConfigValues(of_family, found.name), family, layers)
        mlp_width = mlp_width or options["experts"].width
    return GPTConfig(
        vocab_size=read["vocab_size"],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=read["num_key_value_heads"],
        head_dim=head_dim,
        mlp_width=mlp_width,
        tied_head=read["tie_word_embeddings"],
        windows=pattern(windows),
        **options,
    )


def text_values(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The values of the text model, in the form of a folder that has it alone."""
    kind: Any = MULTIMODAL.get(str(values.get("model_type")))
    quantised = values.get("quantization_config")
    is_packed = isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4"
    if is_packed and values.get("model_type") == "gpt_oss":
        values = {key: x for key, x in values.items() if key != "quantization_config"}
    if kind is None:
        return values
    inner = values.get("text_config")
    part: Any = PARTS.get(values["model_type"], kind)
    if not isinstance(inner, dict) or inner.get("model_type", part) != part:
        wanted = f"an object with model_type {part}"
        raise ConfigValues(values, name).wrong("text_config", wanted, inner)
    ties = "tie_word_embeddings"
    if inner.get(ties, values.get(ties)) != values.get(ties, inner.get(ties)):
        raise ConfigValues(values, name).wrong(ties, "that of text_config", values[ties])
    outer = ("dtype", "torch_dtype", ties, "quantization_config")
    outer = {key: values[key] for key in outer if key in values}
    return {
        **outer,
        **(inner if part == kind else _of_family(inner, part, kind, name)),
        "model_type": kind,
        "architectures": [FAMILIES[kind].architecture],
    }


def _of_family(inner: Mapping[str, Any], part: str, kind: str, name: str) -> dict[str, Any]:
    """A `text_config` of another type, which has other defaults, as values of a family."""
    known = {*READ, *FAMILIES[kind].keys}.difference(NAMES)
    read = read_values({key: inner[key] for key in inner.keys() & known}, part, name).values
    ropes = ("rope_scaling", "rope_theta")
    rope = {key: x for key, x in read[ROPE].items() if key not in ROPE_KEYS_OF_IMAGES}
    read = {key: read[key] for key in known.difference(ropes) & read.keys()}
    return {**{key: x for key, x in inner.items() if key not in ropes}, **read, ROPE: rope}


class ConfigValues:
    """The values of a config.json, or of an object in it, with errors that name them."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        """Keeps the values, and the name of the file for messages."""
        self.values = values
        self.name = name

    def number(self, key: str, *, default: int | None = None) -> int:
        """A whole number from 1 on; the default is for one that is null or missing."""
        value, most = self.values.get(key), MOST.get(key, TOO_LARGE - 1)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most}", value)
        return value

    def real(self, key: str, *, default: float | None = None) -> float:
        """A finite number; the default is for one that is null or missing."""
        value: Any = self.values.get(key)
        value = default if value is None else value
        try:
            if type(value) in (int, float) and math.isfinite(value):
                return float(value)
        except OverflowError:  # Of a whole number that no float holds.
            pass
        raise self.wrong(key, "a finite number", value)

    def wrong(self, key: str, wanted: str, value: Any) -> InputError:
        """The error of a value that is not what it must be."""
        return InputError(
            f"{key} must be {wanted} in {self.name!r}; got {shortened(value)}. Download the file "
            "again."
        )


def _check_keys(values: Mapping[str, Any], kind: str, idle: set[str], name: str) -> None:
    """Raises if a key is unknown, or its value is not supported."""
    family, found = FAMILIES[kind], ConfigValues(values, name)
    known, only = {*READ, *family.keys}, {**ONLY, **family.only}
    for key, value in values.items():
        if key in known or key in idle - only.keys() or key.startswith("_"):
            continue
        if key in only:
            _require(key, value, only[key], name)
        elif value is not None:
            raise UnsupportedError(
                f"Every key must be known for a model of kind {kind} in {name!r}; got {key}="
                f"{value!r}, which may make it another model. Use another model; if transformers "
                "takes no notice of the key, delete it from the file."
            )
    if values.get("architectures") is not None:
        _require("architectures", values["architectures"], ([family.architecture],), name)
    for key in WHOLE:
        if key in known and values.get(key) is not None:
            found.number(key)


def _require(key: str, value: Any, supported: Sequence[Any], name: str) -> None:
    """Raises unless a value is supported; True is not 1."""
    if not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in supported):
        raise UnsupportedError(
            f"{key} must be {' or '.join(map(repr, supported))} in {name!r}; got {value!r}, "
            "which is not supported. Use another model."
        )


def check_layer_types(values: Mapping[str, Any], kind: str, name: str) -> None:
    """Raises if layers are of a type that is not supported, or the family has no such types."""
    types, second = values.get("layer_types"), SLIDING if FAMILIES[kind].linear is None else LINEAR
    if types is not None and (
        not isinstance(types, list) or any(x not in (FULL, second) for x in types)
    ):
        raise UnsupportedError(
            f"layer_types must be {FULL} or {second} in {name!r}; got {types!r}. Use another model."
        )


def _check_no_window(values: Mapping[str, Any], name: str) -> None:
    """Raises if a Llama has a window. Its layers in transformers take no notice of windows, but its
    cache does, which then forgets keys while it generates: unless `layer_types` says otherwise,
    `sliding_window` is that of all."""
    size, types = values.get("sliding_window"), values.get("layer_types")
    if types is None and size is None:
        return
    found = ConfigValues(values, name)
    if types is None:
        length = found.number("max_position_embeddings", default=TOO_LARGE)
        is_idle = found.number("sliding_window") >= length
    else:
        is_idle = SLIDING not in types
    if not is_idle:
        raise UnsupportedError(
            f"No layer may have a sliding window in {name!r}: layer_types must be {FULL} for all, "
            "or sliding_window null or at least max_position_embeddings; got "
            f"layer_types={types!r}, sliding_window={size!r}. Correct the file, or use another "
            "model."
        )


def _check_ropes(values: Mapping[str, Any], family: Family, name: str) -> None:
    """Raises if rotary positions are not understood, of which nothing may be left out silently."""
    found = ConfigValues(values, name)
    for key in ("rope_parameters", "rope_scaling"):
        given = values.get(key)
        nested = family.local_rope and key == "rope_parameters"
        if given is None:
            continue
        if not isinstance(given, dict) or (nested and not given.keys() <= {FULL, SLIDING}):
            with_keys = f" with {FULL} and {SLIDING}" if nested else ""
            raise found.wrong(key, f"an object{with_keys}", given)
        for part in given.values() if nested else (given,):
            if not isinstance(part, dict):
                raise found.wrong(key, "of objects", given)
            kind = part.get("rope_type", part.get("type", "default"))
            of_images = ROPE_KEYS_OF_IMAGES if family.turns_some else set()
            unknown = sorted(part.keys() - ROPE_KEYS - of_images)
            if not isinstance(kind, str) or kind not in SCALINGS or unknown:
                raise UnsupportedError(
                    f"rope_type must be one of {', '.join(SCALINGS)} in {name!r}; got {kind!r}"
                    f"{f' with {unknown}' if unknown else ''}, which is not supported. Use another "
                    "model, or rope_type default and --model.rope.scaling ntk."
                )
            truncates = (True, None) if family.truncates else (True, False, None)
            _require("truncate", part.get("truncate"), truncates, name)
            if not family.turns_some:
                share = "partial_rotary_factor"
                _require(share, part.get(share), (1.0, None), name)


def _local_rope(
    found: ConfigValues, values: Mapping[str, Any], windows: Sequence[int | None]
) -> RopeConfig:
    """The rotary positions of a Gemma 3, whose local layers have a base of their own."""
    given = found.values["rope_parameters"]
    rope, local = (_read_rope(found, given[kind], values) for kind in (FULL, SLIDING))
    if local != RopeConfig(bases=local.bases):
        raise UnsupportedError(
            f"The rotary positions of {SLIDING} must be of rope_type default in {found.name!r}; "
            f"got {given[SLIDING]!r}, which is not supported. Use another model."
        )
    if set(windows) == {None}:
        return rope
    if None not in windows:
        return local
    # Also without a scaling: a flag may add one, and local layers are never stretched.
    bases = tuple((rope if window is None else local).bases[0] for window in windows)
    return replace(rope, bases=bases, stretches="global")


def _read_rope(
    found: ConfigValues,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    may_lack: bool = False,
) -> RopeConfig:
    """One object of rotary positions, as transformers has completed it."""
    rope = ConfigValues(given, found.name)
    if given["rope_theta"] is None and may_lack:
        return RopeConfig(bases=("none",))
    base, name = rope.real("rope_theta"), given["rope_type"]
    if name == "default":
        # transformers does not look at a factor.
        return RopeConfig(bases=(base,))
    # Of the two places, transformers prefers the outer one.
    length = found.values["max_position_embeddings"]
    if name == "yarn" and values.get(OUTER_LENGTH, length) is None:
        raise found.wrong(OUTER_LENGTH, "a whole number", None)
    inner = rope.number(OUTER_LENGTH, default=length)
    original = ConfigValues(values, found.name).number(OUTER_LENGTH, default=inner)
    if name == "yarn" and given.get("factor") is None and 0 < original < length:
        factor = length / original  # YaRN may leave it to the two lengths.
    else:
        factor = rope.real("factor")
    if factor < 1:
        raise rope.wrong("factor", "at least 1", factor)
    attention_factor = _attention_factor(rope, factor) if name == "yarn" else None
    stretches = factor != 1 or attention_factor is not None
    scaling: Any = SCALINGS[name] if stretches else "none"
    if scaling in ("none", "linear"):
        return RopeConfig(bases=(base,), scaling=scaling, factor=factor)
    if scaling == "llama3":
        turns = rope.real("high_freq_factor"), rope.real("low_freq_factor")
        standard = (4.0, 1.0)
    else:
        turns = rope.real("beta_fast", default=32.0), rope.real("beta_slow", default=1.0)
        standard = (32.0, 1.0)
    return RopeConfig(
        bases=(base,),
        scaling=scaling,
        factor=factor,
        original_length=original,
        turns=None if turns == standard else turns,
        attention_factor=attention_factor,
        truncate=name != "yarn" or given.get("truncate") is not False,
    )


def _attention_factor(rope: ConfigValues, factor: float) -> float | None:
    """YaRN's factor of queries and keys; None for that of the paper."""
    if rope.values.get("attention_factor") is not None:
        given = rope.real("attention_factor")
        return None if given == paper_factor(factor) else given
    if not rope.values.get("mscale") or not rope.values.get("mscale_all_dim"):
        return None
    above, below = (
        0.1 * rope.real(key) * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim")
    )
    if not below:
        raise rope.wrong("mscale_all_dim", "above 0", rope.values["mscale_all_dim"])
    return above / below


def _windows(found: ConfigValues, kind: str) -> tuple[int | None, ...]:
    """The sliding window of each layer; None for a layer without one."""
    read, layers = found.values, found.values["num_hidden_layers"]
    if FAMILIES[kind].linear is not None:
        return (None,) * layers
    size = read.get("sliding_window") if read.get("use_sliding_window", True) else None
    # Mistral has no types of layers.
    whole = [FULL if kind == "llama" or size is None else SLIDING] * layers
    types = read.get("layer_types") or whole
    if len(types) != layers:
        raise found.wrong("layer_types", f"a list of {layers} names, one for each layer", types)
    if SLIDING in types and size is None:
        raise UnsupportedError(
            f"Layers of type {SLIDING} need a sliding_window, and use_sliding_window where the "
            f"file has it; got sliding_window={read.get('sliding_window')}, "
            f"use_sliding_window={read.get('use_sliding_window')} in {found.name!r}. "
            "Correct the file."
        )
    return tuple(found.number("sliding_window") if x == SLIDING else None for x in types)


def _experts(found: ConfigValues, family: Family, layers: int) -> dict[str, Any]:
    """The layers of experts, and which these are."""
    read, experts = found.values, family.experts
    assert experts is not None, "the caller has looked"
    sizes: dict[str, Any] = {x: found.number(key) for key, x in family.expert_keys.items()}
    sizes["count"] = found.number(next((x for x in COUNTS if read.get(x) is not None), COUNTS[0]))
    if NORMALISED_SHARES in family.keys:
        sizes["normalised"] = bool(read[NORMALISED_SHARES])
    # transformers adds the loss only if it gives the logits of the router, too.
    sizes["balance_loss"] = found.real(BALANCE) if read.get("output_router_logits") else 0.0
    sizes["balance_over"] = "model"
    dense, step = (read.get(key) for key in DENSE)
    dense = dense or ()
    if not all(type(x) is int and 0 <= x < layers for x in dense):
        raise found.wrong(DENSE[0], f"a list of numbers of layers, from 0 to {layers - 1}", dense)
    step = found.number(DENSE[1], default=1)
    feeds = ["mlp" if i in dense or (i + 1) % step else "experts" for i in range(layers)]
    if "experts" not in feeds:
        raise found.wrong(DENSE[0], "such that a layer has experts", dense)
    return {"experts": replace(experts, **sizes), "feed_forwards": pattern(feeds)}


def _types_of(found: ConfigValues) -> Sequence[str]:
    """The type of each layer of a hybrid."""
    types, layers = found.values["layer_types"], found.values["num_hidden_layers"]
    if len(types) != layers or FULL not in types:
        wanted = f"a list of {layers} names, one for each layer, among them {FULL}"
        raise found.wrong("layer_types", wanted, types)
    return types


def _skips(found: ConfigValues) -> tuple[bool, ...]:
    """Whether each layer of a SmolLM3 has no rotary positions."""
    flags, layers = found.values["no_rope_layers"], found.values["num_hidden_layers"]
    if len(flags) != layers or not set(flags) <= {0, 1}:
        wanted = f"a list of {layers} numbers that are 0 or 1"
        raise found.wrong("no_rope_layers", wanted, flags)
    return tuple(not flag for flag in flags)

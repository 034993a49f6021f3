"""Reads the model of a Hugging Face config.json. Imports no jax.

transformers reads the file: a key that it leaves out has the default of its class there.
Unsupported values are refused, and so are unknown keys, which might change the model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.config import GPTConfig
from startrail_jax.errors import InputError, UnsupportedError
from trainer.data.opening import read_object
from trainer.gpt.pretrained.families.family import Family
from trainer.gpt.pretrained.families.table import (
    FAMILIES,
    INDEXED,
    MULTIMODAL,
    ONE_TIES,
    TEXT_PARTS,
    UNSAID,
    scoring_class,
)
from trainer.gpt.pretrained.plain import plain
from trainer.gpt.pretrained.rope import KEYS_OF_IMAGES, NESTED, OUTER_LENGTH, SCALING, SHARE, THETA
from trainer.gpt.pretrained.values import (
    CONFIG,
    LENGTH,
    ConfigValues,
    require,
    transformers_for,
    with_defaults,
    with_floats,
)
from trainer.places import way_to

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Pattern of the name of a model on the Hub."""
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
    *("num_attention_heads", "num_key_value_heads", LENGTH),
    *("no_rope_layer_interval", "sliding_window_pattern", "query_pre_attn_scalar"),
)
"""Keys whose values are whole numbers from 1 on."""
READ = {
    *(*NAMES, *WHOLE[:8], "rms_norm_eps", "tie_word_embeddings"),
    *(NESTED, SCALING, THETA, OUTER_LENGTH),
}
"""Keys of all families."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    SHARE: (1.0, None),
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
"""Keys of all families, with the few values that are supported."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The model that a config.json describes."""

    family: str
    model: GPTConfig
    length: int
    """Length in tokens of the sequences that the model is made for."""


def read_description(folder: Path) -> Description:
    """Reads the config.json of a folder."""
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
    """Reads the values of a config.json."""
    values = with_floats({**text_values(values, name)})
    model_type = values.get("model_type")
    if model_type is None and isinstance(values.get("model"), dict):
        run = str(Path(name).parent)
        raise UnsupportedError(
            f"--init-from takes a model in the format of Hugging Face; got {name!r}, that of a run "
            "of train.py. Go on with the run, optimizer and all, by --run-dir "
            f"{run} --allow-changes with the flags to change; or begin a new one with its weights: "
            f"python -m trainer.gpt.export {run} exported, then --init-from exported."
        )
    if model_type in INDEXED:
        raise UnsupportedError(
            f"A model must attend to all earlier tokens; got {name!r} of model_type="
            f"{model_type!r}, whose indexer, which chooses the keys of each token, is not served. "
            "Use another model."
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedError(
            f"The architecture must be one of {', '.join(FAMILIES)}; got {name!r} with "
            f"model_type={model_type!r}, architectures={values.get('architectures')}. Use another "
            "model."
        )
    family, transformers = FAMILIES[model_type], transformers_for(name)
    reader = transformers.CONFIG_MAPPING[model_type]
    values = _without_idle_nulls(values, reader, family)
    _check_keys(values, model_type, {*transformers.GenerationConfig().to_dict(), *IDLE}, name)
    family.check_types(values, name)
    family.check(values, name)
    family.rope.check(values, name)
    of_model = {*READ, *family.keys}.difference(NAMES)
    read = with_defaults({key: x for key, x in values.items() if key in of_model}, model_type, name)
    read = ConfigValues(family.usual(read.values), name)
    model = family.model(read)
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    model = replace(
        model,
        scores=_has_scores(values, family.architecture, name),
        norm_eps=read.values[family.epsilon],
        dtype="float32" if dtype in ("float32", "float64") else "bfloat16",
        **family.forward(read, values, model),
    )
    simple = plain(model)
    # `plain` leaves out which layers a scaling stretches if there is none, but a flag may add one.
    rope = replace(simple.rope, stretches=model.rope.stretches)
    length = read.values[LENGTH]
    return Description(family=model_type, model=replace(simple, rope=rope), length=length)


def _without_idle_nulls(values: Mapping[str, Any], reader: Any, family: Family) -> dict[str, Any]:
    """Values without the nulls that transformers reads as if they were left out, or that stand for
    the only value that is supported, such as False; others, as of a window, say something."""
    only = {key: x for key, x in {**ONLY, **family.only}.items() if key not in family.keys}
    given = {key: value for key, value in values.items() if value is not None}

    def read(**nulls: None) -> Any:
        try:
            return reader(**copy.deepcopy(given), **nulls).to_dict()
        except Exception:  # Whatever the values make it raise.
            return None

    plain_values, idle = read(), set[str]()
    for key in values.keys() - given:
        found, is_false = read(**{key: None}), any(not x for x in only.get(key, ()))
        if found is not None and (is_false or found == plain_values):
            idle.add(key)
    return {key: value for key, value in values.items() if key not in idle}


def _has_scores(values: Mapping[str, Any], architecture: str, name: str) -> bool:
    """Whether a model gives each sequence a score, and no words as those of `architecture`; raises
    if it gives several."""
    if values.get("architectures") in (None, [architecture]):
        return False
    labels = values.get("id2label")
    found = len(labels) if isinstance(labels, dict) else values.get("num_labels", 2)
    if found != 1:
        raise UnsupportedError(
            "A model for the classification of sequences must have one label, the reward; got "
            f"{found} in {name!r}. Use a reward model, or the model that it was made of."
        )
    return True


def text_values(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The values of the text model, as in the config.json of a text model."""
    outer_type = str(values.get("model_type"))
    if outer_type in FAMILIES:
        return FAMILIES[outer_type].importable(values)
    if outer_type not in MULTIMODAL:
        return values
    model_type, inner = MULTIMODAL[outer_type], values.get("text_config")
    inner_type = TEXT_PARTS.get(outer_type, model_type)
    if not isinstance(inner, dict) or inner.get("model_type", inner_type) != inner_type:
        needed = f"an object with model_type {inner_type}"
        raise ConfigValues(values, name).wrong("text_config", needed, inner)
    outer = ("dtype", "torch_dtype", "quantization_config")
    return {
        **{key: values[key] for key in outer if key in values},
        **(inner if inner_type == model_type else _of_family(inner, inner_type, model_type, name)),
        **_ties(values, inner, outer_type),
        "model_type": model_type,
        "architectures": [FAMILIES[model_type].architecture],
    }


def _ties(values: Mapping[str, Any], inner: Mapping[str, Any], outer_type: str) -> dict[str, Any]:
    """Whether the embedding is the head, as the whole model of transformers has it: its own value
    counts where a file has both, and one of them is enough for a GLM."""
    key = "tie_word_embeddings"
    written = [x[key] for x in (values, inner) if key in x]
    if outer_type in ONE_TIES and any(x is True for x in written):
        return {key: True}
    return {key: written[0]} if written else {}


def _of_family(
    inner: Mapping[str, Any], inner_type: str, model_type: str, name: str
) -> dict[str, Any]:
    """Turns a `text_config` of another type, with other defaults, into values of a family."""
    keys = {*READ, *FAMILIES[model_type].keys}.difference(NAMES)
    written = {key: inner[key] for key in inner.keys() & keys}
    read = with_defaults(written, inner_type, name).values
    ropes = (SCALING, THETA)
    rope = {key: x for key, x in read[NESTED].items() if key not in KEYS_OF_IMAGES}
    rope = {SHARE: 1.0, **rope}
    read = {key: read[key] for key in keys.difference(ropes) & read.keys()}
    read |= UNSAID.get(inner_type, {})
    return {**{key: x for key, x in inner.items() if key not in ropes}, **read, NESTED: rope}


def _check_keys(values: Mapping[str, Any], model_type: str, idle: set[str], name: str) -> None:
    """Raises if a key is unknown, or its value is not supported."""
    family = FAMILIES[model_type]
    keys, only = {*READ, *family.keys}, {**ONLY, **family.only}
    for key, value in values.items():
        if key in keys or key in idle - only.keys() or key.startswith("_"):
            continue
        if key in only:
            require(key, value, only[key], name)
        elif value is not None:
            raise UnsupportedError(
                f"Every key must be known for a model of kind {model_type} in {name!r}; got {key}="
                f"{value!r}, which may make it another model. Use another model; if transformers "
                "takes no notice of the key, delete it from the file."
            )
    if values.get("architectures") not in (None, [family.architecture]):
        classes = filter(None, (family.architecture, scoring_class(model_type)))
        require("architectures", values["architectures"], [[x] for x in classes], name)
    for key in WHOLE:
        if key in keys and values.get(key) is not None:
            ConfigValues(values, name).number(key)

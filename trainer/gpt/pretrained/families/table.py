"""The families by `model_type`. A family of existing parts is one line here. Imports no jax."""

from __future__ import annotations

from typing import Any

from models.config import GPTConfig
from startrail_jax.errors import UnsupportedError
from trainer.gpt.pretrained.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from trainer.gpt.pretrained.families.experts import (
    BALANCE,
    COUNTS,
    DENSE,
    LOSSES,
    NORMALISED_SHARES,
    SIZES,
    ExpertLayers,
)
from trainer.gpt.pretrained.families.family import (
    CHOICE,
    OPTIONS,
    SCALES,
    SILU,
    WINDOWS,
    Family,
)
from trainer.gpt.pretrained.families.gemma import GEMMA2, GEMMA3
from trainer.gpt.pretrained.families.gemma4 import GEMMA4
from trainer.gpt.pretrained.families.glm import GLM4, GLM4_MOE
from trainer.gpt.pretrained.families.gpt_oss import GPT_OSS
from trainer.gpt.pretrained.families.granite import GRANITE4
from trainer.gpt.pretrained.families.kimi import KIMI_LINEAR
from trainer.gpt.pretrained.families.llama import LLAMA
from trainer.gpt.pretrained.families.mixtral import MIXTRAL
from trainer.gpt.pretrained.families.nemotron import NEMOTRON_H
from trainer.gpt.pretrained.families.olmo import OLMO, OLMO_HYBRID, OLMOE
from trainer.gpt.pretrained.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from trainer.gpt.pretrained.families.smollm3 import SMOLLM3
from trainer.gpt.pretrained.plain import plain
from trainer.gpt.pretrained.rope import BasesByWindow

NORMALISED = {"qk_norm": True}
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": Family(architecture="MistralForCausalLM", keys=("sliding_window",), windows="all"),
    "qwen2": Family(architecture="Qwen2ForCausalLM", keys=CHOICE, options={"qkv_bias": True}),
    "qwen3": Family(architecture="Qwen3ForCausalLM", keys=CHOICE, options=NORMALISED),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        keys=("residual_dropout",),
        only=SILU | {"attention_bias": (True,), "attention_out_bias": (False,)},
        options={"qkv_bias": True},
        windows="no",
    ),
    "smollm3": SMOLLM3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "qwen3_5_text": QWEN3_5,
    "mixtral": MIXTRAL,
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        # Published files have `max_window_layers`, which transformers does not read here.
        keys=(
            *("sliding_window", "use_sliding_window", "max_window_layers", *COUNTS, *SIZES),
            *(NORMALISED_SHARES, *DENSE, *LOSSES),
        ),
        options=NORMALISED,
        windows="all_or_none",
        experts=ExpertLayers(),
    ),
    "gpt_oss": GPT_OSS,
    "olmoe": OLMOE,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "olmo2": Family(architecture="Olmo2ForCausalLM", options=OLMO, windows="no"),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM", keys=WINDOWS, options=OLMO, rope=BasesByWindow()
    ),
    "olmo_hybrid": OLMO_HYBRID,
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "nemotron_h": NEMOTRON_H,
    "granitemoehybrid": GRANITE4,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_linear": KIMI_LINEAR,
}
MULTIMODAL = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
}
"""`model_type` of models of images and text -> the family of their text models."""
TEXT_PARTS = {x: f"{x}_text" for x in ("qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe")}
"""`model_type` of models of images and text -> `model_type` of their `text_config`, if it is no
family."""
INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""`model_type` of models whose tokens attend to keys that another part chooses: not served."""
TEXT_ALONE = ("qwen3_5", "qwen3_5_moe")
"""`model_type` of those whose text model transformers takes alone from their folder, as
`AutoModelForCausalLM`."""
ONE_TIES = ("glm4v", "glm4v_moe")
"""`model_type` of models whose embedding is the head if the file or its `text_config` says so."""
UNSAID: dict[str, dict[str, Any]] = {
    "glm4v_text": {"attention_bias": True},
    # Its loss that balances experts is one of `output_router_logits`, which is refused.
    "glm4v_moe_text": {"use_qk_norm": False, BALANCE: None},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
"""`model_type` of a `text_config` -> what its models always have, whatever it says."""


SCORING: dict[str, str | None] = {
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "qwen3_5_text": "Qwen3_5TextForSequenceClassification",
    **dict.fromkeys(
        (
            *("olmoe", "qwen3_5_moe_text", "olmo_hybrid", "glm4_moe", "nemotron_h", "gemma4_text"),
            *("granitemoehybrid", "kimi_linear"),
        )
    ),
}
"""`model_type` -> the class of transformers that gives sequences scores, if its name is not that of
the family with another ending; None where there is none."""


def scoring_class(model_type: str) -> str | None:
    """The class of transformers that gives sequences scores, of models of a family."""
    name = FAMILIES[model_type].architecture
    return SCORING.get(model_type, name.replace("ForCausalLM", "ForSequenceClassification"))


def score_values(model_type: str) -> dict[str, Any]:
    """What the config.json of a model of scores has in place of what that of others has."""
    name = scoring_class(model_type)
    if name is None:
        raise UnsupportedError(
            "A reward model is exported as a class for the classification of sequences; got a "
            f"model of kind {model_type}, for which transformers has none. Use score.py with the "
            "folder of the run."
        )
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [name], **labels}


def family_of(model: GPTConfig) -> str:
    """The `model_type` of a model."""
    simple = plain(model)
    for model_type, family in FAMILIES.items():
        if family.fits(simple):
            return model_type
    names = (*OPTIONS, *SCALES, "windows", "mixers", "feed_forwards")
    options = {name: getattr(model, name) for name in names}
    raise UnsupportedError(
        f"A model that is exported must be one of {', '.join(FAMILIES)}; got "
        f"{', '.join(f'{name}={value!r}' for name, value in options.items())}, "
        f"rope.bases={model.rope.bases}, rope.channels={model.rope.channels}, "
        f"rope.scaling={model.rope.scaling!r}, rope.stretches={model.rope.stretches!r}, which "
        "none of them has together. Train one of theirs."
    )


def rotary_values(model: GPTConfig) -> dict[str, Any]:
    """The values of a config.json for the rotary positions of a model."""
    return FAMILIES[family_of(model)].rope.values(model)


def to_values(model: GPTConfig, *, length: int, dtype: str) -> dict[str, Any]:
    """The values of a config.json: `describe` gives the model again."""
    model_type = family_of(model)
    values = FAMILIES[model_type].values(model, model_type, length=length, dtype=dtype)
    return values | (score_values(model_type) if model.scores else {})
